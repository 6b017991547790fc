"""Environment of the processes of a run, and the devices of this machine.

Sets the environment variables that torch, vLLM and the tokenizers read at import, before any of
them is imported, so that users need not set them. `runtime/launcher.py` starts the ranks of a node.
"""

import contextlib
import ctypes
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import lru_cache

from megatron_rl.runtime.open_files import raise_limit
from megatron_rl.runtime.versions import hide_unloadable_builds

LAUNCHER = "MEGATRON_RL_LAUNCHER"  # environment variable of a rank: id of its launcher process
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 1 << 30  # freed memory to keep, and the largest block to allocate in it
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
        "NO_VCS_VERSION": "1",  # Megatron-core would call git at every import
    }
    if not has_cuda():
        defaults |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
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

    Otherwise each tensor of a few MiB is mapped again, with a page fault and zero-fill per page.
    """
    with contextlib.suppress(AttributeError):  # C libraries other than glibc have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        # A rejected value would leave the threshold at 128 KiB.
        if not mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES):
            mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT)


def command_start() -> float:
    """Return when this command was started: its launcher, if it is a rank; seconds of the epoch."""
    import psutil

    return psutil.Process(int(os.environ.get(LAUNCHER, os.getpid()))).create_time()


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
