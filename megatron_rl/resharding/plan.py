"""The plan of one rank: messages in rounds of bounded size, arithmetic done once per run.

All that one rank sends to the same others in a round is one message. It goes to each other node
once, to the rank there that least has come to so far, which passes it on within the node.

In a round no rank holds more than a bucket of messages, sent and received together. The slices of a
tensor stay in one round where they fit; those of a larger one are cut into blocks of rows. Where
tensors are assembled for a loader, those that a round adds to are bounded too.

Every rank walks the whole plan to find the same rounds, and keeps its own part. Ranks do not wait
for others to fill a round: each is as far as its own traffic takes it.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.senders import WITHIN, Slice, plan_slices

SLICE_EXTRA = 16  # elements: a slice is aligned to 16 bytes, and checksums of 8 travel with it


@dataclass(frozen=True)
class Message:
    """Slices from one rank to others that all need all of them, as one of these ranks sees it.

    sender: whom this rank gets it from: the source, or a rank of its own node that passes it on.
    to: whom this rank sends it to; on a destination, as soon as it has arrived.
    """

    source: int
    sender: int
    to: tuple[int, ...]
    slices: list[Slice] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(each.size for each in self.slices)


@dataclass(frozen=True)
class Round:
    """What one rank sends and receives in one exchange.

    Between any two ranks messages are listed in the same order on both.
    """

    sends: list[Message]
    receives: list[Message]


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of the plan.

    local: slices within this rank, by tensor. rounds: exchanges, the same number on every rank.
    last_round: by tensor, in the order of the transfer, the round after which it is handed over:
    that of its last slice; where nothing arrives that of the tensor before it, -1 at the beginning.
    """

    rank: int
    rounds: tuple[Round, ...]
    local: dict[str, list[Slice]]
    last_round: dict[str, int]
    elements_sent: int  # between ranks, over the whole plan
    elements_local: int  # within ranks, over the whole plan


class _Rounds:
    """Puts slices into rounds, in order for every rank, each where all its ends have room."""

    def __init__(self, world_size: int, wire: int, tensors: int | None) -> None:
        self.wire_limit, self.tensor_limit = wire, tensors
        self._round = [0] * world_size  # the last one of each rank
        self._wire, self._tensors = [0] * world_size, [0] * world_size  # elements in that round

    def place(self, slices: list[Slice], *, size: int) -> Iterator[tuple[int, Slice]]:
        """The rounds of one tensor's slices: one for all of them where they fit into a bucket.

        size: elements of the whole tensor.
        """
        loads = _wire_loads(slices)
        if max(loads.values(), default=0) <= self.wire_limit:
            if slices:
                receivers = {rank for each in slices for rank in each.destinations}
                number = self._reserve(loads, receivers, size)
                yield from ((number, each) for each in slices)
            return
        # Blocks of all slices in turn: all sources send at once.
        limit = self.wire_limit // len(slices) - SLICE_EXTRA
        for blocks in itertools.zip_longest(*(_row_blocks(each, limit) for each in slices)):
            opened: set[int] = set()
            for block in filter(None, blocks):
                new = set(block.destinations) - opened
                yield self._reserve(_wire_loads([block]), new, size), block
                opened |= new

    def _reserve(self, loads: dict[int, int], receivers: Collection[int], size: int) -> int:
        """The first round, not before the last one of any of these ranks, that has room.

        A tensor [size] is assembled on `receivers`; a larger one than any round may add to has
        its rounds to itself.
        """
        number = max(self._round[rank] for rank in loads)
        adds = 0 if self.tensor_limit is None else min(size, self.tensor_limit)
        if any(
            (self._wire[rank] and self._wire[rank] + load > self.wire_limit)
            or (rank in receivers and 0 < self._tensors[rank] > (self.tensor_limit or 0) - adds)
            for rank, load in loads.items()
            if self._round[rank] == number
        ):
            number += 1
        for rank, load in loads.items():
            if self._round[rank] != number:
                self._round[rank], self._wire[rank], self._tensors[rank] = number, 0, 0
            self._wire[rank] += load
            self._tensors[rank] += adds if rank in receivers else 0
        return number


def _wire_loads(slices: Iterable[Slice]) -> dict[int, int]:
    """Elements that each rank has on the wire; whoever sends a slice to several holds it once."""
    loads: dict[int, int] = {}
    for each in slices:
        for rank in (each.source, *each.destinations):
            loads[rank] = loads.get(rank, 0) + each.size + SLICE_EXTRA
    return loads


