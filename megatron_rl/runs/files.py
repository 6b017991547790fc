"""Files of a run: atomic writes, the lock of a folder, and JSON lines such as metrics.jsonl."""

import contextlib
import errno
import fcntl
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
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
    with lock.open("a+", encoding="utf-8") as file:
        if try_lock(file):
            return None
        file.seek(0)
        return file.read().strip()


def try_lock(file: IO[str]) -> bool:
    """Lock an open file until it is closed; returns False if another process owns the lock.

    The kernel or the NFS server releases the lock when the process exits. On file systems without
    locks this always succeeds.
    """
    try:
        # A record lock: forked processes do not inherit it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read all complete rows of a run directory; an incomplete last line is ignored."""
    return read_rows(folder / "metrics.jsonl")


def is_finished(folder: Path, *, steps: int) -> bool:
    """Return True if a run directory contains all steps and the trained model.

    The model is written last, and appears under its name only when it is complete.
    """
    rows = read_metrics(folder) if (folder / "model").is_dir() else []
    return bool(rows) and rows[-1]["step"] == steps


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
    """Append a row to a JSON lines file, in place of an incomplete one that a kill left."""
    with file.open("ab+") as journal:
        end = journal.seek(0, os.SEEK_END)
        if end and (kept := _complete_bytes(journal)) < end:
            journal.truncate(kept)
        journal.write(json.dumps(row).encode() + b"\n")


def _complete_bytes(file: IO[bytes]) -> int:
    """Return where the last complete line of an open file ends."""
    start = file.seek(0, os.SEEK_END)
    while start:
        end, start = start, max(start - _BLOCK, 0)
        file.seek(start)
        if (place := file.read(end - start).rfind(b"\n")) >= 0:
            return start + place + 1
    return 0


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the complete rows of a JSON lines file; a missing file has none."""
    rows = []
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):  # an interrupted append
                break
            raise UserError(f"{file}, line {number} is damaged: {error}; repair it") from error
    return rows


def evaluation_scores(folder: Path, *, metric: str | None = None) -> dict[int, float]:
    """Return the score of each evaluated step of a run directory, in [0, 1].

    metric: the metric to use. Default: the mean of avg@k over the sets.
    """
    scores = {}
    for row in read_metrics(folder):
        average = [key for key in row if key.startswith("eval/") and "/avg@" in key]
        values = [row.get(key) for key in (average if metric is None else [metric])]
        present = [value for value in values if value is not None]
        if present and len(present) == len(values):
            scores[row["step"]] = sum(present) / len(present)
    return scores
