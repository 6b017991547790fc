"""The plan of a weight push, as arithmetic: slices, their routes and order, and messages in rounds.

*Senders.* A rank copies the slices that it already has; the table has the senders of other slices.
The bytes received are exactly the lower bound: what each rank needs and lacks, and between nodes,
what the ranks of a node need and all of them lack.

| slice | sender |
|---|---|
| some ranks of the node have it | these ranks in turn |
| no rank of the node has it | a rank of another node, once; the receiver forwards it |
| 4 replicas have it | 3 receiving nodes: three other replicas each time; 8: always the same |

*Order.* Order decides how many ranks send at once. Within a module (of the engine's, in model
order) one block of each holder follows the other (of each expert rank, for experts), and pipeline
stages alternate, all in proportion to what they have to send (in plain turns, a dense 72B's rounds
take up to 1.5 times as long). vLLM's loaders therefore have one incomplete module of each stage at
a time.

With many expert ranks a round would have a small message from each of them to each rank. Where
`shares` > 1, each expert rank sends as many layers at once to one share of the nodes, then to the
next; at any time different expert ranks send to different shares. All ranks send and receive as
much as before, in a third of the messages or fewer (235B at 1,024 ranks, tp8 pp4 ep64: 17,742
messages a rank instead of 56,422).

Tensors that the same ranks have and need in the same rectangles are planned once (`_kind`): layers
of a stage, experts of a rank. Replicas are in one group of ranks, so the cost of a plan is that of
the tensors and hardly grows with replicas.

*Rounds.* All slices of a round from one rank along the same path form one message. It is sent once
to each other node, whose ranks receive first in turn and forward it within the node.

In a round no rank has more than a bucket of messages, sent and received together. A tensor that
would fill much of a round is split into blocks of rows, so that several pipeline stages send in it.
If tensors are assembled for a loader, those that a round adds to are bounded as well, and blocks
are so small that every pipeline stage and expert rank sends in a round.

Every rank computes the rounds of all ranks, so that all find the same ones, but only its own
slices. A round ends for all ranks where one of them has no room: ranks that have less in it have
less in the whole push as well, because the order mixes all senders in proportion.

*Messages* are one flat buffer each, of checksums and slices. A push of a large mixture of experts
moves tens of thousands of slices per rank, and on CUDA the host's time for each call is what that
costs. Slices are therefore copied into the buffer by one call for all of them, and written out in
runs: slices of equal shapes that follow each other in the engine's parameter (the experts of a
rank, gate and up) also follow each other in the message.
"""

import gc
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import (
    ActorLayout,
    EngineLayout,
    PushTarget,
    find_needs,
    find_owners,
    group_equal_ranks,
)
from megatron_rl.resharding.pieces import Piece, Span

# Index and count. As many consecutive nodes as a slice has owners, which serve one of them each,
# are in one share, the next ones in the next.
Share = tuple[int, int]
WHOLE: Share = (0, 1)


