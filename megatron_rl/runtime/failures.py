"""Failures of ranks, reported to the launcher, which prints the cause once, at the end.

Each rank that fails writes a file into a folder of its launcher. Most failures only repeat the
error of another rank or report that another rank has exited.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

FOLDER = "MEGATRON_RL_FAILURES"  # environment variable: folder to which a rank writes its failure
FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = (errno.EROFS,)
# torch's file writer drops the system's error and compares positions in the file afterwards.
_TORCH_WRITER = ("inline_container.cc", "PytorchStreamWriter failed")


class RankTimeoutError(RuntimeError):
    """Timeout or exit of another rank during a collective; no further collective can run."""


class OtherRankError(RuntimeError):
    """Error of another rank, raised on a rank that did not fail itself."""


class Cause(IntEnum):
    """Origin of a failure, most informative first."""

    OWN = 0
    LOST_RANK = 1  # another rank timed out or exited during a collective
    OTHER_RANK = 2  # repeats the error of another rank


@dataclass(frozen=True)
class Failure:
    """Failure of one rank, as printed."""

    rank: int
    cause: Cause
    text: str  # one sentence, possibly followed by a list of problems
    in_training: bool  # the run can be resumed
    details: str = ""  # the traceback, if no log file contains it

    def write_to(self, folder: str | Path) -> None:
        """Write the failure atomically to the launcher's folder."""
        partial = Path(folder) / f".{self.rank}"
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.rename(Path(folder) / f"{self.rank}.json")

    def lines(self, *, to_continue: str) -> str:
        """Return the error message, followed by the command that resumes the run."""
        parts = [self.details, f"megatron-rl: error: {self.text}\n"]
        if self.in_training and to_continue:
            parts.append(f"megatron-rl: {to_continue}\n")
        return "".join(parts)


def first_failure(folder: str | Path) -> Failure | None:
    """Return the most informative failure; ties go to the lowest rank."""
    failures = []
    for file in Path(folder).glob("*.json"):
        values = json.loads(file.read_text(encoding="utf-8"))
        failures.append(Failure(**values | {"cause": Cause(values["cause"])}))
    return min(failures, key=lambda failure: (failure.cause, failure.rank), default=None)


def is_full_disk(error: BaseException | None) -> bool:
    """Return True if the cause is a full disk, on this rank or on the rank that sent the error."""
    return _has_number(error, FULL) or any(
        sign in str(each) for each in error_chain(error) for sign in _TORCH_WRITER
    )


def is_read_only(error: BaseException | None) -> bool:
    """Return True if the cause is a read-only disk, on this rank or on that of the error."""
    return _has_number(error, READ_ONLY)


def _has_number(error: BaseException | None, numbers: Sequence[int]) -> bool:
    return any(
        getattr(each, "errno", None) == number or os.strerror(number) in str(each)
        for each in error_chain(error)
        for number in numbers
    )


def describe_space(path: str | Path) -> str:
    """Name the disk of an existing path with its free bytes, and inodes if there is none."""
    usage = shutil.disk_usage(path)
    text = f"the disk of {path} has {usage.free:,} of {usage.total:,} bytes free"
    if free_files(path) == 0:
        text += ", but no more files can be made: all its inodes are in use"
    return text


def free_files(path: str | Path) -> int | None:
    """Return how many files the disk of an existing path can still take; None without a limit."""
    disk = os.statvfs(path)
    return disk.f_favail if disk.f_files else None


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Return an error and the errors that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
