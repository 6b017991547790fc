"""Starting ranks, the environment, and named seeds."""

import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

from megatron_rl.runtime import interruption, processes
from megatron_rl.runtime.interruption import ECHO_SECONDS, Interruption
from megatron_rl.runtime.processes import (
    INTERRUPTED,
    prepare_environment,
    start_processes,
)
from megatron_rl.runtime.seeds import derive_seed
from tests.running import assert_end

FAULTS = """
import ctypes
import resource
from megatron_rl.runtime.processes import prepare_environment

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(), faults())
prepare_environment()
print(faults(), faults())
print(ctypes.CDLL(None).mallopt(-3, 1 << 30))
"""


@pytest.mark.skipif(processes.has_cuda(), reason="on CUDA tensors have another allocator")
def test_freed_memory_is_kept():
    """64 MiB are 16,384 pages, which are new to the process each time but the last."""
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    *given_back, kept, is_taken = map(int, done.stdout.split())
    assert min(given_back) > 8192, done
    assert kept < 8192 or not is_taken  # an older glibc keeps no block above 32 MiB


def test_user_environment_variables_are_kept(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    prepare_environment()
    assert (os.environ["HF_HUB_OFFLINE"], os.environ["OMP_NUM_THREADS"]) == ("0", "7")
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"  # nothing phones home unless asked for


def test_unwritable_home_is_not_used(monkeypatch, tmp_path):
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare_environment()
    assert "XDG_CACHE_HOME" not in os.environ
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.setenv("TRITON_HOME", "/mine")
    prepare_environment()
    assert os.environ["TRITON_HOME"] == "/mine"
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        assert os.environ.pop(name).endswith(f"megatron_rl-{os.getuid()}")


def test_seeds_have_names():
    assert derive_seed(1, "rollout", 3) == derive_seed(1, "rollout", 3)
    different = {derive_seed(s, n, k) for s in (1, 2) for n in ("rollout", "eval") for k in (1, 2)}
    assert len(different) == 8
    assert all(0 <= seed < 2**31 for seed in different)


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Put a shell script in the place of the ranks' program."""

    def write(script):
        file = tmp_path / "rank"
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(file))

    return write


def test_ranks_know_their_places_and_end_well(ranks, tmp_path):
    ranks(f'echo "$RANK $LOCAL_RANK $WORLD_SIZE $*" > {tmp_path}/arguments$RANK')
    assert start_processes(["train", "seed=1"], world_size=2) == 0
    assert (tmp_path / "arguments1").read_text() == "1 1 2 -m megatron_rl.cli train seed=1\n"


def test_killed_rank_is_named_and_others_are_ended(ranks, capfd, tmp_path, monkeypatch):
    # Rank 0 never ends by itself, nor does what it has started.
    monkeypatch.setattr(processes, "CLEAN_UP_SECONDS", 0.2)
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
    monkeypatch.setattr(processes, "CLEAN_UP_SECONDS", 120.0)
    begin, adopt = time.monotonic(), ctypes.CDLL(None).prctl
    adopt(36, 1)  # PR_SET_CHILD_SUBREAPER
    ranks(f"(sleep 0.3; touch {tmp_path}/left$RANK) & echo $! > {tmp_path}/pid$RANK")
    assert start_processes([], world_size=2) == 0
    adopt(36, 0)
    for rank in (0, 1):
        assert (tmp_path / f"left{rank}").exists()
        os.waitpid(int((tmp_path / f"pid{rank}").read_text()), 0)
    assert time.monotonic() - begin < 100


def test_exit_status_is_that_of_failed_rank(ranks, capfd):
    ranks("[ $RANK = 0 ] && exit 3; exec sleep 600")
    assert start_processes([], world_size=2) == 3
    assert capfd.readouterr().err == ""  # it has printed its own error


LEAVE_FAILURE = """
import os, sys
from megatron_rl.runtime.failures import FOLDER, Cause, Failure
cause, text = Cause[sys.argv[1]], sys.argv[2]
Failure(int(os.environ["RANK"]), cause, text, in_training=True).leave_in(os.environ[FOLDER])
"""