def _row_blocks(whole: Slice, limit: int) -> Iterator[Slice]:
    """Parts of at most `limit` elements (at least one row)."""
    (start, stop), columns = whole.held.rows, whole.held.columns
    step = max(1, limit // whole.held.shape[1])
    for row in range(start, stop, step):
        rows = (row, min(row + step, stop))
        crops = whole.held.crop(rows, columns), whole.needed.crop(rows, columns)
        yield Slice(whole.source, whole.destinations, *crops)


@dataclass(frozen=True, slots=True)
class Path:
    """The way of one message: from its source once to every other node, and on within it."""

    source: int
    by_node: tuple[tuple[int, ...], ...]  # destinations; where it comes from afar, first to [0]
    node_size: int

    def hops(self) -> Iterator[tuple[int, int]]:
        """Every (from, to)."""
        for ranks in self.by_node:
            near = ranks[0] // self.node_size == self.source // self.node_size
            yield self.source, ranks[0]
            yield from ((self.source if near else ranks[0], rank) for rank in ranks[1:])

    def ends(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """Whom `rank` gets the message from (itself at its source), and whom it sends it to."""
        hops = list(self.hops())
        sender = next((a for a, b in hops if b == rank), self.source)
        return sender, tuple(b for a, b in hops if a == rank)


class _Paths:
    """Chooses the rank that a message comes to first on each node: the one that had least so far.

    All slices of a round from one rank to the same others are one message, and go one way.
    """

    def __init__(self, world_size: int, node_size: int) -> None:
        self.node_size = node_size
        self.arrived = [0] * world_size  # elements from other nodes
        self._paths: dict[tuple[int, int, tuple[int, ...]], Path] = {}

    def of(self, number: int, slice_: Slice) -> Path:
        """The path of a slice in round `number`."""
        key = number, slice_.source, slice_.destinations
        if key not in self._paths:
            nodes: dict[int, list[int]] = {}
            for rank in slice_.destinations:
                nodes.setdefault(rank // self.node_size, []).append(rank)
            by_node = (sorted(ranks, key=self.arrived.__getitem__) for ranks in nodes.values())
            self._paths[key] = Path(slice_.source, tuple(map(tuple, by_node)), self.node_size)
        for ranks in self._paths[key].by_node:
            if ranks[0] // self.node_size != slice_.source // self.node_size:
                self.arrived[ranks[0]] += slice_.size
        return self._paths[key]


def schedule(
    slices: Mapping[str, Sequence[Slice]],
    sizes: Mapping[str, tuple[int, ...]],
    *,
    world_size: int,
    wire_elements: int,
    tensor_elements: int | None = None,
    ranks_per_node: int | None = None,
) -> Iterator[tuple[int, Slice, Path]]:
    """The round of every slice that travels, or of each of its parts, and the path it takes."""
    placing = _Rounds(world_size, wire_elements, tensor_elements)
    paths = _Paths(world_size, ranks_per_node or world_size)
    for name, of_tensor in slices.items():
        travelling = [each for each in of_tensor if each.source != WITHIN]
        for number, each in placing.place(travelling, size=math.prod(sizes[name])):
            yield number, each, paths.of(number, each)


def plan_for_rank(
    shape: ModelShape,
    source: ActorLayout,
    destination: EngineLayout,
    *,
    rank: int,
    wire_elements: int,
    tensor_elements: int | None = None,
    fused: bool = False,
    ranks_per_node: int | None = None,
) -> RankPlan:
    """The part of one rank.

    wire_elements: bounds what any rank sends plus receives in a round. tensor_elements: bounds
    the tensors that a round adds to, in their full shape; a larger one has its rounds to itself.
    None: slices are written where they belong and no tensors are assembled.
    """
    slices = plan_slices(shape, source, destination, fused=fused, ranks_per_node=ranks_per_node)
    scheduled = schedule(
        slices,
        tensor_shapes(shape),
        world_size=source.world_size,
        wire_elements=wire_elements,
        tensor_elements=tensor_elements,
        ranks_per_node=ranks_per_node,
    )
    rounds: list[dict[tuple, Message]] = []
    arrives: dict[str, int] = {}  # the last round in which this rank gets some of a tensor
    for number, each, path in scheduled:
        rounds += [{} for _ in range(number + 1 - len(rounds))]
        if rank != each.source and rank not in each.destinations:
            continue
        key = each.source, each.destinations
        message = rounds[number].setdefault(key, Message(each.source, *path.ends(rank)))
        message.slices.append(each)
        if rank != each.source:
            arrives[each.tensor] = number
    # No tensor is handed over before its turn: its module may lack others.
    latest = itertools.accumulate((arrives.get(name, -1) for name in slices), max)
    everything = [each for of_tensor in slices.values() for each in of_tensor]
    local = {
        name: [each for each in of_tensor if each.source == WITHIN and rank in each.destinations]
        for name, of_tensor in slices.items()
    }
    return RankPlan(
        rank=rank,
        rounds=tuple(
            Round(
                sends=[message for message in messages.values() if message.source == rank],
                receives=[message for message in messages.values() if message.source != rank],
            )
            for messages in rounds
        ),
        local={name: own for name, own in local.items() if own},
        last_round=dict(zip(slices, latest, strict=True)),
        elements_sent=sum(s.size * len(s.destinations) for s in everything if s.source != WITHIN),
        elements_local=sum(s.size * len(s.destinations) for s in everything if s.source == WITHIN),
    )
