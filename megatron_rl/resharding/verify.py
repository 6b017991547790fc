"""Verification of a weight transfer: shapes before sending, checksums after arrival.

A message contains the sum of its words, computed by its sender at memory speed; each receiver
computes it again. A full check adds a checksum of every slice, which also detects rows or columns
in wrong positions, computed where the receiver passes the slice to the engine: with bits b[r, c] of
the elements as integers,

    sum_r (r + 1) K sum_c b[r, c]  +  sum_c (c + 1) K' sum_r b[r, c]      modulo 2^64.

Sums stay on the device; all of them are read together at the end of the transfer.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl.resharding.adapted import LocalWeight
from megatron_rl.resharding.layouts import ActorLayout
from megatron_rl.resharding.parcels import SUM_BYTES, Parcel, groups_of_equal_layout
from megatron_rl.resharding.pieces import Piece, parameter_shapes
from megatron_rl.resharding.push_schedule import RankPlan
from megatron_rl.resharding.slices import Slice

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd, so that multiplication modulo 2^64 loses nothing; within int64 (2^64 / golden ratio, halved).
_ROW_FACTOR = 0x4F1BBCDCBFA53E0B
_COLUMN_FACTOR = 0x27BB2EE687B0B0FD


def check_parameters(
    parameters: Mapping[str, LocalWeight], pieces: tuple[Piece, ...], *, layout: ActorLayout
) -> None:
    """Raise ValueError naming every local parameter that is missing, extra or of a wrong shape.

    Rows beyond the pieces are allowed as padding of the vocabulary.
    """
    shapes = parameter_shapes(pieces)
    problems = [f"{name} is missing" for name in shapes.keys() - parameters.keys()]
    for name, parameter in parameters.items():
        height, width = parameter.shape[0], math.prod(parameter.shape[1:])
        padded = "word_embeddings" in name or "output_layer" in name
        if name not in shapes:
            if not padded:  # a shard of the vocabulary may be padding only
                problems.append(f"{name} {tuple(parameter.shape)} is not expected")
        elif width != shapes[name][1] or not (
            height == shapes[name][0] or (padded and height > shapes[name][0])
        ):
            problems.append(f"{name} has shape {tuple(parameter.shape)}, expected {shapes[name]}")
    if problems:
        raise ValueError(f"parameters of {layout}: " + "; ".join(sorted(problems)))


def slice_checksum(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Compute a position-dependent checksum of a matrix [h, w]: int64 scalar, device-independent.

    dtype: convert the elements to it first.
    """
    return slice_checksums(matrix[None], dtype)[0]


