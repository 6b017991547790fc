"""Read the rows of a prompt file (parquet, JSON lines, CSV), and parse them.

By default the columns are those of DAPO-Math-17k: `prompt` (a list of chat messages),
`reward_model` (a struct with `ground_truth`) and `data_source`.
Schema: https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k
"""

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.data.hub import HubSet, is_on_hub, read_hub, read_saved
from megatron_rl.errors import UserError
from megatron_rl.texts import clean

PlainRow = dict[str, Any] | ValueError
SOURCE = "data_source"
_ROWS_AT_ONCE = 4096  # a whole large file as objects is too much
BAD_ROW_CURE = "repair it, or leave such rows out by data.bad_rows=skip"
FIRST_ROWS = 1000  # that a command checks before it starts a run


@dataclass(frozen=True)
class Columns:
    """Column names of a prompt file; a dot selects a field of a struct."""

    prompt: str = "prompt"  # a text, the user's message, or a list of chat messages
    answer: str = "reward_model.ground_truth"  # a text or a number
    source: str | None = None  # None: `data_source` where there is one, else the file's name


class Row(NamedTuple):
    """The parsed fields of a row."""

    messages: tuple[dict[str, Any], ...]
    ground_truth: str
    data_source: str


def check_prompt_file(
    path: str | Path,
    columns: Columns,
    *,
    bad_rows: Literal["error", "skip"] = "error",
    system_prompt: str | None = None,
) -> None:
    """Raise UserError if a file cannot be read, lacks a column, or has a malformed first row."""
    path = Path(path)
    for number, row in itertools.islice(read_rows(path, columns), FIRST_ROWS):
        if bad_rows == "error":
            try:
                parse_row(row, columns, path=path, number=number, system_prompt=system_prompt)
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


def read_rows(path: Path, columns: Columns) -> Iterator[tuple[int, PlainRow]]:
    """Each row with its number in the file, from 0; for one that is no row, what is wrong with it.

    Raises ValueError if the file is missing, of another kind, damaged, empty or lacks a column.
    """
    empty = True
    for number, row in _reader_of(path)(path):
        if empty and isinstance(row, dict):
            _check_columns(list(row), columns, path)
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
        raise UserError(f"prompt file {path} does not exist")
    readers = {".parquet": _read_parquet, ".jsonl": _read_lines, ".csv": _read_csv}
    if path.suffix not in readers:
        raise UserError(
            f"{path}: prompts are read from .parquet, .jsonl (one JSON object a line) or .csv "
            "(with a header) by the name's ending; rename or convert the file"
        )
    return readers[path.suffix]


def parse_row(
    row: PlainRow, columns: Columns, *, path: Path, number: int, system_prompt: str | None = None
) -> Row:
    """Parse messages, ground truth and source; raise UserError if one is missing or malformed.

    system_prompt: becomes the first message; a row with its own system message is rejected.
    """
    if isinstance(row, ValueError):
        raise row
    where = name_row(path, number)
    messages = _parse_messages(row, columns, where=where, system_prompt=system_prompt)
    truth = _find(row, columns.answer)
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        truth = str(truth)
    if not isinstance(truth, str) or not truth.strip():
        raise UserError(
            f"{where}: {columns.answer} must be a non-empty text or a number, got {truth!r:.80}"
        )
    source = _find(row, columns.source or SOURCE)
    if source is None and columns.source is None and SOURCE not in row:
        source = clean(HubSet.parse(path).name if is_on_hub(path) else path.stem)
    if not isinstance(source, str):
        raise UserError(f"{where}: {columns.source or SOURCE} must be a text, got {source!r:.80}")
    return Row(messages, truth, source)


def _parse_messages(
    row: dict[str, Any], columns: Columns, *, where: str, system_prompt: str | None
) -> tuple[dict[str, Any], ...]:
    messages = _find(row, columns.prompt)
    if isinstance(messages, str) and messages.strip():
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{where}: {columns.prompt} must be a text or a list of chat messages, got "
            f"{messages!r:.80}"
        )
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise UserError(
                f"{where}: a chat message must have the texts role and content, got {message!r:.80}"
            )
    try:
        return add_system_prompt(tuple(map(_without_nulls, messages)), system_prompt)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def add_system_prompt(
    messages: tuple[dict[str, Any], ...], system_prompt: str | None
) -> tuple[dict[str, Any], ...]:
    """Prepend `data.system_prompt`; raise UserError if the messages have a system message."""
    if system_prompt is None:
        return messages
    if any(message["role"] == "system" for message in messages):
        raise UserError(
            "the row has a system message, and data.system_prompt would be a second one; unset "
            "that, or remove the message"
        )
    return ({"role": "system", "content": clean(system_prompt)}, *messages)


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """Remove nulls, which parquet has for keys of other rows, and convert to JSON types."""
    if message.keys() == {"role", "content"}:
        return message
    present = {key: value for key, value in message.items() if value is not None}
    return json.loads(json.dumps(present, default=str))


def _read_parquet(path: Path) -> Iterator[tuple[int, PlainRow]]:
    try:
        numbers = itertools.count()
        for batch in pq.ParquetFile(path).iter_batches(_ROWS_AT_ONCE):
            for row in batch.to_pylist():
                yield next(numbers), row
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}; write it again") from error


def _read_lines(path: Path) -> Iterator[tuple[int, PlainRow]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                row = ValueError(f"{name_row(path, number)} is not JSON: {error}")
            if not isinstance(row, dict | ValueError):
                row = ValueError(f"{name_row(path, number)} is no JSON object: {row!r:.80}")
            yield number, row


def _read_csv(path: Path) -> Iterator[tuple[int, PlainRow]]:
    csv.field_size_limit(2**31 - 1)  # the library's own limit, 128 KiB, is one long prompt
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        numbers = itertools.count()
        try:
            for row in rows:
                number = next(numbers)
                if None in row or None in row.values():
                    names = len(rows.fieldnames or ())
                    found = names + len(row[None]) if None in row else "fewer"
                    problem = f"has {found} fields, and the header {names}; quote commas in texts"
                    yield number, ValueError(f"{name_row(path, number)} {problem}")
                else:
                    yield number, dict(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path}, line {rows.line_num + 1} is not CSV: {error}") from None


def _check_columns(names: list[str], columns: Columns, path: Path) -> None:
    wanted = [name for name in (columns.prompt, columns.answer, columns.source) if name is not None]
    missing = [name for name in wanted if not {name, name.split(".")[0]} & set(names)]
    if missing:
        raise UserError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(names)}: set "
            "data.columns={prompt: question, answer: answer}, or eval.columns, or columns of one "
            "set (docs/prompts.md)"
        )


def _find(row: dict[str, Any], name: str) -> Any:
    if name in row:  # also of a table, whose header may contain a dot
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
