"""Read the rows of a prompt file (parquet, JSON lines, CSV), and parse them.

By default the columns are those of DAPO-Math-17k: `prompt` (a list of chat messages),
`reward_model` (a struct with `ground_truth`) and `data_source`.
Schema: https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k
"""

import codecs
import contextlib
import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.config.sections import ColumnsSection
from megatron_rl.data.hub import HubSet, is_on_hub, read_hub, read_saved
from megatron_rl.errors import UserError
from megatron_rl.fields import changes_training, has_classes, is_media, with_class_names
from megatron_rl.messages import (
    SYSTEMS,
    TOOLS,
    Message,
    parse_conversation,
    parse_messages,
    parse_tools,
    refuse_left_out,
)
from megatron_rl.texts import clean

PlainRow = dict[str, Any] | ValueError
SOURCE = "data_source"
_ROWS_AT_ONCE = 4096  # a whole large file as objects is too much
BAD_ROW_CURE = "repair it, or leave such rows out by data.bad_rows=skip"
FIRST_ROWS = 1000  # that a command checks before it starts a run
LONGEST = 4000  # digits of a number
_TEXTS_OF_NAN = ("nan", "NaN", "<NA>")  # str() of a missing number in pandas
_LFS = b"version https://git-lfs"
PROMPT = ColumnsSection().prompt  # the default column
CONVERSATIONS = ("messages", "conversations")  # columns that are read in place of the default
# The first bytes of files of other kinds.
_MAGIC = {
    b"PAR1": ("a parquet file", "rename it to end with .parquet"),
    **dict.fromkeys((b"ARROW1", b"\xff\xff\xff\xff"),
                    ("an Arrow file", "give the folder that datasets saved")),
    b"SQLite format 3": ("a database", "export the rows as .jsonl"),
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "extract it, or save it as .csv"),
    **dict.fromkeys((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd"),
                    ("compressed", "decompress it first")),
}  # fmt: skip
_SPACED_QUOTE = re.compile(r'[ \t]+".*"[ \t]*', re.DOTALL)  # of CSV: the quotes would be text
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Row(NamedTuple):
    """The parsed fields of a row."""

    messages: tuple[Message, ...]
    ground_truth: str
    data_source: str
    tools: tuple[dict[str, Any], ...] = ()  # schemas for the chat template


def check_prompt_file(
    path: str | Path,
    columns: ColumnsSection,
    *,
    bad_rows: Literal["error", "skip"] = "error",
    system_prompt: str | None = None,
    conversations: bool = False,
    setting: str = "data.columns",
) -> None:
    """Raise UserError if a file cannot be read, lacks a column, or has a malformed first row.

    setting: what has the file's columns.
    """
    path = Path(path)
    rows = read_rows(path, columns, conversations=conversations, setting=setting)
    for number, row in itertools.islice(rows, FIRST_ROWS):
        if bad_rows == "error":
            try:
                parse_row(
                    row, columns,
                    path=path, number=number, system_prompt=system_prompt,
                    conversations=conversations,
                )  # fmt: skip
            except ValueError as error:
                raise UserError(f"{error}; {BAD_ROW_CURE}") from None


def count_rows(path: str | Path) -> float:
    """Count the rows of a file, or its non-blank lines; infinity if counting would be slow."""
    path = Path(path)
    if path.is_file() and path.suffix == ".parquet":
        return int(pq.read_metadata(path).num_rows)
    if path.is_file() and path.suffix in (".jsonl", ".csv"):  # a text in CSV may have several lines
        with path.open("rb") as lines:
            return sum(bool(line.strip()) for line in lines)
    return math.inf


def name_row(path: Path, number: int) -> str:
    """Name a row for an error message; lines count from 1, as in editors."""
    if path.suffix == ".csv":  # where a field may contain line breaks
        return f"{path}, row {number + 1} after the header"
    return f"{path}, line {number + 1}" if path.suffix == ".jsonl" else f"{path}, row {number}"


