"""Imports of the process that tests fork ranks and runs from: all that a run imports.

`tests.ranks.fork_from` names this module to that process; no test imports it.
"""

import gc
import importlib
import os
import weakref

import pyarrow
import torch.distributed as dist
import torch.library

from megatron_rl.cli import COMMANDS
from megatron_rl.commands.train import rank_modules
from megatron_rl.runtime.processes import prepare_environment, quiet_libraries

MODULES = (
    *rank_modules(), *(f"megatron_rl.commands.{name}" for name in COMMANDS),
    "vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen3_moe",
    "compressed_tensors", "matplotlib.figure", "mpl_toolkits.mplot3d.axes3d", "tabulate",
    # While an engine starts and a checkpoint is saved:
    "vllm.entrypoints.launchers.cli_args", "vllm.v1.core.sched.scheduler",
    "vllm.distributed.elastic_ep.elastic_execute", "vllm.v1.pool.flash_maxsim",
    "vllm.model_executor.layers.quantization.online.base", "megatron.core.models.mimo",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
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


def _prepare_engines() -> None:
    """Do here what vLLM does once in a process and every rank would repeat.

    Its kernels for Triton are looked for in all modules, its plugins in all packages, and its
    logging makes all loggers forget what they know.
    """
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    configure_logging_if_needed(LoggingConfig())
    load_general_plugins()


def _keep_libraries_at_exit() -> None:
    """Let torch's operators end with their process: removing each takes a rank a moment."""
    for each in list(weakref.finalize._registry):
        if (found := each.peek()) and found[1] is torch.library._del_library:
            each.detach()


_use_gloo_with_more_ranks_than_cores()
_prepare_engines()
_keep_libraries_at_exit()
pyarrow.array([0])  # imports pandas where it is, which every run would do with its first row
gc.collect()  # forked processes keep what is there now
