"""Transfer plan of one rank: messages in rounds of bounded size, computed once per run.

All slices of a round from one rank along the same path form one message. It is sent once to each
other node, whose ranks receive first in turn and forward it within the node.

In a round no rank has more than a bucket of messages, sent and received together. A tensor that
would fill much of a round is split into blocks of rows, so that several pipeline stages send in it.
If tensors are assembled for a loader, those that a round adds to are bounded as well, and blocks
are so small that every pipeline stage and expert rank sends in a round.

Every rank computes the rounds of all ranks, so that all find the same ones, but only its own
slices. A round ends for all ranks where one of them has no room: ranks that have less in it have
less in the whole push as well, because the order mixes all senders in proportion.
"""

import gc
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.parcels import Frame, Message
from megatron_rl.resharding.routes import Path
from megatron_rl.resharding.senders import Plan
from megatron_rl.resharding.slices import SLICE_EXTRA, WITHIN, Part, Slice, Step

LEAST_STEPS = 4  # in a round, so that several pipeline stages send in it
SOURCES_AT_ONCE = 32  # from which a rank receives experts in a round
NODES_OF_SHARE = 4  # that a rank sends to, at least
MOST_SHARES = 4  # more would make planning and rounds many, for messages that are few already


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
    # Of each round, by full check and bytes of an element: filled by transfers.
    frames: dict[tuple[bool, int], list[list[Frame]]] = field(
        default_factory=dict, repr=False, compare=False
    )


