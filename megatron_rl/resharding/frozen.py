"""Frozen tensors of a push: in float32 whatever the engine's dtype, and constant in a run.

The exchange of slices converts everything to the engine's dtype, which would round them. They are
small and do not change, so the first push collects them on the host of every rank, and later pushes
only find out that none has changed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed.agreement import sum_over_ranks
from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.adapted import LocalWeight
from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.resharding.pieces import Piece


def without_frozen(shape: ModelShape) -> ModelShape:
    """Return the shape of what the exchange moves."""
    return replace(shape, lists_frozen=False)


@dataclass
class FrozenTensors:
    """The frozen tensors of the model that was pushed last, by Hugging Face name, on the host."""

    _own: dict[str, Tensor] = field(default_factory=dict)
    _all: dict[str, Tensor] = field(default_factory=dict)

    def collect(
        self,
        shape: ModelShape,
        pieces: Iterable[Piece],
        parameters: Mapping[str, LocalWeight],
        *,
        doing: str,
        time_limit: float,
    ) -> Mapping[str, Tensor]:
        """Return all ranks' frozen tensors; collective if the model has any.

        Raises RuntimeError if a tensor is on no rank, or if ranks have different values of one.
        """
        names = tensor_shapes(shape).keys() - tensor_shapes(without_frozen(shape)).keys()
        if not names:
            return {}
        own = {p.tensor: _on_host(parameters[p.parameter]) for p in pieces if p.tensor in names}
        if sum_over_ranks(int(not _equal(own, self._own)), doing=doing, time_limit=time_limit):
            self._own, self._all = own, _gather(own)
        if missing := sorted(names - self._all.keys()):
            raise RuntimeError(f"{doing}: no rank has {missing}")
        return self._all


def _on_host(weight: LocalWeight) -> Tensor:
    assert isinstance(weight, Tensor), "a frozen tensor with an adapter"
    return weight.detach().to("cpu", torch.float32, copy=True)


def _equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def _gather(own: dict[str, Tensor]) -> dict[str, Tensor]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    by_rank: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, own)
    merged: dict[str, Tensor] = {}
    for rank, tensors in enumerate(by_rank):
        for name, tensor in tensors.items():
            if not torch.equal(merged.setdefault(name, tensor), tensor):
                raise RuntimeError(f"rank {rank} has other values of {name} than an earlier rank")
    return merged


def writing_frozen(
    write: Callable[[], object],
    frozen: Mapping[str, Tensor],
    live: Mapping[str, Tensor],
    *,
    shape: ModelShape,
    layout: EngineLayout,
    rank: int,
) -> Callable[[], None]:
    """Return a function that calls `write`, then copies frozen tensors into `live` parameters."""
    places = {p.tensor: p.parameter for p in layout.pieces(shape, rank=rank) if p.tensor in frozen}

    def write_all() -> None:
        write()
        for name, tensor in frozen.items():
            live[places[name]].copy_(tensor)

    return write_all
