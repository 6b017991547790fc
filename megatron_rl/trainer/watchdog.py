"""Start of the watchdog: each rank writes a heartbeat, one process per node reads them."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from megatron_rl.config import Config
from megatron_rl.distributed.agreement import gather_from_ranks
from megatron_rl.distributed.link import Link
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.processes import shared_folder
from megatron_rl.runtime.watchdog import (
    Heartbeat,
    allocate_heartbeats,
    answer_by_stacks,
    map_heartbeats,
)

GRACE = 120.0  # seconds, so that more specific limits are reported first
_WATCHERS: list[subprocess.Popen[bytes]] = []  # kept until this process exits
SLOW_PHASES = ("start", "checkpoint", "export")  # phases with twice the limit


def longest_silence(config: Config) -> float:
    """Maximum seconds of any phase without progress; infinite without a watchdog."""
    stall = config.trainer.stall_seconds
    if stall is None:
        return float("inf")
    return max(2 * stall, config.resharding.time_limit_seconds + GRACE)


def watch(
    config: Config, directory: RunDirectory, *, rank: int, link: Link | None = None
) -> tuple[Heartbeat, str | None]:
    """Start one watchdog process per node; returns this rank's heartbeat and a warning. Collective.

    The warning is the reason why no watchdog could be started. link: joins this rank with others
    that have groups of their own; `rank` is then its number there.
    """
    stall = config.trainer.stall_seconds
    if stall is None:
        return Heartbeat(), None
    budgets = dict.fromkeys(SLOW_PHASES, 2 * stall)
    budgets["sync"] = max(stall, config.resharding.time_limit_seconds + GRACE)
    # Containers may share a host name; processes see each other in one PID namespace.
    node = f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino}"
    nodes = gather_from_ranks(node, link=link)
    ranks = [other for other, where in enumerate(nodes) if where == node]
    place = ranks.index(rank)
    progress = None
    with contextlib.ExitStack() as stack:
        folder, problem = _make_folder(stack, len(ranks)) if place == 0 else (None, None)
        folder = gather_from_ranks(folder, link=link)[ranks[0]]
        if folder is not None:
            try:
                progress = _open(folder, place, budget=stall, budgets=budgets)
            except OSError as error:
                problem = error
        is_open = gather_from_ranks(progress is not None, link=link)
        if place == 0 and folder is not None and all(is_open[other] for other in ranks):
            _start_watcher(folder, ranks, reports=directory.stalls)
    if not all(is_open):
        return Heartbeat(), f"hangs will not be detected: the watchdog cannot start ({problem})"
    assert progress is not None
    return progress, None


def _make_folder(stack: contextlib.ExitStack, ranks: int) -> tuple[Path | None, OSError | None]:
    """Create a folder in memory with the board and a file for each rank's stacks."""
    try:
        folder = stack.enter_context(shared_folder())
        with (folder / "board").open("wb") as file:
            allocate_heartbeats(file.fileno(), ranks=ranks)
        for place in range(ranks):
            (folder / f"stacks{place}").touch()
    except OSError as error:
        return None, error
    return folder, None


def _open(folder: Path, place: int, *, budget: float, budgets: dict[str, float]) -> Heartbeat:
    # Stays open for as long as this process lives.
    stacks = os.open(folder / f"stacks{place}", os.O_WRONLY | os.O_APPEND)
    answer_by_stacks(stacks)
    with (folder / "board").open("r+b") as file:
        board = map_heartbeats(file.fileno())
    return Heartbeat(board, place, budget=budget, budgets=budgets)


def _start_watcher(folder: Path, ranks: list[int], *, reports: Path) -> None:
    """Start the watchdog with open files, so that the folder can be removed."""
    board = os.open(folder / "board", os.O_RDWR)
    stacks = [os.open(folder / f"stacks{place}", os.O_RDONLY) for place in range(len(ranks))]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "megatron_rl.runtime.watchdog", "--board", str(board)),
            *("--ranks", ",".join(map(str, ranks)), "--stacks", ",".join(map(str, stacks))),
            *("--folder", str(reports)),
        ],
        pass_fds=[board, *stacks],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    _WATCHERS.append(process)
    for file in (board, *stacks):
        os.close(file)
