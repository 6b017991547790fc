"""Messages in memory: one flat buffer of checksums and slices, copied in as few calls as possible.

A push of a large mixture of experts moves tens of thousands of slices per rank, and on CUDA the
host's time for each call is what that costs. A message's slices are therefore copied into its
buffer by one call for all of them, and written out in blocks: slices that follow each other in the
engine's parameter (the experts of a rank, gate and up) also follow each other in the message.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.resharding.slices import Slice

ALIGNMENT = 8  # elements
WIRE_ALIGNMENT = 16  # bytes
SUM_BYTES = 8


class Block(NamedTuple):
    """Slices `first` to `stop` of a message: one rectangle of the engine's parameter.

    start: its first element in the message's buffer.
    """

    first: int
    stop: int
    parameter: str
    start: int
    height: int
    width: int
    top: int
    left: int


class Stack(NamedTuple):
    """Slices `first` to `stop` of a message, of equal shapes [height, width].

    step: elements from the start of one to that of the next.
    """

    first: int
    stop: int
    step: int
    height: int
    width: int


class Places(NamedTuple):
    """Positions of the slices of a message in its buffer.

    starts: element at which each begins. size: elements of all. separate: the numbers of the slices
    that are sent without the buffer; their places in it come last, from `end` on, for ranks that
    need them there. stacks: all slices; those that are sent without the buffer come alone.
    """

    starts: list[int]
    size: int
    end: int
    separate: list[int]
    blocks: list[Block]
    stacks: list[Stack]


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

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """HF names."""
        return tuple(dict.fromkeys(each.tensor for each in self.slices))

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
        at += _room(slices[number])
        end = end if number in apart else at
    blocks = list[Block]()
    for number, each in enumerate(slices):
        needed, (height, width) = each.needed, each.needed.shape
        if blocks and _continues(slices, number, blocks[-1], starts, apart):
            so_far = blocks[-1]
            blocks[-1] = so_far._replace(stop=number + 1, height=so_far.height + height)
        else:
            rectangle = (height, width, needed.top, needed.left)
            blocks.append(Block(number, number + 1, needed.parameter, starts[number], *rectangle))
    return Places(starts, at, end, separate, blocks, _find_stacks(slices, apart))


def _find_stacks(slices: Sequence[Slice], apart: set[int]) -> list[Stack]:
    stacks = list[Stack]()
    for number, each in enumerate(slices):
        height, width = each.owned.shape
        # Of equal slices either all are sent apart or none.
        if stacks and stacks[-1][3:] == (height, width) and number not in apart:
            stacks[-1] = stacks[-1]._replace(stop=number + 1)
        else:
            stacks.append(Stack(number, number + 1, _room(each), height, width))
    return stacks


def _room(slice_: Slice) -> int:
    """Return the elements from the start of a slice to that of the next."""
    return -(-slice_.size // ALIGNMENT) * ALIGNMENT


def _continues(
    slices: Sequence[Slice], number: int, block: Block, starts: list[int], apart: set[int]
) -> bool:
    """Return whether a slice follows a block, in the engine's parameter and in the buffer."""
    before, needed = slices[number - 1], slices[number].needed
    return (
        needed.parameter == block.parameter
        and needed.top == block.top + block.height
        and needed.left == block.left
        and needed.shape[1] == block.width
        and starts[number] == starts[number - 1] + before.size
        and not apart.intersection((number - 1, number))
    )


class Frame(NamedTuple):
    """The places of a message in the buffer of its round.

    start, first: the bytes at which its checksums and its slices begin. end: that after what is
    sent from the buffer; stop: that after the places of slices sent apart. sum_count: number of
    checksums: its own, and those of its slices in a full check.
    """

    message: Message
    places: Places
    start: int
    first: int
    end: int
    stop: int
    sum_count: int


def frames_of(
    messages: Iterable[Message], full: bool, separate_from: int | None, itemsize: int
) -> list[Frame]:
    """Lay out messages, each with its sums, its slices in the buffer, then those sent apart.

    full: with a sum of each slice. separate_from: elements from which a slice is sent apart.
    itemsize: bytes of an element.
    """
    frames, start = list[Frame](), 0
    for message in messages:
        places = message.places(separate_from=separate_from)
        sum_count = 1 + len(message.slices) * full
        first = start + _aligned(SUM_BYTES * sum_count)
        end, stop = first + places.end * itemsize, first + _aligned(places.size * itemsize)
        frames.append(Frame(message, places, start, first, end, stop, sum_count))
        start = stop
    return frames


def _aligned(size: int) -> int:
    return -(-size // WIRE_ALIGNMENT) * WIRE_ALIGNMENT


@dataclass(slots=True)
class Parcel:
    """A message in memory.

    frame: its places. buffer: that of its round, in bytes. elements: the same memory as elements.
    wire: its bytes in the buffer, without slices that are sent apart. separate: these, flat; at
    their source or destination, or in the buffer. outside: those of them that are not in the
    buffer, [h, w] by number.
    """

    frame: Frame
    buffer: Tensor
    elements: Tensor
    wire: Tensor
    separate: list[Tensor]
    outside: dict[int, Tensor]

    @property
    def message(self) -> Message:
        """Return the message."""
        return self.frame.message

    @property
    def wires(self) -> list[Tensor]:
        """Return the tensors to send."""
        return [self.wire, *self.separate]

    @property
    def layout(self) -> tuple[int, int]:
        """Return its bytes in the buffer and its number of checksums."""
        return self.frame.end - self.frame.start, self.frame.sum_count

    def matrix(self, number: int) -> Tensor:
        """Return one slice [h, w]."""
        if number in self.outside:
            return self.outside[number]
        height, width = self.message.slices[number].owned.shape
        start = self._offset + self.frame.places.starts[number]
        return self.elements.as_strided((height, width), (width, 1), start)

    def stacks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield runs of slices of equal shapes: the number of the first, and all [n, h, w]."""
        offset, places = self._offset, self.frame.places
        for first, stop, step, height, width in places.stacks:
            if first in self.outside:
                yield first, self.outside[first][None]
            else:
                size, strides = (stop - first, height, width), (step, width, 1)
                start = offset + places.starts[first]
                yield first, self.elements.as_strided(size, strides, start)

    def blocks(self) -> list[Tensor]:
        """Return the slices of each block in the buffer as one rectangle [h, w]."""
        view, offset = self.elements.as_strided, self._offset
        return [
            view((height, width), (width, 1), offset + start)
            for first, _, _, start, height, width, _, _ in self.frame.places.blocks
            if first not in self.outside
        ]

    @property
    def _offset(self) -> int:
        """The element at which its slices begin."""
        return self.frame.first // self.elements.itemsize


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
