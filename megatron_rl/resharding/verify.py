"""What is verified: the shapes of what is sent, and that what arrives is what was sent.

A message ends with the sum of its words, which its sender took, at memory speed; whoever receives
it adds them up again. A full check adds a checksum of every slice that also sees rows or columns in
wrong places, read where the receiver hands the slice to the engine: with bits b[r, c] of the
elements as integers,

    sum_r (r + 1) K sum_c b[r, c]  +  sum_c (c + 1) K' sum_r b[r, c]      modulo 2^64.

Sums stay on the device; all of them are read at once, when the push is over.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megatron_rl.resharding.layouts import ActorLayout
from megatron_rl.resharding.pieces import Piece, parameter_shapes
from megatron_rl.resharding.plan import Message, RankPlan
from megatron_rl.resharding.senders import Slice

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd, so that multiplication modulo 2^64 loses nothing; within int64 (2^64 / golden ratio, halved).
_ROW_FACTOR = 0x4F1BBCDCBFA53E0B
_COLUMN_FACTOR = 0x27BB2EE687B0B0FD
SUM_BYTES = 8


def check_parameters(
    parameters: Mapping[str, Tensor], pieces: tuple[Piece, ...], *, layout: ActorLayout
) -> None:
    """Raise ValueError naming every local parameter that is missing, extra or of a wrong shape.

    Rows beyond the pieces are allowed: they pad the vocabulary.
    """
    shapes = parameter_shapes(pieces)
    problems = [f"{name} is missing" for name in shapes.keys() - parameters.keys()]
    for name, parameter in parameters.items():
        height, width = parameter.shape[0], parameter[0].numel() if parameter.dim() > 1 else 1
        padded = "word_embeddings" in name or "output_layer" in name
        if name not in shapes:
            if not padded:  # a shard of the vocabulary may be padding altogether
                problems.append(f"{name} {tuple(parameter.shape)} is unknown to the table")
        elif width != shapes[name][1] or not (
            height == shapes[name][0] or (padded and height > shapes[name][0])
        ):
            problems.append(
                f"{name} has shape {tuple(parameter.shape)}, the table says {shapes[name]}"
            )
    if problems:
        raise ValueError(f"parameters of {layout}: " + "; ".join(sorted(problems)))


def word_sum(flat: Tensor) -> Tensor:
    """Sum of a flat contiguous tensor read as 64-bit words, zero-padded; int64 scalar."""
    data = flat.view(torch.uint8)
    whole = data.numel() // 8 * 8
    if data.storage_offset() % 8:
        data = data.clone()
    total = data[:whole].view(torch.int64).sum()
    if whole < data.numel():
        rest = data.new_zeros(8)
        rest[: data.numel() - whole] = data[whole:]
        total = total + rest.view(torch.int64)[0]
    return total


def slice_checksum(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Position-dependent checksum of a matrix [h, w], int64 scalar, equal on every device.

    dtype: read the elements in this one. Works on blocks of rows: no copy of the matrix is made.
    """
    height, width = matrix.shape
    count = torch.arange(1, max(height, width) + 1, device=matrix.device)
    by_column = torch.zeros(width, dtype=torch.int64, device=matrix.device)
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    step = max(1, block_elements(matrix.device) // max(1, width))
    for start in range(0, height, step):
        block = matrix[start : start + step].to(dtype or matrix.dtype).contiguous()
        bits = block.view(_INTEGERS[block.dtype.itemsize])
        rows = bits.sum(1, dtype=torch.int64)
        total += (rows * count[start : start + len(rows)] * _ROW_FACTOR).sum()
        by_column += bits.sum(0, dtype=torch.int64)
    return total + (by_column * count[:width] * _COLUMN_FACTOR).sum()


def block_elements(device: torch.device) -> int:
    """Elements of a block: what a CPU's cache holds; elsewhere enough to be worth a kernel."""
    return 1 << (16 if device.type == "cpu" else 24)


class Ledger:
    """Sums of everything that this rank receives: as its sender took them, and as found here.

    full: of every slice too, those that stay within the rank included. dtype: the engine's.
    """

    def __init__(
        self, plan: RankPlan, *, full: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.full, self.dtype = full, dtype
        self._places: dict[int, int] = {}  # by id of the Message or the Slice
        self._tensors: list[tuple[str, ...]] = []  # that the sum in each place stands for
        for part in plan.rounds:
            for message in part.receives:
                names = tuple(dict.fromkeys(each.tensor for each in message.slices))
                self._places[id(message)] = len(self._tensors)
                self._tensors.append(names)
                self._add(message.slices)
        for slices in plan.local.values():
            self._add(slices)
        # One tensor for all sums: kept one by one they would scatter over the heap and pin it.
        self._told, self._found = torch.zeros(
            2, len(self._tensors), dtype=torch.int64, device=device
        )

    def _add(self, slices: Iterable[Slice]) -> None:
        for each in slices if self.full else ():
            self._places[id(each)] = len(self._tensors)
            self._tensors.append((each.tensor,))

    def sums_of(self, message: Message) -> int:
        """How many sums travel with a message: its own, and those of its slices in a full check."""
        return 1 + len(message.slices) * self.full

    def seal(self, sums: Tensor, wires: Iterable[Tensor], matrices: Iterable[Tensor]) -> None:
        """Write the `sums` of a message: of what it is made of on the wire, and of its slices."""
        sums[0] = _total(wires)
        if self.full:
            for place, matrix in enumerate(matrices, start=1):
                sums[place] = slice_checksum(matrix, self.dtype)

    def note_message(self, message: Message, sums: Tensor, wires: Iterable[Tensor]) -> None:
        """A message as it arrived, with the sums that came with it."""
        place = self._places[id(message)]
        self._told[place : place + len(sums)] = sums
        self._found[place] = _total(wires)

    def note_local(self, slice_: Slice, matrix: Tensor) -> None:
        """A slice that stays within this rank as the actor holds it; ignored but in full checks."""
        if self.full:
            self._told[self._places[id(slice_)]] = slice_checksum(matrix, self.dtype)

    def note_slice(self, slice_: Slice, matrix: Tensor) -> None:
        """A slice as the engine is given it; ignored but in full checks."""
        if self.full:
            self._found[self._places[id(slice_)]] = slice_checksum(matrix)

    def changed(self) -> list[str]:
        """The tensors that are not what was sent, sorted; waits for the device, once."""
        differs = (self._told != self._found).tolist()
        wrong = {names for names, found in zip(self._tensors, differs, strict=True) if found}
        # A slice names its tensor; a message only says that one of its tensors is wrong.
        single = {names for names in wrong if len(names) == 1}
        return sorted({name for names in single or wrong for name in names})


def _total(wires: Iterable[Tensor]) -> Tensor:
    return torch.stack([word_sum(wire) for wire in wires]).sum()
