"""Ranks that hang are named, written about and ended, from outside; no torch is needed for it."""

import os
import signal
import subprocess
import sys

import pytest

from megatron_rl.runtime.watchdog import (
    SLOT_BYTES,
    Heartbeat,
    StackSample,
    allocate_heartbeats,
    identify_stalled_ranks,
    map_heartbeats,
    read_slot,
    split_stacks,
)
from tests.running import assert_end

# `wait` appears like a rank inside a collective; `spin` keeps the interpreter's lock.
RANK = """
import os, signal, subprocess, sys, time
from megatron_rl.runtime.watchdog import Heartbeat, map_heartbeats
from megatron_rl.runtime.watchdog import answer_by_stacks
board, stacks, place, action = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
answer_by_stacks(stacks)
progress = Heartbeat(map_heartbeats(board), place, budget=60.0)
child = subprocess.Popen(["sleep", "600"])
progress.begin("train")
print(child.pid, flush=True)
def hurry():  # from here on, so that no busy machine finds it somewhere else
    progress._now = "train", 0.5
    progress.count()
def do_nothing_for_ever():
    hurry()
    sum(range(10**12))
def all_reduce():
    hurry()
    time.sleep(600)
if action == "work":
    for _ in range(20): time.sleep(0.05); progress.count()
elif action == "wait":
    exec(compile("def wait(f): f()", "lib/torch/distributed/collectives.py", "exec"))
    wait(all_reduce)
elif action == "stop":
    hurry()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
elif action == "spin":
    do_nothing_for_ever()
"""


def watch(tmp_path, *actions):
    """Run such ranks and their watcher to the end; return processes, children and output."""
    with (tmp_path / "board").open("w+b") as board:
        allocate_heartbeats(board.fileno(), ranks=len(actions))
        stacks = [os.open(tmp_path / f"s{i}", os.O_RDWR | os.O_CREAT) for i in range(len(actions))]
        files = [board.fileno(), *stacks]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(files[0]), str(stacks[i]), str(i), action],
                stdout=subprocess.PIPE, pass_fds=files,
            )
            for i, action in enumerate(actions)
        ]  # fmt: skip
        children = [int(rank.stdout.readline()) for rank in ranks]
        names = ",".join(str(4 + i) for i in range(len(actions)))
        command = [sys.executable, "-m", "megatron_rl.runtime.watchdog", "--ranks", names,
                   "--board", str(files[0]), "--stacks", ",".join(map(str, stacks)),
                   "--folder", str(tmp_path / "stalls")]  # fmt: skip
        watcher = subprocess.Popen(command, pass_fds=files, stderr=subprocess.PIPE, text=True)
        for rank, action in zip(ranks, actions, strict=True):
            if action == "work":
                rank.wait(timeout=60)
                subprocess.run(["kill", "-9", *map(str, children)], check=True)
            else:
                assert rank.wait(timeout=60) == -signal.SIGKILL
        _, output = watcher.communicate(timeout=60)
        for file in stacks:
            os.close(file)
        for rank in ranks:
            rank.stdout.close()
        return children, output


@pytest.mark.parametrize(
    ("action", "sign", "frame"),
    [("stop", "is stopped", "in <module>"), ("spin", "does not wait", "in do_nothing_for_ever")],
)
def test_hung_rank_is_named_and_no_process_remains(tmp_path, action, sign, frame):
    """Also while it keeps the interpreter's lock, or is stopped and cannot respond."""
    children, output = watch(tmp_path, "wait", action)
    assert f"in train: rank 5 {sign}" in output, output
    (report,) = (tmp_path / "stalls").iterdir()
    assert str(report) in output
    text = report.read_text()
    assert "Main threads, 2 different stacks" in text
    odd = text.split("ranks 5:")[1].split("ranks 4:")[0]
    assert frame in odd and "all_reduce" not in odd, text
    assert "all_reduce" in text.split("ranks 4:")[1]
    assert_end(children)


def test_ranks_that_work_are_left_alone(tmp_path):
    _, output = watch(tmp_path, "work")
    assert output == "" and not (tmp_path / "stalls").exists()


