"""Progress of the ranks of a node, in shared memory that the watchdog process reads.

One shared file contains a slot per rank. Neither side waits for the other, and a slot can be read
while its writer is stopped, dead or inside C code. Does not import torch.
"""

import mmap
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass

SLOT_BYTES = 256
_NUMBERS = struct.Struct("<QQQd")  # process, main thread, count, budget
_LONGEST_PHASE = SLOT_BYTES - _NUMBERS.size - 1


@dataclass(frozen=True)
class HeartbeatSlot:
    """Content of one rank's slot."""

    process: int
    main_thread: int
    count: int
    budget: float  # seconds without progress that the phase allows
    phase: str


def make_board(file: int, *, ranks: int) -> None:
    """Allocate space for the ranks' slots in an open file; OSError if the file system is full.

    Writing to an unallocated part of the file on a full file system would kill the writer (SIGBUS).
    """
    os.posix_fallocate(file, 0, ranks * SLOT_BYTES)


def map_board(file: int) -> mmap.mmap:
    """Map an open board into this process's memory."""
    return mmap.mmap(file, 0)


def read_slot(board: mmap.mmap, place: int) -> HeartbeatSlot:
    """Return the slot of the rank at index `place` of this node."""
    data = board[place * SLOT_BYTES : (place + 1) * SLOT_BYTES]
    process, main_thread, count, budget = _NUMBERS.unpack_from(data)
    length = data[_NUMBERS.size]
    phase = data[_NUMBERS.size + 1 :][:length].decode(errors="replace")
    return HeartbeatSlot(process, main_thread, count, budget, phase)


class Heartbeat:
    """Current phase of a rank and a counter that increases with its progress.

    budget: seconds without progress that a phase allows; `budgets` overrides it for some phases.
    board, place: the board and the rank's index in it; without a board nothing is shared.
    """

    def __init__(
        self,
        board: mmap.mmap | None = None,
        place: int = 0,
        *,
        budget: float = float("inf"),
        budgets: Mapping[str, float] | None = None,
    ) -> None:
        self._board = board if board is not None else bytearray(SLOT_BYTES)
        self._start = place * SLOT_BYTES if board is not None else 0
        self._budget, self._budgets = budget, dict(budgets or {})
        self._count = 0
        self._now = "start", self._budget_of("start")
        self._write()

    def begin(self, phase: str) -> None:
        """Enter a phase."""
        self._now = phase, self._budget_of(phase)
        self._write()

    def count(self, *_: object) -> None:
        """Record progress; usable as a callback, arguments are ignored."""
        self._write()

    def _budget_of(self, phase: str) -> float:
        return self._budgets.get(phase, self._budget)

    def _write(self) -> None:
        self._count += 1
        phase, budget = self._now
        name = phase.encode()[:_LONGEST_PHASE]
        main = threading.main_thread().ident or 0
        data = _NUMBERS.pack(os.getpid(), main, self._count, budget) + bytes([len(name)]) + name
        self._board[self._start : self._start + len(data)] = data
