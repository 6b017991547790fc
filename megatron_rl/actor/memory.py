"""Offloading of gradients and optimizer state while the engine generates.

Megatron-core's own `offload_to_cpu` also moves the parameters that the optimizer updates; in a
float32 model they are views of the model's parameters and would be restored as separate copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

_SMALLEST_CHUNK = 2 << 20  # bytes
_ALIGNMENT = 512
_SLACKS = (0.0, 1 / 16, 1.0)  # the one with the smallest total is used


def optimizer_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that Megatron chains (for a model with experts), or the only one."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def main_parameters(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield the float32 copies of low-precision parameters; none for a float32 model."""
    for part in optimizer_parts(optimizer):
        for group in getattr(part, "shard_fp32_from_float16_groups", []):
            yield from (parameter for parameter in group if parameter is not None)


def _moments(optimizer: MegatronOptimizer) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (state, key) of each optimizer state tensor, except step counts, which do not move."""
    for part in optimizer_parts(optimizer):
        for state in part.optimizer.state.values():
            keys = [key for key, value in state.items() if isinstance(value, Tensor)]
            yield from ((state, key) for key in keys if key != "step")


def _replace_state(
    optimizer: MegatronOptimizer, replace: Callable[[list[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Replace main parameters and moments by `replace(tensors)`; return the previous tensors."""
    parameters, moments = list(main_parameters(optimizer)), list(_moments(optimizer))
    previous = [*(p.data for p in parameters), *(state[key] for state, key in moments)]
    new = iter(replace(previous))
    for parameter in parameters:
        parameter.data = next(new)
    for state, key in moments:
        state[key] = next(new)
    return previous


class PinnedMemory:
    """Page-locked host memory for a list of tensors, reused for the next list of the same sizes.

    Only with page-locked memory are copies asynchronous and as fast as the link.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []  # flat, bytes

    def copies_of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy tensors to the host asynchronously; valid after the device is synchronised."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if [buffer.numel() for buffer in self._buffers] != sizes:
            self._buffers = []  # free the old buffers before allocating new ones
            self._buffers = _allocate_pinned(sizes)
        return [
            buffer.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            for buffer, tensor in zip(self._buffers, tensors, strict=True)
        ]


def _allocate_pinned(sizes: list[int]) -> list[Tensor]:
    plans = (plan_chunks(sizes, slack=slack) for slack in _SLACKS)
    chunks, offsets = min(plans, key=lambda plan: sum(plan[0]))
    pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in chunks]
    return [
        pinned[chunk][start : start + size]
        for (chunk, start), size in zip(offsets, sizes, strict=True)
    ]


def plan_chunks(sizes: Sequence[int], *, slack: float) -> tuple[list[int], list[tuple[int, int]]]:
    """Plan pinned chunks; return their sizes in bytes and (chunk, start) for each of `sizes`.

    Every chunk is a power of two, because torch rounds pinned allocations up to one and wastes the
    rest. First fit, largest size first. A new chunk has the size of all remaining tensors, rounded
    down to a power of two, or up if that wastes at most `slack` times the remaining bytes.
    """
    room = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    chunks: list[int] = []
    used: list[int] = []
    offsets, left = [(0, 0)] * len(room), sum(room)
    for index in sorted(range(len(room)), key=lambda i: -room[i]):
        fits = (n for n, size in enumerate(chunks) if used[n] + room[index] <= size)
        if (chunk := next(fits, len(chunks))) == len(chunks):
            above = _power_of_two(left)
            all_left = above if above - left <= slack * left else above // 2
            chunks.append(max(all_left, _power_of_two(room[index]), _SMALLEST_CHUNK))
            used.append(0)
        offsets[index] = chunk, used[chunk]
        used[chunk] += room[index]
        left -= room[index]
    return chunks, offsets


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _release_routing(ddp_chunks: list[DistributedDataParallel]) -> None:
    """Release the last routing decision, which each expert layer's dispatcher keeps.

    The probabilities reference their autograd graph and, with recomputation, the layer's input.
    """
    for chunk in ddp_chunks:
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            for name in ("probs", "routing_map"):
                if hasattr(dispatcher, name):
                    setattr(dispatcher, name, None)


class TrainingState:
    """The gradients and optimizer state of one actor, which can be offloaded and restored.

    Without CUDA only the gradient buffers are freed: the other tensors are already on the host.
    """

    def __init__(
        self,
        ddp_chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        *,
        device: torch.device,
    ) -> None:
        self.ddp_chunks, self.optimizer, self.device = ddp_chunks, optimizer, device
        self._pinned = PinnedMemory()

    def offload(self) -> None:
        """Move main parameters and moments to the host and free the gradient buffers."""
        _release_routing(self.ddp_chunks)
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            previous = _replace_state(self.optimizer, self._pinned.copies_of)
            torch.cuda.synchronize()  # once for all copies and the last readers of the gradients
            del previous
        for chunk in self.ddp_chunks:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        if on_cuda:
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Undo `offload` asynchronously; gradient buffers are restored as zeros."""

        def to_device(tensors: list[Tensor]) -> list[Tensor]:
            return [
                torch.empty_like(tensor, device=self.device).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]

        if self.device.type == "cuda":
            _replace_state(self.optimizer, to_device)
        for chunk in self.ddp_chunks:
            chunk.restore_grad_buffers(synchronize=False)


def training_state_bytes(
    ddp_chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> int:
    """Return the bytes that `TrainingState.offload` frees on this rank's device."""
    buffers = [b for chunk in ddp_chunks for b in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    total = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)
    total += sum(p.numel() * p.element_size() for p in main_parameters(optimizer))
    tensors = (state[key] for state, key in _moments(optimizer))
    return total + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
