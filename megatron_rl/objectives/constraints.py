"""The constraint axis: what happens to a weight that left its bounds.

All comparisons are between logarithms: near 1 the difference between 1 + 9.5e-4 and 1 + 9.4e-4 is
lost in float32 after an exponential but not before, and an extreme log-ratio never overflows.
Shapes: t tokens on this rank.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.inputs import TokenInputs
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
    Unconstrained,
)
from megatron_rl.objectives.weights import LogRatios, budget_spent, budget_weights


@dataclass(frozen=True)
class Constrained:
    """A weight r after its constraint."""

    value: Tensor  # [t] of the term per unit of A, e.g. clip(r): differentiated through
    coefficient: Tensor  # [t] of A grad log pi, 0 where the value is constant: when detached
    inside: Tensor  # [t] bool, False where the constraint changed something


@dataclass(frozen=True)
class Weighed:
    """What an objective makes of its tokens before anything is added up."""

    ratios: LogRatios
    log_weight: Tensor  # [t] before the constraint
    constrained: Constrained
    factor: Tensor | None = None  # [t] of a rollout correction

    @property
    def kept(self) -> Tensor:
        """Where neither the constraint nor a correction changed or dropped the weight; [t] bool."""
        inside = self.constrained.inside
        return inside if self.factor is None else inside & (self.factor != 0)


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
    clipped = _clipped(log_weight, lower, upper)
    return replace(clipped, coefficient=torch.where(clipped.inside, clipped.value, 0))


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
    return _clipped(log_weight, *log_bounds(bounds, layout, log_weight.dtype))


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
    return _clipped(log_weight, lower, upper)


def prefix_budget(
    budget: PrefixBudget, log_weight: Tensor, x: TokenInputs, ratios: LogRatios
) -> Constrained:
    """Zero where A (rho - 1) > 0 and the token or its prefix has moved further than allowed."""
    _, before = budget_weights(budget, ratios.layout, log_weight.dtype)
    spent = budget_spent(budget, x, ratios.token.detach(), ratios.layout)
    within = (spent <= budget.threshold) & (
        ratios.running("budget") <= budget.threshold + budget.average * before
    )
    return _kept(log_weight, within | (x.advantages * ratios.token.detach() <= 0))


def _clipped(log_weight: Tensor, lower: Tensor, upper: Tensor) -> Constrained:
    """r moved to the nearer bound."""
    inside = (lower <= log_weight) & (log_weight <= upper)
    weight = torch.exp(log_weight.clamp(lower, upper))
    return Constrained(weight, weight, inside)


def _kept(log_weight: Tensor, inside: Tensor) -> Constrained:
    """r inside, 0 outside; never inf * 0, the exponent is gated first."""
    weight = torch.where(inside, torch.exp(torch.where(inside, log_weight, 0)), 0)
    return Constrained(weight, weight, inside)


def apply_constraint(
    constraint: Constraint, log_weight: Tensor, *, x: TokenInputs, ratios: LogRatios
) -> Constrained:
    """Apply the chosen constraint to a log-weight; differentiable in it."""
    advantages = x.advantages
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
            return prefix_budget(constraint, log_weight, x, ratios)
        case SecondMoment():
            raise ValueError(
                "constraint second_moment is of a whole minibatch: give this objective's fit() the "
                "minibatch's log-ratios and advantages, and call what it returns"
            )
    return _kept(log_weight, torch.ones_like(log_weight, dtype=torch.bool))


def second_moment_gate(
    constraint: SecondMoment, log_ratios: Tensor, advantages: Tensor
) -> HardGate | Unconstrained:
    """M2PO's constraint for one minibatch of N tokens, as a gate on their ratios; [N] each.

    Masking the largest masks all above some size: the gate [exp(-b), exp(b)], by the sign of A. b
    lies halfway between the largest log-ratio that stays and the smallest that goes, so that
    rounding moves neither across. Equally large ones go together. Log-ratios that are not finite
    are left to those who report them.
    """
    trust = (log_ratios * advantages > 0) & torch.isfinite(log_ratios)
    sizes = log_ratios[trust].double().abs().sort().values
    means = sizes.square().cumsum(0) / torch.arange(1, len(sizes) + 1, device=sizes.device)
    staying = int((means <= constraint.threshold).sum())  # the means of sorted squares never fall
    if staying == len(sizes):
        return Unconstrained()
    smallest_gone = sizes[staying]
    kept = sizes[sizes < smallest_gone]
    bound = (float(smallest_gone) + (float(kept[-1]) if len(kept) else 0.0)) / 2
    return HardGate(low=bound, high=bound, space="log", sided="advantage")