def test_suspended_time_does_not_count(tmp_path):
    """As under `scontrol suspend`: the first poll after it must find no rank late."""
    from megatron_rl.runtime.watchdog import Watcher

    with (tmp_path / "board").open("w+b") as board:
        allocate_heartbeats(board.fileno(), ranks=1)
        progress = Heartbeat(map_heartbeats(board.fileno()), 0, budget=30.0)
        watcher = Watcher([0], board=board.fileno(), stacks=[])
        clock = iter([0.0, 0.5, 9000.0, 9000.5])  # a poll every 0.5 s; suspended after the second
        looks = []

        class Time:
            monotonic = staticmethod(lambda: next(clock))

            @staticmethod
            def sleep(seconds):
                looks.append(watcher.idle[0])
                if len(looks) == 4:
                    progress._board[:SLOT_BYTES] = bytes(SLOT_BYTES)  # its process has ended

        import megatron_rl.runtime.watchdog as module

        real, module.time = module.time, Time
        try:
            assert not watcher.wait_for_stall()
        except StopIteration:
            pass
        finally:
            module.time = real
    assert looks == [0.0, 0.5, 1.5, 2.0]  # at most two pauses of 0.5 s between two polls


def test_slot_has_phase_budget_and_count(tmp_path):
    with (tmp_path / "board").open("w+b") as file:
        allocate_heartbeats(file.fileno(), ranks=2)
        board = map_heartbeats(file.fileno())
        progress = Heartbeat(board, 1, budget=5.0, budgets={"start": 10.0, "checkpoint": 20.0})
        assert read_slot(board, 0).process == 0
        assert (read_slot(board, 1).phase, read_slot(board, 1).budget) == ("start", 10.0)
        progress.begin("rollout")
        progress.count(3, 16)
        slot = read_slot(board, 1)
        assert (slot.phase, slot.budget, slot.count) == ("rollout", 5.0, 3)
        with progress.patient(60.0):
            assert (read_slot(board, 1).phase, read_slot(board, 1).budget) == ("rollout", 60.0)
        assert read_slot(board, 1).budget == 5.0
        progress.begin("checkpoint" + "é" * 300)
        assert read_slot(board, 1).phase.startswith("checkpointé")
        assert slot.process == os.getpid() and read_slot(board, 0).count == 0


def sample_stacks(rank, *, state="S", idle=9.0, stack="torch/distributed/c10d.py"):
    return StackSample(rank, 100 + rank, state, "train", idle, stack, stack)


def test_identify_stalled_ranks():
    def ranks(*looks):
        return [one.rank for one in identify_stalled_ranks(looks)[0]]

    assert ranks(
        sample_stacks(0), sample_stacks(1, state="T"), sample_stacks(2, stack="mine.py")
    ) == [1]
    assert ranks(sample_stacks(0), sample_stacks(1, state="")) == [1]
    assert ranks(sample_stacks(0), sample_stacks(1, stack="  File mine.py"), sample_stacks(2)) == [
        1
    ]
    assert ranks(sample_stacks(0), sample_stacks(1, idle=11.0)) == [1]
    assert (
        ranks(sample_stacks(0), sample_stacks(1)) == []
        and identify_stalled_ranks([sample_stacks(0), sample_stacks(1)])[1]
    )
    assert ranks(sample_stacks(0, stack="mine.py")) == [0]


def test_threads_are_distinguished():
    text = (
        'Thread 0x00007f01 (most recent call first):\n  File "a.py", line 1 in f\n\n'
        'Current thread 0x00007f02 (most recent call first):\n  File "b.py", line 2 in g\n'
    )
    assert split_stacks(text) == {
        0x7F01: '  File "a.py", line 1 in f\n', 0x7F02: '  File "b.py", line 2 in g\n',
    }  # fmt: skip


@pytest.mark.slow
def test_killed_watchdog_is_replaced_and_named(tmp_path):
    """By the rank that has started it: no later hang would end."""
    script = f"""
import os, signal, sys, threading, time
from pathlib import Path
import psutil
from megatron_rl.trainer import startup
from megatron_rl.runtime.watchdog import allocate_heartbeats
folder = Path({str(tmp_path)!r})
with (folder / "board").open("wb") as file:
    allocate_heartbeats(file.fileno(), ranks=1)
(folder / "stacks0").touch()
progress = startup._open(folder, 0, budget=1.0, budgets={{}})
startup._start_watcher(folder, [0], reports=folder / "stalls", log=print)
progress.begin("start")
(watcher,) = psutil.Process().children()
watcher.kill()
while not (found := psutil.Process().children()) or found[0].pid == watcher.pid:
    progress.count()
    time.sleep(0.01)
time.sleep(600)  # a hang: the next one ends this process
"""
    ended = subprocess.run([sys.executable, "-u", "-c", script], capture_output=True, text=True,
                           timeout=300, check=False)  # fmt: skip
    assert ended.returncode == -9, ended.stderr
    assert "the watchdog of this node has ended (exit status -9): starting another" in ended.stdout
    assert list((tmp_path / "stalls").glob("*.txt"))
