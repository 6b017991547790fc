"""Files of a run: atomic writes, the lock of a folder, and JSON lines such as metrics.jsonl."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from megatron_rl import __version__
from megatron_rl.errors import UserError
from megatron_rl.runtime.versions import installed_releases


@contextlib.contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield a path to write; it replaces `file` atomically, even across a kill or a power cut."""
    partial = file.with_name(f".{file.name}.partial")
    yield partial
    flush_to_disk(partial)  # otherwise the name may reach the disk before the content
    os.replace(partial, file)
    flush_to_disk(file.parent)


def atomic_write_text(file: Path, text: str) -> None:
    """Replace a file's text atomically."""
    with atomic_write(file) as partial:
        partial.write_text(text, encoding="utf-8")


def flush_to_disk(path: Path) -> None:
    """Flush writes to a file, or renames in a folder, so that they survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_BLOCK = 1 << 16  # bytes read at once from the end of a file
LOCK = ".lock"  # name of the lock file in the folder


def lock_owner(lock: Path) -> str | None:
    """Return the description that the owner of a lock wrote, or None if another could take it.

    Must not be called for a lock owned by this process.
    """
    if not lock.is_file():
        return None
    with lock.open(encoding="utf-8") as file:  # also of another user's run, or a read-only disk
        return None if try_lock(file) else file.readline().strip()


def try_lock(file: IO[str]) -> bool:
    """Lock an open file until it is closed; returns False if another process owns the lock.

    The kernel or the NFS server releases the lock when the process exits. On file systems without
    locks this always succeeds. A file that is open for reading is locked against writers.
    """
    kind = fcntl.LOCK_EX if file.writable() else fcntl.LOCK_SH
    try:
        # A record lock: forked processes do not inherit it.
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


TIMELINE = "timeline.jsonl"
PHASES = (
    "rollout", "reward", "pack", "behavior", "reference", "critic", "train", "sync", "eval",
    "record", "checkpoint",
)  # fmt: skip  # of `time/`; they add up to `time/step`

# Cost of a rollout batch in epochs of training: the paper's 510 and 283 s for a step of four epochs
# and of one are c + 4 and c + 1 epochs.
ROLLOUT_COST = 2.7
ROLLOUT_COST_METADATA = "rollout_cost"  # of a study's results.parquet


def read_metrics(
    folder: Path, *, wanted: Callable[[str], bool] = lambda key: True
) -> list[dict[str, Any]]:
    """Read all complete rows of a run directory; an incomplete last line is ignored.

    wanted: which metrics to keep; all of 100,000 steps take gigabytes.
    """
    rows = iterate_rows(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if wanted(key)} for row in rows]


def iterate_metric(folder: Path, key: str) -> Iterator[float]:
    """Yield the numbers of one metric alone; all metrics take a hundred times as long."""
    file, pattern = folder / "metrics.jsonl", re.compile(rf'"{re.escape(key)}": (-?[\d.eE+-]+)')
    if not file.is_file():
        return
    with file.open(encoding="utf-8") as lines:
        found = (pattern.search(line) for line in lines if line.endswith("\n"))
        yield from (float(one[1]) for one in found if one)


def thin_metrics(
    folder: Path, *, most: int, wanted: Callable[[str], bool] = lambda key: True
) -> tuple[list[dict[str, Any]], int]:
    """Read every n-th row of a run directory, and rows with evaluations; returns rows and n.

    most: rows that are at most every n-th, so that memory does not grow with the run. wanted: which
    metrics to keep. Other rows are not parsed.
    """
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return [], 1
    with file.open("rb") as lines:
        every = max(1, -(-sum(1 for _ in lines) // most))
    rows = iterate_rows(file, having=b'"eval/', every=every)
    return [{key: value for key, value in row.items() if wanted(key)} for row in rows], every


def last_step(folder: Path) -> int | None:
    """Return the last recorded step of a run directory, or None; reads the end of the file."""
    row = next(_rows_from_end(folder / "metrics.jsonl"), None)
    return None if row is None else int(row[1]["step"])


def is_finished(folder: Path, *, steps: int) -> bool:
    """Return True if a run directory contains all steps and the trained model.

    The model is written last, and appears under its name only when it is complete.
    """
    return (folder / "model").is_dir() and last_step(folder) == steps


def describe_start(*, after_step: int) -> dict[str, Any]:
    """Describe this start of a run: when, by which releases and command, after how many steps."""
    return {
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "version": __version__,
        "releases": installed_releases(),
        "command": shlex.join(["megatron-rl", *sys.argv[1:]]),
        "after_step": after_step,
    }


def changed_releases(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Describe the packages of another release by name, of two rows of starts.jsonl."""
    old, new = (start.get("releases") or {} for start in (before, now))  # early rows have none
    return {
        name: f"{old[name]} -> {new[name]}"
        for name in old.keys() & new.keys()
        if old[name] != new[name]
    }


