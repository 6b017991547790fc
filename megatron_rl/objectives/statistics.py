"""What an objective reports about a micro-batch: sums and maxima that merge exactly.

Nothing here waits for the device until `to_metrics`, which copies once. Because only sums and
maxima are kept, merging micro-batches and ranks gives the numbers of one big batch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import Group, reduce_max, reduce_sum
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.constraints import Constrained
from megatron_rl.objectives.weights import LogRatios

SUMS = (
    "tokens",
    "loss",
    "inside",
    "log_ratio",
    "prefix_mean",
    "prefix_mean_squared",
)
MAXIMA = ("absolute_deviation",)


@dataclass
class Statistics:
    """Sums and maxima over the valid decisions of one or more micro-batches."""

    sums: Tensor  # [len(SUMS)] float64
    maxima: Tensor  # [len(MAXIMA)] float64

    def merge(self, other: "Statistics") -> "Statistics":
        """The statistics of both batches together."""
        return Statistics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def all_reduce(self, group: Group) -> "Statistics":
        """The statistics of all ranks of the group together, on each of them."""
        return Statistics(reduce_sum(self.sums, group=group), reduce_max(self.maxima, group=group))

    def to_metrics(self) -> dict[str, float]:
        """Named numbers for logging; the only call that waits for the device."""
        sums = dict(zip(SUMS, self.sums.tolist(), strict=True))
        maxima = dict(zip(MAXIMA, self.maxima.tolist(), strict=True))
        tokens = max(sums["tokens"], 1.0)
        mean = sums["prefix_mean"] / tokens
        variance = max(sums["prefix_mean_squared"] / tokens - mean * mean, 0.0)
        return {
            "loss/policy": sums["loss"],
            "gate/acceptance": sums["inside"] / tokens,
            "ratio/log_mean": sums["log_ratio"] / tokens,
            "ratio/prefix_mean_log_mean": mean,
            "ratio/prefix_mean_log_std": math.sqrt(variance),
            "ratio/max_deviation": max(maxima["absolute_deviation"], 0.0),
            "tokens": sums["tokens"],
        }


@torch.no_grad()
def compute_statistics(
    *, loss: Tensor, ratios: LogRatios, constrained: Constrained, layout: SequenceLayout
) -> Statistics:
    """The statistics of one micro-batch's tokens on this rank."""
    mask = layout.mask
    prefix_mean = ratios.prefix_mean.double()
    columns = torch.stack(
        (
            torch.ones_like(prefix_mean),
            loss.double(),
            constrained.inside.double(),
            ratios.token.double(),
            prefix_mean,
            prefix_mean.square(),
        )
    )
    deviation = torch.expm1(ratios.token.double()).abs()
    return Statistics(
        torch.where(mask, columns, 0).sum(dim=1),
        torch.where(mask, deviation, -torch.inf).max().reshape(1),
    )
