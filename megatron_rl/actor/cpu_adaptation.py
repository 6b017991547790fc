"""Adaptation of Megatron-core to machines without CUDA.

Megatron-core is written for CUDA: it names the device "cuda", queries `torch.cuda` for the current
device and forks CUDA generators. Without a CUDA device, `megatron_runtime()` patches torch's
factory functions and a few methods while Megatron's code runs, and only then; with CUDA it does
nothing. It does not intercept operations, so they run at normal speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

from megatron_rl.actor import device
from megatron_rl.distributed.collectives import exchange


def _is_cuda(requested: Any) -> bool:
    if isinstance(requested, str):
        return requested.startswith("cuda")
    return isinstance(requested, torch.device) and requested.type == "cuda"


def _on_cpu(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a factory of torch: tensors requested on CUDA are created in pageable CPU memory."""

    @wraps(create)
    def factory(*args: Any, **kwargs: Any) -> Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = device.local_device()
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return create(*args, **kwargs)

    return factory


def _cuda_type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replace `Tensor.type`: return the type name of a CUDA tensor for a CPU tensor."""
    result = _TENSOR_TYPE(tensor, *args, **kwargs)
    return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result


class _CpuStream:
    """Replacement for a CUDA stream; work on the CPU is already ordered."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        """Return an event that is already complete."""
        return self

    def synchronize(self) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


def _current_device() -> torch.device:
    return device.local_device()


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the split sizes of an all-to-all, which are already on the host."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _init_data(shard: ShardedTensor, requested: Any, *args: Any, **kwargs: Any) -> None:
    """Allocate memory for a shard that will be loaded or exchanged."""
    target = device.local_device() if _is_cuda(requested) else requested
    _INIT_DATA(shard, target, *args, **kwargs)


def _all_gather(outputs: list[Any], tensor: Any, group: Any = None, **options: Any) -> Any:
    """All-gather different numbers of rows, as NCCL supports; gloo requires equal sizes."""
    longest = max(len(output) for output in outputs)
    if all(len(output) == longest for output in outputs):
        return _EQUAL_ALL_GATHER(outputs, tensor, group=group, **options)
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in outputs]
    _EQUAL_ALL_GATHER(gathered, padded, group=group)
    for output, rows in zip(outputs, gathered, strict=True):
        output.copy_(rows[: len(output)])
    return None


def _reduce_scatter(output: Any, inputs: list[Any], group: Any = None, **_: Any) -> None:
    """Reduce-scatter different numbers of rows."""
    total = torch.cat(list(inputs))
    dist.all_reduce(total, group=group)
    output.copy_(total.split([len(part) for part in inputs])[dist.get_rank(group)])


def _parts_in_place(whole: Tensor, shard: Tensor, group: Any) -> list[Tensor] | None:
    """Return the shards of all ranks, if gloo exchanges them and this rank's is in `whole`."""
    parts = whole.view(dist.get_world_size(group), -1)
    own = parts[dist.get_rank(group)].data_ptr() == shard.data_ptr()
    return list(parts) if own and dist.get_backend(group) == "gloo" else None


def _gather_shards(whole: Tensor, shard: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """All-gather parameters without gloo's two copies of all of them, made even by one rank."""
    parts = _parts_in_place(whole, shard, group)
    if parts is None or async_op:
        return _GATHER_SHARDS(whole, shard, group=group, async_op=async_op)
    exchange([shard] * len(parts), parts, group=group)
    return None


def _sum_to_shards(
    shard: Tensor, whole: Tensor, op: Any, group: Any = None, async_op: bool = False
) -> Any:
    """Reduce-scatter gradients by one exchange of shards; gloo copies and sums all of them.

    Each rank adds its own shard's parts in the order of the ranks, its own part first.
    """
    parts = _parts_in_place(whole, shard, group)
    if parts is None or async_op or op != dist.ReduceOp.SUM:
        return _SUM_TO_SHARDS(shard, whole, op=op, group=group, async_op=async_op)
    received = [torch.empty_like(shard) for _ in parts]
    exchange(parts, received, group=group)
    own = dist.get_rank(group)
    for other in (*received[:own], *received[own + 1 :]):
        shard.add_(other)
    return None


_EQUAL_ALL_GATHER = dist.all_gather
_GATHER_SHARDS = param_and_grad_buffer.dist_all_gather_func
_SUM_TO_SHARDS = param_and_grad_buffer.dist_reduce_scatter_func
_INIT_DATA = ShardedTensor.init_data
_TENSOR_TYPE = Tensor.type
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "zeros_like", "empty_like")

# Policy training uses no dropout, so the generators that Megatron forks are never read.
_CPU_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    *((torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES),
    (Tensor, "type", _cuda_type),
    (Tensor, "cuda", lambda tensor, *_, **__: tensor),
    (torch.cuda, "current_device", _current_device),
    (torch.cuda, "synchronize", _nothing),
    (torch.cuda, "empty_cache", _nothing),
    (torch.cuda, "Stream", _CpuStream),
    (torch.cuda, "current_stream", _CpuStream),
    (torch.cuda, "default_stream", _CpuStream),
    (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
    (ShardedTensor, "init_data", _init_data),
    (dist, "all_gather", _all_gather),
    (dist, "reduce_scatter", _reduce_scatter),
    (param_and_grad_buffer, "dist_all_gather_func", _gather_shards),
    (param_and_grad_buffer, "dist_reduce_scatter_func", _sum_to_shards),
    (token_dispatcher, "maybe_move_tensor_to_cpu", _to_host),
    (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.empty(0)),
    (megatron_random, "_set_cuda_rng_state", _nothing),
    (megatron_random.CudaRNGStatesTracker, "fork", lambda *_, **__: contextlib.nullcontext()),
)


@contextlib.contextmanager
def megatron_runtime() -> Iterator[None]:
    """Run Megatron-core's code on this machine's device; patches apply only inside the block."""
    if device.has_cuda():
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in _CPU_PATCHES:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
