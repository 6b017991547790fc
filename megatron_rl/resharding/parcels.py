"""Messages in memory: one flat buffer of checksums and slices, copied in as few calls as possible.

A push of a large mixture of experts moves tens of thousands of slices per rank, and on CUDA the
host's time for each call is what that costs. A message's slices are therefore copied into its
buffer by one call for all of them, and written out in runs: slices of equal shapes that follow each
other in the engine's parameter (the experts of a rank, gate and up) also follow each other in the
message.
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


class Run(NamedTuple):
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

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(each.size for each in self.slices)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """HF names."""
        return tuple(dict.fromkeys(each.tensor for each in self.slices))

    @cached_property
    def runs(self) -> list[Run]:
        """Return the runs of its slices, computed once all are in it."""
        runs, end = list[Run](), 0
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
            runs.append(Run(number, number + 1, start, height, width, *place))
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


@dataclass(slots=True)
class Parcel:
    """A message in memory.

    frame: its places. buffer: that of its round, in bytes. elements: the same memory as elements.
    wire: its bytes in the buffer, to send or receive.
    """

    frame: Frame
    buffer: Tensor
    elements: Tensor
    wire: Tensor

    @property
    def message(self) -> Message:
        """Return the message."""
        return self.frame.message

    @property
    def layout(self) -> tuple[int, int]:
        """Return its bytes in the buffer and its number of checksums."""
        return self.frame.stop - self.frame.start, self.frame.sum_count

    def runs(self) -> Iterator[tuple[Run, Tensor]]:
        """Yield each run with its slices in the buffer, [n, h, w]."""
        offset = self.frame.first // self.elements.itemsize
        for run in self.message.runs:
            size, strides = (run.stop - run.first, run.height, run.width), (run.width, 1)
            start = offset + run.start
            yield run, self.elements.as_strided(size, (run.height * run.width, *strides), start)


def groups_of_equal_layout(parcels: Sequence[Parcel]) -> Iterator[list[Parcel]]:
    """Yield parcels that follow each other with equal layouts."""
    group: list[Parcel] = []
    for parcel in parcels:
        if group and parcel.layout != group[0].layout:
            yield group
            group = []
        group.append(parcel)
    if group:
        yield group


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
