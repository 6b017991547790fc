"""Rows of prompt files as other tools write them: their prompts, answers, tools and files."""

import csv
import datetime
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.config.sections import ColumnsSection
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.rows import parse_answer, parse_row, read_rows
from tests.unit.data.test_prompts import build_tokenizer

COLUMNS = ColumnsSection(prompt="prompt", answer="answer")
USER = {"role": "user", "content": "ab"}
CALL = {"type": "function", "function": {"name": "a", "arguments": {"b": "a"}}}
SHOWS_ALL = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def write_lines(path, *rows, end="\n"):
    path.write_text(end.join(json.dumps(row) for row in rows) + end, newline="")
    return path


def write_table(path, *rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def parse(path, columns=COLUMNS):
    return [
        parse_row(row, columns, path=path, number=number)
        for number, row in read_rows(path, columns)
    ]


def load(path, *, columns=COLUMNS, template=SHOWS_ALL, **options):
    tokenizer = build_tokenizer(template=template)
    return load_prompts(path, tokenizer, columns=columns, max_prompt_tokens=500, **options)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1/2", "1/2"), (7, "7"), (10**20, "1" + "0" * 20), (0.5, "0.5"), (72.0, "72"),
        (1e16, "1" + "0" * 16), (-1e22, "-1" + "0" * 22), (1e-7, "0.0000001"), (-0.0, "0"),
        (Decimal("4"), "4"), (Decimal("4.50"), "4.5"), (Decimal("1E+2"), "100"),
        (np.int64(3), "3"), (np.float64(1e16), "1" + "0" * 16), ("None", "None"),
        (float("nan"), None), (float("inf"), None), (Decimal("NaN"), None), (None, None),
        ("nan", None), ("<NA>", None), (" ", None), (True, None), (["7"], None), ({"a": 1}, None),
        (b"7", None), (datetime.date(2026, 1, 2), None),
    ],
)  # fmt: skip
def test_answer_is_a_text_or_a_finite_number_without_exponent(value, text):
    assert parse_answer(value) == text


def test_answers_of_typed_columns(tmp_path):
    columns = {
        "decimal": pa.array([Decimal("4.00")], pa.decimal128(10, 2)),
        "half": pa.array([0.1], pa.float32()),  # 0.100000001490116 as a double
        "nested.truth": pa.array([{"truth": 0.1}], pa.struct({"truth": pa.float16()})),
        "large": pa.array([1e16]),
        "dictionary": pa.array(["7"]).dictionary_encode(),
    }
    named = {name.split(".")[0]: values for name, values in columns.items()}
    table = pa.table({"prompt": ["ab"], **named})
    pq.write_table(table, path := tmp_path / "set.parquet")
    truths = [
        parse(path, ColumnsSection(prompt="prompt", answer=name))[0].ground_truth
        for name in columns
    ]
    assert truths == ["4", "0.1", "0.1", "10000000000000000", "7"]


USER_ROW = {"prompt": "ab", "answer": "7"}
USER_TABLE = {"prompt": ["ab"], "answer": ["7"]}


def test_rows_that_differ_in_any_column_are_different_prompts(tmp_path):
    rows = [USER_ROW | {"level": level} for level in (1, 2, 1)] + [USER_ROW | {"level": 3}]
    lines, output = write_lines(tmp_path / "set.jsonl", *rows), []
    prompts = load(lines, echo=output.append)
    assert [json.loads(prompt.row)["level"] for prompt in prompts] == [1, 2, 3]
    line, unread = output
    assert line.startswith(f"{lines}: 1 of 4 rows repeat an earlier row in every column: left out")
    assert "columns level (3)" in unread
    # An index that pandas has written does not tell rows apart.
    indexed = [row | {"__index_level_0__": place} for place, row in enumerate(rows)]
    assert len(load(write_table(tmp_path / "set.parquet", *indexed))) == 3
    (path := tmp_path / "set.csv").write_text(",prompt,answer\n0,ab,7\n1,ab,7\n")
    assert len(load(path)) == 1


def test_nulls_that_parquet_adds_to_structs_stay_out_of_prompts(tmp_path):
    other = {"type": "function", "function": {"name": "b", "arguments": {"a": 1}}}
    tools = [{"name": "a", "parameters": {"properties": {"b": {"type": "string"}}}},
             {"name": "b", "parameters": {"properties": {"a": {"type": "integer"}}}}]  # fmt: skip
    tool = {"role": "tool", "content": "b"}
    rows = [
        {"prompt": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, tool],
         "tools": [shown], "answer": "7", "more": None}
        for call, shown in zip([CALL, other], tools, strict=True)
    ]  # fmt: skip
    path = write_table(tmp_path / "set.parquet", *rows)
    first, second = load(path)
    assert first.messages == (USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
                              tool)  # fmt: skip
    assert second.messages[1]["tool_calls"] == [other]
    assert [prompt.tools[0]["function"] for prompt in (first, second)] == tools
    assert json.loads(first.row)["more"] is None  # the reward gets the row as it is


