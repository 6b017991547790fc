"""The weight axis: the logarithm of the likelihood ratio that multiplies a token's advantage.

l_t is the log-ratio of the t-th of L valid decisions, S_t = l_1 + ... + l_t.
Shapes: t tokens on this rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.distributed.chunk_scan import Scan, Scanned, scan_together
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.inputs import TokenInputs
from megatron_rl.objectives.spec import ObjectiveSpec, PrefixBudget, TvFilter, Weight


@dataclass(frozen=True)
class LogRatios:
    """Log-ratios of one micro-batch and all scans along its sequences."""

    token: Tensor  # [t] l_t
    layout: SequenceLayout
    scanned: dict[str, Scanned]

    @classmethod
    def of(cls, log_ratio: Tensor, layout: SequenceLayout, **others: Scan) -> "LogRatios":
        """Scan the log-ratios and all other given values with one all-gather; [t]."""
        scans = {"log_ratio": Scan(log_ratio), **others}
        scanned = scan_together(layout, *scans.values())
        return cls(log_ratio, layout, dict(zip(scans, scanned, strict=True)))

    @property
    def prefix_sum(self) -> Tensor:
        """S_t; [t]."""
        return self.running("log_ratio")

    def running(self, name: str) -> Tensor:
        """Return the running value of a scan at each token; [t]."""
        return self.scanned[name].running

    def total(self, name: str) -> Tensor:
        """Return the total of a scan over the sequence, at each of its tokens; [t]."""
        return self.layout.spread(self.scanned[name].total).to(self.token.dtype)


def compute_log_weight(weight: Weight, ratios: LogRatios) -> Tensor:
    """Compute the logarithm of the selected weight at every token; [t]."""
    match weight:
        case "token":  # rho_t
            return ratios.token
        case "prefix_mean":  # w_t = (rho_1 ... rho_t)^(1/t)
            return ratios.prefix_sum / ratios.layout.position.clamp(min=1)
        case "prefix_product":  # C_t = rho_1 ... rho_t
            return ratios.prefix_sum
        case "prefix_min":  # rho_t * min_{k<t} rho_k, the minimum 1 at t = 1
            smallest = ratios.running("minimum_before")
            return ratios.token + torch.where(smallest < torch.inf, smallest, 0)
        case "sequence_mean":  # s = (rho_1 ... rho_L)^(1/L)
            return ratios.total("log_ratio") / ratios.layout.length.clamp(min=1)
        case "sequence_product":  # C_L
            return ratios.total("log_ratio")
        case "one":
            return torch.zeros_like(ratios.token)
    raise AssertionError(f"unknown weight {weight}")


def prior_log_weight(weight: Weight, ratios: LogRatios) -> Tensor:
    """Compute the logarithm of a prefix weight before each token, at position t - 1; [t]."""
    before = ratios.layout.position - 1
    # At t = 1 nothing has been sampled: the weight of the empty prefix is 1.
    log_product = torch.where(before > 0, ratios.prefix_sum - ratios.token, 0)  # log C_{t-1}
    match weight:
        case "prefix_product":
            return log_product
        case "prefix_mean":
            return log_product / before.clamp(min=1)
    raise AssertionError(f"{weight} is not a prefix weight")


def build_scans(
    spec: ObjectiveSpec, x: TokenInputs, log_ratio: Tensor, layout: SequenceLayout
) -> dict[str, Scan]:
    """Build the scans that an objective needs in addition to its log-ratios [t]."""
    scans, ratio = {}, log_ratio.detach()
    if spec.weight == "prefix_min":
        scans["minimum_before"] = Scan(ratio, "min")
    if isinstance(spec.constraint, TvFilter):
        # The clamp is far above any threshold and keeps extreme ratios finite.
        scans["deviation"] = Scan(torch.expm1(ratio.clamp(max=60)).abs())
    if isinstance(spec.constraint, PrefixBudget):
        scans["budget"] = Scan(budget_spent(spec.constraint, x, ratio, layout))
    if spec.rollout_correction is not None and spec.rollout_correction.level != "token":
        assert x.log_gap is not None, "checked with the inputs"
        scans["log_gap"] = Scan(x.log_gap)
    return scans


def budget_spent(
    budget: PrefixBudget, x: TokenInputs, log_ratio: Tensor, layout: SequenceLayout
) -> Tensor:
    """Compute w_t |pi(y_t) - pi_beta(y_t)|; [t]."""
    before = torch.exp(x.behavior_logprobs)
    change = (torch.exp(x.behavior_logprobs + log_ratio) - before).abs()
    return budget_weights(budget, layout, change.dtype)[0] * change


def budget_weights(
    budget: PrefixBudget, layout: SequenceLayout, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute w_t, falling linearly from 1 to the floor at t = L, and W_{t-1}, the sum before t."""
    before = layout.position.clamp(min=1).to(dtype) - 1  # t - 1
    slope = (1 - budget.floor) / (layout.length.to(dtype) - 1).clamp(min=1)
    return 1 - slope * before, before - slope * before * (before - 1) / 2
