"""Messages in memory: one flat buffer of checksums and slices, copied in as few calls as possible.

A push of a large mixture of experts moves tens of thousands of slices per rank, and on CUDA the
host's time for each call is what that costs. A message's slices are therefore copied into its
buffer by one call for all of them, and written out in blocks: slices that follow each other in the
engine's parameter (the experts of a rank, gate and up) also follow each other in the message.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.resharding.senders import Slice

ALIGNMENT = 8  # elements


class Block(NamedTuple):
    """Slices `first` to `stop` of a message: one rectangle of the engine's parameter."""

    first: int
    stop: int
    top: int
    height: int


class Places(NamedTuple):
    """Positions of the slices of a message in its buffer.

    starts: element at which each begins. size: elements of all. separate: the numbers of the slices
    that are sent without the buffer; their places in it come last, from `end` on, for ranks that
    need them there.
    """

    starts: list[int]
    size: int
    end: int
    separate: list[int]
    blocks: list[Block]


@dataclass(frozen=True)
class Message:
    """Slices from one rank to others that need all of them, as seen by one of these ranks.

    sender: the rank that sends it to this one: the source, or a rank of this node that forwards it.
    to: the ranks that this rank sends it to; a destination forwards it as soon as it has arrived.
    destinations: all ranks that receive it.
    """

    source: int
    sender: int
    to: tuple[int, ...]
    destinations: tuple[int, ...]
    slices: list[Slice] = field(default_factory=list)
    _places: dict[int | None, Places] = field(default_factory=dict, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(each.size for each in self.slices)

    def places(self, *, separate_from: int | None) -> Places:
        """Return the places of the slices, computed once; `separate_from` is in elements."""
        if separate_from not in self._places:
            self._places[separate_from] = _find_places(self.slices, separate_from)
        return self._places[separate_from]


def _find_places(slices: Sequence[Slice], separate_from: int | None) -> Places:
    starts, separate, at, end = [0] * len(slices), list[int](), 0, 0
    if separate_from is not None:
        separate = [n for n, each in enumerate(slices) if each.size >= separate_from]
    apart = set(separate)
    for number in (*(n for n in range(len(slices)) if n not in apart), *separate):
        starts[number] = at
        at += -(-slices[number].size // ALIGNMENT) * ALIGNMENT
        end = end if number in apart else at
    blocks = list[Block]()
    for number, each in enumerate(slices):
        height = each.needed.shape[0]
        if blocks and _continues(slices, number, blocks[-1], starts, apart):
            first, _, top, so_far = blocks[-1]
            blocks[-1] = Block(first, number + 1, top, so_far + height)
        else:
            blocks.append(Block(number, number + 1, each.needed.top, height))
    return Places(starts, at, end, separate, blocks)


def _continues(
    slices: Sequence[Slice], number: int, block: Block, starts: list[int], apart: set[int]
) -> bool:
    """Return whether a slice follows a block, in the engine's parameter and in the buffer."""
    before, needed = slices[number - 1], slices[number].needed
    return (
        needed.parameter == before.needed.parameter
        and needed.top == block.top + block.height
        and needed.left == before.needed.left
        and needed.shape[1] == before.needed.shape[1]
        and starts[number] == starts[number - 1] + before.size
        and not apart.intersection((number - 1, number))
    )


@dataclass(frozen=True)
class Parcel:
    """A message in memory.

    values: its slices, flat, as laid out in `places`. outside: slices [h, w] outside the buffer, at
    their source or destination, by number. payload: all slices, flat. wires: the tensors to send:
    checksums and payload.
    """

    message: Message
    places: Places
    values: Tensor
    outside: dict[int, Tensor]
    sums: Tensor  # int64
    payload: list[Tensor]
    wires: list[Tensor]

    def matrix(self, number: int) -> Tensor:
        """Return one slice [h, w]."""
        if number in self.outside:
            return self.outside[number]
        each = self.message.slices[number]
        return self.values.narrow(0, self.places.starts[number], each.size).view(each.owned.shape)

    def block(self, block: Block) -> Tensor:
        """Return the slices of a block as one rectangle [h, w]."""
        width = self.message.slices[block.first].needed.shape[1]
        start = self.places.starts[block.first]
        return self.values.narrow(0, start, block.height * width).view(block.height, width)


def copy_all(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Copy matrices, in one call for those that are contiguous and one for the others."""
    pairs = list(zip(destinations, sources, strict=True))
    for contiguous in (True, False):
        chosen = [(to, of) for to, of in pairs if of.is_contiguous() == contiguous]
        if chosen:
            torch._foreach_copy_([to for to, _ in chosen], [of for _, of in chosen])
