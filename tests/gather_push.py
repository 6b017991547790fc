"""A push without a plan: each parameter in full on every rank, one after the other.

Simple enough to be trusted: the oracle of the planned push, and the baseline of its benchmark.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed.agreement import raise_across_ranks
from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import ActorLayout, has_fused_names, layout_of
from megatron_rl.resharding.pieces import Piece
from megatron_rl.resharding.push import SyncStats, WeightReceiver, WeightSource, check_ends


@dataclass(frozen=True)
class Shard:
    """A local parameter of the lowest rank that has it."""

    owner: int
    parameter: str
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        """Rows of the parameter that carry weights."""
        return max(piece.top + piece.shape[0] for piece in self.pieces)

    @property
    def width(self) -> int:
        """Columns of the parameter."""
        return max(piece.left + piece.shape[1] for piece in self.pieces)


def distinct_shards(shape: ModelShape, *, layout: ActorLayout, fused: bool) -> list[Shard]:
    """List shards that contain every element of the model exactly once, in model order."""
    held: dict[str, set[tuple[int, int, int, int]]] = {}
    shards: list[Shard] = []
    for rank in range(layout.world_size):
        by_parameter: dict[str, list[Piece]] = {}
        for piece in layout.pieces(shape, rank=rank, fused=fused):
            by_parameter.setdefault(piece.parameter, []).append(piece)
        for parameter, pieces in by_parameter.items():
            first = pieces[0]
            rectangles = held.setdefault(first.tensor, set())
            if (*first.rows, *first.columns) not in rectangles:
                rectangles.add((*first.rows, *first.columns))
                shards.append(Shard(rank, parameter, tuple(pieces)))
    order = {name: index for index, name in enumerate(tensor_shapes(shape))}
    return sorted(shards, key=lambda shard: (order[shard.pieces[0].tensor], shard.owner))


def gather_tensors(
    parameters: Mapping[str, Tensor],
    *,
    shape: ModelShape,
    shards: list[Shard],
    dtype: torch.dtype,
    device: torch.device,
    seconds: dict[str, float] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor in full and in `dtype`, on every rank; collective over all processes.

    shards: from `distinct_shards`; parameters: this rank's, matching the pieces. The time spent in
    broadcasts is added to `seconds["transfer"]`.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    shapes = tensor_shapes(shape)
    open_tensors: dict[str, Tensor] = {}
    missing = {name: torch.Size(size).numel() for name, size in shapes.items()}
    for shard in shards:
        if shard.owner == rank:
            local = parameters[shard.parameter].detach()
            matrix = local.reshape(local.shape[0], -1)[: shard.rows].to(device, dtype).contiguous()
        else:
            matrix = torch.empty(shard.rows, shard.width, dtype=dtype, device=device)
        start = time.perf_counter()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(matrix, src=shard.owner)
        if seconds is not None:
            seconds["transfer"] = seconds.get("transfer", 0.0) + time.perf_counter() - start
        for piece in shard.pieces:
            name = piece.tensor
            if name not in open_tensors:
                open_tensors[name] = torch.empty(shapes[name], dtype=dtype, device=device)
            piece.of_tensor(open_tensors[name]).copy_(piece.of_parameter(matrix))
            missing[name] -= piece.size
            if not missing[name]:
                yield name, open_tensors.pop(name)
    incomplete = {name: count for name, count in missing.items() if count}
    assert not incomplete, f"no rank holds all of {incomplete}"


def gathered_bytes(shards: list[Shard], *, world_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that `gather_tensors` sends between processes, over all ranks."""
    elements = sum(shard.rows * shard.width for shard in shards)
    return elements * dtype.itemsize * (world_size - 1)


def gather_push(source: WeightSource, receiver: WeightReceiver, *, version: int) -> SyncStats:
    """Gather every parameter in full on every rank and load it; collective over all processes.

    Raises on every rank, naming parameters and both layouts, when a parameter is missing, extra or
    of the wrong shape on any of them.
    """
    start = time.perf_counter()
    layout = layout_of(source.topology)
    doing = f"weight sync {version}, {layout} to {receiver.layout}"
    parameters = check_ends(source, receiver, doing=doing)
    shards = distinct_shards(source.shape, layout=layout, fused=has_fused_names(parameters))
    seconds: dict[str, float] = {}
    tensors = gather_tensors(
        parameters,
        shape=source.shape,
        shards=shards,
        dtype=receiver.dtype,
        device=source.topology.device,
        seconds=seconds,
    )
    error: Exception | None = None
    try:
        receiver.receive(tensors, version=version)
    except Exception as found:
        error = found
        for _ in tensors:  # the other ranks still wait for this one's broadcasts
            pass
    raise_across_ranks(error, doing=doing)
    return SyncStats(
        seconds=time.perf_counter() - start,
        bytes_sent=gathered_bytes(shards, world_size=layout.world_size, dtype=receiver.dtype),
        bytes_local=0,
        phases=seconds,
    )
