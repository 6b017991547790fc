"""Imports of the process that tests fork ranks and runs from: all that a run imports.

`tests.ranks.fork_from` names this module to that process; no test imports it.
"""

import gc
import importlib
import os

import pyarrow
import torch.distributed as dist

from megatron_rl.cli import COMMANDS
from megatron_rl.commands.train import rank_modules
from megatron_rl.runtime.processes import prepare_environment, quiet_libraries

MODULES = (
    *rank_modules(), *(f"megatron_rl.commands.{name}" for name in COMMANDS),
    "vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen3_moe",
    "compressed_tensors", "matplotlib.figure", "mpl_toolkits.mplot3d.axes3d", "tabulate",
)  # fmt: skip

prepare_environment()
quiet_libraries()
for module in MODULES:
    importlib.import_module(module)


def _use_gloo_with_more_ranks_than_cores() -> None:
    """Let vLLM's tensor-parallel ranks on a CPU talk over gloo where a rank has no core of its own.

    They spin in shared memory otherwise, which takes the core from the rank they wait for.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    share_memory = CpuCommunicator._all_group_ranks_share_shm_group_name
    cores = len(os.sched_getaffinity(0))

    def decide(communicator: CpuCommunicator) -> bool:
        return share_memory(communicator) and dist.get_world_size() <= cores

    CpuCommunicator._all_group_ranks_share_shm_group_name = decide


def _register_kernels_once() -> None:
    """Let vLLM look for its Triton kernels here, not in each rank: it goes through all modules."""
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


_use_gloo_with_more_ranks_than_cores()
_register_kernels_once()
pyarrow.array([0])  # imports pandas where it is, which every run would do with its first row
gc.collect()  # forked processes keep what is there now
