"""Watchdog process that kills the ranks of one node when they hang.

    python -m megatron_rl.runtime.watchdog --ranks 0,1 --board FD --stacks FD,FD --folder STALLS

Started by the first rank of a node (`megatron_rl.trainer.watchdog`); exits after the ranks. If a
rank makes no progress for longer than its phase allows, the watchdog writes the stacks of all ranks
to one file in STALLS, then kills the ranks and all their children. The launcher of the ranks finds
that file and reports that the run can be resumed from its last checkpoint.
"""

import argparse
import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.runtime.heartbeat import HeartbeatSlot, map_board, read_slot
from megatron_rl.runtime.stacks import (
    SIGNAL,
    StackSample,
    describe,
    identify_stalled_ranks,
    split_stacks,
)

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
        self._board = map_board(board)
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
