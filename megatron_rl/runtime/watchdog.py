"""Watchdog process that kills the ranks of one node when they hang, and what it reads.

    python -m megatron_rl.runtime.watchdog --ranks 0,1 --board FD --stacks FD,FD --folder STALLS

Started by the first rank of a node (`megatron_rl.trainer.startup`); exits after the ranks. If a
rank makes no progress for longer than its phase allows, the watchdog writes the stacks of all ranks
to one file in STALLS, then kills the ranks and all their children. The launcher of the ranks finds
that file and reports that the run can be resumed from its last checkpoint.

Progress is in shared memory, with a slot per rank: neither side waits for the other, and a slot can
be read while its writer is stopped, dead or inside C code. Stacks are written by `faulthandler`,
whose signal handler also runs inside C code and while another thread owns the interpreter lock.
Does not import torch.
"""

import argparse
import contextlib
import faulthandler
import mmap
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def allocate_heartbeats(file: int, *, ranks: int) -> None:
    """Allocate space for the ranks' slots in an open file; OSError if the file system is full.

    Writing to an unallocated part of the file on a full file system would kill the writer (SIGBUS).
    """
    os.posix_fallocate(file, 0, ranks * SLOT_BYTES)


def map_heartbeats(file: int) -> mmap.mmap:
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
        self.also: Callable[[], object] = lambda: None  # called at every progress
        self._now = "start", self._budget_of("start")
        self._write()

    def begin(self, phase: str) -> None:
        """Enter a phase."""
        self._now = phase, self._budget_of(phase)
        self._write()

    def count(self, *_: object) -> None:
        """Record progress; usable as a callback, arguments are ignored."""
        self._write()

    @contextlib.contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Allow at least so many seconds without progress in the block, which waits for others.

        The watchdog of the ranks that do not respond then acts first, and names them.
        """
        phase, budget = self._now
        self._now = phase, max(budget, seconds)
        self._write()
        try:
            yield
        finally:
            self._now = phase, budget
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
        self.also()


SIGNAL = signal.SIGUSR2  # makes a rank write its stacks
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)[^\n]*\n((?:  [^\n]*\n?)*)", re.M)
# A rank with one of these paths among its innermost frames waits for another rank.
_WAITING_IN = (
    "torch/distributed/",
    "megatron/core/pipeline_parallel/p2p",
    "megatron_rl/distributed/",
)
_INNERMOST = 6  # frames


@dataclass(frozen=True)
class StackSample:
    """State and stacks of one rank."""

    rank: int
    process: int
    state: str  # process state as in /proc; "" if the process has exited
    phase: str
    idle: float  # seconds since its last progress
    stack: str  # of its main thread
    everything: str  # of all threads

    @property
    def waits(self) -> bool:
        """True if the main thread waits for another rank."""
        frames = self.stack.splitlines()[:_INNERMOST]
        return any(path in frame for frame in frames for path in _WAITING_IN)


def answer_by_stacks(file: int) -> None:
    """Make this process append the stacks of all its threads to an open file on SIGNAL."""
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def split_stacks(text: str) -> dict[int, str]:
    """Split a faulthandler report into threads: identifier -> frames, innermost first."""
    return {int(match[1], 16): match[2] for match in _THREAD.finditer(text)}


def identify_stalled_ranks(samples: Sequence[StackSample]) -> tuple[list[StackSample], str]:
    """Return the ranks that all other ranks wait for, and the difference; [] if no rank differs."""
    shortest = min((sample.idle for sample in samples), default=0.0)
    signs: Mapping[str, list[StackSample]] = {
        "has exited": [sample for sample in samples if not sample.state],
        "is stopped (SIGSTOP or a debugger)": [
            sample for sample in samples if sample.state in "Tt" and sample.state
        ],
        "is blocked in the kernel, for example by a disk that does not respond": [
            sample for sample in samples if sample.state == "D"
        ],
        "does not wait for another rank": [
            sample for sample in samples if sample.stack and not sample.waits
        ],
        "stopped making progress before the others": [
            sample for sample in samples if sample.idle > shortest + 1.0
        ],
    }
    for sign, stalled in signs.items():
        if 0 < len(stalled) < len(samples) or (stalled and len(samples) == 1):
            return stalled, sign
    return [], "no rank differs from the others"


def describe(
    samples: Sequence[StackSample], *, stalled: Sequence[StackSample], headline: str
) -> str:
    """Return the report of a stall: the ranks, then their stacks, stalled ranks first."""
    lines = [headline, "", "rank  process  state  idle s  phase"]
    lines += [
        f"{sample.rank:>4}  {sample.process:>7}  {sample.state or 'gone':<5}  "
        f"{sample.idle:>6.1f}  {sample.phase}"
        for sample in samples
    ]
    groups: dict[str, list[StackSample]] = {}
    for sample in [*stalled, *(sample for sample in samples if sample not in stalled)]:
        groups.setdefault(sample.stack, []).append(sample)
    lines += ["", f"Main threads, {len(groups)} different stacks, innermost frame first"]
    for stack, members in groups.items():
        lines += ["", f"ranks {', '.join(str(sample.rank) for sample in members)}:"]
        lines += stack.rstrip("\n").splitlines() or ["  (no response)"]
    for members in groups.values():
        first = members[0]
        lines += ["", f"All threads of rank {first.rank}", "", first.everything.strip("\n")]
    return "\n".join(lines) + "\n"


POLLS_PER_BUDGET = 20
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 0.5  # seconds between two polls
ANSWER_SECONDS = 2.0  # to wait for the stacks
END_SECONDS = 10.0  # to wait for killed processes to exit


class Watcher:
    """Monitors the ranks of a node.

    board: open file with their heartbeat slots. stacks: open file of each rank for its stacks.
    """

    def __init__(self, ranks: Sequence[int], *, board: int, stacks: Sequence[int]) -> None:
        self.ranks, self.stacks = ranks, stacks
        self._board = map_heartbeats(board)
        self._started = [_started_at(slot.process) for slot in self._slots()]
        self.idle = [0.0] * len(ranks)  # seconds since each rank's last progress

    def wait_for_stall(self) -> bool:
        """Block until a rank stalls or all have exited; returns True for a stall."""
        counts = [slot.count for slot in self._slots()]
        last = time.monotonic()
        while True:
            slots = self._slots()
            alive = [index for index, slot in enumerate(slots) if self._is_alive(index, slot)]
            if not alive:
                return False
            pause = min(slots[index].budget for index in alive) / POLLS_PER_BUDGET
            pause = min(max(pause, SHORTEST_PAUSE), LONGEST_PAUSE)
            time.sleep(pause)
            now = time.monotonic()
            # Suspending a job suspends its watchdog too: do not count that time.
            passed, last = min(now - last, 2 * pause), now
            for index, slot in enumerate(self._slots()):
                self.idle[index] = self.idle[index] + passed if slot.count == counts[index] else 0.0
                counts[index] = slot.count
                if index in alive and self.idle[index] > slot.budget:
                    return True

    def sample_stacks(self) -> list[StackSample]:
        """Request the stacks of every rank, and return them with the state of its process."""
        slots = self._slots()
        states = [self._state(index, slot) for index, slot in enumerate(slots)]
        sizes = [os.fstat(file).st_size for file in self.stacks]
        for slot, state in zip(slots, states, strict=True):
            if state:
                _send(slot.process, SIGNAL)
                if state == "T":
                    _send(slot.process, signal.SIGCONT)  # a stopped process cannot respond
        answers = [""] * len(slots)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and not all(
            answer or not state for answer, state in zip(answers, states, strict=True)
        ):
            time.sleep(0.2)  # reports are written line by line
            answers = [_read(file, size) for file, size in zip(self.stacks, sizes, strict=True)]
        return [
            StackSample(
                rank, slot.process, state, slot.phase, idle,
                split_stacks(answer).get(slot.main_thread, ""), answer,
            )
            for rank, slot, state, idle, answer in zip(
                self.ranks, slots, states, self.idle, answers, strict=True
            )
        ]  # fmt: skip

    def end_all(self) -> None:
        """Kill the ranks and all their children, and wait until they have exited."""
        import psutil

        doomed = []
        for index, slot in enumerate(self._slots()):
            if self._is_alive(index, slot):
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank = psutil.Process(slot.process)
                    doomed += [rank, *rank.children(recursive=True)]
        doomed = [process for process in doomed if process.pid != os.getpid()]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(doomed, timeout=END_SECONDS)

    def _slots(self) -> list[HeartbeatSlot]:
        return [read_slot(self._board, index) for index in range(len(self.ranks))]

    def _is_alive(self, index: int, slot: HeartbeatSlot) -> bool:
        return self._state(index, slot) not in ("", "Z")

    def _state(self, index: int, slot: HeartbeatSlot) -> str:
        """Return the state of a rank's process; "" if it has exited, even if its id is reused."""
        fields = _stat(slot.process)
        return fields[0] if fields and fields[19] == self._started[index] else ""