def read_rows(
    path: Path,
    columns: ColumnsSection,
    *,
    conversations: bool = False,
    setting: str = "data.columns",
) -> Iterator[tuple[int, PlainRow]]:
    """Each row with its number in the file, from 0; an invalid row is replaced by its problem.

    conversations: rows end with the assistant's answer, and need no ground truth.
    setting: what has the columns, for errors.
    Raises ValueError if the file is missing, of another kind, damaged, empty or lacks a column.
    """
    empty = True
    for number, row in _reader_of(path)(path):
        if empty and isinstance(row, dict):
            _check_columns(list(row), columns, path, conversations=conversations, setting=setting)
            empty = False
        yield number, clean(row)
    if empty:
        raise UserError(f"{path} holds no prompts; give a file with rows")


def _reader_of(path: Path) -> Callable[[Path], Iterator[tuple[int, PlainRow]]]:
    if is_on_hub(path):
        return read_hub
    if path.is_dir():
        return read_saved
    if not path.is_file():
        raise UserError(f"prompt file {path} does not exist{_cure_of_place(str(path))}")
    readers = {".parquet": _read_parquet, ".jsonl": _read_lines, ".csv": _read_csv}
    if path.suffix not in readers:
        if (problem := _other_kind(path)) is not None:  # which another name would not cure
            raise UserError(f"{path} {problem}")
        raise UserError(
            f"{path}: prompts are read from .parquet, .jsonl (one JSON object a line) or .csv "
            "(with a header) by the name's ending; rename or convert the file"
        )
    if (problem := _other_kind(path)) is not None:
        raise UserError(f"{path} {problem}")
    return readers[path.suffix]


def _cure_of_place(path: str) -> str:
    """Return a cure for a place that is no local file, as the end of a message."""
    if found := re.match(r"https?:/+huggingface\.co/datasets/([\w.-]+/[\w.-]+)", path):
        return f"; for the data set of the hub write hf:{found[1]}"
    if path.startswith("file:/"):
        return "; give the path without file:"
    if re.match(r"[a-z][a-z0-9]+:/", path):
        return "; places on a network are not read: download the file, and give its path"
    if re.search(r"[*?,]", path):
        return "; for several files give each a name in data.mix, or join them"
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) and not Path(path).suffix:
        return f"; for the data set of the hub write hf:{path}"
    return ""


def _other_kind(path: Path) -> str | None:
    """Return what a file is, by its first bytes, if that is another kind than its name ends with.

    No row of it could be read, so leaving out malformed rows would be no cure.
    """
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith(_LFS):
        return "is a Git LFS pointer instead of the rows; fetch them with git lfs pull"
    for magic, (kind, cure) in _MAGIC.items():
        if start.startswith(magic) and (path.suffix, kind) != (".parquet", "a parquet file"):
            return f"is {kind}, in spite of its name; {cure}"
    first = start.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if path.suffix == ".parquet" or start.startswith(_UTF16):
        return None
    if first == b"<":
        return "is a page in HTML or XML, such as one of an error; download the file itself again"
    if path.suffix == ".csv":
        return None
    if first == b"[":
        return (
            "is one JSON array, and not one JSON object a line; convert it: python -c "
            f"\"import json; [print(json.dumps(row)) for row in json.load(open('{path.name}'))]\" "
            "> rows.jsonl"
        )
    if re.match(rb"\s*\{\s*[\r\n]", start.removeprefix(codecs.BOM_UTF8)):
        return (
            "has JSON over several lines, and not one JSON object a line; write each object on "
            "one line"
        )
    return None