def append_row(file: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a JSON lines file, in place of an incomplete row that a kill left."""
    with file.open("ab+") as journal:
        end = journal.seek(0, os.SEEK_END)
        if end and (kept := _complete_bytes(journal)) < end:
            journal.truncate(kept)
        journal.write(json.dumps(row).encode() + b"\n")


def _complete_bytes(file: IO[bytes], *, before: int | None = None) -> int:
    """Return where the last line of an open file ends that is complete within `before` bytes."""
    start = file.seek(0, os.SEEK_END) if before is None else before
    while start:
        end, start = start, max(start - _BLOCK, 0)
        file.seek(start)
        if (place := file.read(end - start).rfind(b"\n")) >= 0:
            return start + place + 1
    return 0


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the complete rows of a JSON lines file; a missing file has none."""
    return list(iterate_rows(file))


def iterate_rows(
    file: Path, *, having: bytes = b"", every: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of a JSON lines file, or only rows whose text contains `having`.

    every: also yield every so many rows, from the first one on.
    """
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            is_due = every is not None and number % every == 1 % every
            if not is_due and having not in line:
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                if not lines.read(1):  # the last line: an interrupted append
                    return
                raise UserError(f"{file}, line {number} is damaged: {error}; repair it") from error
            yield row


def drop_rows(file: Path, *, until: Callable[[dict[str, Any]], bool]) -> None:
    """Cut a JSON lines file after the last row for which `until` is true, or empty it."""
    if file.is_file():
        ends = (end for end, row in _rows_from_end(file) if until(row))
        os.truncate(file, next(ends, 0))
        flush_to_disk(file)


def read_last_rows(file: Path, *, most: int) -> list[dict[str, Any]]:
    """Read the last complete rows of a JSON lines file, at most `most`, in order."""
    rows = [row for _, row in itertools.islice(_rows_from_end(file), most)]
    return rows[::-1]


def iterate_rows_after(file: Path, step: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of later steps that a JSON lines file has now; reads no earlier row but one.

    The rows must be in the order of their steps.
    """
    start = end = 0
    for start, row in _rows_from_end(file):
        end = max(start, end)
        if row["step"] <= step:
            break
    else:
        start = 0
    if not end:
        return
    with file.open("rb") as lines:
        lines.seek(start)
        while lines.tell() < end:
            yield json.loads(lines.readline())


def _rows_from_end(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the complete rows of a JSON lines file, last first, each with the place of its end."""
    if not file.is_file():
        return
    with file.open("rb") as lines:
        end = _complete_bytes(lines)
        while end:
            start = _complete_bytes(lines, before=end - 1)
            lines.seek(start)
            line = lines.read(end - start)
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(
                    f"{file}, the line from byte {start} on is damaged: {error}; repair it"
                ) from error
            yield end, row
            end = start


def evaluation_scores(folder: Path, *, metric: str | None = None) -> dict[int, float]:
    """Return the score of each evaluated step of a run directory, in [0, 1].

    metric: the metric to use. Default: the mean of avg@k over the sets.
    """
    scores = {}
    for row in iterate_rows(folder / "metrics.jsonl", having=b'"eval'):
        average = [key for key in row if key.startswith("eval/") and "/avg@" in key]
        values = [row.get(key) for key in (average if metric is None else [metric])]
        present = [value for value in values if value is not None]
        if present and len(present) == len(values):
            scores[row["step"]] = sum(present) / len(present)
    return scores
