"""All slices of a push with their senders, in transfer order; ranks receive only what they lack.

A rank copies the slices that it already has. The others come from ranks of its node that have them;
slices that no rank of the node has are sent once from another node for all ranks that need them.
Several possible senders take turns. The bytes received are therefore exactly the lower bound: what
each rank needs and lacks, and between nodes, what the ranks of a node need and all of them lack.

Order decides how many ranks send at once. Within a module (of the engine's, in model order) one
block of each holder follows the other (of each expert rank, for experts), and pipeline stages
alternate, all in proportion to what they have to send. vLLM's loaders therefore have one incomplete
module of each stage at a time.

Tensors that the same ranks have and need in the same rectangles are planned once (`_Kind`): layers
of a stage, experts of a rank. Replicas are in one group of ranks, so the cost of a plan is that of
the tensors and hardly grows with replicas.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import (
    ActorLayout,
    EngineLayout,
    find_needs,
    find_owners,
    group_equal_ranks,
)
from megatron_rl.resharding.pieces import Piece, Span
from megatron_rl.resharding.routes import Path, Pattern, Turn

WITHIN = -1  # instead of a sender: every destination already has the slice
SLICE_EXTRA = 16  # elements per slice: alignment to 16 bytes and checksums of 8 bytes


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


class Part(NamedTuple):
    """One rectangle of an HF tensor with its routes to all ranks that need it.

    owned: the pieces that contain it, by the actor's group. needed: the engine's piece.
    """

    rows: Span
    columns: Span
    size: int
    owned: Mapping[int, Piece]
    needed: Piece
    turn: Turn
    within: frozenset[int]  # ranks that need it and have it

    def slice(self, source: int, destinations: tuple[int, ...], *, group: int) -> Slice:
        """Return the slice of a source in `group`, or WITHIN ranks of that group."""
        owned = self.owned[group].crop(self.rows, self.columns)
        return Slice(source, destinations, owned, self.needed.crop(self.rows, self.columns))


class Step(NamedTuple):
    """Parts of one tensor that are sent together: all of them, or a block of rows of each.

    load: elements that each rank sends and receives, [ranks]. receives: by rank.
    progress: the share of the push that this step is: its load over all ranks, more than 0.
    """

    tensor: str
    parts: tuple[Part, ...]
    load: np.ndarray
    receives: np.ndarray
    progress: int


class _Cut(NamedTuple):
    """A part without names: its rectangle, the indices of its pieces, its routes."""

    rows: Span
    columns: Span
    size: int
    owned: int
    needed: int
    pattern: Pattern


def _intersection(a: Span, b: Span) -> Span | None:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


class _Kind:
    """Tensors with equal rectangles, owners and needs: their cuts, in blocks, and their loads."""

    def __init__(self, cuts: Sequence[_Cut], *, block_elements: int | None) -> None:
        self.blocks: list[list[_Cut]] = []
        self._sums: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, int]] = {}
        count = 1
        if cuts and block_elements:
            turns = [cut.pattern.turn(0) for cut in cuts]
            messages = np.stack([turn.messages for turn in turns])  # [cuts, ranks]
            busiest = int((np.array([cut.size for cut in cuts]) @ messages).max())
            room = block_elements - SLICE_EXTRA * int(messages.sum(0).max())
            # Without room for the extras of all parts, each row is a block.
            count = -(-busiest // room) if room > 0 else busiest
        for cut in cuts:
            for number, block in enumerate(_row_blocks(cut, count)):
                if number == len(self.blocks):
                    self.blocks.append([])
                self.blocks[number].append(block)

    def sums(
        self, number: int, routes: Sequence[tuple[_Cut, Turn]]
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Return load and receives of block `number`, [ranks] each, and its progress."""
        key = (number, *(id(turn) for _, turn in routes))
        if key not in self._sums:
            loads = [(cut.size + SLICE_EXTRA) * turn.messages for cut, turn in routes]
            load = np.sum(loads, axis=0)
            receives = np.any([turn.receives for _, turn in routes], axis=0)
            self._sums[key] = load, receives, int(load.sum()) + 1
        return self._sums[key]


