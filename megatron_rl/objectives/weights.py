"""The weight axis: which likelihood ratio multiplies a token's advantage, as its logarithm.

With l_t the log-ratio of the t-th valid decision, S_t = l_1 + ... + l_t, L decisions in all.
Shapes: t tokens on this rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.spec import Weight


@dataclass(frozen=True)
class LogRatios:
    """Log-ratios of one micro-batch with their running and total sums; zero off the mask."""

    token: Tensor  # [t] l_t
    prefix_sum: Tensor  # [t] S_t
    sequence_sum: Tensor  # [t] S_L
    layout: SequenceLayout

    @classmethod
    def of(cls, log_ratio: Tensor, layout: SequenceLayout) -> "LogRatios":
        """Scan the log-ratios once: one all-gather for both sums."""
        log_ratio = torch.where(layout.mask, log_ratio, 0)
        prefix_sum, sequence_sum = layout.prefix_sum_and_total(log_ratio)
        return cls(log_ratio, prefix_sum, sequence_sum, layout)

    @property
    def prefix_mean(self) -> Tensor:
        """S_t / t; [t]."""
        return self.prefix_sum / self.layout.position.clamp(min=1)

    @property
    def sequence_mean(self) -> Tensor:
        """S_L / L; [t]."""
        return self.sequence_sum / self.layout.length.clamp(min=1)


def compute_log_weight(weight: Weight, ratios: LogRatios) -> Tensor:
    """The logarithm of the chosen weight at every token; [t]."""
    match weight:
        case "token":  # rho_t
            return ratios.token
        case "prefix_mean":  # w_t = (rho_1 ... rho_t)^(1/t)
            return ratios.prefix_mean
        case "prefix_product":  # C_t = rho_1 ... rho_t
            return ratios.prefix_sum
        case "prefix_min":  # rho_t * min_{k<t} rho_k, the minimum 1 at t = 1
            smallest = ratios.layout.prefix_min(ratios.token, exclusive=True)
            return ratios.token + torch.where(smallest < torch.inf, smallest, 0)
        case "sequence_mean":  # s = (rho_1 ... rho_L)^(1/L)
            return ratios.sequence_mean
        case "sequence_product":  # C_L
            return ratios.sequence_sum
    raise AssertionError(f"unknown weight {weight}")
