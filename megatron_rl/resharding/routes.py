"""Routes of slices between ranks: who sends, who receives from another node, who forwards.

All slices that the same ranks have and the same ranks need share one `Pattern`, computed once.
Several possible senders take turns, and each slice goes on where the last one ended: three nodes
that lack what four replicas have are served by another three of the four each time, eight nodes
always by the same ones, so that few pairs of ranks are connected.

A slice can be sent in several shares, each to other nodes (`senders.py` has the reason).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

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


class Turn:
    """The paths of one slice, and what they ask of each rank.

    messages: the number of messages that each rank sends or receives, [ranks]; one that it sends to
    several counts once. receives: whether each rank receives the slice, [ranks].
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
        self._known: dict[tuple[int, Share], Turn] = {}
        self._whole: dict[int, list[Path]] = {}

    def turn(self, number: int, share: Share = WHOLE) -> Turn:
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
            self._known[key] = Turn(paths, self.world_size)
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
