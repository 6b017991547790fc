"""Fields of rows and messages: media by type, choices by the answer, flags of training."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.config.sections import ColumnsSection
from megatron_rl.data.demonstrations import ConversationTokenizer
from megatron_rl.data.prompts import load_prompts
from megatron_rl.errors import UserError
from megatron_rl.fields import (
    changes_training,
    find_choices,
    find_passage,
    find_place_of_media,
    is_media,
    with_class_names,
)
from tests.unit.data.test_text_tokens import MARKS, build

ASKED, SHORT = {"role": "user", "content": "to"}, {"role": "system", "content": "be"}
PICTURE = {"bytes": b"GIF89a", "path": None}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("figure", PICTURE), ("page_2", [PICTURE]), ("sheet", {"scan": PICTURE}),
        ("raw", b"\x89PNG"), ("clip", {"array": [0.5], "sampling_rate": 8}),
        ("img2", "a/b.png"), ("videoUrl", "http://h/v"), ("doc", "data:audio/wav;base64,AA"),
        ("file", "https://h/a.PNG?x=1"), ("frames", ["v/1.jpg", "v/2.jpg"]), ("heard", "/d/a.wav"),
    ],
)  # fmt: skip
def test_media_are_found_by_their_type_whatever_their_name(name, value):
    assert is_media(name, value) and not is_media(name, type(value)())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_id", "71"), ("image_caption", "a red car"), ("images_count", 3),
        ("has_video", True), ("picture", {"bytes": None, "path": None}), ("question", "why.png"),
        ("source", "https://h/page.html"), ("file", "a/b.png is missing"), ("image_id", "a/b.png"),
    ],
)  # fmt: skip
def test_what_only_speaks_of_media_is_none(name, value):
    assert not is_media(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", 0), ("lossWeight", 0.5), ("train", False), ("to_train", "no"), ("mask", 1),
        ("loss_mask", 0), ("ignore", True), ("keep", False), ("no_grad", 1), ("supervised", "0"),
        ("spans", [{"start": 0, "train": False}]), ("reasoning_content", "so"), ("used", 0),
        ("content.weight", 0), ("thinking", [{"type": "t", "thinking": "4"}]),
    ],
)  # fmt: skip
def test_key_of_an_answer_that_says_how_it_is_trained_is_refused(name, value):
    tokenizer = build("never", MARKS, "<|halt|>")
    one = ConversationTokenizer(tokenizer, stop=(3,))
    answer = {"role": "assistant", "content": "tu", name: value}
    assert changes_training(name, value)
    with pytest.raises(UserError, match=f"message 2 has {name}="):
        one.tokenize(([{"role": "user", "content": "to"}, answer], ()))
    tokenizer.chat_template += "{# m." + name + " #}"  # named, and written nowhere
    with pytest.raises(UserError, match=f"message 2 has {name}="):
        one.tokenize(([{"role": "user", "content": "to"}, answer], ()))
    tokenizer.chat_template = MARKS.replace(
        "{{ m.content }}", "{{ m.content }}{{ m['" + name + "'] }}"
    )
    assert one.tokenize(([{"role": "user", "content": "to"}, answer], ()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", 1), ("train", True), ("loss_mask", 1.0), ("ignore", False), ("no_loss", 0),
        ("id", "msg 7"), ("created_at", 1700), ("finish_reason", "stop"), ("modelName", "x y"),
        ("refusal", None), ("annotations", []),
    ],
)  # fmt: skip
def test_labels_and_neutral_values_are_accepted(name, value):
    assert not changes_training(name, value)


@pytest.mark.parametrize(
    ("row", "truth", "names"),
    [
        ({"A": "north", "B": "south"}, "B", "A, B"),
        ({"opta": "north", "optb": "south"}, "1", "opta, optb"),
        ({"ending0": "north", "ending1": "south"}, "0", "ending0, ending1"),
        ({"place_1": "north", "place_2": "south"}, "south", "place_1, place_2"),
        ({"directions": ["north", "south"]}, "A", "directions"),
        ({"options": "['north', 'south']"}, "A", "options"),
        ({"options": "a ) north , b ) south"}, "b", "options"),
        ({"choices": "(A) north (B) south"}, "A", "choices"),
        ({"answer_options": "north\nsouth"}, "north", "answer_options"),
        ({"choices": [{"label": "A", "text": "north"}]}, "A", "choices"),
        ({"answer_choices": {"A": "north", "B": "south"}}, "B", "answer_choices"),
        ({"a": "north", "b": "south"}, "a", "a, b"),
    ],
)
def test_choices_are_found_by_the_answer_or_their_name(row, truth, names):
    assert find_choices(row, "Which way?", truth=truth) == names
    text = "Which way? A) north B) south"
    assert find_choices(row, text, truth=truth) is None


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"tags": ["algebra", "hard"]}, "4"), ({"a": "3", "b": "5"}, "8"),
        ({"hint1": "think", "hint2": "more"}, "2"), ({"aliases": ["Bonn", "bonn"]}, "Bonn"),
        ({"options": "none"}, "A"), ({"note": "a) x b) y"}, "A"),
        ({"A": "x", "C": "y"}, "A"), ({"A": 3, "B": 4}, "7"),
    ],
)  # fmt: skip
def test_other_lists_and_lettered_columns_are_no_choices(row, truth):
    assert find_choices(row, "How many?", truth=truth) is None


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"context": "It rains  in\nBonn."}, "context"), ({"passage": "It snows."}, "passage"),
        ({"contexts": ["It snows.", "It hails."]}, "contexts"),
        ({"context": {"title": ["a"], "sentences": [["It snows.", "It hails."]]}}, "context"),
        ({"history": [["Where?", "In Bonn."]]}, "history"),
    ],
)  # fmt: skip
def test_passage_that_a_question_lacks_is_found(row, name):
    assert find_passage(row, "Is it wet?") == name
    whole = json.dumps(row).replace('"', " ").replace("\\n", "\n")
    assert find_passage(row, f"{whole} Is it wet?") is None
    assert find_passage(row, "Is it wet?", skip=[name]) is None


@pytest.mark.parametrize(
    "row", [{"context": ""}, {"context_id": "c 7"}, {"context": 3}, {"history": []}, {"note": "x"}]
)
def test_other_columns_are_no_passages(row):
    assert find_passage(row, "Is it wet?") is None


def test_places_of_media_in_a_text():
    for mark in (
        "<image>",
        "<image_2>",
        "<|image_pad|>",
        "<video>",
        "![a](u/v.jpg)",
        '<img src="a">',
    ):
        assert find_place_of_media(f"What is {mark}?") == mark
    for text in ("an image", "a<image", "x![n]", "[a](b)", "<images>", "<imgs>"):
        assert find_place_of_media(text) is None


def test_numbers_of_classes_are_read_as_their_names(tmp_path):
    label = {"_type": "ClassLabel", "names": ["no", "yes", "maybe"]}
    features = {
        "prompt": {"_type": "Value", "dtype": "string"}, "answer": label,
        "votes": {"_type": "Sequence", "feature": label}, "by": [{"vote": label}],
    }  # fmt: skip
    row = {"prompt": "to be", "answer": 2, "votes": [0, -1], "by": [{"vote": 1}]}
    found = with_class_names(row, features)
    assert found == row | {"answer": "maybe", "votes": ["no", None], "by": [{"vote": "yes"}]}
    table = pa.Table.from_pylist([row])
    written = json.dumps({"info": {"features": features}})
    pq.write_table(table.replace_schema_metadata({"huggingface": written}), tmp_path / "a.parquet")
    columns = ColumnsSection(answer="answer")
    options = {"columns": columns, "max_prompt_tokens": 50}
    (prompt,) = load_prompts(tmp_path / "a.parquet", build("never", MARKS), **options)
    assert prompt.ground_truth == "maybe" and json.loads(prompt.row)["by"] == [{"vote": "yes"}]
    datasets = pytest.importorskip("datasets")
    kind = datasets.Features({"prompt": datasets.Value("string"),
                              "answer": datasets.ClassLabel(names=label["names"])})  # fmt: skip
    saved = datasets.Dataset.from_dict({"prompt": ["to"], "answer": [1]}, features=kind)
    saved.save_to_disk(tmp_path / "saved")
    (prompt,) = load_prompts(tmp_path / "saved", build("never", MARKS), **options)
    assert prompt.ground_truth == "yes"


def write(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_what_no_prompt_has_is_named_once_with_its_number_of_rows(tmp_path):
    call = {"function": {"name": "go", "arguments": None}}
    rows = [
        {
            "prompt": [{"role": "user", "content": "to<|halt|>", "mood": "good"}],
            "answer": "4",
            "level": n,
            "empty": [],
        }
        for n in range(3)
    ]
    asked = [{"role": "user", "content": "go?"}, {"role": "assistant", "tool_calls": [call]}]
    rows.append({"prompt": [*asked, {"role": "tool", "content": "1"}], "answer": "5"})
    tokenizer = build(
        "never", MARKS.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")
    )
    lines = []
    load_prompts(write(tmp_path / "p.jsonl", *rows), tokenizer, max_prompt_tokens=200,
                 columns=ColumnsSection(answer="answer"), echo=lines.append)  # fmt: skip
    assert [line.partition(": ")[2] for line in lines] == [
        "in no prompt, for so many rows: columns level (3), keys of messages mood (3); a reward or "
        "environment may read columns",
        "3 rows have control tokens as plain text (<|halt|>): tokenized as text",
        "1 rows have tool calls and no tools, so their prompts do not show any, as those of an "
        "environment of tools do; add a column tools, or data.template_arguments={tools: [...]}",
    ]


def test_parts_of_structs_and_places_of_images_are_named(tmp_path):
    judged = {"ground_truth": "4", "style": "model", "model": None}
    rows = [{"prompt": f"<image> to {n}?", "reward_model": judged} for n in range(2)]
    rows.append({"prompt": "to", "reward_model": judged | {"style": "rule-x"}})
    lines = []
    load_prompts(write(tmp_path / "p.jsonl", *rows), build("never", MARKS), max_prompt_tokens=200,
                 echo=lines.append)  # fmt: skip
    assert [line.partition(": ")[2] for line in lines] == [
        "in no prompt, for so many rows: columns reward_model.style (2); a reward or environment "
        "may read columns",
        "2 rows have the place of an image or a sound (<image>): the policy reads that text, and "
        "not what it stands for",
    ]


def test_columns_that_number_and_sort_the_rows_of_verl_are_not_named(tmp_path):
    """`ability` and `extra_info` are in all of its data; what else is in `extra_info` is named."""
    row = {"ability": "MATH", "reward_model": {"ground_truth": "4"}}
    numbers = [{"extra_info": {"split": "test", "index": n}} for n in range(2)]
    more = [{"extra_info": {"index": 2, "answer": "4"}}, {"extra_info": "hard", "ability": [1]}]
    for extra, names in ((numbers, None), (numbers + more, "extra_info (2), ability (1)")):
        rows = [{"prompt": f"to {n}?"} | row | one for n, one in enumerate(extra)]
        lines = []
        load_prompts(write(tmp_path / "p.jsonl", *rows), build("never", MARKS),
                     max_prompt_tokens=200, echo=lines.append)  # fmt: skip
        assert [line.partition("columns ")[2].partition(";")[0] for line in lines] == (
            [names] if names else []
        )


@pytest.mark.parametrize("extra", [{"weight": 0.5}, {"loss_mask": [1, 0]}, {"label": False}])
def test_column_that_says_how_a_conversation_is_trained_is_refused(extra, tmp_path):
    tokenizer = build("never", MARKS, "<|halt|>")
    options = {"conversations": ConversationTokenizer(tokenizer, stop=(3,))}
    row = {"prompt": "to", "completion": "tu"}
    load_prompts(write(tmp_path / "a.jsonl", row | {"weight": 1}), tokenizer,
                 max_prompt_tokens=50, **options)  # fmt: skip
    with pytest.raises(UserError, match=f"line 1: has {next(iter(extra))}="):
        load_prompts(write(tmp_path / "b.jsonl", row | extra), tokenizer, max_prompt_tokens=50,
                     **options)  # fmt: skip


GOOD = {"role": "assistant", "content": "tu"}


@pytest.mark.parametrize(
    ("prompt", "completion", "problem"),
    [
        ("to", [ASKED, GOOD], None), ([SHORT, ASKED], [SHORT, ASKED, GOOD], None),
        ([ASKED], [SHORT, ASKED, GOOD], None), ([ASKED], [GOOD], None),
        ("to", [{"role": "user", "content": "be"}, GOOD], "completion begins with a message of"),
        ("to", [ASKED, {"role": "assistant", "content": " "}, ASKED, GOOD], "message 2, of the as"),
    ],
)  # fmt: skip
def test_answer_may_begin_with_its_prompt(prompt, completion, problem, tmp_path):
    """UltraFeedback's pairs: `chosen` is the whole conversation, next to its prompt."""
    tokenizer = build("never", MARKS, "<|halt|>")
    options = {
        "conversations": ConversationTokenizer(tokenizer, stop=(3,)),
        "max_prompt_tokens": 99,
    }
    file = write(tmp_path / "a.jsonl", {"prompt": prompt, "completion": completion})
    if problem is None:
        (found,) = load_prompts(file, tokenizer, **options)
        assert found.text.count("to") == 1 and found.messages[-1] == GOOD
        assert len(found.messages) == 2 + (SHORT in found.messages)
    else:
        with pytest.raises(UserError, match=problem):
            load_prompts(file, tokenizer, **options)