def test_tools_of_a_row_reach_the_template(tmp_path):
    row = {"prompt": "b", "answer": 7, "tools": json.dumps([{"name": "a"}])}
    (prompt,) = load(write_lines(tmp_path / "set.jsonl", row))
    assert prompt.token_ids == (0, 1, 3, 2)  # <a>b
    assert prompt.tools == ({"type": "function", "function": {"name": "a"}},)
    named = write_lines(tmp_path / "named.jsonl", USER_ROW | {"functions": [{"name": "a"}]})
    columns = ColumnsSection(prompt="prompt", answer="answer", tools="functions")
    assert load(named, columns=columns)[0].tools == prompt.tools
    path = tmp_path / "set.jsonl"
    with pytest.raises(ValueError, match=r"line 1: the chat template leaves out the tool a; "):
        load(path, template="{% for m in messages %}{{ m.content }}={% endfor %}")
    with pytest.raises(ValueError, match=r"line 1: has tools, but the environment or data\.temp"):
        load(path, template_arguments={"tools": [{"name": "b"}]})
    with pytest.raises(ValueError, match=r"line 1: has tools .*, which data\.template=raw would"):
        load_prompts(path, build_tokenizer(), columns=COLUMNS, max_prompt_tokens=9, template="raw")
    with pytest.raises(ValueError, match=r"line 1: tools must be a list of tools"):
        load(write_lines(path, USER_ROW | {"tools": {"a": 1}}))


def test_what_the_template_leaves_out_is_refused(tmp_path):
    tool = {"role": "tool", "content": "="}
    prompt = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, tool]
    path = write_lines(tmp_path / "set.jsonl", {"prompt": prompt, "answer": "7"})
    assert len(load(path)) == 1
    with pytest.raises(ValueError, match="leaves out message 3, of role tool"):
        load(path, template=SHOWS_ALL.replace("m.content or ''", "m.content if m.role == 'user'"))
    with pytest.raises(ValueError, match="leaves out the call of a in message 2"):
        load(path, template=TEXTS_ALONE)


TEXTS_ALONE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


def test_template_that_wants_arguments_as_text_gets_them(tmp_path):
    """DeepSeek's concatenate them, and take calls from messages whose content is none."""
    prompt = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
              {"role": "tool", "content": "b"}]  # fmt: skip
    path = write_lines(tmp_path / "set.jsonl", {"prompt": prompt, "answer": "7"})
    template = (
        "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    (found,) = load(path, template=template)
    text = 'aba{"b": "a"}b'  # of which `?` stands for what the tokenizer lacks
    assert found.token_ids == tuple("<ab>=!?".find(letter) % 7 for letter in text)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_old_line_ends_and_byte_order_mark(tmp_path, ending, end):
    path, rows = tmp_path / f"set.{ending}", [USER_ROW, USER_ROW | {"prompt": "a\u2028b"}]
    if ending == "jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)
    else:
        text = "".join(f"{one}{end}" for one in ("prompt,answer", "ab,7", "a\u2028b,7"))
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [row.messages[0]["content"] for row in parse(path)] == ["ab", "a\u2028b"]
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(ValueError, match="is encoded as UTF-16; save it as UTF-8"):
        parse(path)


def test_csv_of_structs_and_of_texts_with_line_breaks(tmp_path):
    path = tmp_path / "set.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "reward_model", "tools"])
        writer.writerow([json.dumps([USER]), json.dumps({"ground_truth": 7}), ""])
        writer.writerow(["a\nb", json.dumps({"ground_truth": "8"}), '[{"name": "a"}]'])
    first, second = parse(path, ColumnsSection())
    assert (first.messages, first.ground_truth, first.tools) == ((USER,), "7", ())
    assert second.messages == ({"role": "user", "content": "a\nb"},)
    assert second.tools[0]["function"]["name"] == "a"
    path.write_text("prompt,answer,answer\nab,7,8\n")
    with pytest.raises(ValueError, match="has two columns answer; rename one"):
        parse(path)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"prompt": "a", "answer": 1, "answer": 2}', "line 1 is not JSON: the key 'answer' is gi"),
        ('{"prompt": "a", "answer": 1,}', "line 1 is not JSON"),
        ('{"prompt": "a\x00", "answer": 1}', "line 1 is not JSON"),
        ('{"prompt": "a", "answer": 1, "images": ["a.png"]}',
         "line 1: has a value in the column images; models here read text only"),
        ('{"prompt": [{"role": "assistant", "content": "7"}], "answer": 1}',
         "line 1: prompt ends with a message of the assistant"),
        ("{\"a\":" * 100_000, "line 1 is not JSON"),
        ("version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer instead of the rows"),
        ('{"prompt": "a", "answer": 1, "choices": ["b", "c"]}',
         "line 1: the prompt lacks the texts of the column choices; write it into"),
        ('{"prompt": "a", "answer": 1, "options": {"text": ["b"], "label": ["A"]}}',
         "line 1: the prompt lacks the texts of the column options"),
        ('{"prompt": "a", "answer": 1, "chat_template_kwargs": {"enable_thinking": false}}',
         "line 1: has chat_template_kwargs; set data.template_arguments"),
    ],
)  # fmt: skip
def test_bad_lines_are_refused_by_number(tmp_path, line, error):
    (path := tmp_path / "set.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=error):
        parse(path)


def test_map_with_a_key_twice_is_refused(tmp_path):
    twice = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({**USER_TABLE, "map": twice}), path := tmp_path / "set.parquet")
    with pytest.raises(ValueError, match=r"a row cannot be read: .*duplicate key was 'a'"):
        parse(path)


