"""Rows of a prompt set as they lie in a file, parquet or JSON lines, and what is made of one.

By default the columns are those of DAPO-Math-17k: `prompt` (a list of chat messages),
`reward_model` (a struct with `ground_truth`) and `data_source`.
Schema: https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.data.hub import is_on_hub, read_hub, read_saved

PlainRow = dict[str, Any] | ValueError
SOURCE = "data_source"
_ROWS_AT_ONCE = 4096  # a whole large file as objects is too much
_ROWS_TO_CHECK = 1000


@dataclass(frozen=True)
class Columns:
    """Which columns hold what; a dot reaches into a struct."""

    prompt: str = "prompt"  # a text, the user's message, or a list of chat messages
    answer: str = "reward_model.ground_truth"  # a text or a number
    source: str | None = None  # None: `data_source` where there is one, else the file's name


class Row(NamedTuple):
    """What is used of a row."""

    messages: tuple[dict[str, str], ...]
    ground_truth: str
    data_source: str


def check_prompt_file(
    path: str | Path, columns: Columns, *, bad_rows: Literal["error", "skip"] = "error"
) -> None:
    """ValueError if the file cannot be read, lacks a column, or has a bad one of its first rows."""
    path = Path(path)
    for number, row in itertools.islice(read_rows(path, columns), _ROWS_TO_CHECK):
        if bad_rows == "error":
            parse_row(row, columns, path=path, number=number)


def name_row(path: Path, number: int) -> str:
    """A row as an error names it: editors count lines from 1."""
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
        yield number, row
    if empty:
        raise ValueError(f"{path} holds no prompts")


def _reader_of(path: Path) -> Callable[[Path], Iterator[tuple[int, PlainRow]]]:
    if is_on_hub(path):
        return read_hub
    if path.is_dir():
        return read_saved
    if not path.is_file():
        raise ValueError(f"prompt file {path} does not exist")
    readers = {".parquet": _read_parquet, ".jsonl": _read_lines}
    if path.suffix not in readers:
        raise ValueError(
            f"{path}: prompts are read from .parquet or .jsonl (one JSON object a line) by the "
            "name's ending; rename or convert the file"
        )
    return readers[path.suffix]


def parse_row(row: PlainRow, columns: Columns, *, path: Path, number: int) -> Row:
    """Messages, ground truth and source of a row; ValueError where one is missing or malformed."""
    if isinstance(row, ValueError):
        raise row
    where = name_row(path, number)
    messages = _find(row, columns.prompt)
    if isinstance(messages, str) and messages.strip():
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{where}: {columns.prompt} must be a text or a list of chat messages, got "
            f"{messages!r:.80}"
        )
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(
                f"{where}: a chat message must have the texts role and content, got {message!r:.80}"
            )
    truth = _find(row, columns.answer)
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        truth = str(truth)
    if not isinstance(truth, str) or not truth.strip():
        raise ValueError(
            f"{where}: {columns.answer} must be a non-empty text or a number, got {truth!r:.80}"
        )
    source = _find(row, columns.source or SOURCE)
    if source is None and columns.source is None and SOURCE not in row:
        source = path.stem
    if not isinstance(source, str):
        raise ValueError(f"{where}: {columns.source or SOURCE} must be a text, got {source!r:.80}")
    kept = tuple({"role": message["role"], "content": message["content"]} for message in messages)
    return Row(kept, truth, source)


def _read_parquet(path: Path) -> Iterator[tuple[int, PlainRow]]:
    try:
        numbers = itertools.count()
        for batch in pq.ParquetFile(path).iter_batches(_ROWS_AT_ONCE):
            for row in batch.to_pylist():
                yield next(numbers), row
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error


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


def _check_columns(names: list[str], columns: Columns, path: Path) -> None:
    wanted = [name for name in (columns.prompt, columns.answer, columns.source) if name is not None]
    missing = [name for name in wanted if name.split(".")[0] not in names]
    if missing:
        raise ValueError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(names)}: say which hold "
            "what, as data.columns={prompt: question, answer: answer}, or eval.columns, or columns "
            "of one set (docs/prompts.md)"
        )


def _find(row: dict[str, Any], name: str) -> Any:
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
