"""The plan of one rank: messages in rounds of bounded size.

What several ranks need of one source is one message to all of them, packed once; a large slice is a
message of its own, which needs no packing where it lies in one piece. In a round no
rank holds more than one bucket of messages, sent and received together. The slices of a tensor
stay in one round where they fit, so that a tensor is assembled from one round's messages; those of
a larger tensor are cut into blocks of rows. Where tensors are assembled for a loader, those that a
round adds to are bounded too.

Every rank walks the whole plan to find the same rounds, and keeps its own part. Ranks do not wait
for others to fill a round: each is as far as its own traffic takes it.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from typing import Literal

from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.plan import Copy, crop, iterate_copies

Slice = list[Copy]  # of one rectangle, from one source, to one rank or several
# Elements from which a slice travels alone. Smaller ones share a message, for each has its price.
OWN_MESSAGE = 1 << 16


@dataclass(frozen=True)
class Message:
    """Slices in one flat buffer, from one rank to others that all need all of them.

    copies: in the order in which they lie in the buffer. Those of the first destination on the
    source rank, whose `held` is that of all; this rank's own on a destination.
    """

    source: int
    destinations: tuple[int, ...]
    copies: list[Copy] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(copy.size for copy in self.copies)

    @property
    def is_own(self) -> bool:
        """Whether this is one large slice."""
        return len(self.copies) == 1 and self.size >= OWN_MESSAGE


@dataclass(frozen=True)
class Round:
    """What one rank sends and receives in one exchange.

    Between any two ranks messages are listed in the same order on both.
    """

    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of the plan.

    local: copies within this rank, by tensor. rounds: exchanges, the same number on every rank.
    last_round: by tensor, in the order of the transfer, the round after which it is handed over:
    that of its last slice; where nothing arrives that of the tensor before it, -1 at the beginning.
    """

    rank: int
    rounds: tuple[Round, ...]
    local: dict[str, list[Copy]]
    last_round: dict[str, int]
    elements_sent: int  # between ranks, over the whole plan
    elements_local: int  # within ranks, over the whole plan


def _slices(copies: Iterable[Copy]) -> list[Slice]:
    """Copies of one tensor, those of one rectangle of one source together."""
    found: dict[tuple, Slice] = {}
    for copy in copies:
        found.setdefault((copy.source, copy.held), []).append(copy)
    return list(found.values())


Use = Literal["wire", "tensors"]
Loads = dict[tuple[Use, int], int]  # elements, by what a rank needs memory for


def _wire_loads(slices: Iterable[Slice]) -> Loads:
    """Elements that each rank sends and receives; the sender holds a slice once."""
    loads: Loads = {}
    for copies in slices:
        for rank in (copies[0].source, *_destinations([copies])):
            loads["wire", rank] = loads.get(("wire", rank), 0) + copies[0].size
    return loads


def _destinations(slices: Iterable[Slice]) -> set[int]:
    return {copy.destination for copies in slices for copy in copies}


