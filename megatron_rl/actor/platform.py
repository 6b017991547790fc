"""What depends on the machine and on Megatron-core's release: device, groups, seeds, adaptations.

Megatron-core is written for CUDA: it names the device "cuda", asks `torch.cuda` for the current
device and forks CUDA generators. Where there is no CUDA device, `megatron_runtime()` translates
these requests while Megatron's code runs, and only then; with CUDA it does nothing. One file serves
megatron-core 0.16 to 0.19: `tools/test_versions.sh` runs the actor's tests under each.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode

from megatron_rl.distributed.topology import Topology

_CPU = torch.device("cpu")

if not hasattr(moe_utils, "te_general_gemm"):
    # Without Transformer Engine Megatron-core 0.16 leaves this name undefined, and then asks it.
    moe_utils.te_general_gemm = None


def has_cuda() -> bool:
    """Whether this process computes on a CUDA device."""
    return torch.cuda.is_available()


def local_device() -> torch.device:
    """The device of this process: the CUDA device of its local rank, or the CPU."""
    if not has_cuda():
        return _CPU
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Torch functions that ask for CUDA get the CPU, and CPU tensors say that they are CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            return func(*args, **kwargs)
        return func(*args)


class _CpuStream:
    """Stands in for a CUDA stream: work on the CPU is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        """An event that has already happened."""
        return self

    def synchronize(self) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Split sizes of an all-to-all as the host reads them; here they are there already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _all_gather(outputs: list[Any], tensor: Any, group: Any = None, **options: Any) -> Any:
    """All-gather of different numbers of rows, as NCCL has it: gloo's wants them equal."""
    most = max(len(output) for output in outputs)
    if all(len(output) == most for output in outputs):
        return _EQUAL_ALL_GATHER(outputs, tensor, group=group, **options)
    padded = tensor.new_zeros(most, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in outputs]
    _EQUAL_ALL_GATHER(gathered, padded, group=group)
    for output, rows in zip(outputs, gathered, strict=True):
        output.copy_(rows[: len(output)])
    return None


def _reduce_scatter(output: Any, inputs: list[Any], group: Any = None, **_: Any) -> None:
    """Reduce-scatter of different numbers of rows."""
    total = torch.cat(list(inputs))
    dist.all_reduce(total, group=group)
    output.copy_(total.split([len(part) for part in inputs])[dist.get_rank(group)])


_EQUAL_ALL_GATHER = dist.all_gather

# No dropout is ever active in policy training, so generators that Megatron forks are never read.
_CPU_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (torch.cuda, "current_device", lambda: _CPU),
    (torch.cuda, "synchronize", _nothing),
    (torch.cuda, "empty_cache", _nothing),
    (torch.cuda, "Stream", _CpuStream),
    (torch.cuda, "current_stream", _CpuStream),
    (torch.cuda, "default_stream", _CpuStream),
    (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
    (dist, "all_gather", _all_gather),
    (dist, "reduce_scatter", _reduce_scatter),
    (token_dispatcher, "maybe_move_tensor_to_cpu", _to_host),
    (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.empty(0)),
    (megatron_random, "_set_cuda_rng_state", _nothing),
    (megatron_random.CudaRNGStatesTracker, "fork", lambda *_, **__: contextlib.nullcontext()),
)


@contextlib.contextmanager
def megatron_runtime() -> Iterator[None]:
    """Run Megatron-core's code on this machine's device; nothing outside the block is changed."""
    if has_cuda():
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in _CPU_PATCHES:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(_CudaMeansCpu())
        yield


def _set_shard_states(self: DistributedOptimizer, model_param: Any, tensors: dict) -> None:
    """Copy one parameter's shard and moments from a checkpoint.

    Megatron-core 0.16 asks the checkpoint for torch Adam's per-parameter "step" too, which it keeps
    elsewhere (KeyError: 'step'); with apex or Transformer Engine there is none.
    """
    group, order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][order]
    targets = {"param": main_param, **self.optimizer.state[main_param]}
    for key, tensor in tensors.items():
        targets[key].copy_(tensor)


@contextlib.contextmanager
def optimizer_loading() -> Iterator[None]:
    """Let Megatron-core load a checkpoint into a distributed optimizer on torch's Adam."""
    with mock.patch.object(
        DistributedOptimizer, "_set_main_param_and_optimizer_states", _set_shard_states
    ):
        yield


def _init_process_group(timeout: timedelta) -> None:
    """Join the process group that torchrun's environment describes, or make one of one process."""
    if has_cuda():
        torch.cuda.set_device(local_device())
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def initialise(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    expert: int = 1,
    virtual_stages: int = 1,
    seed: int = 0,
    timeout: timedelta = timedelta(minutes=30),
) -> Topology:
    """Make the process groups of one layout and seed every generator; data parallelism is the rest.

    Collective over all processes. Raises ValueError when the number of processes is not a multiple
    of tensor * pipeline * context.
    """
    _init_process_group(timeout)
    world_size, model_size = dist.get_world_size(), tensor * pipeline * context
    if world_size % model_size:
        raise ValueError(
            f"tensor {tensor} * pipeline {pipeline} * context {context} = {model_size} does not "
            f"divide the {world_size} processes; start a multiple of {model_size} processes"
        )
    with megatron_runtime():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            create_gloo_process_groups=True,
            distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
        )
        seed_everything(seed)
    return topology_now(virtual_stages)


def seed_everything(seed: int) -> None:
    """Seed Python, torch and Megatron's generators; the same on every rank."""
    random.seed(seed)
    torch.manual_seed(seed)
    if has_cuda():
        megatron_random.model_parallel_cuda_manual_seed(seed)
    else:
        megatron_random.initialize_rng_tracker()


def topology_now(virtual_stages: int = 1) -> Topology:
    """This process's place in the process groups that exist."""
    state = parallel_state
    return Topology(
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        device=local_device(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        tp_rank=state.get_tensor_model_parallel_rank(),
        tp_group=state.get_tensor_model_parallel_group(),
        cp_size=state.get_context_parallel_world_size(),
        cp_rank=state.get_context_parallel_rank(),
        cp_group=state.get_context_parallel_group(),
        pp_size=state.get_pipeline_model_parallel_world_size(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        pp_group=state.get_pipeline_model_parallel_group(),
        dp_size=state.get_data_parallel_world_size(),
        dp_rank=state.get_data_parallel_rank(),
        dp_group=state.get_data_parallel_group(),
        dp_cp_group=state.get_data_parallel_group(with_context_parallel=True),
        ep_size=state.get_expert_model_parallel_world_size(),
        ep_rank=state.get_expert_model_parallel_rank(),
        virtual_stages=virtual_stages,
    )
