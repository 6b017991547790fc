"""Process state that vLLM changes, and its restoration.

vLLM expects to own its process. Constructing `LLM` seeds Python, NumPy and torch, replaces
`torch.set_num_threads` on CPU, and writes environment variables that later child processes would
inherit (`LD_PRELOAD`, `LOCAL_WORLD_SIZE`; vllm/platforms/cpu.py, vllm/v1/worker/cpu_worker.py).
Seeded sampling on CPU still draws from torch's global generator.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# vLLM reads its own switches from the environment only.
_SWITCHES = {
    # The engine core must live in this process to share its weights and process group.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Keep the trainer's thread placement: automatic binding pins all ranks to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# Defaults that a user may override.
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # Its groups include one of all ranks, which would connect every pair of them a second time.
    "TORCH_GLOO_LAZY_INIT": "1",
}


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch on exit."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def hosted_start(*, rank: int, world_size: int, local_rank: int) -> Iterator[None]:
    """Restore the process state after vLLM is imported and constructed inside this block.

    rank, world_size, local_rank: the values that vLLM's external launcher backend reads.
    """
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    affinity = os.sched_getaffinity(0)
    environment = dict(os.environ)
    ranks = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank}
    os.environ.update(_SWITCHES | {name: str(value) for name, value in ranks.items()})
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        # Each small compiled function takes seconds to compile and saves nothing on CPU.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        with preserved_generators():
            yield
    finally:
        kept = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
        os.environ.clear()
        os.environ.update(environment | kept)
        os.sched_setaffinity(0, affinity)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)


def sleeping_bytes() -> int:
    """Return the bytes that this process's vLLM engine has released while it sleeps."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return int(CuMemAllocator.get_instance().get_current_usage())
