"""The weight axis: which likelihood ratio multiplies a token's advantage, as its logarithm.

With l_t the log-ratio of the t-th valid decision, S_t = l_1 + ... + l_t, L decisions in all.
Shapes: t tokens on this rank.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.sequence_statistics import Scan, Scanned, scan_together
from megatron_rl.objectives.spec import ObjectiveSpec, PrefixBudget, TvFilter, Weight


@dataclass(frozen=True)
class LogRatios:
    """Log-ratios of one micro-batch and everything that is scanned along its sequences."""

    token: Tensor  # [t] l_t
    prefix_sum: Tensor  # [t] S_t
    layout: SequenceLayout
    scanned: dict[str, Scanned] = field(repr=False)
    probability_change: Tensor | None = None  # [t] |pi(y_t) - pi_beta(y_t)|, where it is needed

    @classmethod
    def of(
        cls,
        log_ratio: Tensor,
        layout: SequenceLayout,
        *,
        spec: ObjectiveSpec | None = None,
        log_gap: Tensor | None = None,
        behavior_logprobs: Tensor | None = None,
    ) -> "LogRatios":
        """Scan what the objective needs, all with one all-gather; tensors are [t].

        `log_gap` is behavior minus rollout log-probability, for a rollout correction;
        `behavior_logprobs` are for a budget of probability.
        """
        change = None
        scans = {"log_ratio": Scan(log_ratio)}
        if spec is not None:
            if spec.weight == "prefix_min":
                scans["minimum_before"] = Scan(log_ratio.detach(), "min")
            if isinstance(spec.constraint, TvFilter):
                # Far beyond any threshold; keeps one extreme ratio from becoming infinite.
                clamped = log_ratio.detach().clamp(max=60)
                scans["deviation"] = Scan(torch.expm1(clamped).abs())
            if isinstance(spec.constraint, PrefixBudget):
                assert behavior_logprobs is not None
                policy = behavior_logprobs + log_ratio.detach()
                change = (torch.exp(policy) - torch.exp(behavior_logprobs)).abs()
                weight, _ = budget_weights(spec.constraint, layout, change.dtype)
                scans["budget"] = Scan(weight * change)
            if spec.rollout_correction is not None and spec.rollout_correction.level != "token":
                assert log_gap is not None, "checked with the inputs"
                scans["log_gap"] = Scan(log_gap)
        scanned = dict(zip(scans, scan_together(layout, *scans.values()), strict=True))
        return cls(log_ratio, scanned["log_ratio"].running, layout, scanned, change)

    def running(self, name: str) -> Tensor:
        """The sum up to and including each token of "log_ratio" or "budget"; [t]."""
        return self.scanned[name].running

    def total(self, name: str) -> Tensor:
        """The whole sequence's sum of "log_ratio", "deviation" or "log_gap" at its tokens; [t]."""
        return self.layout.spread(self.scanned[name].total).to(self.token.dtype)

    @property
    def sequence_sum(self) -> Tensor:
        """S_L; [t]."""
        return self.total("log_ratio")

    @property
    def prefix_mean(self) -> Tensor:
        """S_t / t; [t]."""
        return self.prefix_sum / self.layout.position.clamp(min=1)

    @property
    def sequence_mean(self) -> Tensor:
        """S_L / L; [t]."""
        return self.sequence_sum / self.layout.length.clamp(min=1)

    @property
    def prefix_min(self) -> Tensor:
        """l_t + min_{k<t} l_k, the minimum 0 at t = 1; [t]."""
        smallest = self.scanned["minimum_before"].running
        return self.token + torch.where(smallest < torch.inf, smallest, 0)


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
            return ratios.prefix_min
        case "sequence_mean":  # s = (rho_1 ... rho_L)^(1/L)
            return ratios.sequence_mean
        case "sequence_product":  # C_L
            return ratios.sequence_sum
        case "one":
            return torch.zeros_like(ratios.token)
    raise AssertionError(f"unknown weight {weight}")


def budget_weights(
    budget: PrefixBudget, layout: SequenceLayout, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """w_t, which falls linearly from 1 to the floor at t = L, and W_{t-1} = w_1 + ... + w_{t-1}."""
    before = layout.position.clamp(min=1).to(dtype) - 1  # t - 1
    slope = (1 - budget.floor) / (layout.length.to(dtype) - 1).clamp(min=1)
    return 1 - slope * before, before - slope * before * (before - 1) / 2
