"""Runs of the real command with something that goes wrong inside, one after the other.

The launcher is the real one; its ranks are forked from a process that has imported everything. A
fault is a function, or the name of one of `fault_injection`, which a forked rank calls before the
command;
None: no fault.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.commands import train
from megatron_rl.commands.ending import leave
from megatron_rl.runtime.launcher import RankProcess
from tests.functional.forked_runs import act_in_ranks, run_command

GONE_SECONDS = 30.0


def run(
    fault: str | Callable | None, rank: int, arguments: list[str], **details: Any
) -> dict[str, Any]:
    """Run once; return status, output, seconds, and the processes that remain."""

    def strike(place: int) -> None:
        from tests.functional.faults import fault_injection

        if fault is not None:
            inject = getattr(fault_injection, fault) if isinstance(fault, str) else fault
            inject(is_mine=place == rank, **details)

    started, launcher = act_in_ranks(strike), os.getpid()
    train.leave = lambda status: status if os.getpid() == launcher else leave(status)
    with tempfile.TemporaryFile() as output:
        kept = os.dup(1), os.dup(2)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        status = run_command(arguments)
        for number, file in enumerate(kept, start=1):
            os.dup2(file, number)
            os.close(file)
        output.seek(0)
        text = output.read().decode(errors="replace")
    ended = {"status": status, "output": text, "ended_at": time.time()}
    return ended | {"left": find_left(started)}


def find_left(started: list[RankProcess]) -> list[str]:
    """Return processes that still run in the ranks' sessions after a moment."""
    sessions = {str(rank.pid) for rank in started}
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        left = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                if fields[3] in sessions and fields[0] not in "ZX":
                    left.append((folder / "cmdline").read_text().replace("\0", " "))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def run_all(requests: list[dict[str, Any]], answer: str) -> None:
    """Several runs, one after the other; writes what became of each as JSON."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    Path(answer).write_text(json.dumps([run(**each) for each in requests]))
