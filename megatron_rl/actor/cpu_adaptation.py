"""Megatron-core on a machine without CUDA.

Megatron-core is written for CUDA: it names the device "cuda", asks `torch.cuda` for the current
device and forks CUDA generators. Where there is no CUDA device, `megatron_runtime()` translates
these requests while Megatron's code runs, and only then; with CUDA it does nothing. One file serves
megatron-core 0.16 to 0.19: `tools/test_versions.sh` runs the actor's tests under each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode

from megatron_rl.actor.device import has_cuda

_CPU = torch.device("cpu")

if not hasattr(moe_utils, "te_general_gemm"):
    # Without Transformer Engine Megatron-core 0.16 leaves this name undefined, and then asks it.
    moe_utils.te_general_gemm = None


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
