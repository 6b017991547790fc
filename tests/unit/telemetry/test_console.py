"""Plain lines, heartbeats and silence."""

import os
import pty
import subprocess
import sys

import pytest

from megatron_rl.telemetry import console as console_module
from megatron_rl.telemetry.console import Console


def test_lines_without_terminal_are_plain(tmp_path, capsys):
    console = Console(is_main_rank=True, log_file=tmp_path / "log.txt")
    console.echo("step 1  [reward] 0.5")
    assert capsys.readouterr().out == "step 1  [reward] 0.5\n"
    assert (tmp_path / "log.txt").read_text().endswith(" step 1  [reward] 0.5\n")


def test_long_phase_prints_every_ten_seconds_and_later_less_often(capsys, monkeypatch):
    """A line is due after ten seconds, and after a quarter of what the phase has taken."""
    now = iter([0.0, 5.0, 11.0, 20.0, 100.0, 120.0])
    monkeypatch.setattr(console_module.time, "monotonic", lambda: next(now))
    with Console(is_main_rank=True).progress("rollout") as advance:
        for done in (0, 0, 1, 2, 4):  # at 5, 11, 20, 100 and 120 seconds
            advance(done, 8, 1000 * done, 5000)
    lines = ["  rollout: 0/8", "  rollout: 2/8, 2,000 tokens, about 150 s left"]
    assert capsys.readouterr().out.splitlines() == lines


PRINT = """
import os, sys, time
from pathlib import Path
from megatron_rl.telemetry.console import Console

console = Console(is_main_rank=True, log_file=Path(sys.argv[1]))
console.echo("before")
sys.stdin.readline()
with console.progress("train") as advance:
    console.echo("after")
    print("of a library", flush=True)
    advance(1, 2)
console.echo("end")
"""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_run_goes_on_when_nobody_reads_what_it_prints(tmp_path, is_terminal):
    """As behind `| head`, or in a terminal that was closed."""
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PRINT, str(tmp_path / "log.txt")], stdin=subprocess.PIPE,
        stdout=theirs, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert os.read(ours, 6) == b"before"
    os.close(theirs)
    os.close(ours)
    _, errors = process.communicate(b"\n", timeout=120)
    assert (process.returncode, errors) == (0, b"")
    lines = [line.split(" ", 2)[2] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert [line for line in lines if "warning" not in line] == ["before", "after", "end"]
    assert sum("nothing more can be printed" in line for line in lines) == 1


def test_only_main_rank_prints(tmp_path, capsys):
    console = Console(is_main_rank=False, log_file=tmp_path / "log.txt")
    console.echo("hello")
    with console.progress("rollout") as advance:
        advance(1, 1)
    assert capsys.readouterr().out == "" and not (tmp_path / "log.txt").exists()
