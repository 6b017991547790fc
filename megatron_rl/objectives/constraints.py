"""The constraint axis: what happens to a weight that left its bounds.

All comparisons are between logarithms: near 1 the difference between 1 + 9.5e-4 and 1 + 9.4e-4 is
lost in float32 after an exponential but not before, and an extreme log-ratio never overflows.
Shapes: t tokens on this rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.spec import (
    Bounds,
    Constraint,
    HardGate,
    PpoClip,
    PrefixBudget,
    SecondMoment,
    Taper,
    Truncate,
    TvFilter,
)
from megatron_rl.objectives.weights import LogRatios, budget_weights


class Constrained(NamedTuple):
    """A weight r after its constraint."""

    value: Tensor  # [t] of the term per unit of A, e.g. clip(r): differentiated through
    coefficient: Tensor  # [t] of A grad log pi, 0 where the value is constant: when detached
    inside: Tensor  # [t] bool, False where the constraint changed something


def position_scale(bounds: Bounds, layout: SequenceLayout, dtype: torch.dtype) -> Tensor:
    """h(t, L): 1, sqrt(L/t) or t^p; [t], or [] where it is constant."""
    position = layout.position.clamp(min=1).to(dtype)
    match bounds.scale:
        case "constant":
            return torch.ones((), dtype=dtype, device=layout.device)
        case "sqrt(L/t)":
            return torch.sqrt(layout.length.to(dtype) / position)
        case "t^p":
            assert bounds.power is not None, "checked when the bounds were made"
            return position**bounds.power
    raise AssertionError(f"unknown scale {bounds.scale}")


def log_bounds(bounds: Bounds, layout: SequenceLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of the log-weight, both inclusive; ([t] or [], [t] or [])."""
    scale = position_scale(bounds, layout, dtype)
    upper = torch.full((), torch.inf, dtype=dtype, device=layout.device)
    lower = -upper
    if bounds.low is not None:
        reach = bounds.low * scale
        # 1 - low * h <= 0 bounds nothing, a ratio is positive: log1p of -1 is -inf.
        lower = -reach if bounds.space == "log" else torch.log1p(-reach.clamp(max=1))
    if bounds.high is not None:
        reach = bounds.high * scale
        upper = reach if bounds.space == "log" else torch.log1p(reach)
    return lower, upper


def ppo_clip(
    clip: PpoClip, log_weight: Tensor, advantages: Tensor, layout: SequenceLayout
) -> Constrained:
    """min(r A, clip(r) A) and the dual clip, as one clamp of r whose bounds depend on A's sign.

    A > 0: min(r, upper) A.  A < 0: max(r, lower) A, with dual min(max(r, lower), dual) A.
    """
    lower, upper = log_bounds(clip, layout, log_weight.dtype)
    dual = torch.full_like(upper, torch.inf)
    if clip.dual is not None:
        dual = log_bounds(_dual_bounds(clip), layout, log_weight.dtype)[1]
    lower = torch.where(advantages < 0, lower, -torch.inf)
    upper = torch.where(advantages > 0, upper, torch.where(advantages < 0, dual, torch.inf))
    inside = (lower <= log_weight) & (log_weight <= upper)
    weight = torch.exp(log_weight.clamp(lower, upper))
    return Constrained(weight, torch.where(inside, weight, 0), inside)


def _dual_bounds(clip: PpoClip) -> Bounds:
    assert clip.dual is not None
    if clip.space == "ratio":  # the ratio c itself, at every position
        return Bounds(low=None, high=clip.dual - 1)
    return Bounds(low=None, high=clip.dual, space="log", scale=clip.scale, power=clip.power)


def hard_gate(
    gate: HardGate, log_weight: Tensor, advantages: Tensor, layout: SequenceLayout
) -> Constrained:
    """M r with M = 1 inside the bounds, 0 outside."""
    lower, upper = log_bounds(gate, layout, log_weight.dtype)
    below, above = log_weight < lower, log_weight > upper
    if gate.sided == "advantage":
        below, above = below & (advantages < 0), above & (advantages > 0)
    return _kept(log_weight, ~(below | above))


def truncate(bounds: Truncate, log_weight: Tensor, layout: SequenceLayout) -> Constrained:
    """clip(r); detached, every token keeps its gradient."""
    lower, upper = log_bounds(bounds, layout, log_weight.dtype)
    inside = (lower <= log_weight) & (log_weight <= upper)
    weight = torch.exp(log_weight.clamp(lower, upper))
    return Constrained(weight, weight, inside)


def tv_filter(
    tv: TvFilter, log_weight: Tensor, advantages: Tensor, ratios: LogRatios
) -> Constrained:
    """Zero where A (rho - 1) > 0 in a response with mean |rho - 1| / 2 above the threshold."""
    variation = ratios.total("deviation") / (2 * ratios.layout.length.clamp(min=1))
    inside = (variation <= tv.threshold) | (advantages * ratios.token.detach() <= 0)
    return _kept(log_weight, inside)


def taper(tapered: Taper, log_weight: Tensor, advantages: Tensor) -> Constrained:
    """clip(r) to [a+, b+] where A >= 0, to [a-, b-] where A < 0."""
    ratios = [
        [tapered.positive_low, tapered.negative_low],
        [tapered.positive_high, tapered.negative_high],
    ]
    bounds = torch.tensor(ratios, dtype=log_weight.dtype, device=log_weight.device).log()
    lower, upper = torch.where(advantages < 0, bounds[:, 1:], bounds[:, :1])
    inside = (lower <= log_weight) & (log_weight <= upper)
    weight = torch.exp(log_weight.clamp(lower, upper))
    return Constrained(weight, weight, inside)


def prefix_budget(
    budget: PrefixBudget, log_weight: Tensor, advantages: Tensor, ratios: LogRatios
) -> Constrained:
    """Zero where A (rho - 1) > 0 and the token or its prefix has moved further than allowed."""
    weight, before = budget_weights(budget, ratios.layout, log_weight.dtype)
    assert ratios.probability_change is not None, "scanned with the ratios"
    token = weight * ratios.probability_change
    within = (token <= budget.threshold) & (
        ratios.running("budget") <= budget.threshold + budget.average * before
    )
    return _kept(log_weight, within | (advantages * ratios.token.detach() <= 0))


def _kept(log_weight: Tensor, inside: Tensor) -> Constrained:
    """r inside, 0 outside; never inf * 0, the exponent is gated first."""
    weight = torch.where(inside, torch.exp(torch.where(inside, log_weight, 0)), 0)
    return Constrained(weight, weight, inside)


def apply_constraint(
    constraint: Constraint, log_weight: Tensor, *, advantages: Tensor, ratios: LogRatios
) -> Constrained:
    """Apply the chosen constraint to a log-weight; differentiable in it."""
    match constraint:
        case PpoClip():
            return ppo_clip(constraint, log_weight, advantages, ratios.layout)
        case HardGate():
            return hard_gate(constraint, log_weight, advantages, ratios.layout)
        case Truncate():
            return truncate(constraint, log_weight, ratios.layout)
        case TvFilter():
            return tv_filter(constraint, log_weight, advantages, ratios)
        case Taper():
            return taper(constraint, log_weight, advantages)
        case PrefixBudget():
            return prefix_budget(constraint, log_weight, advantages, ratios)
        case SecondMoment():
            raise ValueError(
                "constraint second_moment is of a whole minibatch: give this objective's fit() the "
                "minibatch's log-ratios and advantages, and call what it returns"
            )
    return _kept(log_weight, torch.ones_like(log_weight, dtype=torch.bool))
