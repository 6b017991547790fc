"""The launcher's ranks: how they start, and what becomes of them and of signals."""

import atexit
import ctypes
import json
import os
import signal
import stat
import sys
import threading
import time

import pytest

from megatron_rl.runtime import interruption, launcher
from megatron_rl.runtime.interruption import INTERRUPTED
from megatron_rl.runtime.launcher import RankProcess, end_all, start_processes
from tests.running import assert_end

PROGRAM = """
import gc, json, os, signal, sys, threading, time
from pathlib import Path

numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
state = {
    "name": (__name__, __spec__.name), "arguments": sys.argv[1:], "collects": gc.isenabled(),
    "handlers": [str(signal.getsignal(each)) for each in numbers],
    "blocked": [str(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "is_leader": os.getsid(0) == os.getpid() == os.getpgid(0), "folder": os.getcwd(),
    "parent": os.getppid() == int(os.environ["MEGATRON_RL_LAUNCHER"]),
    "threads": threading.active_count(),
    "ranks": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "HF_HUB_OFFLINE")],
}
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(state))
if os.environ["RANK"] == "0":
    sys.exit(0)
while not Path(sys.argv[1], "0").exists():  # its failure ends rank 0
    time.sleep(0.01)
sys.exit(3)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Put a module that writes what it finds in the place of the command."""
    (tmp_path / "described.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setattr(launcher, "PROGRAM", "described")

    def start(name, **settings):
        folder = tmp_path / name
        folder.mkdir()
        assert start_processes([str(folder), "seed=1"], world_size=2, **settings) == 3
        texts = [(folder / rank).read_text().replace(str(folder), "FOLDER") for rank in "01"]
        return list(map(json.loads, texts))

    return start


def test_forked_rank_starts_like_new_interpreter(program, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    new = program("new")
    monkeypatch.setattr(sys, "executable", "/nowhere")  # no other program is needed
    # Other tests may have left threads, with which the launcher would start new interpreters.
    monkeypatch.setattr(launcher.threading, "active_count", lambda: 1)
    atexit.register((tmp_path / "exit_handler").touch)
    forked = program("forked", modules=("json",))
    assert not (tmp_path / "exit_handler").exists()
    assert forked == new
    assert forked[1]["name"] == ["__main__", "described"]
    assert forked[1]["arguments"] == ["FOLDER", "seed=1"]
    assert forked[1]["ranks"] == ["1", "1", "2", "1"]


def test_ranks_are_new_interpreters_when_fork_would_lose_thread(ranks, tmp_path):
    ranks(f"touch {tmp_path}/$RANK")
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    thread.start()
    assert start_processes([], world_size=1, modules=("json",)) == 0
    ended.set()
    thread.join()
    assert (tmp_path / "0").exists()


def test_ranks_are_new_interpreters_when_fork_cannot_use_devices(ranks, tmp_path, monkeypatch):
    """As after an import that initialises CUDA: torch fails in the fork, here for want of CUDA."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(launcher, "has_cuda", lambda: True)
    ranks(f"touch {tmp_path}/$RANK")
    assert start_processes([], world_size=1, modules=("json",)) == 0
    assert (tmp_path / "0").exists()


def test_module_that_cannot_be_imported_is_left_to_ranks(program, tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('broken')")
    assert program("ranks", modules=("broken", "json"))[0]["arguments"] == ["FOLDER", "seed=1"]


def test_signal_during_imports_exits_immediately(tmp_path, monkeypatch, capfd):
    here = tmp_path / "here"
    slow = f"import pathlib, time\npathlib.Path({str(here)!r}).touch()\ntime.sleep(60)"
    (tmp_path / "slow.py").write_text(slow)
    monkeypatch.syspath_prepend(tmp_path)
    process = RankProcess(lambda: start_processes([], world_size=1, modules=("slow",)), {})
    try:
        while not here.exists():
            time.sleep(0.02)
        process.send(signal.SIGTERM)
        assert process.wait() == INTERRUPTED
    finally:
        end_all([process])
    assert "interrupted before the first step; there is nothing to save" in capfd.readouterr().err


def test_id_of_ended_process_stays_its_own_until_group_is_killed():
    process = RankProcess(lambda: None, {})
    assert process.wait() == process.poll() == 0
    os.kill(process.pid, 0)  # of a zombie, which nobody else can have
    end_all([process])
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Put a shell script in the place of the ranks' program."""

    def write(script):
        file = tmp_path / "rank"
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(file))

    return write


def test_killed_rank_is_named_and_others_are_ended(ranks, capfd, tmp_path, monkeypatch):
    # Rank 0 never ends by itself, nor does what it has started.
    monkeypatch.setattr(launcher, "CLEAN_UP_SECONDS", 0.2)
    pid = tmp_path / "pid"
    die = f"while [ ! -s {pid} ]; do sleep 0.1; done; kill -9 $$"
    ranks(f"if [ $RANK = 1 ]; then {die}; fi; sleep 600 & echo $! > {pid}; wait")
    advice = "resume from the checkpoint of step 3 with\n  megatron-rl train ..."
    assert start_processes([], world_size=2, to_continue=lambda: advice) == 128 + 9
    output = capfd.readouterr().err
    assert output == (
        "megatron-rl: error: rank 1 was killed by signal 9, SIGKILL (often the out-of-memory "
        "killer)\n"
        f"megatron-rl: {advice}\n"
    )
    assert_end([int(pid.read_text())])


def test_children_of_ranks_end_and_ended_ones_are_not_waited_for(ranks, tmp_path, monkeypatch):
    """A process that does not collect orphans, like the first process of many containers."""
    monkeypatch.setattr(launcher, "CLEAN_UP_SECONDS", 120.0)
    is_any_alive, answers = launcher._is_any_alive, []

    def record(groups):
        answers.append(is_any_alive(groups))
        return answers[-1]

    monkeypatch.setattr(launcher, "_is_any_alive", record)
    adopt = ctypes.CDLL(None).prctl
    adopt(36, 1)  # PR_SET_CHILD_SUBREAPER
    ranks(f"(sleep 0.3; touch {tmp_path}/left$RANK) & echo $! > {tmp_path}/pid$RANK")
    assert start_processes([], world_size=2) == 0
    adopt(36, 0)
    for rank in (0, 1):
        assert (tmp_path / f"left{rank}").exists()
        os.waitpid(int((tmp_path / f"pid{rank}").read_text()), 0)
    assert answers[-1] is False  # the wait ended because they had, not at its deadline


LEAVE_FAILURE = """
import os, sys
from megatron_rl.runtime.failures import FOLDER, Cause, Failure
cause, text = Cause[sys.argv[1]], sys.argv[2]
Failure(int(os.environ["RANK"]), cause, text, in_training=True).write_to(os.environ[FOLDER])
"""


def test_cause_of_failure_is_printed_once_and_last(ranks, tmp_path, capfd):
    """Rank 1 repeats what rank 0 has met, or misses it, and ends first; rank 0 still prints."""
    (tmp_path / "leave.py").write_text(LEAVE_FAILURE)
    leave = f"'{sys.executable}' {tmp_path}/leave.py"
    ranks(
        f"if [ $RANK = 1 ]; then {leave} OTHER_RANK 'rank 0: bad'; exit 1; fi\n"
        f"if [ $RANK = 2 ]; then {leave} LOST_RANK 'a rank has ended'; exit 1; fi\n"
        f"sleep 1; echo noise >&2; {leave} OWN 'the verifier failed'; exit 1"
    )
    assert start_processes([], world_size=3, to_continue=lambda: "continue with\n  this") == 1
    assert capfd.readouterr().err == (
        "noise\nmegatron-rl: error: the verifier failed\nmegatron-rl: continue with\n  this\n"
    )


def send_when(*files, again=(), number=signal.SIGINT):
    """A signal to this process once these files are there, and again once the next ones are."""

    def send():
        for awaited in filter(None, (files, again)):
            while not all(file.exists() for file in awaited):
                time.sleep(0.02)
            os.kill(os.getpid(), number)

    threading.Thread(target=send).start()


def test_stop_request_is_forwarded_and_awaited(ranks, tmp_path):
    end = f"sleep 0.5; touch {tmp_path}/saved$RANK; exit {INTERRUPTED}"
    ranks(f"trap '{end}' TERM; touch {tmp_path}/$RANK; for _ in $(seq 600); do sleep 0.1; done")
    send_when(tmp_path / "0", tmp_path / "1", number=signal.SIGTERM)
    handler = signal.getsignal(signal.SIGTERM)
    assert start_processes([], world_size=2) == INTERRUPTED
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_stop_request_before_ranks_listen_is_no_failure(ranks, tmp_path, capfd):
    """As in the first second, while Python imports: SIGTERM simply ends them."""
    ranks(f"touch {tmp_path}/$RANK; exec sleep 600")
    send_when(tmp_path / "0", tmp_path / "1")
    assert start_processes([], world_size=2) == INTERRUPTED
    output = capfd.readouterr().err
    assert "a second signal kills it immediately" in output and "was killed by" not in output


def test_second_stop_request_ends_immediately(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(interruption, "ECHO_SECONDS", 0.0)
    trap = f"trap 'touch {tmp_path}/stopped$RANK' TERM"
    ranks(f"{trap}; touch {tmp_path}/$RANK; for _ in $(seq 600); do sleep 0.1; done")
    send_when(tmp_path / "0", tmp_path / "1", again=[tmp_path / "stopped0", tmp_path / "stopped1"])
    assert start_processes([], world_size=2) == 128 + signal.SIGTERM