@dataclass(frozen=True, slots=True)
class Path:
    """Route of one message: once from its source to every other node, then within that node."""

    source: int
    by_node: tuple[tuple[int, ...], ...]  # destinations; on other nodes [0] receives it first
    node_size: int

    def share(self, share: "Share", *, owners: int) -> "Path":
        """Return the part of the path to the nodes of a share."""
        index, count = share
        nodes = [to for to in self.by_node if to[0] // self.node_size // owners % count == index]
        return Path(self.source, tuple(nodes), self.node_size)

    @property
    def destinations(self) -> tuple[int, ...]:
        """Return the ranks that receive the message."""
        return tuple(rank for ranks in self.by_node for rank in ranks)

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


class SenderTurn:
    """The paths of one slice, and the messages that each rank sends and receives for them.

    messages: the number of messages that each rank sends or receives, [ranks]; a message to several
    ranks counts once. receives: whether each rank receives the slice, [ranks].
    """

    def __init__(self, paths: Sequence[Path], world_size: int) -> None:
        self.paths = tuple(paths)
        to = [rank for path in paths for rank in path.destinations]
        received = np.bincount(np.array(to, np.int64), minlength=world_size)
        sources = np.array([path.source for path in paths], np.int64)
        self.messages = received + np.bincount(sources, minlength=world_size)
        self.receives = received > 0
        self.received = len(to)
        self._of: dict[int, list[Path]] = {}

    def of(self, rank: int) -> list[Path]:
        """Return the paths that `rank` is part of."""
        if rank not in self._of:
            self._of[rank] = [
                path
                for path in self.paths
                if rank == path.source or any(rank in ranks for ranks in path.by_node)
            ]
        return self._of[rank]


class Pattern:
    """The routes of all slices that the ranks `owners` have and `ranks` need.

    within: the ranks that need what they have. turns: after as many slices the paths repeat.
    paths: those of all patterns; equal ones become the same object, which identifies a message.
    """

    def __init__(
        self,
        owners: Sequence[int],
        ranks: Sequence[int],
        *,
        world_size: int,
        node_size: int,
        paths: dict[Path, Path],
    ) -> None:
        self.world_size, self.node_size, self._owners = world_size, node_size, owners
        self._same = paths
        have = set(owners)
        self.within = frozenset(rank for rank in ranks if rank in have)
        local: dict[int, list[int]] = {}
        for rank in owners:
            local.setdefault(rank // node_size, []).append(rank)
        lacking: dict[int, list[int]] = {}
        for rank in ranks:
            if rank not in have:
                lacking.setdefault(rank // node_size, []).append(rank)
        self._near = [(to, local[node]) for node, to in lacking.items() if node in local]
        self._far = [tuple(to) for node, to in lacking.items() if node not in local]
        self.turns = math.lcm(
            *(len(of) // math.gcd(len(of), len(to)) for to, of in self._near),
            *(len(owners) // math.gcd(len(owners), len(self._far)) for _ in self._far[:1]),
            *(len(to) for to in self._far),
        )
        self._known: dict[tuple[int, Share], SenderTurn] = {}
        self._whole: dict[int, list[Path]] = {}

    def turn(self, number: int, share: Share = WHOLE) -> SenderTurn:
        """Return the routes of slice `number`, or a share of them."""
        key = (number % self.turns, share)
        if key not in self._known:
            if key[0] not in self._whole:  # kept for the other shares
                self._whole[key[0]] = self._paths(key[0])
            paths = [
                self._same.setdefault(path, path)
                for whole in self._whole[key[0]]
                if (path := whole.share(share, owners=len(self._owners))).by_node
            ]
            self._known[key] = SenderTurn(paths, self.world_size)
        return self._known[key]

    def _paths(self, number: int) -> list[Path]:
        receivers: dict[int, list[tuple[int, ...]]] = {}
        for to, of in self._near:
            by_sender: dict[int, list[int]] = {}
            for index, rank in enumerate(to, number * len(to)):
                by_sender.setdefault(of[index % len(of)], []).append(rank)
            for sender, its in by_sender.items():
                receivers.setdefault(sender, []).append(tuple(its))
        for index, ranks in enumerate(self._far, number * len(self._far)):
            sender = self._owners[index % len(self._owners)]
            first = number % len(ranks)  # receives it for its node
            receivers.setdefault(sender, []).append(ranks[first:] + ranks[:first])
        return [Path(sender, tuple(to), self.node_size) for sender, to in receivers.items()]


WITHIN = -1  # instead of a sender: every destination already has the slice
SLICE_EXTRA = 16  # elements per slice: alignment to 16 bytes and checksums of 8 bytes


@dataclass(frozen=True, slots=True)
class Slice:
    """A rectangle of an HF tensor, sent from one rank to other ranks or copied WITHIN a rank."""

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


class Part(NamedTuple):
    """One rectangle of an HF tensor with its routes to all ranks that need it.

    owned: the pieces that contain it, by the actor's group. needed: the engine's piece.
    """

    rows: Span
    columns: Span
    size: int
    owned: Mapping[int, Piece]
    needed: Piece
    turn: SenderTurn
    within: frozenset[int]  # ranks that need it and have it

    def slice(self, source: int, destinations: tuple[int, ...], *, group: int) -> Slice:
        """Return the slice of a source in `group`, or WITHIN ranks of that group."""
        owned = self.owned[group].crop(self.rows, self.columns)
        return Slice(source, destinations, owned, self.needed.crop(self.rows, self.columns))


class Loads(NamedTuple):
    """Cost of a step: elements that each rank sends and receives, and who receives; [ranks] each.

    involved: ranks that send, receive or copy within themselves, [ranks]. sent, within: elements
    between and within ranks. progress: the share of the push that this is, more than 0.
    """

    load: np.ndarray
    receives: np.ndarray
    involved: np.ndarray
    sent: int
    within: int
    progress: int


@dataclass(frozen=True, slots=True)
class PushStep:
    """Blocks that are sent together, to all ranks that need them or to a share of these.

    A block is a whole tensor or some of its rows; a step for a loader has a single one.
    """

    blocks: tuple["PushBlock", ...]
    share: Share
    loads: Loads

    @property
    def tensors(self) -> tuple[str, ...]:
        """HF names."""
        return tuple(block.tensor for block in self.blocks)

    def parts(self) -> list[Part]:
        """Return the parts of all blocks; what ranks have themselves is in the first share."""
        nobody = frozenset[int]()
        return [
            Part(
                cut.rows, cut.columns, cut.size, block.owned[cut.owned], block.needed[cut.needed],
                cut.pattern.turn(turn, self.share), nobody if self.share[0] else cut.pattern.within,
            )
            for block in self.blocks
            for cut, turn in zip(block.cuts, block.turns, strict=True)
        ]  # fmt: skip


class PushCut(NamedTuple):
    """A part without names: its rectangle, the indices of its pieces, its routes."""

    rows: Span
    columns: Span
    size: int
    owned: int
    needed: int
    pattern: Pattern


class PushBlock(NamedTuple):
    """Rows of a tensor: their cuts, with the pieces that these index and the turn of each."""

    tensor: str
    owned: Sequence[Mapping[int, Piece]]
    needed: Sequence[Piece]
    cuts: Sequence[PushCut]
    turns: tuple[int, ...]


def split_into_blocks(cuts: Sequence[PushCut], block_elements: int | None) -> list[list[PushCut]]:
    """Split a tensor's cuts into blocks of rows; a tensor that no rank needs has one, empty."""
    count = 1
    if cuts and block_elements:
        turns = [cut.pattern.turn(0) for cut in cuts]
        messages = np.stack([turn.messages for turn in turns])  # [cuts, ranks]
        busiest = int((np.array([cut.size for cut in cuts]) @ messages).max())
        room = block_elements - SLICE_EXTRA * int(messages.sum(0).max())
        # Without room for the extras of all parts, each row is a block.
        count = -(-busiest // room) if room > 0 else busiest
    blocks: list[list[PushCut]] = []
    for cut in cuts:
        for number, block in enumerate(_row_blocks(cut, count)):
            if number == len(blocks):
                blocks.append([])
            blocks[number].append(block)
    return blocks or [[]]


def _row_blocks(whole: PushCut, count: int) -> Iterator[PushCut]:
    """Split into at most `count` blocks of rows, at least one row each."""
    (start, stop), width = whole.rows, whole.columns[1] - whole.columns[0]
    step = max(1, (stop - start) // max(1, count))
    for row in range(start, stop, step):
        rows = (row, min(row + step, stop))
        yield whole._replace(rows=rows, size=(rows[1] - rows[0]) * width)


NOTHING = Loads(np.zeros(0), np.zeros(0), np.zeros(0), 0, 0, 1)


def _intersection(a: Span, b: Span) -> Span | None:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


class Plan:
    """All slices of a push. Every rank computes the same plan, without communication.

    ranks_per_node: ranks are numbered node by node (None: all on one node).
    block_elements: split a tensor's slices into blocks of rows, so that no rank sends and receives
    more than this at once. shares: of the nodes, to which experts are sent one after another.
    """

    def __init__(
        self,
        shape: ModelShape,
        source: ActorLayout,
        destination: PushTarget,
        *,
        fused: bool = False,
        ranks_per_node: int | None = None,
        block_elements: int | None = None,
        shares: int = 1,
    ) -> None:
        if destination.ranks != source.ranks and destination.first != source.world_size:
            raise ValueError(f"{source} and {destination} have different numbers of ranks")
        self.world_size = destination.ranks.stop
        self._node_size = ranks_per_node or self.world_size
        self._block_elements, self._shares = block_elements, shares
        self._stage_size = source.world_size // source.pipeline
        self._owned = find_owners(shape, source, fused=fused)
        self._needs = find_needs(shape, destination)
        self.sizes = {name: math.prod(size) for name, size in tensor_shapes(shape).items()}
        self._owners, self._needers = group_equal_ranks(source), group_equal_ranks(destination)
        self.group_of = {rank: g for g, ranks in enumerate(self._owners) for rank in ranks}
        self._patterns: dict[tuple, Pattern] = {}
        self._paths: dict[Path, Path] = {}
        self._kinds: dict[tuple, list[list[PushCut]]] = {}  # blocks
        self._turns: dict[tuple[int, int], int] = {}  # slices so far, by pattern and size
        self._loads: dict[tuple, Loads] = {}

    def _kind(self, name: str) -> list[list[PushCut]]:
        owned, needs = self._owned[name], self._needs[name]
        key = (
            tuple((*rectangle, *pieces) for rectangle, pieces in owned.items()),
            tuple((need.rows, need.columns, *groups) for need, groups in needs.items()),
        )
        if key not in self._kinds:
            cuts = []
            for n, (need, groups) in enumerate(needs.items()):
                for o, (rectangle, pieces) in enumerate(owned.items()):
                    rows = _intersection(rectangle[0], need.rows)
                    columns = _intersection(rectangle[1], need.columns)
                    if rows and columns:
                        size = (rows[1] - rows[0]) * (columns[1] - columns[0])
                        pattern = self._pattern(tuple(pieces), tuple(groups))
                        cuts.append(PushCut(rows, columns, size, o, n, pattern))
            self._kinds[key] = split_into_blocks(cuts, self._block_elements)
        return self._kinds[key]

    def _pattern(self, owners: tuple[int, ...], needers: tuple[int, ...]) -> Pattern:
        if (owners, needers) not in self._patterns:
            self._patterns[owners, needers] = Pattern(
                sorted(rank for group in owners for rank in self._owners[group]),
                sorted(rank for group in needers for rank in self._needers[group]),
                world_size=self.world_size,
                node_size=self._node_size,
                paths=self._paths,
            )
        return self._patterns[owners, needers]

    def _turn(self, cut: PushCut) -> int:
        """Return the number of a slice of this size; other sizes begin with other senders."""
        if cut.pattern.turns == 1:
            return 0
        key = (id(cut.pattern), cut.size)
        number = self._turns.get(key)
        if number is None:
            number = sum(pattern == key[0] for pattern, _ in self._turns)
        self._turns[key] = number + 1
        return number % cut.pattern.turns

    def _blocks(self, name: str) -> list[PushBlock]:
        owned, needs = list(self._owned[name].values()), list(self._needs[name])
        return [
            PushBlock(name, owned, needs, cuts, tuple(self._turn(cut) for cut in cuts))
            for cuts in self._kind(name)
        ]

    def _step(self, blocks: tuple[PushBlock, ...], share: Share = WHOLE) -> PushStep:
        key = (share, *((id(block.cuts), block.turns) for block in blocks))
        if key not in self._loads:
            self._loads[key] = self._find_loads(PushStep(blocks, share, NOTHING).parts())
        return PushStep(blocks, share, self._loads[key])

    def _find_loads(self, parts: list[Part]) -> Loads:
        load, inside = np.zeros((2, self.world_size), np.int64)
        sizes: dict[SenderTurn, int] = defaultdict(int)  # a turn is that of several parts
        for part in parts:
            sizes[part.turn] += part.size + SLICE_EXTRA
            if part.within:
                inside[list(part.within)] += part.size
        for turn, size in sizes.items():
            load += size * turn.messages
        receives = np.any([load < 0, *(turn.receives for turn in sizes)], axis=0)
        sent = sum(part.size * part.turn.received for part in parts)
        involved = (load > 0) | (inside > 0)
        return Loads(load, receives, involved, sent, int(inside.sum()), int(load.sum()) + 1)

    def steps(self) -> Iterator[PushStep]:
        """Yield all steps in transfer order; steps of several pipeline stages alternate."""
        stages: dict[int, list[list[list[PushBlock]]]] = {}  # by stage, module and holder
        modules: dict[str, list[str]] = {}
        for name, pieces in self._needs.items():
            modules.setdefault(next(iter(pieces)).parameter.rpartition(".")[0], []).append(name)
        for names in modules.values():
            holders: dict[tuple, list[PushBlock]] = {}
            for name in names:
                holder = tuple(map(tuple, self._owned[name].values()))
                holders.setdefault(holder, []).extend(self._blocks(name))
            first = min(self._owners[groups[0]][0] for groups in next(iter(holders)))
            stages.setdefault(first // self._stage_size, []).append(list(holders.values()))
        yield from _in_proportion([self._queue(of_stage) for of_stage in stages.values()])

    def _queue(self, modules: list[list[list[PushBlock]]]) -> list[PushStep]:
        """Order the steps of a stage."""
        queue: list[PushStep] = []
        while modules:
            batch, modules = _next_modules(modules, self._shares)
            alone = [each for each in batch if self._shares == 1 or not _of_expert_ranks(each)]
            steps = [
                step
                for holders in alone
                for step in _in_proportion(
                    [[self._step((b,)) for b in of] for _, of in self._alternate(holders)]
                )
            ]
            together = [each for each in batch if self._shares > 1 and _of_expert_ranks(each)]
            by_holder = [list(itertools.chain(*of)) for of in zip(*together, strict=True)]
            queue += _in_proportion([steps, self._in_shares(by_holder)])
        return queue

    def _alternate(self, holders: list[list[PushBlock]]) -> list[tuple[int, list[PushBlock]]]:
        """Order holders so that different ranks receive, with each one's number of those to them.

        In an expert-parallel engine, expert ranks next to each other send to the same engine rank.
        """
        seen: Counter[tuple] = Counter()
        numbered = []
        for blocks in holders:
            needers = tuple(map(tuple, self._needs[blocks[0].tensor].values()))
            numbered.append((seen[needers], blocks))
            seen[needers] += 1
        return sorted(numbered, key=lambda each: each[0])

    def _in_shares(self, holders: list[list[PushBlock]]) -> list[PushStep]:
        """Order the steps of experts: each time every holder sends to another share of the nodes.

        A step has as many blocks as there are shares, so that it moves no less than others.
        """
        count, steps = self._shares, list[PushStep]()
        for turn in range(count):
            queues = []
            for number, blocks in self._alternate(holders):
                share = ((number + turn) % count, count)
                bundles = (blocks[n : n + count] for n in range(0, len(blocks), count))
                queues.append([self._step(tuple(bundle), share) for bundle in bundles])
            steps += _in_proportion(queues)
        return steps


def _of_expert_ranks(holders: list[list[PushBlock]]) -> bool:
    """Return whether a module's experts are divided over several ranks.

    Other modules may have several holders too: with more ranks than key-value heads, ranks share
    keys and values, but not queries.
    """
    return len(holders) > 1 and ".experts." in holders[0][0].tensor


def _next_modules(modules: list, count: int) -> tuple[list, list]:
    """Split off the modules up to number `count` of those of experts."""
    experts = 0
    for end, holders in enumerate(modules, 1):
        experts += _of_expert_ranks(holders)
        if experts == count:
            return modules[:end], modules[end:]
    return modules, []


def _in_proportion(queues: list[list[PushStep]]) -> list[PushStep]:
    """Merge queues of steps so that all progress at the same rate."""
    order = []
    for number, queue in enumerate(queues):
        total, done = sum(step.loads.progress for step in queue), 0
        for step in queue:
            order.append(((done + step.loads.progress / 2) / total, number, step))
            done += step.loads.progress
    return [step for *_, step in sorted(order, key=lambda entry: entry[:2])]


def plan_slices(
    shape: ModelShape,
    source: ActorLayout,
    destination: PushTarget,
    *,
    fused: bool = False,
    ranks_per_node: int | None = None,
) -> dict[str, list[Slice]]:
    """Return every slice of all ranks by its tensor, in transfer order."""
    plan = Plan(shape, source, destination, fused=fused, ranks_per_node=ranks_per_node)
    slices: dict[str, list[Slice]] = {}
    for step in plan.steps():
        found = slices.setdefault(step.tensors[0], [])
        for part in step.parts():
            ends = [(path.source, path.destinations) for path in part.turn.paths]
            by_group: dict[int, list[int]] = {}
            for rank in sorted(part.within):
                by_group.setdefault(plan.group_of[rank], []).append(rank)
            ends += [(WITHIN, tuple(ranks)) for ranks in by_group.values()]
            for sender, to in ends:
                group = plan.group_of[to[0] if sender == WITHIN else sender]
                found.append(part.slice(sender, to, group=group))
    return slices


ALIGNMENT = 8  # elements


WIRE_ALIGNMENT = 16  # bytes


SUM_BYTES = 8


class CopyRun(NamedTuple):
    """Slices `first` to `stop` of a message, [height, width] each, one below the other.

    start: element of the message at which the first one begins. parameter, top, left: the engine's
    parameter and where the first one begins there.
    """

    first: int
    stop: int
    start: int
    height: int
    width: int
    parameter: str
    top: int
    left: int


@dataclass(frozen=True)
class Message:
    """Slices from one rank to all ranks that need them, as one of these ranks handles them.

    sender: the rank that sends it to this one: the source, or a rank of this node that forwards it.
    to: the ranks that this rank sends it to; a destination forwards it as soon as it has arrived.
    destinations: all ranks that receive it.
    """

    source: int
    sender: int
    to: tuple[int, ...]
    destinations: tuple[int, ...]
    slices: list[Slice] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(each.size for each in self.slices)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """HF names."""
        return tuple(dict.fromkeys(each.tensor for each in self.slices))

    @cached_property
    def runs(self) -> list[CopyRun]:
        """Return the runs of its slices, computed once all are in it."""
        runs, end = list[CopyRun](), 0
        for number, each in enumerate(self.slices):
            needed, (height, width) = each.needed, each.needed.shape
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + each.size
            if runs:
                last, first = runs[-1], runs[-1].first
                place = (needed.parameter, needed.top - height * (number - first), needed.left)
                begins = start - height * width * (number - first)
                if last[2:] == (begins, height, width, *place):
                    runs[-1] = last._replace(stop=number + 1)
                    continue
            place = (needed.parameter, needed.top, needed.left)
            runs.append(CopyRun(number, number + 1, start, height, width, *place))
        return runs


class Frame(NamedTuple):
    """The places of a message in the buffer of its round.

    start, first, stop: the bytes at which its checksums and its slices begin, and at which it ends.
    sum_count: number of checksums: its own, and those of its slices in a full check.
    """

    message: Message
    start: int
    first: int
    stop: int
    sum_count: int


def frames_of(messages: Iterable[Message], full: bool, itemsize: int) -> list[Frame]:
    """Lay out messages in a buffer, each with its sums before its slices.

    full: with a sum of each slice. itemsize: bytes of an element.
    """
    frames, start = list[Frame](), 0
    for message in messages:
        sum_count = 1 + len(message.slices) * full
        first = start + _aligned(SUM_BYTES * sum_count)
        last = message.runs[-1]
        elements = last.start + (last.stop - last.first) * last.height * last.width
        stop = first + _aligned(elements * itemsize)
        frames.append(Frame(message, start, first, stop, sum_count))
        start = stop
    return frames


def _aligned(size: int) -> int:
    return -(-size // WIRE_ALIGNMENT) * WIRE_ALIGNMENT


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

    def place(self, step: PushStep, *, size: int) -> list[int]:
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
    destination: PushTarget,
    *,
    wire_elements: int,
    tensor_elements: int | None = None,
    fused: bool = False,
    ranks_per_node: int | None = None,
) -> tuple[Plan, Iterator[tuple[PushStep, list[int]]]]:
    """Return the plan, and each of its steps in transfer order with its round or its parts' rounds.

    The limits are the same as for `plan_for_rank`.
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


def parts_in_rounds(step: PushStep, numbers: list[int]) -> Iterator[tuple[int, Part]]:
    """Yield the parts of a step with their rounds."""
    parts = step.parts()
    yield from zip(numbers * len(parts) if len(numbers) == 1 else numbers, parts, strict=True)


def shares_of_nodes(
    shape: ModelShape, source: ActorLayout, destination: PushTarget, ranks_per_node: int | None
) -> int:
    """Count the shares of the nodes to which expert ranks send in turn: 1 for few expert ranks.

    A rank receives from every expert rank whose expert it needs. At once, these would be hundreds
    of small messages a round; in shares, each comes from fewer ranks with more tensors. A share has
    several nodes, so that shares are about equal.
    """
    if shape.experts is None:
        return 1
    sources = source.pipeline * source.expert
    if isinstance(destination, EngineLayout) and destination.expert_parallel:
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
    destination: PushTarget,
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


NO_GROUP = -1  # of a rank that only generates


class _OwnPart:
    """The messages and local slices of one rank, and the last round in which a tensor arrives."""

    def __init__(self, plan: Plan, rank: int, *, direct: bool) -> None:
        self._plan, self._rank, self._group = plan, rank, plan.group_of.get(rank, NO_GROUP)
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
