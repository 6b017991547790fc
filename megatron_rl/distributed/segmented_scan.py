"""Running sums and minima inside many segments of very different lengths at once.

Segments are broken into rows of a fixed width, every row is scanned by one vectorised call, and
the row totals are scanned again per segment. With rows about as wide as the longest segment has
rows, padding costs at most some 4 * sqrt(longest) elements per segment: a [segments, longest]
rectangle would be hundreds of times larger for long-tailed response lengths.

Shapes: n tokens in all segments together, R rows of W columns, K segments.
"""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Combine = Literal["sum", "min"]  # sums are accumulated in float64
IDENTITY: dict[Combine, float] = {"sum": 0.0, "min": math.inf}


class SegmentedScan:
    """Index tables of K consecutive segments, and the scans that use them.

    `lengths` [K] int64 on the host; a segment may be empty. `to_device` moves a host table to
    where the scanned tensors live.
    """

    def __init__(self, lengths: Tensor, *, to_device: Callable[[Tensor], Tensor]) -> None:
        longest = max(int(lengths.max()), 1)
        # A power of two near sqrt(longest), within what one cumsum call handles well.
        self.width = min(max(2 ** round(math.log2(longest) / 2), 16), 1024)
        rows = -(-lengths // self.width)  # [K] rows of each segment
        self.segments = lengths.numel()
        self.tokens = int(lengths.sum())
        self.rows = int(rows.sum())
        self.rows_of_longest = int(rows.max())
        starts = lengths.cumsum(0) - lengths
        row_starts = rows.cumsum(0) - rows
        self._host_table = torch.stack((lengths, starts, rows, row_starts))  # [4, K]
        self._to_device = to_device

    @cached_property
    def _table(self) -> Tensor:
        return self._to_device(self._host_table)

    @cached_property
    def segment_ids(self) -> Tensor:
        """The segment of each token; [n] int64."""
        return torch.repeat_interleave(self._table[0], output_size=self.tokens)

    @cached_property
    def columns(self) -> Tensor:
        """Each token's place in its segment, from 0; [n] int64."""
        tokens = torch.arange(self.tokens, device=self._table.device)
        return tokens - self._table[1][self.segment_ids]

    @cached_property
    def _cells(self) -> Tensor:
        """Each token's cell in the [R, W] rows; [n] int64."""
        return self._table[3][self.segment_ids] * self.width + self.columns

    @cached_property
    def _row_cells(self) -> Tensor:
        """Each row's cell in the [K, rows of the longest] table; [R] int64."""
        segment = torch.repeat_interleave(self._table[2], output_size=self.rows)
        row = torch.arange(self.rows, device=self._table.device) - self._table[3][segment]
        return segment * self.rows_of_longest + row

    def begin(self, x: Tensor, *, combine: Combine, reverse: bool = False) -> "StartedScan":
        """Scan the rows and their totals: all that is known before a carry comes in; x is [n]."""
        identity = IDENTITY[combine]
        dtype = torch.float64 if combine == "sum" else x.dtype
        rows = x.new_full((self.rows * self.width,), identity, dtype=dtype)
        rows.scatter_(0, self._cells, x.to(dtype))
        inside = _scan_last(rows.view(self.rows, self.width), combine, reverse)  # [R, W]

        row_totals = inside[:, 0] if reverse else inside[:, -1]
        table = x.new_full((self.segments * self.rows_of_longest,), identity, dtype=dtype)
        table.scatter_(0, self._row_cells, row_totals)
        across = _scan_last(table.view(self.segments, -1), combine, reverse)
        totals = across[:, 0] if reverse else across[:, -1]
        return StartedScan(inside, _shift(across, identity, reverse), totals, combine, reverse)

    def finish(
        self, started: "StartedScan", *, carry: Tensor | None = None, exclusive: bool = False
    ) -> Tensor:
        """The scan of every segment, begun with the segment's `carry` [K]; [n].

        `exclusive` leaves each token itself out.
        """
        inside, before, _, combine, reverse = started
        if carry is not None:
            before = combine_pair(before, carry.to(before.dtype)[:, None], combine)
        if exclusive:
            inside = _shift(inside, IDENTITY[combine], reverse)
        before_row = before.reshape(-1).index_select(0, self._row_cells)  # [R]
        scanned = combine_pair(inside, before_row[:, None], combine)
        return scanned.reshape(-1).index_select(0, self._cells)

    def __call__(
        self, x: Tensor, *, combine: Combine, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Inclusive scan of every segment, and every segment's total; [n] -> ([n], [K])."""
        started = self.begin(x, combine=combine, reverse=reverse)
        return self.finish(started), started.totals


class StartedScan(NamedTuple):
    """A scan whose segments do not know yet what came before them."""

    inside: Tensor  # [R, W] inclusive scan of every row
    before: Tensor  # [K, rows of the longest] what the segment holds before each row
    totals: Tensor  # [K]
    combine: Combine
    reverse: bool


def combine_pair(x: Tensor, y: Tensor, combine: Combine) -> Tensor:
    """x + y or min(x, y)."""
    return x + y if combine == "sum" else torch.minimum(x, y)


def _scan_last(x: Tensor, combine: Combine, reverse: bool) -> Tensor:
    if reverse:
        return _scan_last(x.flip(-1), combine, False).flip(-1)
    return x.cumsum(-1) if combine == "sum" else x.cummin(-1).values


def _shift(x: Tensor, identity: float, reverse: bool) -> Tensor:
    """Make an inclusive scan exclusive by moving it one place along."""
    edge = x.new_full((x.shape[0], 1), identity)
    return torch.cat((x[:, 1:], edge), -1) if reverse else torch.cat((edge, x[:, :-1]), -1)