def test_columns_that_belong_to_the_prompt_may_be_in_it_or_empty(tmp_path):
    row = {"instruction": "b or c?", "choices": ["b", "c"], "input": "", "answer": "c"}
    columns = ColumnsSection(prompt="instruction", answer="answer")
    nothing = {"options": [], "chat_template_kwargs": {"enable_thinking": None}}
    path = write_lines(tmp_path / "set.jsonl", row | nothing)
    assert parse(path, columns)[0].messages == ({"role": "user", "content": "b or c?"},)
    with pytest.raises(ValueError, match="line 1: the prompt lacks the text of the column input"):
        parse(write_lines(path, row | {"input": "2 3"}), columns)
    older = {"messages": [USER], "prompt": "ab", "functions": [{"name": "a"}], "answer": 1}
    for prompt in ("messages", "prompt"):
        with pytest.raises(ValueError, match="line 1: has functions, OpenAI's older name of tools"):
            parse(write_lines(path, older), ColumnsSection(prompt=prompt, answer="answer"))
    assert parse(write_lines(path, older | {"functions": ["def f(): ..."]}))
    with pytest.raises(ValueError, match="line 1: the prompt lacks the text of the column context"):
        parse(write_lines(path, USER_ROW | {"context": "Bonn is a town."}))
    assert parse(write_lines(path, USER_ROW | {"context": "a", "prompt": "a b"}))


