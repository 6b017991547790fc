"""Transfer plan of one rank: messages in rounds of bounded size, computed once per run.

All slices that one rank sends to the same destinations in a round form one message. It is sent once
to each other node, to the rank there that has received least so far, which forwards it within the
node.

In a round no rank has more than a bucket of messages, sent and received together. The slices of a
tensor stay in one round if they fit; those of a larger tensor are split into blocks of rows. If
tensors are assembled for a loader, the tensors that a round adds to are bounded as well.

Every rank computes the whole plan, so that all find the same rounds, and keeps its own part. Ranks
do not wait for others to fill a round: each advances with its own traffic.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.senders import WITHIN, Slice, plan_slices

SLICE_EXTRA = 16  # elements per slice: alignment to 16 bytes and checksums of 8 bytes


@dataclass(frozen=True)
class Message:
    """Slices from one rank to others that need all of them, as seen by one of these ranks.

    sender: the rank that sends it to this one: the source, or a rank of this node that forwards it.
    to: the ranks that this rank sends it to; a destination forwards it as soon as it has arrived.
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
    """Messages that one rank sends and receives in one exchange.

    Messages between two ranks are in the same order on both.
    """

    sends: list[Message]
    receives: list[Message]


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of the plan.

    local: slices within this rank, by tensor. rounds: exchanges, the same number on every rank.
    last_round: by tensor in transfer order, the round after which it is complete: that of its last
    slice, or that of the tensor before it if nothing arrives; -1 before the first round.
    """

    rank: int
    rounds: tuple[Round, ...]
    local: dict[str, list[Slice]]
    last_round: dict[str, int]
    elements_sent: int  # between ranks, over the whole plan
    elements_local: int  # within ranks, over the whole plan


class _Rounds:
    """Assignment of slices to rounds, in order for every rank, within the limits of all ranks."""

    def __init__(self, world_size: int, wire: int, tensors: int | None) -> None:
        self.wire_limit, self.tensor_limit = wire, tensors
        self._round = [0] * world_size  # the last round of each rank
        self._wire, self._tensors = [0] * world_size, [0] * world_size  # elements in that round

    def place(self, slices: list[Slice], *, size: int) -> Iterator[tuple[int, Slice]]:
        """Yield the rounds of one tensor's slices: a single round if they fit into a bucket.

        size: elements of the whole tensor.
        """
        loads = _wire_loads(slices)
        if max(loads.values(), default=0) <= self.wire_limit:
            if slices:
                receivers = {rank for each in slices for rank in each.destinations}
                number = self._reserve(loads, receivers, size)
                yield from ((number, each) for each in slices)
            return
        # Take blocks of all slices in turn, so that all sources send at the same time.
        limit = self.wire_limit // len(slices) - SLICE_EXTRA
        for blocks in itertools.zip_longest(*(_row_blocks(each, limit) for each in slices)):
            opened: set[int] = set()
            for block in filter(None, blocks):
                new = set(block.destinations) - opened
                yield self._reserve(_wire_loads([block]), new, size), block
                opened |= new

    def _reserve(self, loads: dict[int, int], receivers: Collection[int], size: int) -> int:
        """Reserve room in the first possible round, at or after the last one of these ranks.

        A tensor of `size` elements is assembled on `receivers`; one above the limit of a round
        uses its rounds alone.
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
    """Count the elements that each rank sends or receives; a slice sent to several counts once."""
    loads: dict[int, int] = {}
    for each in slices:
        for rank in (each.source, *each.destinations):
            loads[rank] = loads.get(rank, 0) + each.size + SLICE_EXTRA
    return loads


def _row_blocks(whole: Slice, limit: int) -> Iterator[Slice]:
    """Split a slice into blocks of rows with at most `limit` elements (at least one row)."""
    (start, stop), columns = whole.owned.rows, whole.owned.columns
    step = max(1, limit // whole.owned.shape[1])
    for row in range(start, stop, step):
        rows = (row, min(row + step, stop))
        crops = whole.owned.crop(rows, columns), whole.needed.crop(rows, columns)
        yield Slice(whole.source, whole.destinations, *crops)


@dataclass(frozen=True, slots=True)
class Path:
    """Route of one message: once from its source to every other node, then within that node."""

    source: int
    by_node: tuple[tuple[int, ...], ...]  # destinations; on other nodes [0] receives it first
    node_size: int

    def hops(self) -> Iterator[tuple[int, int]]:
        """Yield every (from, to)."""
        for ranks in self.by_node:
            same_node = ranks[0] // self.node_size == self.source // self.node_size
            yield self.source, ranks[0]
            yield from ((self.source if same_node else ranks[0], rank) for rank in ranks[1:])

    def ends(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """Return the rank that `rank` receives from (itself at the source), and its receivers."""
        hops = list(self.hops())
        sender = next((a for a, b in hops if b == rank), self.source)
        return sender, tuple(b for a, b in hops if a == rank)


class _Paths:
    """Choice of the first receiver of a message on each node: the one with least traffic so far.

    All slices of a round from one rank to the same destinations form one message with one path.
    """

    def __init__(self, world_size: int, node_size: int) -> None:
        self.node_size = node_size
        self.arrived = [0] * world_size  # elements from other nodes
        self._paths: dict[tuple[int, int, tuple[int, ...]], Path] = {}

    def of(self, number: int, slice_: Slice) -> Path:
        """Return the path of a slice in round `number`."""
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
    """Yield the round and the path of every slice sent between ranks, or of its blocks."""
    placing = _Rounds(world_size, wire_elements, tensor_elements)
    paths = _Paths(world_size, ranks_per_node or world_size)
    for name, of_tensor in slices.items():
        remote = [each for each in of_tensor if each.source != WITHIN]
        for number, each in placing.place(remote, size=math.prod(sizes[name])):
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
    """Compute the plan and return the part of one rank.

    wire_elements: limit of the elements any rank sends plus receives in a round. tensor_elements:
    limit of the tensors that a round adds to, in full shape; a larger tensor uses its rounds alone.
    None: slices are written directly to their destination and no tensors are assembled.
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
    arrives: dict[str, int] = {}  # the last round in which this rank receives part of a tensor
    for number, each, path in scheduled:
        rounds += [{} for _ in range(number + 1 - len(rounds))]
        if rank != each.source and rank not in each.destinations:
            continue
        key = each.source, each.destinations
        message = rounds[number].setdefault(key, Message(each.source, *path.ends(rank)))
        message.slices.append(each)
        if rank != each.source:
            arrives[each.tensor] = number
    # Tensors are yielded in order, since a module may still lack others.
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
