"""Where the ranks of a node write how far they are, for a process that looks on from outside.

One shared file with a slot for each rank: neither side waits for the other, and a slot can be read
while its writer is stopped, dead or busy inside C code. No torch here.
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
class Slot:
    """What one rank has written."""

    process: int
    main_thread: int
    count: int
    budget: float  # seconds that its phase may take without counting
    phase: str


def make_board(file: int, *, ranks: int) -> None:
    """Give an open file room for so many ranks; OSError where there is none.

    A hole in a file of a full file system would end by a signal whoever writes there.
    """
    os.posix_fallocate(file, 0, ranks * SLOT_BYTES)


def map_board(file: int) -> mmap.mmap:
    """An open board in this process's memory."""
    return mmap.mmap(file, 0)


def read_slot(board: mmap.mmap, place: int) -> Slot:
    """What the rank at `place` of this node has written last."""
    data = board[place * SLOT_BYTES : (place + 1) * SLOT_BYTES]
    process, main_thread, count, budget = _NUMBERS.unpack_from(data)
    length = data[_NUMBERS.size]
    phase = data[_NUMBERS.size + 1 :][:length].decode(errors="replace")
    return Slot(process, main_thread, count, budget, phase)


class Progress:
    """One rank's account of itself: the phase that it is in, and a count that grows as it works.

    budget: seconds that a phase may take without counting; `budgets` has those of certain phases.
    board, place: where it is written; without a board nobody looks.
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
        """Something was done; a callback, whose arguments are not read."""
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