def test_system_column_is_the_system_message(tmp_path):
    row = {"conversations": [{"from": "human", "value": "ab"}], "system": "ba", "answer": 1}
    columns = ColumnsSection(prompt="conversations", answer="answer")
    path, system = tmp_path / "set.jsonl", {"role": "system", "content": "ba"}
    for form in (row, row | {"conversations": [system, USER]}, row | {"conversations": "ab"}):
        assert parse(write_lines(path, form), columns)[0].messages == (system, USER)
    row["conversations"].insert(0, {"from": "system", "value": "a"})
    with pytest.raises(ValueError, match=r"line 1: .* its column system would be a second one"):
        parse(write_lines(path, row), columns)
    other = {"prompt": "ab", "answer": 1, "system_prompt": "ba"}  # OpenOrca's
    assert parse(write_lines(path, other))[0].messages == (system, USER)
    with pytest.raises(ValueError, match=r"its column system_prompt would be a second one"):
        parse(write_lines(path, other | {"system": "b"}))


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.jsonl", b' \n[{"prompt": "a"}]', "is one JSON array.*json.load"),
        ("a.jsonl", b"\xef\xbb\xbf[\n{}]", "is one JSON array"),
        ("a.jsonl", b'{\r\n  "prompt": "a"\r\n}', "has JSON over several lines"),
        ("a.jsonl", b"<!DOCTYPE html>", "is a page in HTML"),
        ("a.csv", b"<html>", "is a page in HTML"),
        ("a.csv", b"PK\x03\x04..", "is a zip archive or a spreadsheet.*save it as .csv"),
        ("a.jsonl", b"\x1f\x8b\x08", "is compressed, in spite of its name; decompress"),
        ("a.parquet", b"\x1f\x8b\x08", "is compressed"),
    ],
)
def test_file_of_another_kind_is_named(tmp_path, name, content, error):
    """Leaving out bad rows would be no cure: none is good."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=error) as caught:
        parse(tmp_path / name)
    assert "bad_rows" not in str(caught.value)


def test_parquet_is_known_by_its_content(tmp_path):
    path = write_table(tmp_path / "a.parquet", {"prompt": "ab", "answer": "7"})
    assert parse(path)[0].ground_truth == "7"
    with pytest.raises(ValueError, match=r"is a parquet file.*rename it to end with \.parquet"):
        parse(path.rename(tmp_path / "a.jsonl"))


def test_conversations_need_no_columns_of_evaluation_sets(tmp_path):
    """`data.columns` given for `eval.sets`: rows that are messages are read as without them."""
    columns = ColumnsSection(prompt="question", answer="answer")
    answered = {"messages": [USER, {"role": "assistant", "content": "7"}]}
    path = write_lines(tmp_path / "a.jsonl", answered)
    ((number, row),) = read_rows(path, columns, conversations=True)
    found = parse_row(row, columns, path=path, number=number, conversations=True)
    assert [each["content"] for each in found.messages] == ["ab", "7"]
    path = write_lines(tmp_path / "b.jsonl", {"text": "a", "reply": "b"})
    cure = r"set, as an example, sft.validation.v.columns=\{prompt: text, completion: reply\}"
    with pytest.raises(ValueError, match=cure):
        list(read_rows(path, columns, conversations=True, setting="sft.validation.v.columns"))


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("123456789012345678.5", "123456789012345678.5"), ("1.50", "1.5"), ("1e5", "100000"),
        ("12345678901234567890.0", "12345678901234567890"), ("-0.0", "0"), ("1e400", None),
        ("NaN", None), ("0.1000000000000000055", "0.1000000000000000055"),
        ("1e-99999999", None), ("7" * 5000, "7" * 5000),
    ],
)  # fmt: skip
def test_numbers_of_lines_keep_their_digits(tmp_path, written, text):
    """A float has 17 digits, and the number of a line may have more."""
    (path := tmp_path / "set.jsonl").write_text('{"prompt": "ab", "answer": ' + written + "}")
    if text is None:
        with pytest.raises(ValueError, match="answer must be a non-empty text or a number"):
            parse(path)
    else:
        assert parse(path)[0].ground_truth == text
        if len(text) < 4300:  # Python converts no longer ones
            row = json.loads(json.dumps(next(read_rows(path, COLUMNS))[1]))
            assert row["answer"] == float(written)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "prompt\tanswer\na\t7\n",
            r"has no commas between columns, its first line is 'prompt.tans",
        ),
        ("sep=,\nprompt,answer\na,7\n", "has no commas between columns, its first line is 'sep=,'"),
        (
            'prompt,answer\na, "7"\n',
            "row 1 after the header has a space before the quote of ' \"7\"'",
        ),
    ],
)
def test_csv_of_other_dialects_is_refused(tmp_path, text, error):
    (path := tmp_path / "set.csv").write_text(text)
    with pytest.raises(ValueError, match=error):
        parse(path)


@pytest.mark.parametrize(
    ("place", "cure"),
    [
        ("data/*.parquet", "give each a name in data.mix"), ("a.jsonl,b.jsonl", "in data.mix"),
        ("https://huggingface.co/datasets/o/n/tree/main", "write hf:o/n"),
        ("openai/gsm8k", "write hf:openai/gsm8k"), ("s3://b/a.jsonl", "download the file"),
        ("file:///tmp/a.jsonl", "give the path without file:"), ("a/b.jsonl", "does not exist$"),
    ],
)  # fmt: skip
def test_place_that_is_no_file_has_its_cure(place, cure):
    with pytest.raises(ValueError, match=cure):
        list(read_rows(Path(place), COLUMNS))


def test_bytes_of_a_text_are_not_called_an_image(tmp_path):
    path = write_table(tmp_path / "set.parquet", {"prompt": b"ab", "answer": "7"})
    with pytest.raises(
        ValueError, match=r"column prompt; .* convert its bytes to text, if they are"
    ):
        parse(path)
    (path := tmp_path / "set.jsonl.gz").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(ValueError, match=r"is compressed.*; decompress it first"):
        parse(path)