def parse_row(
    row: PlainRow,
    columns: ColumnsSection,
    *,
    path: Path,
    number: int,
    system_prompt: str | None = None,
    conversations: bool = False,
) -> Row:
    """Parse messages, truth, source and tools; raise UserError if one is missing or malformed.

    system_prompt: becomes the first message; a row with its own system message is rejected.
    conversations: messages end with the assistant's, and there is no truth.
    """
    if isinstance(row, ValueError):
        raise row
    where = name_row(path, number)
    if media := [name for name, value in row.items() if is_media(name, value)]:
        cure = "leave such rows out, or remove the column"
        if isinstance(row[media[0]], bytes) and media[0] in (columns.prompt, columns.answer):
            cure = "convert its bytes to text, if they are text"
        raise UserError(
            f"{where}: has a value in the column {media[0]}; models here read text only: {cure}"
        )
    if conversations:
        for name, value in row.items():
            if changes_training(name, value, is_column=True):
                raise UserError(
                    f"{where}: has {name}={value!r:.40}, which would have no effect: every answer "
                    "is trained alike; leave such rows out, or remove the column"
                )
    messages = _parse_prompt(
        row, columns,
        path=path, where=where, system_prompt=system_prompt, conversations=conversations,
    )  # fmt: skip
    value = _find(row, columns.answer)
    truth = "" if conversations else parse_answer(value)
    if truth is None:
        raise UserError(
            f"{where}: {columns.answer} must be a non-empty text or a number, got {value!r:.80}; "
            "write other kinds as a text, several right answers as the text of a JSON list, or let "
            "the reward read them from the row"
        )
    source = _find(row, columns.source or SOURCE)
    if source is None and columns.source is None and SOURCE not in row:
        source = clean(HubSet.parse(path).name if is_on_hub(path) else path.stem)
    if not isinstance(source, str):
        raise UserError(f"{where}: {columns.source or SOURCE} must be a text, got {source!r:.80}")
    name = columns.tools or TOOLS
    try:
        tools = parse_tools(_find(row, name), key=name, from_table=_is_table(path))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return Row(messages, truth, source, tools)


def parse_answer(value: Any) -> str | None:
    """Return a ground truth as text; None if it is no text and no number of a usual size.

    Numbers have no exponent and no zeros at the end: 72.0 is `72`, and 1e16 a 1 with 16 zeros.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a NumPy scalar
        value = value.item()
    if isinstance(value, str):
        return value if value.strip() and value not in _TEXTS_OF_NAN else None
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return None
    written = value.text if isinstance(value, _Written) else repr(value)
    number = Decimal(written) if isinstance(value, float) else value
    if abs(number.adjusted()) > LONGEST:
        return None
    text = format(number, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _parse_prompt(
    row: dict[str, Any],
    columns: ColumnsSection,
    *,
    path: Path,
    where: str,
    system_prompt: str | None,
    conversations: bool,
) -> tuple[Message, ...]:
    try:
        if conversations:
            messages = _parse_conversation(row, columns, from_table=_is_table(path))
        else:
            value = _find(row, columns.prompt)
            messages = parse_messages(value, key=columns.prompt, from_table=_is_table(path))
        messages = add_system_column(messages, row)
        truth = None if conversations else parse_answer(_find(row, columns.answer))
        used = [columns.answer, columns.tools or TOOLS, columns.prompt]
        used += [columns.completion] if conversations else []
        refuse_left_out(row, prompt=columns.prompt, messages=messages, truth=truth, used=used)
        return add_system_prompt(messages, system_prompt)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _parse_conversation(
    row: dict[str, Any], columns: ColumnsSection, *, from_table: bool
) -> tuple[Message, ...]:
    """Return the messages of a row of conversations, which end with the assistant's."""
    completion = _find(row, columns.completion)
    names = [columns.prompt, *CONVERSATIONS, PROMPT]  # data.columns may be those of eval.sets
    if columns.prompt == PROMPT:  # some data sets have the question alone next to the conversation
        names = [*CONVERSATIONS, PROMPT] if completion is None else [PROMPT, *CONVERSATIONS]
    key = next((name for name in names if _find(row, name) is not None), columns.prompt)
    messages = parse_conversation(_find(row, key), key=key, from_table=from_table)
    if completion is not None:
        if messages[-1]["role"] == "assistant":
            raise UserError(
                f"{key} ends with a message of the assistant, and {columns.completion} has another "
                "answer; remove one of them"
            )
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        further = parse_conversation(completion, key=columns.completion, from_table=from_table)
        messages = _continue_by(messages, further, key=key, completion=columns.completion)
    last = messages[-1]
    if last["role"] != "assistant" or not (last["content"].strip() or last.get("tool_calls")):
        raise UserError(
            f"{key} has no answer of the assistant at its end, and there is none in a column "
            f"{columns.completion}; add it, or name its column as data.columns.completion"
        )
    return messages


