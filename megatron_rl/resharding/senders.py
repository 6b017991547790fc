"""All slices of a push with their senders, in transfer order; ranks receive only what they lack.

A rank copies the slices that it already has. The others come from ranks of its node that have them;
slices that no rank of the node has are sent once from another node for all ranks that need them.
Several possible senders take turns. The bytes received are therefore exactly the lower bound: what
each rank needs and lacks, and between nodes, what the ranks of a node need and all of them lack.

Order decides how many ranks send at once. Within a module (of the engine's, in model order) one
block of each holder follows the other (of each expert rank, for experts), and pipeline stages
alternate, all in proportion to what they have to send (in plain turns, a dense 72B's rounds take up
to 1.5 times as long). vLLM's loaders therefore have one incomplete module of each stage at a time.

With many expert ranks a round would have a small message from each of them to each rank. Where
`shares` > 1, each expert rank sends as many layers at once to one share of the nodes, then to the
next; at any time different expert ranks send to different shares. All ranks send and receive as
much as before, in fewer messages.

Tensors that the same ranks have and need in the same rectangles are planned once (`_kind`): layers
of a stage, experts of a rank. Replicas are in one group of ranks, so the cost of a plan is that of
the tensors and hardly grows with replicas.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import (
    ActorLayout,
    EngineLayout,
    find_needs,
    find_owners,
    group_equal_ranks,
)
from megatron_rl.resharding.pieces import Span
from megatron_rl.resharding.routes import WHOLE, Path, Pattern, Share, Turn
from megatron_rl.resharding.slices import (
    NOTHING,
    SLICE_EXTRA,
    WITHIN,
    Block,
    Cut,
    Loads,
    Part,
    Slice,
    Step,
    split_into_blocks,
)


def _intersection(a: Span, b: Span) -> Span | None:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


class Plan:
    """All slices of a push. Every rank computes the same one, without communication.

    ranks_per_node: ranks are numbered node by node (None: all on one node).
    block_elements: split a tensor's slices into blocks of rows, so that no rank sends and receives
    more than this at once. shares: of the nodes, to which experts are sent one after another.
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
        shares: int = 1,
    ) -> None:
        if source.world_size != destination.world_size:
            raise ValueError(f"{source} and {destination} have different numbers of ranks")
        self.world_size, self._node_size = source.world_size, ranks_per_node or source.world_size
        self._block_elements, self._shares = block_elements, shares
        self._stage_size = source.world_size // source.pipeline
        self._owned = find_owners(shape, source, fused=fused)
        self._needs = find_needs(shape, destination)
        self.sizes = {name: math.prod(size) for name, size in tensor_shapes(shape).items()}
        self._owners, self._needers = group_equal_ranks(source), group_equal_ranks(destination)
        self.group_of = {rank: g for g, ranks in enumerate(self._owners) for rank in ranks}
        self._patterns: dict[tuple, Pattern] = {}
        self._paths: dict[Path, Path] = {}
        self._kinds: dict[tuple, list[list[Cut]]] = {}  # blocks
        self._turns: dict[tuple[int, int], int] = {}  # slices so far, by pattern and size
        self._loads: dict[tuple, Loads] = {}

    def _kind(self, name: str) -> list[list[Cut]]:
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
                        cuts.append(Cut(rows, columns, size, o, n, pattern))
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

    def _turn(self, cut: Cut) -> int:
        """Return the number of a slice of this size; other sizes begin with other senders."""
        if cut.pattern.turns == 1:
            return 0
        key = (id(cut.pattern), cut.size)
        number = self._turns.get(key)
        if number is None:
            number = sum(pattern == key[0] for pattern, _ in self._turns)
        self._turns[key] = number + 1
        return number % cut.pattern.turns

    def _blocks(self, name: str) -> list[Block]:
        owned, needs = list(self._owned[name].values()), list(self._needs[name])
        return [
            Block(name, owned, needs, cuts, tuple(self._turn(cut) for cut in cuts))
            for cuts in self._kind(name)
        ]

    def _step(self, blocks: tuple[Block, ...], share: Share = WHOLE) -> Step:
        key = (share, *((id(block.cuts), block.turns) for block in blocks))
        if key not in self._loads:
            self._loads[key] = self._find_loads(Step(blocks, share, NOTHING).parts())
        return Step(blocks, share, self._loads[key])

    def _find_loads(self, parts: list[Part]) -> Loads:
        load, inside = np.zeros((2, self.world_size), np.int64)
        sizes: dict[Turn, int] = defaultdict(int)  # a turn is that of several parts
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

    def steps(self) -> Iterator[Step]:
        """Yield all steps in transfer order; those of several stages alternate."""
        stages: dict[int, list[list[list[Block]]]] = {}  # by stage, module and holder
        modules: dict[str, list[str]] = {}
        for name, pieces in self._needs.items():
            modules.setdefault(next(iter(pieces)).parameter.rpartition(".")[0], []).append(name)
        for names in modules.values():
            holders: dict[tuple, list[Block]] = {}
            for name in names:
                holder = tuple(map(tuple, self._owned[name].values()))
                holders.setdefault(holder, []).extend(self._blocks(name))
            first = min(self._owners[groups[0]][0] for groups in next(iter(holders)))
            stages.setdefault(first // self._stage_size, []).append(list(holders.values()))
        yield from _in_proportion([self._queue(of_stage) for of_stage in stages.values()])

    def _queue(self, modules: list[list[list[Block]]]) -> list[Step]:
        """Order the steps of a stage."""
        queue: list[Step] = []
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

    def _alternate(self, holders: list[list[Block]]) -> list[tuple[int, list[Block]]]:
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

    def _in_shares(self, holders: list[list[Block]]) -> list[Step]:
        """Order the steps of experts: each time every holder sends to another share of the nodes.

        A step has as many blocks as there are shares, so that it moves no less than others.
        """
        count, steps = self._shares, list[Step]()
        for turn in range(count):
            queues = []
            for number, blocks in self._alternate(holders):
                share = ((number + turn) % count, count)
                bundles = (blocks[n : n + count] for n in range(0, len(blocks), count))
                queues.append([self._step(tuple(bundle), share) for bundle in bundles])
            steps += _in_proportion(queues)
        return steps


def _of_expert_ranks(holders: list[list[Block]]) -> bool:
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


def _in_proportion(queues: list[list[Step]]) -> list[Step]:
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
    destination: EngineLayout,
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
