"""Which rank sends which slice to whom: only what the destination does not hold already.

Pure arithmetic on pieces, computed once per run. For every rectangle that a vLLM rank needs the
source is the nearest rank that holds it: itself (nothing moves), else one of the same node, else
any; among equals the one that has least to send so far. The bytes on the wire are therefore
exactly the lower bound of point-to-point transfer: what each rank needs and does not hold.

A plan is cut into rounds: in a round no rank sends and receives more than one bucket. Every rank
walks the whole plan to find the same rounds, and keeps its own part. Ranks do not wait for others
to fill a round: each is as far as its own traffic takes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_rl.resharding.architectures import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.pieces import Piece, Span


@dataclass(frozen=True, slots=True)
class Copy:
    """One rectangle of an HF tensor on its way between two ranks (or within one)."""

    source: int
    destination: int
    held: Piece  # the rectangle in the source rank's Megatron parameter
    needed: Piece  # the same rectangle in the destination rank's vLLM parameter

    @property
    def tensor(self) -> str:
        """HF name."""
        return self.held.tensor

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.held.size


@dataclass
class Round:
    """What one rank sends and receives in one exchange, by the other rank, in order."""

    sends: dict[int, list[Copy]] = field(default_factory=dict)
    receives: dict[int, list[Copy]] = field(default_factory=dict)


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of the plan.

    local: copies within this rank, by tensor. rounds: exchanges, the same number on every rank.
    complete_after: the tensors whose last slice arrives in each round; those that need nothing
    from others come before the first round, in `ready`.
    """

    rank: int
    rounds: tuple[Round, ...]
    local: dict[str, list[Copy]]
    ready: tuple[str, ...]
    complete_after: tuple[tuple[str, ...], ...]
    elements_sent: int  # between ranks, over the whole plan
    elements_local: int  # within ranks, over the whole plan


def _intersection(a: Span, b: Span) -> Span | None:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


def _crop(piece: Piece, rows: Span, columns: Span) -> Piece:
    """The part of `piece` that covers `rows` and `columns` of the HF tensor."""
    return Piece(
        tensor=piece.tensor,
        rows=rows,
        columns=columns,
        parameter=piece.parameter,
        row=piece.row + rows[0] - piece.rows[0],
        column=piece.column + columns[0] - piece.columns[0],
    )


Holders = dict[tuple[Span, Span], list[tuple[int, Piece]]]


def _index_sources(shape: ModelShape, layout: ActorLayout, *, fused: bool) -> dict[str, Holders]:
    """Per HF tensor: each distinct rectangle with the ranks that hold it."""
    index: dict[str, Holders] = {}
    for rank in range(layout.world_size):
        for piece in layout.pieces(shape, rank=rank, fused=fused):
            holders = index.setdefault(piece.tensor, {})
            holders.setdefault((piece.rows, piece.columns), []).append((rank, piece))
    return index


