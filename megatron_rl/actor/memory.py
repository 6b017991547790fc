"""Gradients and optimizer state off the device while the engine generates, and back.

Megatron-core's own `offload_to_cpu` of the optimizer also moves the parameters it updates; those of
a float32 model are views of the model's own, and would come back as copies that no model sees.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _main_parameters(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Float32 copies of low-precision parameters; a float32 model has none."""
    for part in _parts(optimizer):
        for group in getattr(part, "shard_fp32_from_float16_groups", []):
            yield from (parameter for parameter in group if parameter is not None)


def _move_state(optimizer: MegatronOptimizer, device: torch.device | str) -> None:
    for parameter in _main_parameters(optimizer):
        parameter.data = parameter.data.to(device)
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            for key, value in state.items():
                if key != "step" and isinstance(value, Tensor):  # torch's Adam counts on the host
                    state[key] = value.to(device)


def offload_training_state(
    wrapped: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> None:
    """Free the gradient buffers and move main parameters and moments to the host."""
    for chunk in wrapped:
        chunk.offload_grad_buffers()
    _move_state(optimizer, "cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def restore_training_state(
    wrapped: list[DistributedDataParallel], optimizer: MegatronOptimizer, *, device: torch.device
) -> None:
    """Undo `offload_training_state`; gradient buffers come back as zeros."""
    _move_state(optimizer, device)
    for chunk in wrapped:
        chunk.restore_grad_buffers()


def training_state_bytes(
    wrapped: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> int:
    """Bytes that `offload_training_state` takes off this rank's device."""
    buffers = [b for chunk in wrapped for b in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    total = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)
    total += sum(p.numel() * p.element_size() for p in _main_parameters(optimizer))
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            for key, value in state.items():
                if key != "step" and isinstance(value, Tensor):
                    total += value.numel() * value.element_size()
    return total