def _continue_by(
    messages: tuple[Message, ...], further: tuple[Message, ...], *, key: str, completion: str
) -> tuple[Message, ...]:
    """Return a prompt and its answer, which begins with the prompt in some preference pairs."""
    for start in (0, 1):  # after a system message
        is_system = all(one["role"] == "system" for one in further[:start])
        if is_system and further[start : start + len(messages)] == messages:
            return further
    if further[0]["role"] != "assistant":
        raise UserError(
            f"{completion} begins with a message of role {further[0]['role']} that {key} does not "
            f"have; let it be the answer alone, or the whole conversation as the column messages"
        )
    return (*messages, *further)


def add_system_column(messages: tuple[Message, ...], row: Mapping[str, Any]) -> tuple[Message, ...]:
    """Prepend the system message that some formats have in a column of its own."""
    own = [one["content"] for one in messages if one["role"] == "system"][:1]
    for name in SYSTEMS:
        system = row.get(name)
        if isinstance(system, str) and system.strip() and system not in own:
            messages = add_system_prompt(messages, system, key=f"its column {name}")
            own = [system]
    return messages


def add_system_prompt(
    messages: tuple[Message, ...], system_prompt: str | None, *, key: str = "data.system_prompt"
) -> tuple[Message, ...]:
    """Prepend the system message of setting `key`; UserError if the messages contain their own."""
    if system_prompt is None:
        return messages
    if any(message["role"] == "system" for message in messages):
        raise UserError(
            f"the row has a system message, and {key} would be a second one; unset that, or remove "
            "the message"
        )
    return ({"role": "system", "content": clean(system_prompt)}, *messages)


def _is_table(path: Path) -> bool:
    """Return True if the rows of a file have typed columns."""
    return path.suffix not in (".jsonl", ".csv")


def _read_parquet(path: Path) -> Iterator[tuple[int, PlainRow]]:
    try:
        numbers = itertools.count()
        with pq.ParquetFile(path) as file:
            if repeated := _repeated(file.schema_arrow.names):
                raise UserError(f"{path} has two columns {repeated}; rename one")
            classes = _classes_of(file.schema_arrow)
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                for row in _to_rows(batch):
                    yield next(numbers), with_class_names(row, classes)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}; write it again") from error
    except KeyError as error:  # of a map with a key twice
        raise UserError(f"{path}: a row cannot be read: {error}; leave the column out") from None


def _classes_of(schema: pa.Schema) -> Any:
    """Return the types that `datasets` has written into a file, if some are classes."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return None
    return found if has_classes(found) else None


def _to_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Convert rows to objects; small floats by their shortest decimal form, so that 0.1 is 0.1."""
    rows = batch.to_pylist(maps_as_pydicts="strict")
    for field in batch.schema:
        if "float" in str(field.type):  # at any depth; the others are `double`
            for row in rows:
                row[field.name] = _widen(row[field.name], field.type)
    return rows


def _widen(value: Any, kind: pa.DataType) -> Any:
    if isinstance(value, float) and kind in (pa.float16(), pa.float32()):
        return float(str(kind.to_pandas_dtype()(value)))
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {field.name: _widen(value[field.name], field.type) for field in kind}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_widen(one, kind.value_type) for one in value]
    return value


def _read_lines(path: Path) -> Iterator[tuple[int, PlainRow]]:
    # A bare \r ends a line too; it cannot occur inside a line, where JSON escapes it.
    _refuse_utf16(path)
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines):
            if not line.strip("\ufeff \t\n"):
                continue
            try:
                text = line.encode("utf-8", "surrogateescape").decode("utf-8-sig")
                row = json.loads(
                    text, object_pairs_hook=_unique_keys, parse_float=_Written, parse_int=_whole
                )
            except (ValueError, RecursionError) as error:
                row = ValueError(f"{name_row(path, number)} is not JSON: {error}")
            if not isinstance(row, dict | ValueError):
                row = ValueError(f"{name_row(path, number)} is no JSON object: {row!r:.80}")
            yield number, row


class _Written(float):
    """A number of a JSON text, with its text, which may have more digits than a float."""

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str

    def __repr__(self) -> str:
        return self.text


