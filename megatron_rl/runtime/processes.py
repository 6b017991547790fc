"""Start the processes of one node.

Also sets the environment variables that torch, vLLM and the tokenizers read at import, before any
of them is imported, so that users need not set them.
"""

import contextlib
import ctypes
import gc
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from megatron_rl.runtime.failures import FOLDER, Cause, Failure, first_failure
from megatron_rl.runtime.interruption import (
    INTERRUPTED,
    Interruption,
    handled_signals,
)
from megatron_rl.runtime.open_files import raise_limit
from megatron_rl.runtime.versions import hide_unloadable_builds

LAUNCHER = "MEGATRON_RL_LAUNCHER"  # environment variable of a rank: id of its launcher process
POLL_SECONDS = 0.1
CLEAN_UP_SECONDS = 3.0
CAUSE_SECONDS = 10.0  # to wait for the rank that caused another rank's failure
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 1 << 30  # freed memory to keep, and the largest block to allocate in it
_OLD_LIMIT = 1 << 25  # the largest such block that older releases of glibc accept


@lru_cache(maxsize=1)
def cuda_devices() -> int:
    """Return the number of CUDA devices that CUDA_VISIBLE_DEVICES leaves to this process.

    Calls the driver instead of importing torch, which takes seconds.
    """
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@lru_cache(maxsize=1)
def cuda_memory() -> int | None:
    """Return the memory in bytes of the first CUDA device, or None without CUDA."""
    if not has_cuda():
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    device, size = ctypes.c_int(0), ctypes.c_size_t(0)
    if driver.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    return size.value if driver.cuDeviceTotalMem_v2(ctypes.byref(size), device) == 0 else None


def has_cuda() -> bool:
    """Return True if this process may use a CUDA device."""
    return cuda_devices() > 0


