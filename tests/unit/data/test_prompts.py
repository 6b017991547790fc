"""Prompt sets: what is read, what is refused, and the order of a run."""

import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.config.sections import ColumnsSection
from megatron_rl.data import prompts
from megatron_rl.data.prompts import (
    ROWS_AT_ONCE,
    SCHEMA,
    JoinedPrompts,
    PromptMix,
    PromptOrder,
    PromptTable,
    load_prompts,
    share,
    write_prompts,
)
from megatron_rl.data.rows import check_prompt_file
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.types import Prompt

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def build_tokenizer(*, template=TEMPLATE, eos="!"):
    """One token per character; ids of `<ab>=` are 0 1 2 3 4."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {piece: index for index, piece in enumerate("<ab>=!?")}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token=eos, unk_token="?")
    tokenizer.chat_template = template
    return tokenizer


def build_row(content="ab", truth="7", **changes):
    return {
        "data_source": "made_up",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": "x"},
    } | changes


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_prompt_is_rendered_row_without_additions(tmp_path):
    path = write(tmp_path / "set.parquet", [build_row(), build_row("b", "1/2")])
    first, second = load_prompts(path, build_tokenizer(), max_prompt_tokens=5)
    assert first.token_ids == (0, 1, 2, 3, 4)  # <ab>= : no end-of-sequence token added
    assert first.text == "< a b > ="  # decoded: this tokenizer joins its pieces by spaces
    assert first.messages == ({"role": "user", "content": "ab"},)
    assert (second.index, second.token_ids, second.ground_truth) == (1, (0, 2, 3, 4), "1/2")
    assert second.data_source == "made_up"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (build_row(prompt=[]), "row 1: prompt must be a text or a list of chat messages"),
        (
            build_row(prompt=[{"role": "user", "content": None}]),
            r"row 1: prompt, message 1: a chat message must have a text as content, got None",
        ),
        (build_row(reward_model=None), "row 1: reward_model.ground_truth must be"),
        (build_row(data_source=None), "row 1: data_source must be a text"),
        (build_row(prompt=[{"role": "tool", "content": "a"}]), "row 1: the chat template refuses"),
        (build_row("abab"), r"row 1: the prompt has 7 tokens, more than data.max_prompt_tokens=5"),
    ],
)
def test_bad_row_is_named(tmp_path, row, message):
    path = write(tmp_path / "set.parquet", [build_row(), row])
    with pytest.raises(ValueError, match=message):
        load_prompts(path, build_tokenizer(), max_prompt_tokens=5)


def test_plain_text_prompt_becomes_user_message(tmp_path):
    path = write(tmp_path / "set.parquet", [build_row(prompt="ab")])
    (prompt,) = load_prompts(path, build_tokenizer(), max_prompt_tokens=5)
    assert prompt.messages == ({"role": "user", "content": "ab"},)
    path = write(tmp_path / "set.parquet", [build_row(prompt=" ")])
    with pytest.raises(ValueError, match="must be a text or a list of chat messages, got ' '"):
        load_prompts(path, build_tokenizer(), max_prompt_tokens=5)


QUESTIONS = [
    {"question": "ab", "answer": 7, "level": {"name": "hard"}},
    {"question": "b", "answer": "1/2", "level": {"name": "easy"}},
]


def write_lines(path, rows):
    path.write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def write_csv(path, rows):
    header, *lines = ["question,answer,level.name"] + [
        f'"{row["question"]}",{row["answer"]},{row["level"]["name"]}' for row in rows
    ]
    path.write_text("\ufeff" + "\r\n".join([header, *lines, ""]), encoding="utf-8", newline="")
    return path


def test_table_of_texts_is_read(tmp_path):
    """A field may contain commas, quotes and line breaks, and is never taken for a number."""
    rows = [{"question": 'a,b\n""b""', "answer": "007", "level": {"name": "x"}}] + QUESTIONS
    path = write_csv(tmp_path / "mine.csv", rows)
    columns = ColumnsSection(prompt="question", answer="answer", source="level.name")
    check_prompt_file(path, columns)
    first, second, _ = load_prompts(path, build_tokenizer(), max_prompt_tokens=19, columns=columns)
    assert first.messages[0]["content"] == 'a,b\n"b"'
    assert (first.ground_truth, first.data_source) == ("007", "x")
    assert json.loads(second.row) == {"question": "ab", "answer": "7", "level.name": "hard"}


def test_extra_keys_of_message_reach_template(tmp_path):
    """And nulls, with which parquet fills up the keys of other rows, do not."""
    named = {"role": "user", "content": "ab", "name": "b"}
    rows = [build_row(prompt=[named]), build_row(prompt=[{"role": "user", "content": "ab"}])]
    path = write(tmp_path / "set.parquet", rows)
    template = TEMPLATE + "{% for m in messages if 'name' in m %}{{ m.name }}{% endfor %}"
    tokenizer = build_tokenizer(template=template)
    first, second = load_prompts(path, tokenizer, max_prompt_tokens=9)
    assert first.messages == (named,) and second.messages == (rows[1]["prompt"][0],)
    assert first.token_ids == (*second.token_ids, 2)


def test_system_prompt_is_first_message_of_every_row(tmp_path):
    path = write_lines(tmp_path / "set.jsonl", [build_row(), build_row(prompt="b")])
    prompts = load_prompts(path, build_tokenizer(), max_prompt_tokens=9, system_prompt="ba")
    assert [prompt.messages[0] for prompt in prompts] == [{"role": "system", "content": "ba"}] * 2
    assert prompts[0].token_ids == (0, 2, 1, 3, 0, 1, 2, 3, 4)  # <ba><ab>=
    own = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    path = write(tmp_path / "own.parquet", [build_row(), build_row(prompt=own)])
    with pytest.raises(ValueError, match=r"row 1: the row has a system message, and data.system_"):
        check_prompt_file(path, ColumnsSection(), system_prompt="ba")
    check_prompt_file(path, ColumnsSection())


@pytest.mark.parametrize(
    ("write_file", "ending"), [(write, "parquet"), (write_lines, "jsonl"), (write_csv, "csv")]
)
def test_questions_and_answers_of_one_s_own(tmp_path, write_file, ending):
    """A blank line and a byte order mark do no harm; an answer may be a number or a text."""
    rows = [row | {"answer": str(row["answer"])} for row in QUESTIONS]
    path = write_file(tmp_path / f"mine.{ending}", QUESTIONS if ending == "jsonl" else rows)
    columns = ColumnsSection(prompt="question", answer="answer")
    check_prompt_file(path, columns)
    first, second = load_prompts(path, build_tokenizer(), max_prompt_tokens=5, columns=columns)
    assert first.token_ids == (0, 1, 2, 3, 4)
    assert (first.ground_truth, second.ground_truth) == ("7", "1/2")
    assert first.data_source == "mine"
    if ending != "csv":
        assert json.loads(first.row)["level"] == {"name": "hard"}
    columns = ColumnsSection(prompt="question", answer="answer", source="level.name")
    prompts = load_prompts(path, build_tokenizer(), max_prompt_tokens=5, columns=columns)
    assert [prompt.data_source for prompt in prompts] == ["hard", "easy"]


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path):
    rows = [build_row("abab"), build_row("ab"), build_row("aba"), build_row("b", "1")]
    path, output = write(tmp_path / "set.parquet", rows), []
    prompts = load_prompts(
        path, build_tokenizer(), max_prompt_tokens=5, too_long="skip", echo=output.append
    )
    assert [prompt.index for prompt in prompts] == [1, 3]  # rows of the file, as without them
    assert output[:1] == [
        f"{path}: 2 of 4 prompts have more than data.max_prompt_tokens=5 tokens, the longest 7: "
        "left out (data.too_long=skip)"
    ]


def test_missing_columns_are_named_with_those_there_are(tmp_path):
    path = write(tmp_path / "set.parquet", [{"question": "2+2", "data_source": "x"}])
    with pytest.raises(
        ValueError,
        match=r"no column prompt, reward_model\.ground_truth; it has .*question.*data\.columns=",
    ):
        load_prompts(path, build_tokenizer(), max_prompt_tokens=5)


def test_files_that_are_not_prompt_sets_are_refused(tmp_path):
    tokenizer = build_tokenizer()
    with pytest.raises(ValueError, match="does not exist"):
        load_prompts(tmp_path / "none.parquet", tokenizer, max_prompt_tokens=5)
    (tmp_path / "set.txt").touch()
    with pytest.raises(ValueError, match=r"prompts are read from \.parquet, \.jsonl .* or \.csv"):
        load_prompts(tmp_path / "set.txt", tokenizer, max_prompt_tokens=5)
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        load_prompts(tmp_path / "text.parquet", tokenizer, max_prompt_tokens=5)
    whole = write(tmp_path / "whole.parquet", [build_row() for _ in range(9)]).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        load_prompts(tmp_path / "cut.parquet", tokenizer, max_prompt_tokens=5)
    empty = pa.Table.from_pylist([build_row()]).slice(0, 0)
    pq.write_table(empty, tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match="holds no prompts"):
        load_prompts(tmp_path / "empty.parquet", tokenizer, max_prompt_tokens=5)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [({"template": None}, "no chat template"), ({"eos": None}, "no eos_token")],
)
def test_tokenizer_without_required_parts_is_refused(tmp_path, tokenizer, message):
    path = write(tmp_path / "set.parquet", [build_row()])
    with pytest.raises(ValueError, match=message):
        load_prompts(path, build_tokenizer(**tokenizer), max_prompt_tokens=5)


def test_folder_without_tokenizer_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(
        ValueError, match=re.escape(f"{tmp_path} has no tokenizer (no tokenizer.json")
    ):
        load_tokenizer(tmp_path)


def test_every_epoch_is_new_permutation_cut_into_whole_steps():
    order = PromptOrder(10, seed=3)
    # 10 prompts make 3 steps of 3 an epoch; the tenth sits out.
    first = [index for step in range(3) for index in order.indices(step, 3)]
    second = [index for step in range(3, 6) for index in order.indices(step, 3)]
    assert len(set(first)) == len(set(second)) == 9
    assert first != second
    # Who sits out changes: over 200 epochs each prompt is left out about 20 times.
    seen = Counter(index for step in range(600) for index in order.indices(step, 3))
    assert set(seen) == set(range(10))
    assert min(seen.values()) > 160


def test_order_depends_on_seed_and_step_alone():
    expected = PromptOrder(50, seed=1).indices(17, 8)
    other = PromptOrder(50, seed=1)
    other.indices(3, 8)  # asking for other steps moves nothing
    assert other.indices(17, 8) == expected
    assert PromptOrder(50, seed=2).indices(17, 8) != expected
    # Recorded from the first version: a change would silently alter every resumed run.
    assert PromptOrder(6, seed=0).indices(0, 6) == [5, 4, 1, 3, 2, 0]
    steps = [PromptOrder(6, seed=0).indices(step, 2) for step in range(3)]
    assert steps == [[5, 4], [1, 3], [2, 0]]


@pytest.mark.parametrize("count", [0, 11])
def test_step_larger_than_set_is_refused(count):
    with pytest.raises(ValueError, match="without repeating one"):
        PromptOrder(10, seed=0).indices(0, count)


def test_repeated_rows_are_left_out(tmp_path):
    rows = [build_row("a", "2"), build_row("b", "4"), build_row("a", "2"), build_row("a", "3")]
    rows += [build_row("a", "2")] * 5000 + [build_row("aa", "5")]  # beyond one batch of reading
    path = write(tmp_path / "set.parquet", rows)
    prompts = load_prompts(path, build_tokenizer(), max_prompt_tokens=5)
    # Row 2 repeats row 0; row 3 asks the same and wants another answer, so it is kept.
    kept = [(prompt.index, prompt.ground_truth) for prompt in prompts]
    assert kept == [(0, "2"), (1, "4"), (3, "3"), (5004, "5")]


def test_malformed_rows_are_named_or_left_out_and_counted(tmp_path):
    path = tmp_path / "set.jsonl"
    rows = [json.dumps(build_row()), "{broken", "[1]", json.dumps(build_row(truth=" ")),
            json.dumps(build_row("b"))]  # fmt: skip
    path.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"line 2 is not JSON.*data\.bad_rows=skip"):
        load_prompts(path, build_tokenizer(), max_prompt_tokens=5)
    output = []
    prompts = load_prompts(
        path, build_tokenizer(), max_prompt_tokens=5, bad_rows="skip", echo=output.append
    )
    assert [prompt.index for prompt in prompts] == [0, 4]
    assert len(output) == 1 and "3 malformed rows left out" in output[0] and "line 2" in output[0]
    with pytest.raises(ValueError, match="line 2"):
        check_prompt_file(path, ColumnsSection())
    check_prompt_file(path, ColumnsSection(), bad_rows="skip")
    path.write_text("\n".join([rows[3], rows[1]]))
    with pytest.raises(ValueError, match="all of its rows are malformed"):
        load_prompts(path, build_tokenizer(), max_prompt_tokens=5, bad_rows="skip")


def test_rows_that_the_template_refuses_are_malformed(tmp_path):
    rows = [build_row(), build_row(prompt=[{"role": "tool", "content": "a"}]), build_row("b")]
    path = write(tmp_path / "set.parquet", rows)
    with pytest.raises(
        ValueError, match=r"row 1: the chat template refuses .* data\.bad_rows=skip"
    ):
        load_prompts(path, build_tokenizer(), max_prompt_tokens=5)
    options, output = {"max_prompt_tokens": 5, "bad_rows": "skip"}, []
    prompts = load_prompts(path, build_tokenizer(), echo=output.append, **options)
    assert [prompt.index for prompt in prompts] == [0, 2]
    assert "1 rows that the chat template or training refuses left out" in output[0]
    assert "row 1: the chat template refuses these messages: no tools" in output[0]
    with pytest.raises(ValueError, match=r"holds no prompts: all of its rows are refused: .*row 0"):
        load_prompts(write(path, rows[1:2]), build_tokenizer(), **options)


def test_argument_that_no_template_reads_is_refused(tmp_path):
    path = write(tmp_path / "set.parquet", [build_row()])
    for arguments, problem in (
        ({"enable_think": False}, "the chat template does not read enable_think, so it would"),
        ({"chat_template": "rag"}, "chat_template='rag' is none of the model's templates, default"),
    ):
        with pytest.raises(ValueError, match=problem):
            load_prompts(path, build_tokenizer(), max_prompt_tokens=9, template_arguments=arguments)


def test_arguments_reach_chat_template(tmp_path):
    path = write(tmp_path / "set.parquet", [build_row()])
    template = TEMPLATE + "{% if loud %}b{% endif %}"
    tokenizer = build_tokenizer(template=template)
    (plain,) = load_prompts(path, tokenizer, max_prompt_tokens=9)
    (loud,) = load_prompts(path, tokenizer, max_prompt_tokens=9, template_arguments={"loud": True})
    assert loud.token_ids == (*plain.token_ids, 2)


def test_folders_and_hub_names_need_datasets_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for path in (tmp_path, "hf:owner/name"):
        with pytest.raises(ValueError, match="needs the library datasets; pip install it"):
            load_prompts(path, build_tokenizer(), max_prompt_tokens=5)


def test_folder_saved_by_datasets_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [build_row(), build_row("b", "8")]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows[1:])}).save_to_disk(
        str(tmp_path / "several")
    )
    one = load_prompts(tmp_path / "one", build_tokenizer(), max_prompt_tokens=5)
    assert [prompt.ground_truth for prompt in one] == ["7", "8"]
    (second,) = load_prompts(tmp_path / "several", build_tokenizer(), max_prompt_tokens=5)
    assert second.ground_truth == "8"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="`datasets` cannot load"):
        load_prompts(tmp_path / "empty", build_tokenizer(), max_prompt_tokens=5)
    with pytest.raises(ValueError, match=r"hf download nobody/nothing.* --repo-type dataset"):
        load_prompts("hf:nobody/nothing-of-this-name", build_tokenizer(), max_prompt_tokens=5)


def test_shares_by_hand():
    assert share(64, [3, 1]) == [48, 16]
    assert share(10, [1, 1, 1]) == [4, 3, 3]  # the first has the first of equal remainders
    assert share(8, [0.5, 0.3, 0.2]) == [4, 2, 2]  # 4, 2.4, 1.6
    with pytest.raises(
        ValueError, match=r"weights 100, 1 give a set none of the 8 new prompts of a step"
    ):
        share(8, [100, 1])


def test_every_step_has_its_shares_and_every_set_its_own_epochs():
    mix = PromptMix((12, 8), (3, 1), seed=5)
    steps = [mix.indices(step, 8) for step in range(6)]
    for step in steps:
        assert len(set(step)) == 8
        assert sum(index < 12 for index in step) == 6
    # The first set has 2 steps to an epoch, the second 4.
    first = [Counter(index for step in steps[n : n + 2] for index in step if index < 12)
             for n in (0, 2, 4)]  # fmt: skip
    assert first == [Counter(range(12))] * 3
    second = Counter(index for step in steps[:4] for index in step if index >= 12)
    assert second == Counter(range(12, 20))


def test_each_permutation_of_mix_is_made_once(monkeypatch):
    """Also where steps of two epochs of each of four sets are asked for in turn, as under lag."""
    made = []
    derive = prompts.derive_seed
    monkeypatch.setattr(prompts, "derive_seed", lambda *use: made.append(use) or derive(*use))
    mix = PromptMix((8, 8, 8, 8), (1, 1, 1, 1), seed=77)  # two steps are an epoch
    for step in (1, 2) * 10:
        mix.indices(step, 16)
    permutations = [use for use in made if use[1] == "prompt order"]
    assert len(permutations) == len(set(permutations)) == 4 * 2


def test_steps_follow_from_seed_alone_and_are_mixed():
    mix = PromptMix((50, 50), (1, 1), seed=1)
    order = mix.indices(3, 40)
    assert order == PromptMix((50, 50), (1, 1), seed=1).indices(3, 40)
    assert order != PromptMix((50, 50), (1, 1), seed=2).indices(3, 40)
    sides = [index < 50 for index in order]
    assert sides != sorted(sides) and sides != sorted(sides, reverse=True)


def test_recorded_order():
    """From the first version: a change would silently alter every resumed run."""
    mix = PromptMix((4, 4), (1, 1), seed=0)
    assert [mix.indices(step, 4) for step in range(2)] == [[3, 1, 6, 7], [2, 4, 0, 5]]


def test_set_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="a step of 6 prompts cannot be drawn from a set of 5"):
        PromptMix((5, 10), (3, 1), seed=1).indices(0, 8)


def _prompt(number: int) -> Prompt:
    return Prompt(
        index=2 * number + 1,
        messages=({"role": "system", "content": "é\n"}, {"role": "user", "content": f"{number}?",
                  "tool_calls": [{"id": 1, "x": None}]}),
        token_ids=tuple(range(number % 5)),
        ground_truth=f'"{number}"',
        data_source="made up",
        row=f'{{"a": {number}}}',
    )  # fmt: skip


def test_prompts_are_read_back_as_they_were(tmp_path):
    prompts = [_prompt(number) for number in range(2 * ROWS_AT_ONCE + 3)]
    write_prompts(tmp_path / "0.arrow", iter(prompts))
    table = PromptTable(tmp_path / "0.arrow")
    assert len(table) == len(prompts)
    assert list(table) == prompts
    assert [table[place] for place in (0, ROWS_AT_ONCE, -1)] == [
        prompts[place] for place in (0, ROWS_AT_ONCE, -1)
    ]
    assert table[5:9:2] == prompts[5:9:2]
    with pytest.raises(IndexError):
        table[len(prompts)]
    (tmp_path / "0.arrow").unlink()
    assert table[7] == prompts[7]  # a file that is open can be read after its removal


def test_file_with_whole_blocks_or_empty_has_no_extra_prompt(tmp_path):
    write_prompts(tmp_path / "0.arrow", map(_prompt, range(ROWS_AT_ONCE)))
    assert len(list(PromptTable(tmp_path / "0.arrow"))) == ROWS_AT_ONCE
    write_prompts(tmp_path / "1.arrow", [])
    assert list(PromptTable(tmp_path / "1.arrow")) == []


def test_every_field_of_prompt_is_in_file():
    assert SCHEMA.names == [field.name for field in dataclasses.fields(Prompt)]


def test_joined_sets_are_numbered_through(tmp_path):
    first, second = [_prompt(0), _prompt(3)], [_prompt(1)]
    write_prompts(tmp_path / "0.arrow", first)
    joined = JoinedPrompts([PromptTable(tmp_path / "0.arrow"), second])
    assert [prompt.index for prompt in joined] == [1, 7, 8 + 3]
    assert [prompt.token_ids for prompt in joined] == [one.token_ids for one in first + second]


PROGRAM = """
import itertools, re, sys
from pathlib import Path
from megatron_rl.data.prompts import PromptTable, write_prompts
from megatron_rl.types import Prompt

def prompts():
    for number in range(int(sys.argv[2])):
        text, ids = f"{number} " * 100, tuple(range(1000, 1200))
        chat = ({"role": "user", "content": text},)
        yield Prompt(number, chat, ids, "1", "x", text)

def own_mib():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) / 1024

file = Path(sys.argv[1])
write_prompts(file, itertools.islice(prompts(), 4096))
PromptTable(file)[0]  # imports and buffers of the libraries
before = own_mib()
write_prompts(file, prompts())
written = own_mib()
table = PromptTable(file)
chosen = [table[place] for place in range(0, len(table), 100)]
print(written - before, own_mib() - before)
"""


def test_prompts_cost_no_memory_until_they_are_used(tmp_path):
    """20,000 prompts are 150 MiB of objects; writing takes a block, using 1% of them 1.5 MiB."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "0.arrow"), "20000"]
    output = subprocess.run(command, check=True, capture_output=True, text=True)
    written, used = map(float, output.stdout.split())
    assert written < 40
    assert used < 40