def main() -> None:
    """Monitor the ranks until they have exited; kill them if they hang."""
    parser = argparse.ArgumentParser()
    for name in ("--ranks", "--stacks"):
        parser.add_argument(
            name, required=True, type=lambda text: [int(n) for n in text.split(",")]
        )
    parser.add_argument("--board", required=True, type=int)
    parser.add_argument("--folder", required=True, type=Path)
    options = parser.parse_args()
    # Signals reach every process of a job; the watchdog must exit after the ranks.
    for request in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(request, signal.SIG_IGN)
    watcher = Watcher(options.ranks, board=options.board, stacks=options.stacks)
    if not watcher.wait_for_stall():
        return
    samples = watcher.sample_stacks()
    stalled, sign = identify_stalled_ranks(samples)
    longest = max(samples, key=lambda sample: sample.idle)
    reason = ", ".join(f"rank {sample.rank} {sign}" for sample in stalled) or sign
    headline = (
        f"{socket.gethostname()}: no progress for {longest.idle:.0f} s in {longest.phase}: {reason}"
    )
    file = options.folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}.txt"
    outcome = f"the stacks are in {file}"
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(describe(samples, stalled=stalled, headline=headline), encoding="utf-8")
    except OSError as error:  # kill the ranks even if the disk is full
        outcome = f"the stacks cannot be written: {error}"
    text = f"megatron-rl: {headline}; {outcome}; killing all ranks of this node\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    watcher.end_all()


def _stat(process: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on, or None if the process is gone."""
    try:
        return (
            Path(f"/proc/{process}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rsplit(")", 1)[1]
            .split()
        )
    except (OSError, IndexError):
        return None


def _started_at(process: int) -> str:
    fields = _stat(process)
    return fields[19] if fields else ""


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _read(file: int, start: int) -> str:
    size = os.fstat(file).st_size - start
    return os.pread(file, size, start).decode(errors="replace") if size > 0 else ""


if __name__ == "__main__":
    main()