def _row_blocks(whole: _Cut, count: int) -> Iterator[_Cut]:
    """Split into at most `count` blocks of rows, at least one row each."""
    (start, stop), width = whole.rows, whole.columns[1] - whole.columns[0]
    step = max(1, (stop - start) // max(1, count))
    for row in range(start, stop, step):
        rows = (row, min(row + step, stop))
        yield whole._replace(rows=rows, size=(rows[1] - rows[0]) * width)


class Plan:
    """All slices of a push. Every rank computes the same one, without communication.

    ranks_per_node: ranks are numbered node by node (None: all on one node).
    block_elements: split a tensor's slices into blocks of rows, so that no rank sends and receives
    more than this at once.
    """

    def __init__(
        self,
        shape: ModelShape,
        source: ActorLayout,
        destination: EngineLayout,
        *,
        fused: bool = False,
        ranks_per_node: int | None = None,
        block_elements: int | None = None,
    ) -> None:
        if source.world_size != destination.world_size:
            raise ValueError(f"{source} and {destination} have different numbers of ranks")
        self.world_size, self._node_size = source.world_size, ranks_per_node or source.world_size
        self._block_elements = block_elements
        self._stage_size = source.world_size // source.pipeline
        self._owned = find_owners(shape, source, fused=fused)
        self._needs = find_needs(shape, destination)
        self.sizes = {name: math.prod(size) for name, size in tensor_shapes(shape).items()}
        self._owners, self._needers = group_equal_ranks(source), group_equal_ranks(destination)
        self.group_of = {rank: g for g, ranks in enumerate(self._owners) for rank in ranks}
        self._patterns: dict[tuple, Pattern] = {}
        self._paths: dict[Path, Path] = {}
        self._kinds: dict[tuple, _Kind] = {}
        self._turns: dict[tuple[int, int], int] = {}  # slices so far, by pattern and size

    def _kind(self, name: str) -> _Kind:
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
                        cuts.append(_Cut(rows, columns, size, o, n, pattern))
            self._kinds[key] = _Kind(cuts, block_elements=self._block_elements)
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

    def _turn(self, cut: _Cut) -> Turn:
        """Return the next routes of a slice of this size; other sizes begin with other senders."""
        if cut.pattern.turns == 1:
            return cut.pattern.turn(0)
        key = (id(cut.pattern), cut.size)
        number = self._turns.get(key)
        if number is None:
            number = sum(pattern == key[0] for pattern, _ in self._turns)
        self._turns[key] = number + 1
        return cut.pattern.turn(number)

    def steps_of(self, name: str) -> list[Step]:
        """Return the steps of one tensor; a tensor of which no rank needs anything has one."""
        kind = self._kind(name)
        owned, needs = list(self._owned[name].values()), list(self._needs[name])
        steps = []
        for number, block in enumerate(kind.blocks):
            routes = [(cut, self._turn(cut)) for cut in block]
            parts = tuple(
                Part(
                    cut.rows, cut.columns, cut.size, owned[cut.owned], needs[cut.needed],
                    turn, cut.pattern.within,
                )
                for cut, turn in routes
            )  # fmt: skip
            steps.append(Step(name, parts, *kind.sums(number, routes)))
        nothing = np.zeros(self.world_size, np.int64)
        return steps or [Step(name, (), nothing, nothing > 0, 1)]

    def steps(self) -> Iterator[Step]:
        """Yield all steps in transfer order; those of several stages alternate."""
        stages: dict[int, list[list[Step]]] = {}
        modules: dict[str, list[str]] = {}
        for name, pieces in self._needs.items():
            modules.setdefault(next(iter(pieces)).parameter.rpartition(".")[0], []).append(name)
        for names in modules.values():
            holders: dict[tuple, list[list[Step]]] = {}
            for name in names:
                holder = tuple(map(tuple, self._owned[name].values()))
                holders.setdefault(holder, []).extend([step] for step in self.steps_of(name))
            first = min(self._owners[groups[0]][0] for groups in next(iter(holders)))
            queue = stages.setdefault(first // self._stage_size, [])
            queue.extend(_in_proportion(list(holders.values())))
        for together in _in_proportion(list(stages.values())):
            yield from together


def _in_proportion(queues: list[list[list[Step]]]) -> list[list[Step]]:
    """Merge queues of steps that stay together, so that all progress at the same rate."""
    order = []
    for number, queue in enumerate(queues):
        sizes = [sum(step.progress for step in item) for item in queue]
        total, done = sum(sizes), 0
        for item, size in zip(queue, sizes, strict=True):
            order.append(((done + size / 2) / total, number, item))
            done += size
    return [item for *_, item in sorted(order, key=lambda entry: entry[:2])]


def plan_slices(
    shape: ModelShape,
    source: ActorLayout,
    destination: EngineLayout,
    *,
    fused: bool = False,
    ranks_per_node: int | None = None,
) -> dict[str, list[Slice]]:
    """Return every slice of all ranks by its tensor, in transfer order."""
    plan = Plan(shape, source, destination, fused=fused, ranks_per_node=ranks_per_node)
    slices: dict[str, list[Slice]] = {}
    for step in plan.steps():
        found = slices.setdefault(step.tensor, [])
        for part in step.parts:
            ends = [(path.source, path.destinations) for path in part.turn.paths]
            by_group: dict[int, list[int]] = {}
            for rank in sorted(part.within):
                by_group.setdefault(plan.group_of[rank], []).append(rank)
            ends += [(WITHIN, tuple(ranks)) for ranks in by_group.values()]
            for sender, to in ends:
                group = plan.group_of[to[0] if sender == WITHIN else sender]
                found.append(part.slice(sender, to, group=group))
    return slices
