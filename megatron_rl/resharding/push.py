"""One weight push: from the actor's shards to the engine, every parameter, or an error."""

import time
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.resharding.agreement import raise_together
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

    def receive(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace every parameter."""
        ...


def gather_push(holder: WeightHolder, receiver: WeightReceiver, *, version: int) -> SyncStats:
    """Gather every parameter in full on every rank and load it; collective over all processes.

    Raises RuntimeError on every rank, naming parameters and both layouts, when a parameter is
    missing, extra or of the wrong shape on any of them.
    """
    start = time.perf_counter()
    layout = layout_of(holder.topology)
    doing = f"weight push {version}, {layout} to {receiver.layout}"
    rank = dist.get_rank() if dist.is_initialized() else 0
    parameters = holder.named_parameters_local()
    fused = has_fused_names(parameters)
    pieces = layout.pieces(holder.shape, rank=rank, fused=fused)
    error: Exception | None = None
    try:
        check_parameters(parameters, pieces, layout=layout)
    except ValueError as found:
        error = found
    raise_together(error, doing=doing)
    shards = distinct_shards(holder.shape, layout=layout, fused=fused)
    tensors = gather_tensors(
        parameters,
        shape=holder.shape,
        shards=shards,
        dtype=receiver.dtype,
        device=holder.topology.device,
    )
    try:
        receiver.receive(tensors, version=version)
    except (ValueError, RuntimeError) as found:
        error = found
    raise_together(error, doing=doing)
    return SyncStats(
        seconds=time.perf_counter() - start,
        bytes_sent=gathered_bytes(shards, world_size=layout.world_size, dtype=receiver.dtype),
        bytes_local=0,
    )
