"""Slices of a push, and the steps in which they are sent.

`senders.py` has their order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_rl.resharding.pieces import Piece, Span
from megatron_rl.resharding.routes import Pattern, Share, Turn

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
class Step:
    """Blocks that are sent together, to all ranks that need them or to a share of these.

    A block is a whole tensor or some of its rows; a step for a loader has a single one.
    """

    blocks: tuple["Block", ...]
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


class Cut(NamedTuple):
    """A part without names: its rectangle, the indices of its pieces, its routes."""

    rows: Span
    columns: Span
    size: int
    owned: int
    needed: int
    pattern: Pattern


class Block(NamedTuple):
    """Rows of a tensor: their cuts, with the pieces that these index and the turn of each."""

    tensor: str
    owned: Sequence[Mapping[int, Piece]]
    needed: Sequence[Piece]
    cuts: Sequence[Cut]
    turns: tuple[int, ...]


def split_into_blocks(cuts: Sequence[Cut], block_elements: int | None) -> list[list[Cut]]:
    """Split a tensor's cuts into blocks of rows; a tensor that no rank needs has one, empty."""
    count = 1
    if cuts and block_elements:
        turns = [cut.pattern.turn(0) for cut in cuts]
        messages = np.stack([turn.messages for turn in turns])  # [cuts, ranks]
        busiest = int((np.array([cut.size for cut in cuts]) @ messages).max())
        room = block_elements - SLICE_EXTRA * int(messages.sum(0).max())
        # Without room for the extras of all parts, each row is a block.
        count = -(-busiest // room) if room > 0 else busiest
    blocks: list[list[Cut]] = []
    for cut in cuts:
        for number, block in enumerate(_row_blocks(cut, count)):
            if number == len(blocks):
                blocks.append([])
            blocks[number].append(block)
    return blocks or [[]]


def _row_blocks(whole: Cut, count: int) -> Iterator[Cut]:
    """Split into at most `count` blocks of rows, at least one row each."""
    (start, stop), width = whole.rows, whole.columns[1] - whole.columns[0]
    step = max(1, (stop - start) // max(1, count))
    for row in range(start, stop, step):
        rows = (row, min(row + step, stop))
        yield whole._replace(rows=rows, size=(rows[1] - rows[0]) * width)


NOTHING = Loads(np.zeros(0), np.zeros(0), np.zeros(0), 0, 0, 1)
