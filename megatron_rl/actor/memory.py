"""Gradients and optimizer state off the device while the engine generates, and back.

Megatron-core's own `offload_to_cpu` of the optimizer also moves the parameters it updates; those of
a float32 model are views of the model's own, and would come back as copies that no model sees.
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
_SLACKS = (0.0, 1 / 16, 1.0)  # the one that needs the least memory is taken


def optimizer_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Those that Megatron chains where a model has experts; else the one."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def main_parameters(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Float32 copies of low-precision parameters; a float32 model has none."""
    for part in optimizer_parts(optimizer):
        for group in getattr(part, "shard_fp32_from_float16_groups", []):
            yield from (parameter for parameter in group if parameter is not None)


def _moments(optimizer: MegatronOptimizer) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the optimizer keeps each tensor but counts of steps, which stay where they are."""
    for part in optimizer_parts(optimizer):
        for state in part.optimizer.state.values():
            keys = [key for key, value in state.items() if isinstance(value, Tensor)]
            yield from ((state, key) for key in keys if key != "step")


def _replace_state(
    optimizer: MegatronOptimizer, replace: Callable[[list[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Put others in the places of main parameters and moments; those that were there, in order."""
    parameters, moments = list(main_parameters(optimizer)), list(_moments(optimizer))
    held = [*(each.data for each in parameters), *(state[key] for state, key in moments)]
    new = iter(replace(held))
    for parameter in parameters:
        parameter.data = next(new)
    for state, key in moments:
        state[key] = next(new)
    return held


class PinnedMemory:
    """Page-locked host memory for a list of tensors, kept for the next list of the same sizes.

    Only from such memory, and into it, copies run beside the host and at the link's speed.
    """

    def __init__(self) -> None:
        self._places: list[Tensor] = []  # flat, bytes

    def copies_of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Host tensors that hold the values of `tensors` as soon as the device is synchronised."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if [place.numel() for place in self._places] != sizes:
            self._places = []  # let go before there are others
            self._places = _pinned_places(sizes)
        return [
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            for place, tensor in zip(self._places, tensors, strict=True)
        ]


def _pinned_places(sizes: list[int]) -> list[Tensor]:
    plans = (plan_chunks(sizes, slack=slack) for slack in _SLACKS)
    chunks, places = min(plans, key=lambda plan: sum(plan[0]))
    pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in chunks]
    return [
        pinned[chunk][start : start + size]
        for (chunk, start), size in zip(places, sizes, strict=True)
    ]


def plan_chunks(sizes: Sequence[int], *, slack: float) -> tuple[list[int], list[tuple[int, int]]]:
    """(bytes of chunks, (chunk, start) of each of `sizes`), every chunk a power of two.

    torch rounds up to one what it pins: memory that nobody uses, where a chunk is anything else.
    The largest come first, each into the first chunk with room. A new chunk is as large as all that
    is left, rounded down, or up where no more than `slack` times what is left would be too much.
    """
    room = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    chunks: list[int] = []
    used: list[int] = []
    places, left = [(0, 0)] * len(room), sum(room)
    for index in sorted(range(len(room)), key=lambda each: -room[each]):
        fits = (n for n, size in enumerate(chunks) if used[n] + room[index] <= size)
        if (chunk := next(fits, len(chunks))) == len(chunks):
            above = _power_of_two(left)
            all_left = above if above - left <= slack * left else above // 2
            chunks.append(max(all_left, _power_of_two(room[index]), _SMALLEST_CHUNK))
            used.append(0)
        places[index] = chunk, used[chunk]
        used[chunk] += room[index]
        left -= room[index]
    return chunks, places


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _forget_routes(wrapped: list[DistributedDataParallel]) -> None:
    """Let go of the last pass through the experts, which each layer's dispatcher keeps.

    The probabilities carry the graph that made them, and with recomputation their layer's input.
    """
    for chunk in wrapped:
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            for name in ("probs", "routing_map"):
                if hasattr(dispatcher, name):
                    setattr(dispatcher, name, None)


class TrainingState:
    """The gradients and optimizer state of one actor, on its device or off it.

    On a host without CUDA only the gradient buffers are freed: the rest is where it would go.
    """

    def __init__(
        self,
        wrapped: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        *,
        device: torch.device,
    ) -> None:
        self.wrapped, self.optimizer, self.device = wrapped, optimizer, device
        self._pinned = PinnedMemory()

    def offload(self) -> None:
        """Move main parameters and moments to the host and free the gradient buffers."""
        _forget_routes(self.wrapped)
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            held = _replace_state(self.optimizer, self._pinned.copies_of)
            torch.cuda.synchronize()  # once for all of them, and for the last user of a gradient
            del held
        for chunk in self.wrapped:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        if on_cuda:
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Undo `offload`; gradient buffers come back as zeros. What uses them next waits itself."""

        def to_device(tensors: list[Tensor]) -> list[Tensor]:
            return [
                torch.empty_like(each, device=self.device).copy_(each, non_blocking=True)
                for each in tensors
            ]

        if self.device.type == "cuda":
            _replace_state(self.optimizer, to_device)
        for chunk in self.wrapped:
            chunk.restore_grad_buffers(synchronize=False)


def training_state_bytes(
    wrapped: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> int:
    """Bytes that `TrainingState.offload` takes off this rank's device."""
    buffers = [b for chunk in wrapped for b in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    total = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)
    total += sum(p.numel() * p.element_size() for p in main_parameters(optimizer))
    tensors = (state[key] for state, key in _moments(optimizer))
    return total + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
