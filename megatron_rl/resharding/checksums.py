"""Numbers that tell whether two pieces of memory hold the same weights.

`message_checksum` is cheap (one pass at memory speed) and sees any changed value. `slice_checksum`
also sees rows or columns that changed places: with bits b[r, c] of the elements as integers,

    sum_r (r + 1) K sum_c b[r, c]  +  sum_c (c + 1) K' sum_r b[r, c]      modulo 2^64.
"""

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd, so that multiplication modulo 2^64 loses nothing; within int64 (2^64 / golden ratio, halved).
_ROW_FACTOR = 0x4F1BBCDCBFA53E0B
_COLUMN_FACTOR = 0x27BB2EE687B0B0FD
_BLOCK = 1 << 16  # elements


def message_checksum(message: Tensor) -> Tensor:
    """Sum of a flat contiguous buffer read as 64-bit words, zero-padded; int64 scalar."""
    data = message.view(torch.uint8)
    whole = data.numel() // 8 * 8
    if data.storage_offset() % 8 or data.data_ptr() % 8:
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
    step = max(1, _BLOCK // max(1, width))
    for start in range(0, height, step):
        block = matrix[start : start + step].to(dtype or matrix.dtype).contiguous()
        bits = block.view(_INTEGERS[block.dtype.itemsize])
        rows = bits.sum(1, dtype=torch.int64)
        total += (rows * count[start : start + len(rows)] * _ROW_FACTOR).sum()
        by_column += bits.sum(0, dtype=torch.int64)
    return total + (by_column * count[:width] * _COLUMN_FACTOR).sum()