def _whole(text: str) -> int | str:
    """Return a whole number, or its digits where Python converts no number of so many."""
    return int(text) if len(text) <= LONGEST else text


def _read_csv(path: Path) -> Iterator[tuple[int, PlainRow]]:
    csv.field_size_limit(2**31 - 1)  # the library's own limit, 128 KiB, is one long prompt
    _refuse_utf16(path)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        numbers = itertools.count()
        try:
            names = list(rows.fieldnames or ())
            if repeated := _repeated(names):
                raise UserError(f"{path} has two columns {repeated}; rename one")
            if names[:1] == ["sep="] or (names[1:] == [] and re.search(r"[;\t|]", "".join(names))):
                raise UserError(
                    f"{path} has no commas between columns, its first line is {','.join(names)!r}; "
                    "save it with commas, and the names of the columns as the first line"
                )
            for row in rows:
                number = next(numbers)
                if None in row or None in row.values():
                    found = len(names) + len(row[None]) if None in row else "fewer"
                    problem = f"has {found} fields, and the header {len(names)}; "
                    problem += "quote commas in texts"
                    yield number, ValueError(f"{name_row(path, number)} {problem}")
                elif quoted := next(filter(_SPACED_QUOTE.fullmatch, row.values()), None):
                    problem = f"has a space before the quote of {quoted!r:.60}; remove the space"
                    yield number, ValueError(f"{name_row(path, number)} {problem}")
                else:
                    yield number, dict(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path}, line {rows.line_num + 1} is not CSV: {error}") from None


def _refuse_utf16(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(2) in _UTF16:
            raise UserError(f"{path} is encoded as UTF-16; save it as UTF-8")


def _repeated(names: Sequence[str]) -> str | None:
    """Return a name that occurs twice, if there is one."""
    return next((name for place, name in enumerate(names) if name in names[:place]), None)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of JSON; raise ValueError for a key that it has twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(f"the key {_repeated([key for key, _ in pairs])!r} is given twice")
    return made


def _check_columns(
    names: list[str], columns: ColumnsSection, path: Path, *, conversations: bool, setting: str
) -> None:
    prompt = columns.prompt
    if conversations and not {prompt, prompt.split(".")[0]} & set(names):
        prompt = next((name for name in (*CONVERSATIONS, PROMPT) if name in names), prompt)
    answer = None if conversations else columns.answer
    named = prompt, answer, columns.source, columns.tools
    wanted = [name for name in named if name is not None]
    missing = [name for name in wanted if not {name, name.split(".")[0]} & set(names)]
    if missing:
        known = _likely(names, _QUESTIONS, "question") if prompt in missing else prompt
        further = "completion" if conversations else "answer"
        likely = _likely([name for name in names if name != known], _ANSWERS, "answer")
        raise UserError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(names)}: set, as an "
            f"example, {setting}={{prompt: {_quoted(known)}, {further}: {_quoted(likely)}}} "
            "(docs/prompts.md)"
        )


def _quoted(name: str) -> str:
    """Write a name in YAML, in quotes if it may need them, as one with spaces around it."""
    return name if re.fullmatch(r"[\w.-]+", name) else "'" + name.replace("'", "''") + "'"


# Usual names of columns, for the example of an error alone.
_QUESTIONS = ("question", "problem", "query", "instruction", "prompt", "messages", "conversations",
              "conversation", "input", "text")  # fmt: skip
_ANSWERS = ("answer", "final_answer", "ground_truth", "solution", "response", "reply", "output",
            "completion", "chosen", "answers", "target", "label")  # fmt: skip


def _likely(names: Sequence[str], usual: Sequence[str], default: str) -> str:
    """Return the first usual name that is among the names, whatever its capitals and spaces."""
    by_name = {name.strip().lower(): name for name in names}
    return next((by_name[one] for one in usual if one in by_name), default)


def _find(row: dict[str, Any], name: str) -> Any:
    if name in row:  # also of a table, whose header may contain a dot
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):  # a struct in a CSV
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        value = value.get(part) if isinstance(value, dict) else None
    return value