def prepare_environment() -> None:
    """Raise the limit of open files; set variables and hide packages that libraries import."""
    raise_limit()
    hide_unloadable_builds()
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's overlap of communication needs it
    }
    if not has_cuda():
        defaults |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        _keep_freed_memory()
    if not os.access(os.path.expanduser("~"), os.W_OK):  # vLLM and Triton keep caches there
        folder = os.path.join(tempfile.gettempdir(), f"megatron_rl-{os.getuid()}")
        names = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TRITON_HOME")
        defaults |= dict.fromkeys(names, folder)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _keep_freed_memory() -> None:
    """Make the allocator keep freed memory instead of returning it to the system.

    Otherwise each tensor of a few MiB is mapped again, with a page fault and zero-fill per page.
    """
    with contextlib.suppress(AttributeError):  # C libraries other than glibc have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        # A rejected value would leave the threshold at 128 KiB.
        if not mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES):
            mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection during imports, where it takes a fifth of the time for nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def quiet_libraries() -> None:
    """Hide warnings of libraries about their own code."""
    for module in ("torch", "megatron", "vllm", "transformers"):
        warnings.filterwarnings("ignore", module=rf"{module}\.", append=False)
        warnings.filterwarnings("ignore", module=module, append=False)
    # On a CPU it warns that Triton lacks a CPU backend, before vLLM's log level applies.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    # Megatron warns about its deprecated classes and about state that exists on one rank by design.
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    # Megatron reads `.grad` of tensors whose gradient it stores elsewhere.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def start_processes(
    arguments: list[str],
    *,
    world_size: int,
    find_stall: Callable[[], object] = lambda: None,
    to_continue: Callable[[], str] = lambda: "",
) -> int:
    """Run `megatron-rl ARGUMENTS` in `world_size` processes of this node; returns the exit code.

    If one process fails, the others are killed, and its error is printed last. The first signal
    that requests a stop is forwarded, and the processes may finish; a second one kills them.
    find_stall: returns the report of the watchdog if it killed the processes because they hung.
    to_continue: returns the message that describes how to resume after a failure.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # single node: do not resolve its host name
    interruption, insistent = Interruption(), threading.Event()

    def take(number: int, frame: object) -> None:
        interruption.take(signal.Signals(number), at_second=insistent.set)

    previous = {each: signal.signal(each, take) for each in handled_signals()}
    port = _find_port()
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="megatron_rl-", dir=shared) as folder:
        os.environ[FOLDER] = folder
        processes = [_start_rank(arguments, rank, world_size, port) for rank in range(world_size)]
        try:
            codes = _wait_for_end(processes, interruption, insistent, Path(folder))
        finally:
            del os.environ[FOLDER]
            _end(processes)
            for each, handler in previous.items():
                signal.signal(each, handler)
        failure = first_failure(folder)
    if insistent.is_set():
        return 128 + signal.SIGTERM
    if any(codes) and (report := find_stall()) is not None:
        _print(f"the run hung and was killed: {report}; restart it with run.resume=auto")
        return INTERRUPTED
    status = max(codes, key=lambda code: (code not in (0, INTERRUPTED), code))
    for rank, code in enumerate(codes):
        if code < 0:
            hint = " (often the out-of-memory killer)" if -code == signal.SIGKILL else ""
            name = signal.Signals(-code).name
            text = f"rank {rank} was killed by signal {-code}, {name}{hint}"
            failure, status = Failure(rank, Cause.OWN, text, in_training=True), 128 - code
            break
    if failure is not None and status not in (0, INTERRUPTED):
        print(failure.lines(to_continue=to_continue()), end="", file=sys.stderr, flush=True)
    return status


def _wait_for_end(
    processes: list[subprocess.Popen[bytes]],
    interruption: Interruption,
    insistent: threading.Event,
    failures: Path,
) -> list[int]:
    """Return the exit code of every rank; 0 for ranks still running when another one failed.

    A rank that succeeds or stops on request does not stop the others.
    """
    is_forwarded, deadline = False, math.inf
    unready: tuple[int, ...] = ()
    while None in (codes := [process.poll() for process in processes]):
        failed = set(codes) - {None, 0, INTERRUPTED, *unready}
        if failed and deadline == math.inf:
            deadline = time.monotonic() + CAUSE_SECONDS
        if insistent.is_set() or (failed and _has_cause(failed, failures)):
            break
        if time.monotonic() > deadline:
            break
        if interruption.received and not is_forwarded:
            is_forwarded = True
            unready = (-signal.SIGTERM,)  # a rank without a handler has not started any work
            _print(
                f"Received {interruption.received.name}: stopping as soon as the run can be "
                "resumed; a second signal kills it immediately"
            )
            for process in processes:
                process.terminate()
        time.sleep(POLL_SECONDS)
    return [INTERRUPTED if code in unready else code or 0 for code in codes]


def _has_cause(codes: set[int | None], failures: Path) -> bool:
    """Return True if the cause of the failure is known; otherwise its rank may still be exiting."""
    failure = first_failure(failures)
    is_killed = any(code is not None and code < 0 for code in codes)
    return is_killed or failure is None or failure.cause is Cause.OWN


def _start_rank(
    arguments: list[str], rank: int, world_size: int, port: int
) -> subprocess.Popen[bytes]:
    """Start one rank in its own session, so that Ctrl-C reaches only the launcher."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        LAUNCHER: os.getpid(),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.cli", *arguments],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        start_new_session=True,
    )


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill the processes, then their children: reward workers and checkpoint writers."""
    for process in processes:
        process.kill()
        process.wait()
    deadline, groups = time.monotonic() + CLEAN_UP_SECONDS, {process.pid for process in processes}
    while _is_any_alive(groups) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):  # the group is gone
            os.killpg(group, signal.SIGKILL)


def _is_any_alive(groups: set[int]) -> bool:
    """Return True if a process of these groups is alive; zombies do not count.

    The first process of a container inherits the children of a rank and often does not reap them.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has exited
            state, _, group = (
                (process / "stat")
                .read_text(encoding="utf-8", errors="replace")
                .rsplit(")", 1)[1]
                .split()[:3]
            )
            if int(group) in groups and state not in "ZX":
                return True
    return False


def _find_port() -> int:
    """Return a free port for the rendezvous, below the system's ephemeral ports."""
    for offset in range(10_000):
        port = 20_000 + (os.getpid() + offset) % 10_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("none of the ports 20000 to 29999 is free on this node")


def _print(text: str) -> None:
    print(f"megatron-rl: {text}", file=sys.stderr, flush=True)