def slice_checksums(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the checksum of each matrix [n, h, w]: int64 [n].

    Works on blocks of rows, without copying the matrices.
    """
    number, height, width = matrices.shape
    step = max(1, block_elements(matrices.device) // max(1, number * width))
    of_rows, of_columns = [], 0
    for part in matrices.split(step, dim=1):
        block = part.to(dtype or matrices.dtype).contiguous()
        bits = block.view(_INTEGERS[block.dtype.itemsize])
        of_rows.append(bits.sum(2, dtype=torch.int64))
        of_columns = bits.sum(1, dtype=torch.int64) + of_columns
    rows = of_rows[0] if len(of_rows) == 1 else torch.cat(of_rows, dim=1)
    down, across = _place_factors(1 << (max(height, width) - 1).bit_length(), matrices.device)
    return (rows * down[:height]).sum(1) + (of_columns * across[:width]).sum(1)


@functools.lru_cache(maxsize=32)
def _place_factors(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the factors of rows and of columns, int64 [count] each.

    They are kept because a full check needs them for thousands of slices; `count` is a power of
    two, so that few sizes take memory. Valid on the stream that asked for them first.
    """
    places = torch.arange(1, count + 1, device=device)
    return places * _ROW_FACTOR, places * _COLUMN_FACTOR


def block_elements(device: torch.device) -> int:
    """Return the elements of a block: a CPU's cache; elsewhere enough to amortize a kernel."""
    return 1 << (16 if device.type == "cpu" else 24)


class Ledger:
    """Sums of everything that this rank receives, from the sender and computed here.

    full: also of every slice, including those that stay within the rank. dtype: the engine's.
    """

    def __init__(
        self, plan: RankPlan, *, full: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.full, self.dtype = full, dtype
        self._indices: dict[int, int] = {}  # by id of the Message or the Slice
        self._tensors: list[tuple[str, ...]] = []  # covered by the sum at each index
        for part in plan.rounds:
            for message in part.receives:
                self._indices[id(message)] = len(self._tensors)
                self._tensors.append(message.tensors)
                self._add(message.slices)
        for slices in plan.local.values():
            self._add(slices)
        # One tensor for all sums: separate ones would fragment the heap.
        self._expected, self._actual = torch.zeros(
            2, len(self._tensors), dtype=torch.int64, device=device
        )

    def _add(self, slices: Iterable[Slice]) -> None:
        for each in slices if self.full else ():
            self._indices[id(each)] = len(self._tensors)
            self._tensors.append((each.tensor,))

    def seal(self, parcels: Sequence[Parcel]) -> None:
        """Compute the sums of messages: of their tensors on the wire, and of their slices."""
        for group in groups_of_equal_layout(parcels):
            _sums(group)[:, 0] = _totals(group)
        for parcel in parcels if self.full else ():
            of_slices = _sums([parcel])[0, 1:]
            for run, matrices in parcel.runs():
                of_slices[run.first : run.stop] = slice_checksums(matrices, self.dtype)

    def note_messages(self, parcels: Sequence[Parcel]) -> None:
        """Record messages that arrived, in the order of the plan, and the sums in them."""
        for group in groups_of_equal_layout(parcels):
            first, size = self._indices[id(group[0].message)], group[0].frame.sum_count
            stop = first + len(group) * size
            self._expected[first:stop].view(len(group), size).copy_(_sums(group))
            self._actual[first:stop:size] = _totals(group)

    def note_local(self, slice_: Slice, matrix: Tensor) -> None:
        """Record a slice that stays within this rank, as the actor has it; only in full checks."""
        if self.full:
            self._expected[self._indices[id(slice_)]] = slice_checksum(matrix, self.dtype)

    def note_slices(self, first: Slice, matrices: Tensor) -> None:
        """Record a message's slices [n, h, w], `first` and those after it, as the engine has them.

        Only in full checks.
        """
        if self.full:
            index = self._indices[id(first)]
            self._actual[index : index + len(matrices)] = slice_checksums(matrices, self.dtype)

    def changed(self) -> list[str]:
        """Return the sorted names of tensors that differ from those sent; waits for the device."""
        differs = (self._expected != self._actual).tolist()
        changed = {
            names
            for names, is_different in zip(self._tensors, differs, strict=True)
            if is_different
        }
        # A slice identifies its tensor; a message only that one of its tensors changed.
        single = {names for names in changed if len(names) == 1}
        return sorted({name for names in single or changed for name in names})


def _sums(group: list[Parcel]) -> Tensor:
    """Return the sums in parcels of equal layout, as a view of the buffer [parcels, sums]."""
    words, frame = group[0].buffer.view(torch.int64), group[0].frame
    return words.as_strided(
        (len(group), frame.sum_count), (_stride(group), 1), frame.start // SUM_BYTES
    )


def _totals(group: list[Parcel]) -> Tensor:
    """Compute the sum of the words of the slices of parcels of equal layout: int64 [parcels]."""
    words, frame = group[0].buffer.view(torch.int64), group[0].frame
    size = (len(group), (frame.stop - frame.first) // SUM_BYTES)
    return words.as_strided(size, (_stride(group), 1), frame.first // SUM_BYTES).sum(1)


def _stride(group: list[Parcel]) -> int:
    return (group[0].frame.stop - group[0].frame.start) // SUM_BYTES
