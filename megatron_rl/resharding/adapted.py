"""Weights with a low-rank update: rectangles of W + scale B A, computed when they are read.

The sum is never stored: a rectangle is computed for the slice that is sent, in float32, and rounded
once to W's dtype. The last bit of a matrix product depends on the shapes of its operands, so the
product is always computed in the same blocks of whole rows, whichever rectangle is read: a push,
its checks and an export read the same bits.

To bfloat16 the sum is rounded stochastically: up or down with probabilities that make the expected
value exact (arXiv 1502.02551). An update of less than half a unit in the last place of W, which
rounding to nearest would drop from every element, is then kept on average (docs/lora.md has the
measurements). The random numbers are a function of seed, tensor and position, so they depend on
neither layout nor slices.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.resharding.pieces import Piece
from megatron_rl.runtime.seeds import derive_seed

BLOCK_ROWS = 256
_DROPPED_BITS = 16  # of float32 in bfloat16
# Odd factors within int64, whose products wrap around; two rounds mix the bits, as in SplitMix64.
_ROW, _COLUMN = 0x4F1BBCDCBFA53E0B, 0x27BB2EE687B0B0FD
_MIX = ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB))


@dataclass(frozen=True)
class AdaptedWeight:
    """A rank's shard of a weight and of its low-rank update.

    weight: W [h, w]. a: A [r, w]. b: B [h, r]. seed: of rounding to bfloat16.
    """

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float
    seed: int = 0

    @property
    def shape(self) -> torch.Size:
        """Shape of the shard."""
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weight, and of the rectangles."""
        return self.weight.dtype

    def rectangle(self, piece: Piece) -> Tensor:
        """Return a piece's rectangle of W + scale B A in new memory; [height, width]."""
        height, width = piece.shape
        left, bottom = piece.left, piece.top + height
        weight, a, b = (each.detach() for each in (self.weight, self.a, self.b))
        wide_a, result = a.float(), weight.new_empty(height, width)
        for first in range(piece.top // BLOCK_ROWS * BLOCK_ROWS, bottom, BLOCK_ROWS):
            product = b[first : first + BLOCK_ROWS].float() @ wide_a
            start, stop = max(first, piece.top), min(first + BLOCK_ROWS, bottom)
            update = product[start - first : stop - first, left : left + width]
            old = weight[start:stop, left : left + width].float()  # no copy of a float32 weight
            total = old.add(update, alpha=self.scale)
            if weight.dtype == torch.bfloat16:
                row = piece.rows[0] + start - piece.top  # in the whole tensor
                seed = derive_seed(self.seed, piece.tensor)
                total = round_stochastically(total, seed=seed, row=row, column=piece.columns[0])
            result[start - piece.top : stop - piece.top] = total
        return result


def round_stochastically(values: Tensor, *, seed: int, row: int, column: int) -> Tensor:
    """Round float32 values [h, w] to numbers of bfloat16, still as float32; inf and NaN stay.

    row, column: position of the first value. Numbers of bfloat16 are not changed.
    """
    height, width = values.shape
    rows = torch.arange(row, row + height, device=values.device) * _ROW
    columns = torch.arange(column, column + width, device=values.device) * _COLUMN
    mixed = rows[:, None] + columns + seed
    for shift, factor in _MIX:
        mixed = mixed.bitwise_xor_(mixed >> shift).mul_(factor)
    noise = mixed.bitwise_right_shift_(64 - _DROPPED_BITS).bitwise_and_((1 << _DROPPED_BITS) - 1)
    bits = values.contiguous().view(torch.int32) + noise.int()
    bits = bits.bitwise_right_shift_(_DROPPED_BITS).bitwise_left_shift_(_DROPPED_BITS)
    return torch.where(values.isfinite(), bits.view(torch.float32), values)


LocalWeight = Tensor | AdaptedWeight


def read_rectangle(weight: LocalWeight, piece: Piece) -> Tensor:
    """Return a piece's rectangle of a rank's weight; a view of it if it has no update."""
    if isinstance(weight, AdaptedWeight):
        return weight.rectangle(piece)
    return piece.of_parameter(weight.detach())
