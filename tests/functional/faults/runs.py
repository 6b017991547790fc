"""Runs of the real command with something that goes wrong inside, one after the other.

    python -m tests.functional.faults.runs < [{"fault": NAME, "rank": 1, "arguments": [...]}, ...]

The launcher is the real one; its ranks are forked from a process that has imported everything, so
that imports are paid for once. NAME is a function of `tests.functional.faults.deeds`, which a
forked rank calls before the command; null: no fault. Prints a JSON list of what became of each.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl import processes
from megatron_rl.processes import LAUNCHER, prepare_environment, quiet_libraries
from tests.functional.preloaded import MODULES

GONE_SECONDS = 30.0


class Forked:
    """A rank as the launcher knows it: of subprocess.Popen what it uses."""

    def __init__(self, pid: int) -> None:
        self.pid, self.code = pid, None

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        while self.poll() is None:
            time.sleep(0.01)
        return self.code

    def terminate(self) -> None:
        """Ask it to end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run(
    fault: str | Callable | None, rank: int, arguments: list[str], **details: Any
) -> dict[str, Any]:
    """One run: its status, what it said, its seconds, and the processes that it left behind."""
    started: list[Forked] = []

    def start_rank(arguments: list[str], place: int, world_size: int, port: int) -> Forked:
        if pid := os.fork():
            started.append(Forked(pid))
            return started[-1]
        os.setsid()
        places = {"RANK": place, "LOCAL_RANK": place, "WORLD_SIZE": world_size, LAUNCHER: parent,
                  "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1",
                  "MASTER_PORT": port}  # fmt: skip
        os.environ.update({name: str(value) for name, value in places.items()})
        try:
            from tests.functional.faults import deeds

            if fault is not None:
                deed = getattr(deeds, fault) if isinstance(fault, str) else fault
                deed(is_mine=place == rank, **details)
            run_command(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # a run leaves by itself

    parent = os.getpid()
    processes._start_rank = start_rank
    with tempfile.TemporaryFile() as said:
        kept = os.dup(1), os.dup(2)
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        begin = time.monotonic()
        status = run_command(arguments)
        seconds = time.monotonic() - begin
        for number, file in enumerate(kept, start=1):
            os.dup2(file, number)
            os.close(file)
        said.seek(0)
        text = said.read().decode(errors="replace")
    ended = {"status": status, "said": text, "seconds": seconds, "ended_at": time.time()}
    return ended | {"left": find_left(started)}


def run_command(arguments: list[str]) -> int:
    """`megatron-rl ARGUMENTS`; its status."""
    from megatron_rl.cli import main

    try:
        main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def find_left(started: list[Forked]) -> list[str]:
    """What still runs in the ranks' sessions after the kernel has had its moment."""
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


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    prepare_environment()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    quiet_libraries()
    for module in MODULES:
        importlib.import_module(module)
    answer = os.dup(1)
    os.dup2(2, 1)
    os.write(answer, json.dumps([run(**each) for each in asked]).encode())
