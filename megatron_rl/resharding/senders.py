"""Which rank sends which slice to whom: only what the destination does not hold already.

Of what a rank needs it copies what it holds itself. The rest comes from ranks of its node that hold
it; what no rank of the node holds comes from one rank of another, once for all that need it there.
Where several could send, the one that has least to send so far does, the largest tensors first. The
bytes that ranks receive are therefore exactly the lower bound, what each needs and does not hold,
and those between nodes what the ranks of each node need and none of them holds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import (
    ActorLayout,
    EngineLayout,
    Holders,
    Rectangle,
    find_holders,
    find_needs,
)
from megatron_rl.resharding.pieces import Piece, Span

WITHIN = -1  # in place of a sender: whoever needs the slice holds it


@dataclass(frozen=True, slots=True)
class Slice:
    """One rectangle of an HF tensor on its way from one rank to others, or WITHIN each of them."""

    source: int
    destinations: tuple[int, ...]
    held: Piece  # in the source's Megatron parameter
    needed: Piece  # in each destination's vLLM parameter

    @property
    def tensor(self) -> str:
        """HF name."""
        return self.held.tensor

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.held.size


def _intersection(a: Span, b: Span) -> Span | None:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


class _Senders:
    """Chooses who sends, and remembers how many elements each rank has to send by now."""

    def __init__(self, world_size: int, node_size: int) -> None:
        self.node_size = node_size
        self.within, self.between = [0] * world_size, [0] * world_size  # nodes

    def choose(
        self, holders: Holders, ranks: Iterable[int], size: int
    ) -> dict[tuple[int, Piece], list[int]]:
        """The ranks that need one rectangle by who sends it to them, and from where it has it."""
        chosen: dict[tuple[int, Piece], list[int]] = {}
        remote: dict[int, list[int]] = {}
        for rank in ranks:
            node = rank // self.node_size
            if rank in holders:
                chosen.setdefault((WITHIN, holders[rank]), []).append(rank)
            elif near := [other for other in holders if other // self.node_size == node]:
                sender = min(near, key=lambda r: (self.within[r], r))
                self.within[sender] += size
                chosen.setdefault((sender, holders[sender]), []).append(rank)
            else:
                remote.setdefault(node, []).append(rank)
        for of_node in remote.values():
            sender = min(holders, key=lambda r: (self.between[r], self.within[r], r))
            self.between[sender] += size
            chosen.setdefault((sender, holders[sender]), []).extend(of_node)
        return chosen


def _transfer_order(
    held: dict[str, dict[Rectangle, Holders]],
    needs: dict[str, dict[Piece, list[int]]],
    stage_size: int,
) -> list[str]:
    """Tensors module by module, taken from all pipeline stages in turn so that all send.

    Modules are the engine's, in the order of the model: vLLM's loaders keep what they are given
    until all of a module is there, so one module at a time is under way.
    """
    modules: dict[str, list[str]] = {}
    for name, pieces in needs.items():
        modules.setdefault(next(iter(pieces)).parameter.rpartition(".")[0], []).append(name)
    by_stage: dict[int, list[list[str]]] = {}
    for names in modules.values():
        first_rank = min(min(holders) for holders in held[names[0]].values())
        by_stage.setdefault(first_rank // stage_size, []).append(names)
    placed = [
        (place / len(queue), stage, names)
        for stage, queue in by_stage.items()
        for place, names in enumerate(queue)
    ]
    return [name for _, _, names in sorted(placed, key=lambda item: item[:2]) for name in names]


def plan_slices(
    shape: ModelShape,
    source: ActorLayout,
    destination: EngineLayout,
    *,
    fused: bool = False,
    ranks_per_node: int | None = None,
) -> dict[str, list[Slice]]:
    """Every slice by its tensor, in the order of the transfer; the same on every rank.

    ranks_per_node: ranks are numbered node by node (None: all on one node).
    """
    if source.world_size != destination.world_size:
        raise ValueError(f"{source} and {destination} have different numbers of ranks")
    held, needs = find_holders(shape, source, fused=fused), find_needs(shape, destination)
    senders = _Senders(source.world_size, ranks_per_node or source.world_size)
    order = _transfer_order(held, needs, source.world_size // source.pipeline)
    slices: dict[str, list[Slice]] = {name: [] for name in order}
    sizes = {name: math.prod(size) for name, size in tensor_shapes(shape).items()}
    for name in sorted(order, key=lambda name: -sizes[name]):
        for needed, ranks in needs[name].items():
            for (held_rows, held_columns), holders in held[name].items():
                rows = _intersection(held_rows, needed.rows)
                columns = _intersection(held_columns, needed.columns)
                if rows is None or columns is None:
                    continue
                size = (rows[1] - rows[0]) * (columns[1] - columns[0])
                for (sender, piece), to in senders.choose(holders, ranks, size).items():
                    crops = piece.crop(rows, columns), needed.crop(rows, columns)
                    slices[name].append(Slice(sender, tuple(to), *crops))
    return slices
