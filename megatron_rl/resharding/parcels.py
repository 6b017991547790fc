"""Messages in memory: one flat buffer of checksums and slices, copied in as few calls as possible.

A push of a large mixture of experts moves tens of thousands of slices per rank, and on CUDA the
host's time for each call is what that costs. A message's slices are therefore copied into its
buffer by one call for all of them, and written out in blocks: slices that follow each other in the
engine's parameter (the experts of a rank, gate and up) also follow each other in the message.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.resharding.slices import Slice

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

    buffer: that of its round, in bytes. elements: the same memory as elements. start, first: the
    bytes at which its checksums and its slices begin. sum_count: number of checksums. wire: its
    bytes in the buffer, without slices that are sent apart. separate: these, flat; at their source
    or destination, or in the buffer. outside: those of them that are not in the buffer, [h, w] by
    number.
    """

    message: Message
    places: Places
    buffer: Tensor
    elements: Tensor
    start: int
    first: int
    sum_count: int
    wire: Tensor
    separate: list[Tensor]
    outside: dict[int, Tensor]

    @property
    def wires(self) -> list[Tensor]:
        """Return the tensors to send."""
        return [self.wire, *self.separate]

    @property
    def layout(self) -> tuple[int, int]:
        """Return its bytes in the buffer and its number of checksums."""
        return self.wire.numel(), self.sum_count

    def matrix(self, number: int) -> Tensor:
        """Return one slice [h, w]."""
        if number in self.outside:
            return self.outside[number]
        owned = self.message.slices[number].owned
        (first, last), (left, right) = owned.rows, owned.columns
        return self.rows(number, last - first, right - left)

    def stacks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield runs of slices of equal shapes: the number of the first, and all [n, h, w]."""
        slices, starts = self.message.slices, self.places.starts
        apart, first = set(self.places.separate), 0
        for stop in range(1, len(slices) + 1):
            if stop < len(slices) and not apart.intersection((first, stop)):
                step = starts[first + 1] - starts[first]
                if (
                    slices[stop].owned.shape == slices[first].owned.shape
                    and starts[stop] == starts[first] + (stop - first) * step
                ):
                    continue
            matrix = self.matrix(first)
            if stop - first == 1:
                yield first, matrix[None]
            else:
                height, width = matrix.shape
                size = (stop - first, height, width)
                step = starts[first + 1] - starts[first]
                yield first, matrix.as_strided(size, (step, width, 1))
            first = stop

    def block(self, block: Block) -> Tensor:
        """Return the slices of a block as one rectangle [h, w]."""
        width = self.message.slices[block.first].needed.shape[1]
        return self.rows(block.first, block.height, width)

    def rows(self, number: int, height: int, width: int) -> Tensor:
        """Return the memory from a slice on as a matrix [height, width]."""
        start = self.first // self.elements.itemsize + self.places.starts[number]
        return self.elements.as_strided((height, width), (width, 1), start)


def stacked(block: Block, slices: Sequence[Slice], rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield slices of equal height in the `rows` [h, w] of a block, as `Parcel.stacks` does."""
    first, top = block.first, 0
    while first < block.stop:
        height = slices[first].needed.shape[0]
        stop = first + 1
        while stop < block.stop and slices[stop].needed.shape[0] == height:
            stop += 1
        of_run = rows.narrow(0, top, (stop - first) * height)
        yield first, of_run.unflatten(0, (stop - first, height))
        first, top = stop, top + (stop - first) * height


def runs_of_equal_layout(parcels: Sequence[Parcel]) -> Iterator[list[Parcel]]:
    """Yield parcels that follow each other with equal layouts; those sent in parts come alone."""
    run: list[Parcel] = []
    for parcel in parcels:
        if run and (parcel.layout != run[0].layout or parcel.separate or run[0].separate):
            yield run
            run = []
        run.append(parcel)
    if run:
        yield run


def copy_all(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Copy matrices, in one call for those that are contiguous and one for the others."""
    contiguous: tuple[list[Tensor], list[Tensor]] = [], []
    others: tuple[list[Tensor], list[Tensor]] = [], []
    for to, of in zip(destinations, sources, strict=True):
        chosen = contiguous if of.is_contiguous() and to.is_contiguous() else others
        chosen[0].append(to)
        chosen[1].append(of)
    for copied, copies in (contiguous, others):
        if copied:
            torch._foreach_copy_(copied, copies)
