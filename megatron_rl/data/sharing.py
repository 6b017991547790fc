"""Choice of the rollouts that are packed together because they begin alike.

Every rank knows all prompts and lengths, so each plans by itself. Rollouts that begin alike are one
item, or several where the token budget cuts them: whole groups where they fit, and otherwise parts
of a group, each with the prompt. What replaced histories share is found when a pack is built, where
the tokens are.

*Cost.* A row costs its linear layers, and its queries the keys that they see:

    cost = rows + (query-key pairs) / pairs_per_row

Sharing never adds pairs, but a query behind a parent is not in the attention kernel's causal mode:
its pairs cost `slowdown` times as much. Long responses behind a short prompt are therefore left
alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.data.prefix_tree import ANY, Node, Path, build_tree
from megatron_rl.types import Rollout

# Attention copies a prompt's keys for each sequence behind it, for the time of one layer: at most
# this many times as many as the budget has tokens.
MOST_COPIES = 8


@dataclass(frozen=True)
class Sharing:
    """The choice of packs that compute the common beginning of their sequences once.

    always: wherever it saves rows, whatever it costs.
    """

    pairs_per_row: float  # query-key pairs that cost as much as the linear layers of a row
    slowdown: float = 1.0
    always: bool = False

    def cost(self, length: int, *, depth: int = 0) -> float:
        """Return the cost of a sequence of `length` tokens that follow `depth` tokens."""
        pairs = length * (depth + length / 2)
        return length + pairs / self.pairs_per_row * (self.slowdown if depth else 1.0)

    def is_worth(self, alignment: int) -> Callable[[Node], bool]:
        """Return the rule of `build_tree`: whether computing a node once costs less."""

        def padded(length: int) -> int:
            return -(-max(1, length) // alignment) * alignment

        def is_worth(node: Node) -> bool:
            ends = [0] * len(node.ends)
            below = [*(child.length for child in node.children), *ends]
            apart = [node.length + length for length in below]
            saved = sum(map(padded, apart)) - padded(node.length)
            saved -= sum(padded(length) for length in below if length)
            if saved <= 0 or self.always:
                return saved > 0
            once = self.cost(node.length, depth=node.first)
            once += sum(self.cost(length, depth=node.stop) for length in below)
            return once < sum(self.cost(length, depth=node.first) for length in apart)

        return is_worth


@dataclass(frozen=True)
class Item:
    """Rollouts that are in one pack: one, or several with a common beginning.

    rows: of the budget; more than its padded tokens where keys are copied too often.
    """

    rollouts: tuple[int, ...]
    rows: int
    cost: float
    is_shared: bool


def plan_items(
    rollouts: Sequence[Rollout],
    packed: Sequence[int],
    lengths: Sequence[Sequence[int]],
    *,
    alignment: int,
    budget: int,
    sharing: Sharing,
) -> list[Item]:
    """Return the items of the rollouts at `packed`; an item of several has at most `budget` rows.

    lengths: of the sequences of each of them, without padding.
    """
    arrays: dict[int, np.ndarray] = {}
    paths = []
    for index, (first, *_) in zip(packed, lengths, strict=True):
        ids = rollouts[index].prompt.token_ids
        tokens = arrays.setdefault(id(ids), np.asarray(ids))
        paths.append(Path(index, tokens, max(0, min(len(ids), first) - 1), first))
    root = build_tree(paths, is_worth=sharing.is_worth(alignment))
    further = [sum(_padded(length, alignment) for length in others) for _, *others in lengths]
    costs = [sum(map(sharing.cost, others)) for _, *others in lengths]

    units: dict[Node, list[tuple[tuple[int, ...], int, float]]] = {}

    def find_units(node: Node, room: int) -> list[tuple[tuple[int, ...], int, float]]:
        """Return (sequences, rows, cost) of all below a node, cut to `room` rows each."""
        rows = _padded(node.length, alignment)
        cost = sharing.cost(node.length, depth=node.first)
        if node.ends:
            (end,) = node.ends
            copies = -(-node.stop // MOST_COPIES)
            return [((end,), max(rows, copies) + further[end], cost + costs[end])]
        below = [unit for child in node.children for unit in units[child]]
        return [
            (
                tuple(sorted(end for unit in one for end in unit[0])),
                rows + sum(unit[1] for unit in one),
                cost + sum(unit[2] for unit in one),
            )
            for one in _fewest(below, room - rows)
        ]

    rooms = {root: budget}
    for node in root.walk():  # a node before those below it
        used = 0 if node is root else _padded(node.length, alignment)
        rooms |= dict.fromkeys(node.children, rooms[node] - used)
    for node in reversed([*rooms][1:]):
        units[node] = find_units(node, rooms[node])
    return [
        Item(tuple(packed[end] for end in ends), rows, cost, bool(child.children))
        for child in root.children
        for ends, rows, cost in units[child]
    ]


def _padded(length: int, alignment: int) -> int:
    return -(-max(1, length) // alignment) * alignment


def _fewest(
    units: list[tuple[tuple[int, ...], int, float]], room: int
) -> list[list[tuple[tuple[int, ...], int, float]]]:
    """Divide units into as few sets as possible of at most `room` rows, about equal."""
    count = max(1, -(-sum(rows for _, rows, _ in units) // max(1, room)))
    while True:
        bins = longest_first([unit[1] for unit in units], bins=count)
        sets = [[units[i] for i in one] for one in bins if one]
        if count >= len(units) or max(sum(unit[1] for unit in one) for one in sets) <= room:
            return sets
        count += 1


def longest_first(weights: Sequence[float], *, bins: int) -> list[list[int]]:
    """Each item, heaviest first, into the emptiest of `bins` (Graham's LPT rule)."""
    heap: list[tuple[float, int]] = [(0, place) for place in range(bins)]
    packs: list[list[int]] = [[] for _ in range(bins)]
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, place = heapq.heappop(heap)
        packs[place].append(index)
        heapq.heappush(heap, (load + weights[index], place))
    return packs


def dense_items(
    packed: Sequence[int],
    lengths: Sequence[Sequence[int]],
    *,
    alignment: int,
    sharing: Sharing,
) -> list[Item]:
    """Return every rollout as an item of its own."""
    return [
        Item((index,), sum(_padded(one, alignment) for one in own), sum(map(sharing.cost, own)),
             False)
        for index, own in zip(packed, lengths, strict=True)
    ]  # fmt: skip


__all__ = ["ANY", "Item", "Sharing", "dense_items", "longest_first", "plan_items"]
