"""Advantages from values, and the loss of the values: what a critic adds to an objective.

Shapes: t tokens on this rank, in the order of its SequenceLayout; T tokens in the pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_rl.distributed.advantage_scan import generalized_advantages
from megatron_rl.distributed.collectives import Group, reduce_sum
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.types import Denominators


@dataclass(frozen=True)
class GaeSettings:
    """Settings by which advantages and targets follow from rewards and values.

    discount: the step that gamma and lambda count, a sampled token or a turn of the policy; within
    a turn both are then 1. length_alpha: VAPO's (arXiv 2504.05118), lambda is 1 - 1 / (alpha L) for
    a response of L tokens, at least 0. target_lambda: lambda of the targets of values, which the
    decoupled form of VC-PPO (arXiv 2503.01491) and VAPO set to 1.
    """

    gamma: float = 1.0
    gae_lambda: float = 0.95
    target_lambda: float = 1.0
    length_alpha: float | None = None
    discount: str = "token"

    @classmethod
    def of(cls, section: object) -> GaeSettings:
        """Return the value settings of a config's `critic` section."""
        return cls(**{one.name: getattr(section, one.name) for one in fields(cls)})


@dataclass(frozen=True)
class ValueTargets:
    """Constants of an update, per token, in the values' dtype; [t] each, 0 off the mask."""

    advantages: Tensor
    returns: Tensor  # targets of the values: advantages by target_lambda plus values


def compute_targets(
    layout: SequenceLayout,
    values: Tensor,
    rewards: Tensor,
    *,
    ends: Tensor,
    cut: Tensor,
    settings: GaeSettings,
) -> ValueTargets:
    """Compute advantages and targets of values by generalized advantage estimation. Collective.

    values, rewards: [t]; a reward belongs to the decision that it follows. ends [t] is True at the
    last decision of each turn of the policy, which a layout does not show: a sequence may end where
    another one continues it. cut [t] is True in responses that a limit of length cut: what would
    have followed counts as their last value. A reward at the cut is an end instead: with both, and
    gamma 1, the last value would have to be itself plus that reward, and would grow without bound.
    """
    one = torch.ones((), dtype=torch.float64, device=values.device)
    counts = ends if settings.discount == "turn" else torch.ones_like(layout.mask)
    gamma = torch.where(counts, settings.gamma * one, one)
    lambdas = settings.gae_lambda * torch.ones_like(gamma)
    if settings.length_alpha is not None:
        lambdas = (1 - 1 / (settings.length_alpha * layout.length.clamp(min=1).double())).clamp(0)
    pair = [lambdas, settings.target_lambda * torch.ones_like(gamma)]
    is_last = layout.mask & (layout.position == layout.length)
    bootstrap = torch.where(is_last & cut & (rewards == 0), gamma * values.double(), 0)
    advantages, target = generalized_advantages(
        layout,
        values,
        rewards.double() + bootstrap,
        gamma=gamma,
        lambdas=[torch.where(counts, x, one) for x in pair],
    )
    returns = torch.where(layout.mask, target + values.double(), 0)
    return ValueTargets(advantages.to(values.dtype), returns.to(values.dtype))


SUMS = ("tokens", "loss", "clipped", "value", "return", "return_squared", "error", "error_squared")


@dataclass(frozen=True)
class ValueStatistics:
    """Sums over the decisions of micro-batches; they merge exactly."""

    sums: Tensor  # [SUMS] float64

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> ValueStatistics:
        """Create the statistics of no tokens."""
        return cls(torch.zeros(len(SUMS), dtype=torch.float64, device=device))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [self.sums]

    def merge(self, other: ValueStatistics) -> ValueStatistics:
        """Return the statistics of both together."""
        return ValueStatistics(self.sums + other.sums)

    def all_reduce(self, group: Group) -> ValueStatistics:
        """Return the statistics of all ranks of the group together."""
        return ValueStatistics(reduce_sum(self.sums, group=group))

    def raise_on_faults(self) -> None:
        """Raise ValueError unless all sums are finite; copies once."""
        faults = torch.isfinite(self.sums).logical_not().double().tolist()
        for name, fault in zip(SUMS, faults, strict=True):
            if fault > 0:
                raise ValueError(f"the critic's {name.replace('_', ' ')} is not finite")

    def to_metrics(self) -> Mapping[str, float]:
        """Return the means over tokens, and the explained variance of the returns.

        1 - Var(return - value) / Var(return); nan where all returns are equal.
        """
        total = dict(zip(SUMS, self.sums.tolist(), strict=True))
        tokens = max(total["tokens"], 1.0)
        mean = {name: value / tokens for name, value in total.items()}
        variance = mean["return_squared"] - mean["return"] ** 2
        unexplained = mean["error_squared"] - mean["error"] ** 2
        is_constant = variance <= 1e-12 * max(mean["return_squared"], 1e-30)
        return {
            "critic/loss": total["loss"],
            "critic/clipped_fraction": mean["clipped"],
            "critic/value_mean": mean["value"],
            "critic/return_mean": mean["return"],
            "critic/explained_variance": float("nan")
            if is_constant
            else 1 - unexplained / variance,
        }


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: float | None,
    layout: SequenceLayout,
    denominators: Denominators,
) -> tuple[Tensor, ValueStatistics]:
    """Compute max((V - R)^2, (clip(V) - R)^2) / 2, over all tokens of the minibatch; [t].

    PPO's clipped value loss: clip(V) is within `clip` of the value at the start of the step, so
    that a value that has moved further gets no gradient. None: no clipping.
    """
    mask = layout.mask
    v, old, target = (torch.where(mask, x.float(), 0) for x in (values, old_values, returns))
    plain = (v - target).square()
    clipped = plain
    if clip is not None:
        near = torch.minimum(torch.maximum(v, old - clip), old + clip)
        clipped = (near - target).square()
    loss = torch.where(mask, torch.maximum(plain, clipped) / 2, 0) / denominators.tokens
    with torch.no_grad():
        error = (target - v).double()
        columns = (
            mask, loss, clipped > plain, v, target, target.double().square(), error, error.square()
        )  # fmt: skip
        sums = torch.stack([torch.where(mask, x.double(), 0).sum() for x in columns])
    return loss, ValueStatistics(sums)
