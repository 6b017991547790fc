"""Sums by position: of each bucket of t/L and of log2 t, and a histogram of log w_t in each.

Tokens are added to cells of pairs (bucket of t/L, bucket of log2 t); the two kinds of bucket are
the table's margins. Shapes: b tokens in a block.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import schema

if TYPE_CHECKING:
    from megatron_rl.objectives.diagnostics import TokenColumns

EXPONENT_BIAS, MANTISSA_BITS = 127, 23  # of a float32
SMALLEST_STEP = (EXPONENT_BIAS + schema.SMALLEST_EXPONENT) * schema.BINS_PER_OCTAVE


@dataclass(frozen=True)
class BucketTable:
    """One row per pair of buckets, and a last one for what the mask excludes."""

    counts: Tensor  # [PAIRS + 1, COUNTS] float64
    sums: Tensor  # [columns, PAIRS + 1] float64
    histogram: Tensor  # [PAIRS + 1, BINS] float64

    @classmethod
    def empty(cls, device: torch.device) -> "BucketTable":
        """The table of no tokens."""
        rows = schema.PAIRS + 1
        sizes = (
            (rows, len(schema.COUNTS)),
            (len(schema.BUCKET_SUMS) - len(schema.COUNTS), rows),
            (rows, schema.BINS),
        )
        return cls(*(torch.zeros(s, dtype=torch.float64, device=device) for s in sizes))

    def add(self, x: "TokenColumns") -> None:
        """Add a block of tokens."""
        row = x.pair
        one = torch.ones((), dtype=torch.float64, device=row.device).expand(row.shape)
        cell = row * len(schema.COUNTS) + outcome(x.inside, x.log_weight, x.advantages)
        self.counts.view(-1).scatter_add_(0, cell, one)
        log_w = x.prefix_sum.double() / x.position.clamp(min=1)
        cell = row * schema.BINS + histogram_bin(log_w)
        self.histogram.view(-1).scatter_add_(0, cell, one)
        weight = x.weight.double().clamp(max=1e100)  # its square must be finite
        columns = [log_w, log_w.square(), weight, weight.square()]
        if x.log_gap is not None:
            gap = x.log_gap.double()
            columns += [gap, gap.square(), one]
        for total, column in zip(self.sums, columns, strict=False):
            total.scatter_add_(0, row, column)

    def margins(self) -> Tensor:
        """[BUCKETS, BUCKET_SUMS] and [BUCKETS, BINS], flat."""
        rows = torch.cat((self.counts, self.sums.T), dim=1)
        return torch.cat((bucket_margins(rows), bucket_margins(self.histogram)))


def bucket_margins(pairs: Tensor) -> Tensor:
    """From rows of pairs to rows of buckets, flat: [at least PAIRS, n] -> [BUCKETS * n]."""
    table = pairs[: schema.PAIRS].view(schema.DECILES, schema.OCTAVES, -1)
    return torch.cat((table.sum(dim=1), table.sum(dim=0))).reshape(-1)


def position_pairs(layout: SequenceLayout) -> Tensor:
    """The pair of buckets of each token's position, PAIRS off the mask; [t] int64."""
    position, length = layout.position.clamp(min=1), layout.length.clamp(min=1)
    tenth = ((schema.DECILES * position - 1) // length).clamp(max=schema.DECILES - 1)
    octave = torch.frexp(position.float()).exponent - 1
    pair = tenth * schema.OCTAVES + octave.clamp(max=schema.OCTAVES - 1)
    return torch.where(layout.mask, pair, schema.PAIRS)


def outcome(inside: Tensor, log_weight: Tensor, advantages: Tensor) -> Tensor:
    """The place in schema.COUNTS: what the constraint did and the advantage's sign; [b]."""
    sign = (advantages <= 0).byte() + (advantages < 0)  # positive 0, zero 1, negative 2
    side = (~inside).byte() * (1 + (log_weight <= 0).byte())  # inside 0, above 1, below 2
    return len(schema.SIGNS) * side + sign


def histogram_bin(log_w: Tensor) -> Tensor:
    """The bin of each log-weight: symmetric around 0, by exponent and two bits of mantissa; [b].

    What is below 2^SMALLEST_EXPONENT is in the middle, what is not finite at an end.
    """
    bits = log_w.float().view(torch.int32)
    steps = ((bits & 0x7FFFFFFF) >> (MANTISSA_BITS - 2)) - (SMALLEST_STEP - 1)
    distance = steps.clamp(0, schema.HALF)
    return schema.HALF + torch.where(bits < 0, -distance, distance)
