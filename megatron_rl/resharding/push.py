"""The simple weight push: gather everything; and what every push checks first."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.distributed.agreement import raise_together
from megatron_rl.resharding.gather import distinct_shards, gather_tensors, gathered_bytes
from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.resharding.source import (
    SyncStats,
    WeightHolder,
    check_parameters,
    has_fused_names,
    layout_of,
)


class WeightReceiver(Protocol):
    """The part of a rollout engine that weights go into."""

    layout: EngineLayout
    dtype: torch.dtype

    def check_idle(self) -> None:
        """RuntimeError while requests are running: weights must not change under them."""
        ...

    def receive(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> float:
        """Replace every parameter; returns the seconds that resetting caches took."""
        ...

    def live_parameters(self) -> Mapping[str, Tensor] | None:
        """The engine's own parameters, laid out as its table says; None where they are not."""
        ...

    def overwrite(self, write: Callable[[], None], *, version: int) -> float:
        """Let `write` replace every live parameter; returns seconds as `receive` does."""
        ...

    def invalidate(self) -> None:
        """Refuse to generate until other weights are received."""
        ...


def check_ends(
    holder: WeightHolder,
    receiver: WeightReceiver,
    *,
    doing: str,
    time_limit: float | None = None,
) -> Mapping[str, Tensor]:
    """The holder's local parameters, once all ranks are ready; collective, changes nothing.

    Raises on every rank when parameters of any rank do not fit the table (naming them) or its
    engine is generating: the error itself on that rank, RuntimeError elsewhere.
    """
    error: Exception | None = None
    parameters: Mapping[str, Tensor] = {}
    try:
        receiver.check_idle()
        parameters = holder.named_parameters_local()
        layout, fused = layout_of(holder.topology), has_fused_names(parameters)
        pieces = layout.pieces(holder.shape, rank=holder.topology.rank, fused=fused)
        check_parameters(parameters, pieces, layout=layout)
    except Exception as found:  # noqa: BLE001 - the others must not wait, whatever it is
        error = found
    raise_together(error, doing=doing, time_limit=time_limit)
    return parameters


def gather_push(holder: WeightHolder, receiver: WeightReceiver, *, version: int) -> SyncStats:
    """Gather every parameter in full on every rank and load it; collective over all processes.

    Raises on every rank, naming parameters and both layouts, when a parameter is missing, extra or
    of the wrong shape on any of them.
    """
    start = time.perf_counter()
    layout = layout_of(holder.topology)
    doing = f"weight push {version}, {layout} to {receiver.layout}"
    parameters = check_ends(holder, receiver, doing=doing)
    shards = distinct_shards(holder.shape, layout=layout, fused=has_fused_names(parameters))
    seconds: dict[str, float] = {}
    tensors = gather_tensors(
        parameters,
        shape=holder.shape,
        shards=shards,
        dtype=receiver.dtype,
        device=holder.topology.device,
        seconds=seconds,
    )
    error: Exception | None = None
    try:
        receiver.receive(tensors, version=version)
    except Exception as found:  # noqa: BLE001 - loaders raise KeyError, AssertionError, ...
        error = found
        for _ in tensors:  # the other ranks still wait for this one's broadcasts
            pass
    raise_together(error, doing=doing)
    return SyncStats(
        seconds=time.perf_counter() - start,
        bytes_sent=gathered_bytes(shards, world_size=layout.world_size, dtype=receiver.dtype),
        bytes_local=0,
        phases=seconds,
    )
