"""Starting the processes of one node, or joining those that torchrun or SLURM started.

The environment variables that torch, vLLM and the tokenizers read at import are set here, once,
before any of them is imported: nobody has to set one by hand.
"""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megatron_rl.interruption import (
    INTERRUPTED,
    Interruption,
    end_with_parent,
    heard_signals,
)

LAUNCHER = "MEGATRON_RL_LAUNCHER"  # in a rank's environment: the process that started it
POLL_SECONDS = 0.1
CLEAN_UP_SECONDS = 3.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 1 << 30  # of freed memory, and of a block that may lie in it
_OLD_LIMIT = 1 << 25  # of such a block, where glibc is of an older release, which takes no more


@dataclass(frozen=True)
class ProcessPlace:
    """Where this process stands among all."""

    rank: int
    world_size: int
    local_rank: int


@lru_cache(maxsize=1)
def cuda_devices() -> int:
    """CUDA devices that this process may use: the driver counts, heeding CUDA_VISIBLE_DEVICES.

    Without torch, whose import takes seconds.
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
    """Bytes of the first CUDA device that this process may use; None where there is none."""
    if not has_cuda():
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    device, size = ctypes.c_int(0), ctypes.c_size_t(0)
    if driver.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    return size.value if driver.cuDeviceTotalMem_v2(ctypes.byref(size), device) == 0 else None


def has_cuda() -> bool:
    """Whether there is a CUDA device that this process may use."""
    return cuda_devices() > 0


def prepare_environment() -> None:
    """Settings that only work before the imports; a value that is already set is kept."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # models are folders on disk; nothing is looked up
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
    """Let the allocator keep what tensors free instead of giving it back to the system.

    A tensor of some MiB would otherwise be new memory each time, whose pages the kernel fills with
    zeros, one fault each.
    """
    with contextlib.suppress(AttributeError):  # another C library than glibc has other ways
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        # One that is refused would leave every block above 128 KiB to be new memory each time.
        if not mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES):
            mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For imports: they make no garbage, and looking for it takes a fifth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def quiet_libraries() -> None:
    """Hide warnings of libraries about themselves; those of our own code stay."""
    for module in ("torch", "megatron", "vllm", "transformers"):
        warnings.filterwarnings("ignore", module=rf"{module}\.", append=False)
        warnings.filterwarnings("ignore", module=module, append=False)
    # On a CPU it says that Triton lacks a CPU backend, before vLLM's own log level applies.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    # Megatron warns of itself: classes that will go, state that is on one rank as it should be.
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    # Megatron reads `.grad` of tensors whose gradient it keeps elsewhere.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def join_processes() -> ProcessPlace | None:
    """This process's place if torchrun or srun started it, else None.

    For srun the variables of torch's `env://` rendezvous are derived from SLURM's.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if LAUNCHER in os.environ:
            end_with_parent(int(os.environ[LAUNCHER]))
        _share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return _place()
    world_size = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_STEP_ID" not in os.environ or world_size == 1:  # no step, or an interactive shell
        return None
    nodes = os.environ["SLURM_STEP_NODELIST"]
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        hosts = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"srun started this process, but the hosts of {nodes} cannot be listed ({error}); put "
            "scontrol on the PATH, or start by torchrun"
        ) from error
    job = int(os.environ["SLURM_JOB_ID"])
    os.environ.update(
        RANK=os.environ["SLURM_PROCID"],
        LOCAL_RANK=os.environ["SLURM_LOCALID"],
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(max(world_size // len(hosts), 1)),
    )
    os.environ.setdefault("MASTER_ADDR", hosts[0])
    os.environ.setdefault("MASTER_PORT", str(20000 + job % 20000))
    _share_cores(int(os.environ["LOCAL_WORLD_SIZE"]))
    return _place()


def _share_cores(ranks: int) -> None:
    """Give each rank of this node as many threads as there are cores for it; on CUDA one.

    To be called before torch is imported. A value that is set is kept (torchrun sets 1).
    """
    cores = 1 if has_cuda() else len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))


def _place() -> ProcessPlace:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    return ProcessPlace(*(int(os.environ.get(name, "0")) for name in names))


def start_processes(
    arguments: list[str], *, world_size: int, find_stall: Callable[[], object] = lambda: None
) -> int:
    """Run `megatron-rl ARGUMENTS` in `world_size` processes of this node; returns the exit code.

    When one process fails the others are ended. A signal that asks to end is passed on, and the
    processes take the time they need; the next one ends them at once.
    find_stall: the report of their watcher, where it has ended them because they hung.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one node: no need to resolve its name
    interruption, insistent = Interruption(), threading.Event()

    def take(number: int, frame: object) -> None:
        interruption.take(signal.Signals(number), at_second=insistent.set)

    earlier = {one: signal.signal(one, take) for one in heard_signals()}
    port = _find_port()
    processes = [_start_rank(arguments, rank, world_size, port) for rank in range(world_size)]
    is_passed_on = False
    unready: tuple[int, ...] = ()
    try:
        # Those that end well, or early as asked, do not end the others.
        while None in (codes := [process.poll() for process in processes]):
            if insistent.is_set() or not set(codes) <= {None, 0, INTERRUPTED, *unready}:
                break
            if interruption.received and not is_passed_on:
                is_passed_on = True
                unready = (-signal.SIGTERM,)  # a rank that did not listen yet has begun nothing
                _say(
                    f"{interruption.received.name}: ending as soon as the run can be continued; "
                    "a second one ends it at once"
                )
                for process in processes:
                    process.terminate()
            time.sleep(POLL_SECONDS)
        if insistent.is_set():
            return 128 + signal.SIGTERM
        if any(codes) and (report := find_stall()) is not None:
            _say(f"the run hung and was ended: {report}; start it again with run.resume=auto")
            return INTERRUPTED
        return _exit_code(processes, unready)
    finally:
        _end(processes)
        for one, handler in earlier.items():
            signal.signal(one, handler)


