"""Environment and limits of the processes of a run, and the devices of this machine.

Sets the environment variables that torch, vLLM and the tokenizers read at import, before any of
them is imported, so that users need not set them. `runtime/launcher.py` starts the ranks of a node.

Two ranks of a gloo group are connected by a socket in each of them. Linux counts sockets as open
files, and the usual soft limit is 1,024.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from megatron_rl.runtime.versions import hide_unloadable_builds

MAX_OPEN_FILES = 1 << 20  # some programs loop over all numbers below their limit
_SHARED = "megatron_rl_shared-"  # begins the names of folders in memory
CPU_INFO = Path("/proc/cpuinfo")
# Instructions for bfloat16: of Intel's and AMD's processors, and of ARM's.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
OTHERS = 512  # files that are not sockets between ranks: CUDA, libraries, models, workers


def raise_limit() -> None:
    """Raise this process's soft limit of open files to its hard limit; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def describe_address_space() -> str | None:
    """Return a warning if the address space is limited, as by `ulimit -v`."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return (
        f"warning: processes may use {limit / 2**30:.1f} GiB of address space (ulimit -v), and "
        "torch, vLLM and CUDA map far more than they use; if the start fails, run: ulimit -v "
        "unlimited"
    )


@lru_cache(maxsize=1)
def has_bfloat16_instructions() -> bool | None:
    """Return whether the processor has instructions for bfloat16; None if that is unknown."""
    if not CPU_INFO.is_file():
        return None
    flags = re.search(
        r"^(?:flags|Features)\s*:(.*)$", CPU_INFO.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    return None if flags is None else bool(BFLOAT16_FLAGS & set(flags[1].split()))


def describe_slow_bfloat16(dtype: str) -> str | None:
    """Return a warning if `trainer.dtype` is bfloat16 on a CPU without instructions for it."""
    if dtype != "bfloat16" or has_cuda() or has_bfloat16_instructions() is not False:
        return None
    return (
        "warning: trainer.dtype=bfloat16 is slower than float32 on this processor, which has no "
        "instructions for it; set trainer.dtype=float32"
    )


def hard_limit() -> int:
    """Return the number of files that this process may open after `raise_limit`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)


def limit_problem(world_size: int) -> str | None:
    """Describe why this machine's limit of open files is too small for the ranks, if it is.

    On CUDA only the group of all ranks has sockets: vLLM's groups and our own for tensors on the
    host connect ranks when they first need it.
    """
    needed = world_size - 1 + OTHERS
    if needed <= (limit := hard_limit()):
        return None
    return (
        f"each of the {world_size:,} processes needs up to {needed:,} open files and sockets, but "
        f"the hard limit here is {limit:,} (ulimit -Hn); raise it, for example by LimitNOFILE of "
        "slurmd or --ulimit nofile of docker"
    )


_IMPORTED = time.time()
LAUNCHER = "MEGATRON_RL_LAUNCHER"  # environment variable of a rank: id of its launcher process
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_NEVER = -1  # a threshold that no size reaches
_LARGEST_BLOCK = (1 << 31) - 1  # bytes that may be allocated in freed memory
_OLD_LIMIT = 1 << 25  # the largest such block that older releases of glibc accept


# Prints the number of CUDA devices and the memory of the first in bytes.
_QUERY_DRIVER = """
import ctypes, json
count, device, size = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_size_t(0)
driver = ctypes.CDLL("libcuda.so.1")
if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value:
    if driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
print(json.dumps([count.value, size.value]))
"""