def _row_blocks(copies: Slice, limit: int) -> Iterator[Slice]:
    """Parts of at most `limit` elements (at least one row)."""
    (start, stop), columns = copies[0].held.rows, copies[0].held.columns
    step = max(1, limit // copies[0].held.shape[1])
    for row in range(start, stop, step):
        rows = (row, min(row + step, stop))
        yield [
            Copy(
                copy.source,
                copy.destination,
                crop(copy.held, rows, columns),
                crop(copy.needed, rows, columns),
            )
            for copy in copies
        ]


class _Rounds:
    """Puts slices into rounds, in order for every rank, each where all its ends have room."""

    def __init__(self, wire: int, tensors: int | None) -> None:
        self.capacity: dict[Use, int | None] = {"wire": wire, "tensors": tensors}
        self._round: dict[tuple[Use, int], int] = {}  # the last one that needs memory for this
        self._load: Loads = {}  # in that round

    def place(self, slices: list[Slice], *, size: int) -> Iterator[tuple[int, Slice]]:
        """The rounds of one tensor's slices: one for all of them where they fit into a bucket.

        size: elements of the whole tensor.
        """
        wire, capacity = _wire_loads(slices), self.capacity["wire"] or 0
        if max(wire.values(), default=0) <= capacity:
            number = self._reserve(wire | self._opened(_destinations(slices), size))
            yield from ((number, each) for each in slices)
            return
        # Blocks of all slices in turn: all sources send at once.
        limit = capacity // len(slices)
        for blocks in zip_longest(*(_row_blocks(each, limit) for each in slices)):
            opened: set[int] = set()
            for block in filter(None, blocks):
                new = _destinations([block]) - opened
                yield self._reserve(_wire_loads([block]) | self._opened(new, size)), block
                opened |= new

    def _opened(self, ranks: Iterable[int], size: int) -> Loads:
        """A tensor that is assembled on `ranks`; one above the limit has its rounds to itself."""
        limit = self.capacity["tensors"]
        return {} if limit is None else {("tensors", rank): min(size, limit) for rank in ranks}

    def _reserve(self, loads: Loads) -> int:
        """The first round, not before the last one of any of these ranks, that has room."""
        number = max((self._round.get(key, 0) for key in loads), default=0)
        present = {key: self._load_in(number, key) for key in loads}
        if any(present[k] and present[k] + loads[k] > (self.capacity[k[0]] or 0) for k in loads):
            number, present = number + 1, dict.fromkeys(loads, 0)
        for key, load in loads.items():
            self._round[key], self._load[key] = number, present[key] + load
        return number

    def _load_in(self, number: int, key: tuple[Use, int]) -> int:
        return self._load.get(key, 0) if self._round.get(key, 0) == number else 0


def plan_for_rank(
    shape: ModelShape,
    source: ActorLayout,
    destination: EngineLayout,
    *,
    rank: int,
    bucket_elements: int,
    tensor_elements: int | None = None,
    fused: bool = False,
    ranks_per_node: int | None = None,
) -> RankPlan:
    """The part of one rank.

    bucket_elements: bounds what any rank sends plus receives in a round. tensor_elements: bounds
    the tensors that a round adds to, in their full shape; a larger one has its rounds to itself.
    None: slices are written where they belong and no tensors are assembled.
    """
    copies = iterate_copies(shape, source, destination, fused=fused, ranks_per_node=ranks_per_node)
    placing = _Rounds(bucket_elements, tensor_elements)
    sizes = tensor_shapes(shape)
    parts: list[dict[tuple, Message]] = []  # of this rank, by round
    large = itertools.count(1)
    local: dict[str, list[Copy]] = {}
    last_round: dict[str, int] = {}
    latest = -1  # of the rounds in which this rank receives anything
    elements_sent = elements_local = 0
    for name, of_tensor in groupby(copies, key=lambda copy: copy.tensor):
        travelling: list[Copy] = []
        for copy in of_tensor:
            if copy.source != copy.destination:
                travelling.append(copy)
                elements_sent += copy.size
                continue
            elements_local += copy.size
            if copy.source == rank:
                local.setdefault(name, []).append(copy)
        for number, copies_of_slice in placing.place(
            _slices(travelling), size=math.prod(sizes[name])
        ):
            parts += [{} for _ in range(number + 1 - len(parts))]
            own = _own_copy(copies_of_slice, rank)
            if own is None:
                continue
            ends = own.source, tuple(copy.destination for copy in copies_of_slice)
            key = *ends, next(large) if own.size >= OWN_MESSAGE else 0
            parts[number].setdefault(key, Message(*ends)).copies.append(own)
            if own.destination == rank:
                latest = number
        last_round[name] = latest  # no tensor before its turn: its module may lack others
    for name in sizes:
        last_round.setdefault(name, -1)
    return RankPlan(
        rank=rank,
        rounds=tuple(_round_of(rank, messages.values()) for messages in parts),
        local=local,
        last_round=last_round,
        elements_sent=elements_sent,
        elements_local=elements_local,
    )


def _own_copy(copies: Slice, rank: int) -> Copy | None:
    """This rank's copy of a slice: the first one that it sends, or the one that it receives."""
    if copies[0].source == rank:
        return copies[0]
    return next((copy for copy in copies if copy.destination == rank), None)


def _round_of(rank: int, messages: Iterable[Message]) -> Round:
    part = Round()
    for message in messages:
        (part.sends if message.source == rank else part.receives).append(message)
    return part
