"""Runs of the real command in processes forked from one that has imported everything.

The launcher forks its ranks itself; here it is forked too, from the process of `tests.ranks`.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_rl.runtime import launcher
from megatron_rl.runtime.launcher import RankProcess
from megatron_rl.trainer.recorder import Recorder
from tests.ranks import start_process


def act_in_ranks(action: Callable[[int], None]) -> list[RankProcess]:
    """Let each rank that the launcher in this process starts call `action` before its command.

    Returns the list that the ranks are added to.
    """
    started: list[RankProcess] = []

    class ActingRank(RankProcess):
        def __init__(self, run, environment):
            def act_and_run():
                action(int(environment["RANK"]))
                run()

            super().__init__(act_and_run, environment)
            started.append(self)

    launcher.RankProcess = ActingRank
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
    # A figure takes a second; runs in new interpreters draw theirs.
    Recorder.draw = lambda recorder: None
    os._exit(run_command(arguments))