@lru_cache(maxsize=1)
def _query_driver() -> tuple[int, int]:
    """Return the number of CUDA devices of this process, and the memory of the first in bytes.

    Asks the driver instead of importing torch, which takes seconds, and in another process: ranks
    that are forked from a process that has initialised the driver cannot use their devices.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, 0
    command = [sys.executable, "-I", "-S", "-c", _QUERY_DRIVER]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout
    count, size = json.loads(output or "[0, 0]")  # the driver may crash that process
    return count, size


def cuda_devices() -> int:
    """Return the number of CUDA devices that CUDA_VISIBLE_DEVICES leaves to this process."""
    return _query_driver()[0]


def cuda_memory() -> int | None:
    """Return the memory in bytes of the first CUDA device, or None without CUDA."""
    return _query_driver()[1] or None


def has_cuda() -> bool:
    """Return True if this process may use a CUDA device."""
    return cuda_devices() > 0


# Variables of which a run needs one value, and why.
_NEEDED = {
    "TOKENIZERS_PARALLELISM": (
        "false", "processes are forked after texts were tokenized, and would wait for its threads"
    ),
    "VLLM_ENABLE_V1_MULTIPROCESSING": ("0", "the engine runs in the processes of training"),
    "VLLM_USE_MODELSCOPE": ("false", "the engine reads the model from the folder of model.path"),
}  # fmt: skip


def prepare_environment() -> None:
    """Raise the limit of open files; set variables and hide packages that libraries import.

    Names the variables of the user that are replaced.
    """
    raise_limit()
    hide_unloadable_builds()
    for name, (needed, reason) in _NEEDED.items():
        given = os.environ.get(name, needed)
        if given.lower() not in (needed, "", "0", "false") and os.environ.get("RANK", "0") == "0":
            line = f"megatron-rl: {name}={given} has no effect: {reason}"
            print(line, file=sys.stderr, flush=True)  # noqa: T201
        os.environ[name] = needed
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's overlap of communication needs it
        "NO_VCS_VERSION": "1",  # Megatron-core would call git at every import
    }
    if not has_cuda():
        defaults |= {
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Kernels, one for every shape and of 0.3 MiB each, in vLLM's and in torch's oneDNN;
            # by its own limit of 1,024 the heap of a rank grows for thousands of steps.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
            "THP_MEM_ALLOC_ENABLE": "1",  # torch's tensors of 2 MiB and more in huge pages
        }
        _keep_freed_memory()
    else:  # `torch.cuda.is_available` asks NVML: the launcher may fork ranks after it
        defaults["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if not os.access(os.path.expanduser("~"), os.W_OK):  # vLLM and Triton keep caches there
        folder = os.path.join(tempfile.gettempdir(), f"megatron_rl-{os.getuid()}")
        names = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TRITON_HOME")
        defaults |= dict.fromkeys(names, folder)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _keep_freed_memory() -> None:
    """Make the allocator keep freed memory instead of returning it to the system.

    Otherwise each tensor of a few MiB is mapped again, with a page fault and zero-fill per page. On
    a virtual machine whose host takes freed pages back, that is many times as slow.
    """
    with contextlib.suppress(AttributeError):  # C libraries other than glibc have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_ARENA_MAX, 1)  # other threads' arenas map large blocks anew each time
        # A rejected value would leave the threshold at 128 KiB.
        if not mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK):
            mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT)


def command_start() -> float:
    """Return when this command was started: its launcher, if it is a rank; seconds of the epoch.

    A rank is forked from its launcher, so both have imported this module at the same time. The age
    of the process would count what a shell script did before it became this command by `exec`.
    """
    return _IMPORTED


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


def use_downloaded_files() -> None:
    """Make libraries use the files on this disk only: they are downloaded before ranks start."""
    if "HF_HUB_OFFLINE" in os.environ:
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:  # it has read the variable already
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Make a folder in memory for processes of this node, and remove it in the end."""
    parent = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    with locked_folder(parent, prefix=_SHARED) as folder:
        yield folder


@contextlib.contextmanager
def locked_folder(parent: Path, *, prefix: str) -> Iterator[Path]:
    """Make a folder whose name begins with `prefix`, and remove it in the end.

    It is locked until then, so that the next call finds and removes folders of processes that were
    killed.
    """
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder)
    with contextlib.ExitStack() as stack:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            # Another process may take it for one of a killed process until it is locked.
            with contextlib.suppress(FileNotFoundError):
                stack.enter_context(_locked(folder, fcntl.LOCK_SH))
                if folder.exists():
                    break
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, operation: int) -> Iterator[None]:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, operation)
        yield
    finally:
        os.close(file)