def _start_rank(
    arguments: list[str], rank: int, world_size: int, port: int
) -> subprocess.Popen[bytes]:
    """One process of this node, in a session of its own: Ctrl-C reaches the launcher alone."""
    places = {
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
        env=os.environ | {name: str(value) for name, value in places.items()},
        start_new_session=True,
    )


def _exit_code(processes: list[subprocess.Popen[bytes]], unready: Sequence[int]) -> int:
    """That of a process that failed; one that could not speak for itself is named.

    unready: codes of those that were asked to end before they listened.
    """
    codes = [process.poll() or 0 for process in processes]
    codes = [INTERRUPTED if code in unready else code for code in codes]
    for rank, code in enumerate(codes):
        if code < 0:
            often = " (often the out-of-memory killer)" if -code == signal.SIGKILL else ""
            _say(f"rank {rank} was ended by signal {-code}, {signal.Signals(-code).name}{often}")
            return 128 - code
    return max(codes, key=lambda code: (code not in (0, INTERRUPTED), code))


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs, then what it has started: reward workers, writers of checkpoints."""
    for process in processes:
        process.kill()
        process.wait()
    deadline, groups = time.monotonic() + CLEAN_UP_SECONDS, {process.pid for process in processes}
    while _is_any_alive(groups) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):  # nothing is left of it
            os.killpg(group, signal.SIGKILL)


def _is_any_alive(groups: set[int]) -> bool:
    """Whether a process of these groups lives; one that has ended may never be collected.

    What a rank has started falls, after it, to the first process of a container, which often
    collects nobody.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended since
            state, _, group = (process / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            if int(group) in groups and state not in "ZX":
                return True
    return False


def _find_port() -> int:
    """A port for the ranks to meet at, below those that the system gives to anyone who asks."""
    for offset in range(10_000):
        port = 20_000 + (os.getpid() + offset) % 10_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("none of the ports 20000 to 29999 is free on this node")


def _say(text: str) -> None:
    print(f"megatron-rl: {text}", file=sys.stderr, flush=True)
