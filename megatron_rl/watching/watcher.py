"""The process that looks after the ranks of one node, from outside: it ends them when they hang.

    python -m megatron_rl.watching.watcher --ranks 0,1 --board FD --stacks FD,FD --folder STALLS

Started by the first rank of a node (`megatron_rl.trainer.watched`); ends when they have. A rank
that does not count for longer than its phase may take is a stall: what all of them were doing is
written to one file in STALLS, then they and all they have started are killed. Whoever started the
ranks finds that file and says that the run can go on from its last checkpoint.
"""

import argparse
import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.watching.board import Slot, map_board, read_slot
from megatron_rl.watching.stacks import SIGNAL, Look, describe, find_culprits, split_stacks

LOOKS_PER_BUDGET = 20
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 0.5  # seconds between two looks
ANSWER_SECONDS = 2.0  # for the stacks
END_SECONDS = 10.0  # for killed processes to be gone


class Watcher:
    """Looks after the ranks of a node.

    board: open file of their slots. stacks: open files into which each writes its stacks.
    """

    def __init__(self, ranks: Sequence[int], *, board: int, stacks: Sequence[int]) -> None:
        self.ranks, self.stacks = ranks, stacks
        self._board = map_board(board)
        self._started = [_started_at(slot.process) for slot in self._slots()]
        self.idle = [0.0] * len(ranks)  # seconds since each counted

    def wait_for_stall(self) -> bool:
        """Whether the ranks hang; False when all have ended."""
        counts = [slot.count for slot in self._slots()]
        last = time.monotonic()
        while True:
            slots = self._slots()
            alive = [place for place, slot in enumerate(slots) if self._is_alive(place, slot)]
            if not alive:
                return False
            pause = min(slots[place].budget for place in alive) / LOOKS_PER_BUDGET
            pause = min(max(pause, SHORTEST_PAUSE), LONGEST_PAUSE)
            time.sleep(pause)
            now = time.monotonic()
            # A job that is suspended stops its watcher too: that time counts for nobody.
            passed, last = min(now - last, 2 * pause), now
            for place, slot in enumerate(self._slots()):
                self.idle[place] = self.idle[place] + passed if slot.count == counts[place] else 0.0
                counts[place] = slot.count
                if place in alive and self.idle[place] > slot.budget:
                    return True

    def look(self) -> list[Look]:
        """Every rank with its stacks, which it is asked for."""
        slots = self._slots()
        states = [self._state(place, slot) for place, slot in enumerate(slots)]
        sizes = [os.fstat(file).st_size for file in self.stacks]
        for slot, state in zip(slots, states, strict=True):
            if state:
                _send(slot.process, SIGNAL)
                if state == "T":
                    _send(slot.process, signal.SIGCONT)  # it can answer then; its end is near
        answers = [""] * len(slots)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and not all(
            answer or not state for answer, state in zip(answers, states, strict=True)
        ):
            time.sleep(0.2)  # a report is written line by line
            answers = [_read(file, size) for file, size in zip(self.stacks, sizes, strict=True)]
        return [
            Look(
                rank, slot.process, state, slot.phase, idle,
                split_stacks(answer).get(slot.main_thread, ""), answer,
            )
            for rank, slot, state, idle, answer in zip(
                self.ranks, slots, states, self.idle, answers, strict=True
            )
        ]  # fmt: skip

    def end_all(self) -> None:
        """Kill the ranks and all that they have started; returns when they are gone."""
        import psutil

        doomed = []
        for place, slot in enumerate(self._slots()):
            if self._is_alive(place, slot):
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank = psutil.Process(slot.process)
                    doomed += [rank, *rank.children(recursive=True)]
        doomed = [process for process in doomed if process.pid != os.getpid()]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(doomed, timeout=END_SECONDS)

    def _slots(self) -> list[Slot]:
        return [read_slot(self._board, place) for place in range(len(self.ranks))]

    def _is_alive(self, place: int, slot: Slot) -> bool:
        return self._state(place, slot) not in ("", "Z")

    def _state(self, place: int, slot: Slot) -> str:
        """The state of a rank's process, "" where it has ended and its number is another's."""
        fields = _stat(slot.process)
        return fields[0] if fields and fields[19] == self._started[place] else ""


def main() -> None:
    """Watch until the ranks have ended, or end them."""
    parser = argparse.ArgumentParser()
    for name in ("--ranks", "--stacks"):
        parser.add_argument(
            name, required=True, type=lambda text: [int(n) for n in text.split(",")]
        )
    parser.add_argument("--board", required=True, type=int)
    parser.add_argument("--folder", required=True, type=Path)
    options = parser.parse_args()
    # Requests to end reach every process of a job; this one ends after the ranks.
    for request in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(request, signal.SIG_IGN)
    watcher = Watcher(options.ranks, board=options.board, stacks=options.stacks)
    if not watcher.wait_for_stall():
        return
    looks = watcher.look()
    culprits, sign = find_culprits(looks)
    longest = max(looks, key=lambda look: look.idle)
    whose = ", ".join(f"rank {look.rank} {sign}" for look in culprits) or sign
    headline = (
        f"{socket.gethostname()}: no progress for {longest.idle:.0f} s in {longest.phase}: {whose}"
    )
    file = options.folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}.txt"
    where = f"the stacks are in {file}"
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(describe(looks, culprits=culprits, headline=headline))
    except OSError as error:  # a full disk must not keep a hang alive
        where = f"its report cannot be written: {error}"
    text = f"megatron-rl: {headline}; {where}; ending all ranks of this node\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    watcher.end_all()


def _stat(process: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on, None where there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
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
