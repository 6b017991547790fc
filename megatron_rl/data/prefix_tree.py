"""Common beginnings of sequences, as segments that a pack computes once.

A tree of token sequences: every node is a run of tokens, and a sequence is the path from the root
to its leaf. Each node becomes a segment of the pack, which continues the segment of the node above.

A decision, a position whose next token is sampled, belongs to one response: it has one log-prob,
and its weight depends on that response's t and L. So several responses share only tokens before
their first decision, their free beginning. A response whose history was replaced also shares what
it sampled with its own later sequences, in which the same tokens are observed. Where two responses
happen to sample the same tokens, each keeps its own: as many losses as responses.

The last token of a prompt predicts the first sampled one. It is the first token of each response's
own segment, so every label, mask and log-prob stays with the token that predicts it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

ANY = -1  # owner of a node without decisions, which any response may share


@dataclass(frozen=True)
class Path:
    """A sequence of `length` tokens that predict one.

    owner: its response. tokens: at least the first `free`, which are before its last token and not
    after its first decision.
    """

    owner: int
    tokens: np.ndarray
    free: int
    length: int


@dataclass(eq=False)
class Node:
    """A run [first, stop) of the tokens of sequence `source`, and all that continue it.

    owner: the response whose decisions it may have, or ANY.
    """

    source: int
    first: int
    stop: int
    owner: int
    children: list[Node] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # sequences whose last token is here
    by_token: dict[Hashable, Node] = field(default_factory=dict)  # by owner and first token

    @property
    def length(self) -> int:
        """Number of its own tokens."""
        return self.stop - self.first

    def walk(self) -> Iterator[Node]:
        """Yield this node and all its descendants, each node before its descendants."""
        waiting = [self]  # no recursion: prompts that grow word by word are thousands of nodes deep
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children)


class Segment(NamedTuple):
    """A node in the order of a pack."""

    source: int  # sequence whose tokens [first, stop) it has
    first: int
    stop: int
    owner: int  # response, or ANY
    parent: int  # an earlier segment, -1 for none
    readers: tuple[int, ...]  # sequences that begin with it or have it within


def build_tree(paths: Sequence[Path], *, is_worth: Callable[[Node], bool]) -> Node:
    """Return the root, without tokens, of the tree of all sequences.

    is_worth: of a node that several continue, whether it is computed once; otherwise each of them
    begins with its tokens.
    """
    root = Node(-1, 0, 0, ANY)
    for index, path in enumerate(paths):
        _insert(root, index, paths)
        assert 0 <= path.free <= max(0, path.length - 1), "a sequence's last token is its own"
    for node in reversed([*root.walk()]):  # from the leaves up
        _merge(node, is_worth)
    return root


def list_segments(root: Node, paths: Sequence[Path]) -> list[Segment]:
    """Return all nodes, each after the node that it continues.

    The segments of a response follow one another in the order of its decisions.
    """
    routes = _trace(root)
    readers: dict[Node, list[int]] = {}
    for index in range(len(paths)):
        for node in routes[index]:
            readers.setdefault(node, []).append(index)
    by_owner: dict[int, list[int]] = {}
    for index, path in enumerate(paths):
        by_owner.setdefault(path.owner, []).append(index)
    places: dict[Node, int] = {}
    segments: list[Segment] = []
    for own in by_owner.values():
        nodes = [
            (node, parent)
            for index in own
            for node, parent in zip(routes[index], [None, *routes[index]], strict=False)
        ]
        shared = [pair for pair in nodes if pair[0].owner == ANY]
        for node, parent in (*shared, *(pair for pair in nodes if pair[0].owner != ANY)):
            if node not in places:
                place = -1 if parent is None else places[parent]
                places[node] = len(segments)
                segments.append(
                    Segment(node.source, node.first, node.stop, node.owner, place,
                            tuple(readers[node]))
                )  # fmt: skip
    return segments


def _trace(root: Node) -> dict[int, list[Node]]:
    """Find the nodes of each sequence, below the root."""
    parents = {child: node for node in root.walk() for child in node.children}
    routes: dict[int, list[Node]] = {}
    for last in parents:
        if last.ends:
            node, route = last, []
            while node is not root:
                route.append(node)
                node = parents[node]
            routes.update(dict.fromkeys(last.ends, route[::-1]))
    return routes


def _insert(root: Node, index: int, paths: Sequence[Path]) -> None:
    """Add a sequence: down the nodes that it shares, then its free rest and what it owns."""
    path, node, depth = paths[index], root, 0
    while depth < path.free:
        keys = ((owner, int(path.tokens[depth])) for owner in (ANY, path.owner))
        found = next((node.by_token[key] for key in keys if key in node.by_token), None)
        if found is None:
            break
        end = min(found.stop, path.free)
        same = paths[found.source].tokens[depth:end] == path.tokens[depth:end]
        depth = end if same.all() else depth + int(same.argmin())
        node = found if depth == found.stop else _split(node, found, depth, paths)
    if depth < path.free:
        node = _add(node, Node(index, depth, path.free, node.owner), paths)
    _add(node, Node(index, node.stop, path.length, path.owner, ends=[index]), paths)


def _add(parent: Node, node: Node, paths: Sequence[Path]) -> Node:
    parent.children.append(node)
    tokens = paths[node.source].tokens
    if node.first < len(tokens):
        parent.by_token.setdefault((node.owner, int(tokens[node.first])), node)
    return node


def _split(parent: Node, node: Node, place: int, paths: Sequence[Path]) -> Node:
    """Cut a node at a token and return its first part, which takes its place."""
    upper = Node(node.source, node.first, place, node.owner)
    parent.children[parent.children.index(node)] = upper
    parent.by_token[upper.owner, int(paths[upper.source].tokens[upper.first])] = upper
    node.first = place
    _add(upper, node, paths)
    return upper


def _merge(node: Node, is_worth: Callable[[Node], bool]) -> None:
    """Give a node's tokens to those that continue it where sharing them gains nothing.

    Called from the leaves up, so that `is_worth` sees what was decided below.
    """
    children: list[Node] = []
    for child in node.children:
        users = len(child.children) + len(child.ends)
        if not child.children or (users > 1 and is_worth(child)):
            children.append(child)
            continue
        for one in child.children:
            one.first = child.first
        children += child.children
        if child.ends:
            child.children = []
            children.append(child)
    node.children = children