def _transfer_order(index: dict[str, Holders], shape: ModelShape, layout: ActorLayout) -> list[str]:
    """Tensors in the order of the model, pipeline stages interleaved so that all send at once."""
    stage_size = layout.world_size // layout.pipeline
    by_stage: dict[int, list[str]] = {}
    for name in tensor_shapes(shape):
        first_rank = min(rank for held in index[name].values() for rank, _ in held)
        by_stage.setdefault(first_rank // stage_size, []).append(name)
    placed = [
        (place / len(names), stage, name)
        for stage, names in by_stage.items()
        for place, name in enumerate(names)
    ]
    return [name for _, _, name in sorted(placed, key=lambda item: item[:2])]


def iterate_copies(
    shape: ModelShape,
    source: ActorLayout,
    destination: EngineLayout,
    *,
    fused: bool = False,
    ranks_per_node: int | None = None,
) -> Iterator[Copy]:
    """Every copy of the plan, in transfer order; the same sequence on every rank.

    ranks_per_node: ranks are numbered node by node (None: all on one node).
    """
    if source.world_size != destination.world_size:
        raise ValueError(f"{source} and {destination} have different numbers of ranks")
    node_size = ranks_per_node or source.world_size
    index = _index_sources(shape, source, fused=fused)
    needs: dict[str, list[tuple[int, Piece]]] = {}
    for rank in range(destination.world_size):
        for piece in destination.pieces(shape, rank=rank):
            needs.setdefault(piece.tensor, []).append((rank, piece))
    sent = [0] * source.world_size

    def distance(rank: int, to: int) -> tuple[int, int, int]:
        return (
            0 if rank == to else 1 if rank // node_size == to // node_size else 2,
            sent[rank],
            rank,
        )

    for name in _transfer_order(index, shape, source):
        for to, needed in needs[name]:
            for (held_rows, held_columns), holders in index[name].items():
                rows = _intersection(held_rows, needed.rows)
                columns = _intersection(held_columns, needed.columns)
                if rows is None or columns is None:
                    continue
                rank, held = min(holders, key=lambda holder: distance(holder[0], to))
                copy = Copy(rank, to, _crop(held, rows, columns), _crop(needed, rows, columns))
                if rank != to:
                    sent[rank] += copy.size
                yield copy


def _split(copy: Copy, limit: int) -> Iterator[Copy]:
    """Row blocks of at most `limit` elements (at least one row)."""
    if copy.size <= limit:
        yield copy
        return
    (start, stop), columns = copy.held.rows, copy.held.columns
    step = max(1, limit // copy.held.shape[1])
    for row in range(start, stop, step):
        rows = (row, min(row + step, stop))
        held, needed = _crop(copy.held, rows, columns), _crop(copy.needed, rows, columns)
        yield Copy(copy.source, copy.destination, held, needed)


class _RoundPlacing:
    """Puts copies into rounds, in order for every rank, each where both of its ends have room."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._round: dict[int, int] = {}  # by rank: the last round it takes part in
        self._load: dict[int, int] = {}  # by rank: elements in that round

    def place(self, copy: Copy) -> int:
        """The round of the next copy."""
        ends = (copy.source, copy.destination)
        place = max(self._round.get(end, 0) for end in ends)
        loads = [self._load.get(e, 0) if self._round.get(e, 0) == place else 0 for e in ends]
        if any(load and load + copy.size > self.capacity for load in loads):
            place, loads = place + 1, [0, 0]
        for end, load in zip(ends, loads, strict=True):
            self._round[end], self._load[end] = place, load + copy.size
        return place


def plan_for_rank(
    shape: ModelShape,
    source: ActorLayout,
    destination: EngineLayout,
    *,
    rank: int,
    bucket_elements: int,
    fused: bool = False,
    ranks_per_node: int | None = None,
) -> RankPlan:
    """The part of one rank. `bucket_elements` bounds what a rank sends plus receives per round."""
    copies = iterate_copies(shape, source, destination, fused=fused, ranks_per_node=ranks_per_node)
    rounds: list[Round] = []
    placing = _RoundPlacing(bucket_elements)
    local: dict[str, list[Copy]] = {}
    last_round: dict[str, int] = {}
    elements_sent = elements_local = 0
    for whole in copies:
        if whole.source == whole.destination:
            elements_local += whole.size
            if whole.source == rank:
                local.setdefault(whole.tensor, []).append(whole)
                last_round.setdefault(whole.tensor, -1)
            continue
        elements_sent += whole.size
        for copy in _split(whole, bucket_elements):
            place = placing.place(copy)
            while len(rounds) <= place:
                rounds.append(Round())
            if copy.source == rank:
                rounds[place].sends.setdefault(copy.destination, []).append(copy)
            elif copy.destination == rank:
                rounds[place].receives.setdefault(copy.source, []).append(copy)
                last_round[copy.tensor] = place
    for name in tensor_shapes(shape):
        last_round.setdefault(name, -1)  # this rank needs none of it, as of a vocabulary's padding
    complete: list[list[str]] = [[] for _ in range(len(rounds) + 1)]
    for name, place in last_round.items():
        complete[place + 1].append(name)
    return RankPlan(
        rank=rank,
        rounds=tuple(rounds),
        local=local,
        ready=tuple(complete[0]),
        complete_after=tuple(tuple(names) for names in complete[1:]),
        elements_sent=elements_sent,
        elements_local=elements_local,
    )