class _Rounds:
    """Assignment of steps to rounds, in order, within the limits of every rank."""

    def __init__(self, world_size: int, wire: int, tensors: int | None) -> None:
        self.wire_limit, self.tensor_limit = wire, tensors
        self.number = 0
        self._wire = np.zeros(world_size, np.int64)  # elements in this round, [ranks]
        self._tensors = np.zeros(world_size, np.int64)  # elements of tensors that it adds to
        self._open = set[str]()  # these tensors

    def place(self, step: Step, *, size: int) -> list[int]:
        """Return the round of a step if it fits into a bucket, otherwise that of each part.

        size: elements of the whole tensor.
        """
        tensor, loads = step.tensors[0], step.loads
        if loads.load.max(initial=0) <= self.wire_limit:
            if loads.progress > 1 or loads.within:
                self._reserve(tensor, loads.load, loads.receives, size)
            return [self.number]
        numbers = []
        for part in step.parts():
            load = (part.size + SLICE_EXTRA) * part.turn.messages
            self._reserve(tensor, load, part.turn.receives, size)
            numbers.append(self.number)
        return numbers

    def _reserve(self, tensor: str, load: np.ndarray, receives: np.ndarray, size: int) -> None:
        """Open another round if this one has no room on some rank.

        load: elements [ranks]. A tensor of `size` elements is assembled on the ranks in `receives`.
        """
        full = ((self._wire > 0) & (self._wire + load > self.wire_limit) & (load > 0)).any()
        if self.tensor_limit is not None and tensor not in self._open:
            size = min(size, self.tensor_limit // 2)  # others are sent while a larger one is
            no_room = (receives & (self._tensors + size > self.tensor_limit)).any()
            full |= bool(self._open) and no_room
        if full:
            self.number += 1
            self._wire, self._tensors, self._open = 0 * load, 0 * load, set()
        self._wire = self._wire + load
        if tensor not in self._open:
            self._open.add(tensor)
            self._tensors = self._tensors + receives * size


def _one_of_each_holder(sizes: Mapping[str, int], source: ActorLayout) -> int:
    """Count elements of one tensor of each pipeline stage and expert rank; not the vocabulary's.

    Ranks send at once only if a round has room for a tensor of each.
    """
    holders = {name: source.expert if ".experts." in name else 1 for name in sizes}
    return source.pipeline * max(
        size * holders[name] for name, size in sizes.items() if ".layers." in name
    )


def schedule(
    shape: ModelShape,
    source: ActorLayout,
    destination: EngineLayout,
    *,
    wire_elements: int,
    tensor_elements: int | None = None,
    fused: bool = False,
    ranks_per_node: int | None = None,
) -> tuple[Plan, Iterator[tuple[Step, list[int]]]]:
    """Return the plan, and each of its steps in transfer order with its round or its parts' rounds.

    The limits are those of `plan_for_rank`.
    """
    steps = LEAST_STEPS
    if tensor_elements is not None:  # its rounds are smaller: each has room for a block of each
        steps = max(steps, source.pipeline * (source.expert if shape.experts else 1))
    plan = Plan(
        shape, source, destination, fused=fused, ranks_per_node=ranks_per_node,
        block_elements=max(1, wire_elements // steps),
        shares=(
            1 if tensor_elements is not None
            else shares_of_nodes(shape, source, destination, ranks_per_node)
        ),
    )  # fmt: skip
    if tensor_elements is not None:
        tensor_elements = max(tensor_elements, 2 * _one_of_each_holder(plan.sizes, source))
    placing = _Rounds(plan.world_size, wire_elements, tensor_elements)
    return plan, ((s, placing.place(s, size=plan.sizes[s.tensors[0]])) for s in plan.steps())


def parts_in_rounds(step: Step, numbers: list[int]) -> Iterator[tuple[int, Part]]:
    """Yield the parts of a step with their rounds."""
    parts = step.parts()
    yield from zip(numbers * len(parts) if len(numbers) == 1 else numbers, parts, strict=True)


def shares_of_nodes(
    shape: ModelShape, source: ActorLayout, destination: EngineLayout, ranks_per_node: int | None
) -> int:
    """Count the shares of the nodes to which expert ranks send in turn: 1 for few expert ranks.

    A rank receives from every expert rank whose expert it needs. At once, these would be hundreds
    of small messages a round; in shares, each comes from fewer ranks with more tensors. A share has
    several nodes, so that shares are about equal.
    """
    if shape.experts is None:
        return 1
    sources = source.pipeline * source.expert
    if destination.expert_parallel:
        sources //= destination.tensor
    slices = source.tensor if source.expert_tensor is None else source.expert_tensor
    replicas = source.world_size // (source.pipeline * source.expert * slices)
    nodes = source.world_size // (ranks_per_node or source.world_size) // replicas
    most = max(1, min(sources // SOURCES_AT_ONCE, nodes // NODES_OF_SHARE, MOST_SHARES))
    return max(count for count in range(1, most + 1) if source.expert % count == 0)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause Python's collector: it would search millions of objects, of which none is free."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_garbage_collection()
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
    limit of the tensors that a round adds to, in full shape, but at least the largest of a layer
    for each pipeline stage; a larger tensor uses its rounds alone. None: slices are written
    directly to their destination and no tensors are assembled.
    """
    plan, steps = schedule(
        shape, source, destination, wire_elements=wire_elements, tensor_elements=tensor_elements,
        fused=fused, ranks_per_node=ranks_per_node,
    )  # fmt: skip
    own = _OwnPart(plan, rank, direct=tensor_elements is None)
    sent = within = last = 0
    for step, numbers in steps:
        for name in step.tensors:
            own.arrives.setdefault(name, -1)
        sent += step.loads.sent
        within += step.loads.within
        last = numbers[-1] + 1 if step.loads.sent else last
        if step.loads.involved[rank]:
            for number, part in parts_in_rounds(step, numbers):
                own.add(number, part)
    # Tensors are yielded in order, since a module may still lack others.
    latest = itertools.accumulate(own.arrives.values(), max)
    return RankPlan(
        rank=rank,
        rounds=own.rounds(last),
        local=own.local,
        last_round=dict(zip(own.arrives, latest, strict=True)),
        elements_sent=sent,
        elements_local=within,
    )


class _OwnPart:
    """The messages and local slices of one rank, and the last round in which a tensor arrives."""

    def __init__(self, plan: Plan, rank: int, *, direct: bool) -> None:
        self._plan, self._rank, self._group = plan, rank, plan.group_of[rank]
        self._direct = direct
        self._rounds: list[dict[int, Message]] = []  # by the identity of the path
        self._ends: dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        self.arrives: dict[str, int] = {}
        self.local: dict[str, list[Slice]] = {}

    def add(self, number: int, part: Part) -> None:
        """Add what this rank sends, receives or copies of a part in round `number`."""
        name = part.needed.tensor
        if self._rank in part.within:
            own = part.slice(WITHIN, (self._rank,), group=self._group)
            self.local.setdefault(name, []).append(own)
        for path in part.turn.of(self._rank):
            message = self._message(number, path)
            group = self._plan.group_of[path.source]
            message.slices.append(part.slice(path.source, message.destinations, group=group))
            if self._rank != path.source:
                self.arrives[name] = number

    def _message(self, number: int, path: Path) -> Message:
        self._rounds += [{} for _ in range(number + 1 - len(self._rounds))]
        messages = self._rounds[number]
        if id(path) not in messages:
            if id(path) not in self._ends:
                self._ends[id(path)] = *path.ends(self._rank), path.destinations
            messages[id(path)] = Message(path.source, *self._ends[id(path)])
        return messages[id(path)]

    def rounds(self, count: int) -> tuple[Round, ...]:
        """Return `count` rounds, the same number on every rank."""
        rounds = [list(messages.values()) for messages in self._rounds]
        for message in itertools.chain(*rounds) if self._direct else ():
            message.slices.sort(key=_place_in_engine)
        for messages in rounds:
            # Equal layouts follow each other, so that one call sums them; the same on both ends.
            messages.sort(key=lambda each: (each.size, len(each.slices)))
        empty: list[list[Message]] = [[] for _ in range(count - len(rounds))]
        return tuple(
            Round(
                sends=[each for each in messages if each.source == self._rank],
                receives=[each for each in messages if each.source != self._rank],
            )
            for messages in rounds + empty
        )


def _place_in_engine(slice_: Slice) -> tuple[str, int, int]:
    """Order a message written directly as the engine's parameters: slices then merge to runs."""
    return slice_.needed.parameter, slice_.needed.left, slice_.needed.top
