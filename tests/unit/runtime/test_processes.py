"""The environment, stop requests, devices, and named seeds."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from megatron_rl.runtime import processes
from megatron_rl.runtime.interruption import ECHO_SECONDS, INTERRUPTED, Interruption
from megatron_rl.runtime.processes import (
    prepare_environment,
    use_downloaded_files,
)
from megatron_rl.runtime.seeds import derive_seed

FAULTS = """
import ctypes
import resource
from concurrent.futures import ThreadPoolExecutor
from megatron_rl.runtime.processes import prepare_environment

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(), faults())
prepare_environment()
print(faults(), faults())
with ThreadPoolExecutor(1) as pool:
    print(pool.submit(faults).result())
print(ctypes.CDLL(None).mallopt(-3, 1 << 30))
"""


@pytest.mark.skipif(processes.has_cuda(), reason="on CUDA tensors have another allocator")
def test_freed_memory_is_kept():
    """64 MiB are 16,384 pages, new to the process until it keeps them, also for its threads."""
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    *given_back, kept, of_thread, is_taken = map(int, done.stdout.split())
    assert min(given_back) > 8192, done
    assert max(kept, of_thread) < 8192 or not is_taken  # an older glibc keeps no block above 32 MiB


def test_user_environment_variables_are_kept(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "77")
    prepare_environment()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "77"
    assert (os.environ["HF_HUB_OFFLINE"], os.environ["OMP_NUM_THREADS"]) == ("0", "7")
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"  # nothing phones home unless asked for


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_variables_of_which_a_run_needs_one_value_are_replaced(monkeypatch, capfd, rank):
    """With TOKENIZERS_PARALLELISM, forked ranks would wait for threads of the launcher forever."""
    for name in processes._NEEDED:
        monkeypatch.setenv(name, "True")
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    prepare_environment()
    assert {name: os.environ[name] for name in processes._NEEDED} == {
        "TOKENIZERS_PARALLELISM": "false", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_MODELSCOPE": "false",
    }  # fmt: skip
    first = capfd.readouterr().err
    assert ("TOKENIZERS_PARALLELISM=True has no effect: " in first) == (rank != "1")
    prepare_environment()
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "FALSE")  # the same
    prepare_environment()
    assert not capfd.readouterr().err


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


def test_libraries_that_are_imported_use_downloaded_files(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    use_downloaded_files()
    assert (os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE) == ("0", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    use_downloaded_files()
    assert (os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE) == ("1", True)


def test_seeds_have_names():
    assert derive_seed(1, "rollout", 3) == derive_seed(1, "rollout", 3)
    different = {derive_seed(s, n, k) for s in (1, 2) for n in ("rollout", "eval") for k in (1, 2)}
    assert len(different) == 8
    assert all(0 <= seed < 2**31 for seed in different)


def test_repeated_signal_is_no_second_request(monkeypatch):
    now = iter([10.0, 10.1, 10.0 + ECHO_SECONDS + 0.1, 100.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    interruption, ends = Interruption(), []
    for when in ("first", "echo", "second"):
        interruption.record_signal(signal.SIGTERM, at_second=lambda when=when: ends.append(when))
    interruption.ignore_further_signals()
    interruption.record_signal(signal.SIGTERM, at_second=lambda: ends.append("third"))
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
int is_initialised = 0;
int cuInit(unsigned flags) { is_initialised = 1; return getenv("CUDA_VISIBLE_DEVICES") ? 0 : 100; }
int cuDeviceGetCount(int *count) {
    *count = 0;
    for (const char *c = getenv("CUDA_VISIBLE_DEVICES"); *c; c++) *count += *c != ',';
    return 0;
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 80; return 0; }
"""


@pytest.mark.parametrize(("visible", "devices"), [("0,1", 2), (None, 0)])
def test_devices_are_counted_by_driver(tmp_path, visible, devices):
    """A stand-in for the driver that follows CUDA_VISIBLE_DEVICES.

    It stays uninitialised in the process that asks, which may fork; torch is not imported.
    """
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("needs a C compiler, for the stand-in")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    program = (
        "import ctypes, sys; from megatron_rl.runtime.processes import *; "
        "print(cuda_devices(), cuda_memory(), has_cuda(), 'torch' in sys.modules); "
        "driver = ctypes.CDLL('libcuda.so.1'); "
        "print(ctypes.c_int.in_dll(driver, 'is_initialised').value)"
    )
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    memory = 80 if devices else None
    assert output.stdout == f"{devices} {memory} {devices > 0} False\n0\n"


RAISED = """
import resource
from megatron_rl.runtime.processes import prepare_environment
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (180, hard))
prepare_environment()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), hard)
"""


def test_soft_limit_is_raised_to_hard_one():
    done = subprocess.run(
        [sys.executable, "-c", RAISED], capture_output=True, text=True, check=True
    )
    soft, hard, before = map(int, done.stdout.split())
    assert hard == before
    assert soft == (hard if 0 <= hard < processes.MAX_OPEN_FILES else processes.MAX_OPEN_FILES)


@pytest.fixture
def limit(monkeypatch):
    def set_limit(hard):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (180, hard))

    return set_limit


def test_limit_too_small_for_ranks_is_named(limit):
    limit(1535)  # 1,023 sockets and 512 other files
    assert processes.limit_problem(1024) is None
    limit(1534)
    problem = processes.limit_problem(1024)
    assert problem is not None
    assert "1,024 processes needs up to 1,535 open files" in problem and "is 1,534" in problem
    limit(resource.RLIM_INFINITY)
    assert processes.limit_problem(1024) is None


def test_limited_address_space_is_named_with_its_cure(monkeypatch):
    limits = iter([resource.RLIM_INFINITY, 6 << 30])
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (next(limits), -1))
    assert processes.describe_address_space() is None
    text = processes.describe_address_space()
    assert "6.0 GiB of address space (ulimit -v)" in text and "ulimit -v unlimited" in text


def test_bfloat16_without_instructions_for_it_is_named(monkeypatch, tmp_path):
    def describe(flags, dtype="bfloat16", cuda=False):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\nbugs\t\t: spectre\n\n")
        monkeypatch.setattr(processes, "CPU_INFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(processes, "has_cuda", lambda: cuda)
        processes.has_bfloat16_instructions.cache_clear()
        try:
            return processes.describe_slow_bfloat16(dtype)
        finally:
            processes.has_bfloat16_instructions.cache_clear()

    ice_lake, arm = "flags\t\t: fpu avx2 avx512f", "Features\t: asimd"
    for flags in (ice_lake, arm):
        assert "set trainer.dtype=float32" in describe(flags)
        assert describe(flags, "float32") is describe(flags, "auto") is None
        assert describe(flags, cuda=True) is None
    for flags in (f"{ice_lake} avx512_bf16 amx_tile", f"{arm} bf16", "no such line"):
        assert describe(flags) is None


def test_shared_folder_of_killed_process_is_removed_by_next_one():
    """And no other one: a process that lives, or its child, has the lock."""
    program = """
import os, time
from megatron_rl.runtime.processes import shared_folder
with shared_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""
    command = [sys.executable, "-c", program]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = [Path(process.stdout.readline().strip()) for process in started]
    started[0].kill()
    started[0].wait()
    assert folders[0].exists()
    with processes.shared_folder() as own:
        assert [own.exists(), *(folder.exists() for folder in folders)] == [True, False, True]
    assert not own.exists()
    started[1].kill()
    started[1].wait()
    with processes.shared_folder():
        assert not folders[1].exists()
