"""Runs of the real command whose processes are forked from one that has imported everything.

The launcher is the real one, and so is what its ranks do; only their imports are paid for once, in
the process that `tests.ranks` forks from.
"""

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_rl.runtime import processes
from megatron_rl.runtime.processes import LAUNCHER
from tests.ranks import start_process


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


def fork_ranks(action: Callable[[int], None] = lambda place: None) -> list[Forked]:
    """Let the launcher in this process fork its ranks; each runs `action` before its command.

    Returns the list that the ranks are added to.
    """
    started: list[Forked] = []
    launcher = os.getpid()

    def start_rank(arguments: list[str], place: int, world_size: int, port: int) -> Forked:
        if pid := os.fork():
            started.append(Forked(pid))
            return started[-1]
        os.setsid()
        atexit._clear()  # the launcher's handlers would delete its folder of failures
        places = {"RANK": place, "LOCAL_RANK": place, "WORLD_SIZE": world_size, LAUNCHER: launcher,
                  "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1",
                  "MASTER_PORT": port}  # fmt: skip
        os.environ.update({name: str(value) for name, value in places.items()})
        try:
            action(place)
            run_command(arguments)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)  # a run leaves by itself

    processes._start_rank = start_rank
    return started


def run_command(arguments: list[str]) -> int:
    """`megatron-rl ARGUMENTS`; its status."""
    from megatron_rl.cli import main

    try:
        main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


class ForkedCommand:
    """`megatron-rl ARGUMENTS` in a session of its own: of subprocess.Popen what tests use."""

    def __init__(self, arguments: list[str], *, output: Path, cwd: Path) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        self.output = output
        self._process = start_process(_run, arguments, str(output), str(cwd))
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """To the command's own process, the launcher."""
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended."""
        self._process.join(timeout)
        assert self.poll() is not None, f"not at its end in {timeout} s: {self.read()}"
        return self.poll()

    def read(self) -> str:
        """Output of the command and its ranks."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def _run(arguments: list[str], output: str, cwd: str) -> None:
    os.setsid()
    os.chdir(cwd)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    fork_ranks()
    os._exit(run_command(arguments))