def test_cause_of_failure_is_printed_once_and_last(ranks, tmp_path, capfd):
    """Rank 1 repeats what rank 0 has met, or misses it, and ends first; rank 0 still prints."""
    (tmp_path / "leave.py").write_text(LEAVE_FAILURE)
    leave = f"{sys.executable} {tmp_path}/leave.py"
    ranks(
        f"if [ $RANK = 1 ]; then {leave} OTHER_RANK 'rank 0: bad'; exit 1; fi\n"
        f"if [ $RANK = 2 ]; then {leave} LOST_RANK 'a rank has ended'; exit 1; fi\n"
        f"sleep 1; {leave} OWN 'the verifier failed'; echo noise >&2; exit 1"
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_request_is_forwarded_and_awaited(ranks, tmp_path, number):
    end = f"sleep 0.5; touch {tmp_path}/saved$RANK; exit {INTERRUPTED}"
    ranks(f"trap '{end}' TERM; touch {tmp_path}/$RANK; for _ in $(seq 600); do sleep 0.1; done")
    send_when(tmp_path / "0", tmp_path / "1", number=number)
    handler = signal.getsignal(number)
    assert start_processes([], world_size=2) == INTERRUPTED
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()
    assert signal.getsignal(number) is handler


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


def test_repeated_signal_is_no_second_request(monkeypatch):
    now = iter([10.0, 10.1, 10.0 + ECHO_SECONDS + 0.1, 100.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    interruption, ends = Interruption(), []
    for when in ("first", "echo", "second"):
        interruption.take(signal.SIGTERM, at_second=lambda when=when: ends.append(when))
    interruption.settle()
    interruption.take(signal.SIGTERM, at_second=lambda: ends.append("third"))
    assert ends == ["second"]
    assert interruption.received == signal.SIGTERM


def test_rank_responds_while_main_thread_is_blocked():
    """The first signal disturbs neither it nor its children; the second ends it inside C code."""
    program = """
import ctypes, multiprocessing, time
from megatron_rl.runtime import interruption
interruption.ECHO_SECONDS = 0.0
request = interruption.Interruption()
request.listen()
request.defer()
manager = multiprocessing.get_context("spawn").Manager()  # as Megatron has one for checkpoints
print(manager._process.pid, flush=True)
while request.received is None:
    time.sleep(0.01)
print(list(manager.list([request.received.name])), flush=True)
ctypes.CDLL(None).sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    manager = int(process.stdout.readline())
    for pid in (manager, process.pid):
        os.kill(pid, signal.SIGTERM)
    assert process.stdout.readline() == "['SIGTERM']\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 128 + signal.SIGINT
    os.kill(manager, signal.SIGKILL)
    assert (
        process.communicate()[1]
        == "megatron-rl: second request to stop (SIGINT): exiting immediately\n"
    )


def test_stop_request_during_set_up_ends_rank_immediately():
    """Nothing is lost yet, and set-up may take minutes, inside C code too."""
    program = """
import ctypes
from megatron_rl.runtime.interruption import Interruption
Interruption().listen(is_main_rank=True)
print("set up", flush=True)
ctypes.CDLL(None).sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "set up\n"
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[1]
    assert process.returncode == INTERRUPTED
    assert output == "megatron-rl: interrupted before the first step; there is nothing to save\n"


def test_ctrl_c_before_anything_has_begun_shows_no_traceback(tmp_path):
    """In the very first moment: the command's imports wait for the test's signal."""
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml" / "__init__.py").write_text("print('here', flush=True)\nimport time\n"
                                                   "time.sleep(600)\n")  # fmt: skip
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.cli", "train", "--config", "c.yaml"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[1]
    assert (process.returncode, output) == (
        130,
        "megatron-rl: interrupted before the command started\n",
    )


DRIVER = """
#include <stdlib.h>
int cuInit(unsigned flags) { return getenv("CUDA_VISIBLE_DEVICES") ? 0 : 100; }
int cuDeviceGetCount(int *count) {
    *count = 0;
    for (const char *c = getenv("CUDA_VISIBLE_DEVICES"); *c; c++) *count += *c != ',';
    return 0;
}
"""


@pytest.mark.parametrize(("visible", "devices"), [("0,1", 2), ("", 0), (None, 0)])
def test_devices_are_counted_by_driver(tmp_path, visible, devices):
    """A stand-in for the driver that follows CUDA_VISIBLE_DEVICES; torch is not imported."""
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-o", library, tmp_path / "driver.c"], check=True)
    program = (
        "import sys; from megatron_rl.runtime.processes import cuda_devices, has_cuda; "
        "print(cuda_devices(), has_cuda(), 'torch' in sys.modules)"
    )
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert output.stdout == f"{devices} {devices > 0} False\n"
