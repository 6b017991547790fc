"""Choice of the sender of every slice, so that ranks receive only what they lack.

A rank copies the slices that it already has. The others come from ranks of its node that have them;
slices that no rank of the node has are sent once from another node for all ranks that need them.
Among several possible senders, the one with the least traffic so far is chosen, for the largest
tensors first. The bytes received are therefore exactly the lower bound: what each rank needs and
lacks, and between nodes, what the ranks of a node need and all of them lack.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import (
    ActorLayout,
    EngineLayout,
    Owners,
    Rectangle,
    find_needs,
    find_owners,
)
from megatron_rl.resharding.pieces import Piece, Span

WITHIN = -1  # instead of a sender: every destination already has the slice


@dataclass(frozen=True, slots=True)
class Slice:
    """One rectangle of an HF tensor, sent from one rank to others or copied WITHIN each of them."""

    source: int
    destinations: tuple[int, ...]
    owned: Piece  # in the source's Megatron parameter
    needed: Piece  # in each destination's vLLM parameter

    @property
    def tensor(self) -> str:
        """HF name."""
        return self.owned.tensor

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.owned.size


def _intersection(a: Span, b: Span) -> Span | None:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


class _Senders:
    """Choice of senders, with the number of elements each rank has to send so far."""

    def __init__(self, world_size: int, node_size: int) -> None:
        self.node_size = node_size
        self.within, self.between = [0] * world_size, [0] * world_size  # nodes

    def choose(
        self, owners: Owners, ranks: Iterable[int], size: int
    ) -> dict[tuple[int, Piece], list[int]]:
        """Group the ranks that need one rectangle by their sender and its piece."""
        chosen: dict[tuple[int, Piece], list[int]] = {}
        remote: dict[int, list[int]] = {}
        for rank in ranks:
            node = rank // self.node_size
            if rank in owners:
                chosen.setdefault((WITHIN, owners[rank]), []).append(rank)
            elif local := [other for other in owners if other // self.node_size == node]:
                sender = min(local, key=lambda r: (self.within[r], r))
                self.within[sender] += size
                chosen.setdefault((sender, owners[sender]), []).append(rank)
            else:
                remote.setdefault(node, []).append(rank)
        for of_node in remote.values():
            sender = min(owners, key=lambda r: (self.between[r], self.within[r], r))
            self.between[sender] += size
            chosen.setdefault((sender, owners[sender]), []).extend(of_node)
        return chosen


def _transfer_order(
    owned: dict[str, dict[Rectangle, Owners]],
    needs: dict[str, dict[Piece, list[int]]],
    stage_size: int,
) -> list[str]:
    """Order tensors by module, alternating between pipeline stages so that all of them send.

    Modules are the engine's, in model order: vLLM's loaders keep tensors until a module is
    complete, so only one module is loaded at a time.
    """
    modules: dict[str, list[str]] = {}
    for name, pieces in needs.items():
        modules.setdefault(next(iter(pieces)).parameter.rpartition(".")[0], []).append(name)
    by_stage: dict[int, list[list[str]]] = {}
    for names in modules.values():
        first_rank = min(min(owners) for owners in owned[names[0]].values())
        by_stage.setdefault(first_rank // stage_size, []).append(names)
    ordered = [
        (index / len(queue), stage, names)
        for stage, queue in by_stage.items()
        for index, names in enumerate(queue)
    ]
    return [name for _, _, names in sorted(ordered, key=lambda item: item[:2]) for name in names]


def plan_slices(
    shape: ModelShape,
    source: ActorLayout,
    destination: EngineLayout,
    *,
    fused: bool = False,
    ranks_per_node: int | None = None,
) -> dict[str, list[Slice]]:
    """Return every slice by its tensor, in transfer order; identical on every rank.

    ranks_per_node: ranks are numbered node by node (None: all on one node).
    """
    if source.world_size != destination.world_size:
        raise ValueError(f"{source} and {destination} have different numbers of ranks")
    owned, needs = find_owners(shape, source, fused=fused), find_needs(shape, destination)
    senders = _Senders(source.world_size, ranks_per_node or source.world_size)
    order = _transfer_order(owned, needs, source.world_size // source.pipeline)
    slices: dict[str, list[Slice]] = {name: [] for name in order}
    sizes = {name: math.prod(size) for name, size in tensor_shapes(shape).items()}
    for name in sorted(order, key=lambda name: -sizes[name]):
        for needed, ranks in needs[name].items():
            for (owned_rows, owned_columns), owners in owned[name].items():
                rows = _intersection(owned_rows, needed.rows)
                columns = _intersection(owned_columns, needed.columns)
                if rows is None or columns is None:
                    continue
                size = (rows[1] - rows[0]) * (columns[1] - columns[0])
                for (sender, piece), to in senders.choose(owners, ranks, size).items():
                    crops = piece.crop(rows, columns), needed.crop(rows, columns)
                    slices[name].append(Slice(sender, tuple(to), *crops))
    return slices
