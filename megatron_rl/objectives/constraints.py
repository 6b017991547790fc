"""The constraint axis: clip, reject or reshape weights.

All comparisons use logarithms: near 1, float32 loses the difference between 1 + 9.5e-4 and
1 + 9.4e-4 after an exponential but not before, and an extreme log-ratio never overflows.
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
    DivergenceGate,
    GammaKernel,
    HardGate,
    PpoClip,
    PrefixBudget,
    SecondMoment,
    SoftGate,
    Taper,
    Truncate,
    TvFilter,
    Unconstrained,
    Weight,
)
from megatron_rl.objectives.weights import (
    LogRatios,
    budget_spent,
    budget_weights,
    prior_log_weight,
)


@dataclass(frozen=True)
class ConstrainedWeights:
    """A weight r after its constraint."""

    value: Tensor  # [t] of the term per unit of A, e.g. clip(r): differentiated through
    coefficient: Tensor  # [t] of A grad log pi, 0 where the value is constant: when detached
    inside: Tensor  # [t] bool, False where the constraint changed something


@dataclass(frozen=True)
class TokenWeights:
    """Weights of the tokens of a micro-batch, before anything is summed."""

    ratios: LogRatios
    log_weight: Tensor  # [t] before the constraint
    constrained: ConstrainedWeights
    factor: Tensor | None = None  # [t] of a rollout correction

    @property
    def kept(self) -> Tensor:
        """Mask of tokens whose weight neither constraint nor correction changed; [t] bool."""
        inside = self.constrained.inside
        return inside if self.factor is None else inside & (self.factor != 0)


def position_scale(
    bounds: Bounds, layout: SequenceLayout, dtype: torch.dtype, *, before: int = 0
) -> Tensor:
    """Compute h(t - before, L): 1, sqrt(L/t) or t^p; [t], or [] if it is constant."""
    position = (layout.position - before).clamp(min=1).to(dtype)
    match bounds.scale:
        case "constant":
            return torch.ones((), dtype=dtype, device=layout.device)
        case "sqrt(L/t)":
            return torch.sqrt(layout.length.to(dtype) / position)
        case "t^p":
            assert bounds.power is not None, "checked when the bounds were made"
            return position**bounds.power
    raise AssertionError(f"unknown scale {bounds.scale}")


def log_bounds(
    bounds: Bounds, layout: SequenceLayout, dtype: torch.dtype, *, before: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute the inclusive lower and upper bounds of the log-weight; ([t] or [], [t] or []).

    before: 1 for the bounds of the prefix before each token, at its position t - 1.
    """
    scale = position_scale(bounds, layout, dtype, before=before)
    upper = torch.full((), torch.inf, dtype=dtype, device=layout.device)
    lower = -upper
    if bounds.low is not None:
        reach = bounds.low * scale
        # 1 - low * h <= 0 is no bound, because ratios are positive: log1p of -1 is -inf.
        lower = -reach if bounds.space == "log" else torch.log1p(-reach.clamp(max=1))
    if bounds.high is not None:
        reach = bounds.high * scale
        upper = reach if bounds.space == "log" else torch.log1p(reach)
    return lower, upper


def ppo_clip(
    clip: PpoClip, log_weight: Tensor, advantages: Tensor, layout: SequenceLayout
) -> ConstrainedWeights:
    """Apply min(r A, clip(r) A) and the dual clip as one clamp of r with bounds by the sign of A.

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
) -> ConstrainedWeights:
    """Compute M r with M = 1 inside the bounds and 0 outside."""
    lower, upper = log_bounds(gate, layout, log_weight.dtype)
    below, above = log_weight < lower, log_weight > upper
    if gate.sided == "advantage":
        below, above = below & (advantages < 0), above & (advantages > 0)
    return _kept(log_weight, ~(below | above))


def truncate(bounds: Truncate, log_weight: Tensor, layout: SequenceLayout) -> ConstrainedWeights:
    """Clip r to the bounds; with a detached weight every token keeps its gradient."""
    return _clipped(log_weight, *log_bounds(bounds, layout, log_weight.dtype))


def tv_filter(
    tv: TvFilter, log_weight: Tensor, advantages: Tensor, ratios: LogRatios
) -> ConstrainedWeights:
    """Reject A (rho - 1) > 0 in responses with a mean |rho - 1| / 2 above the threshold."""
    variation = ratios.total("deviation") / (2 * ratios.layout.length.clamp(min=1))
    inside = (variation <= tv.threshold) | (advantages * ratios.token.detach() <= 0)
    return _kept(log_weight, inside)


def taper(tapered: Taper, log_weight: Tensor, advantages: Tensor) -> ConstrainedWeights:
    """Clip r to [a+, b+] where A >= 0 and to [a-, b-] where A < 0."""
    ratios = [
        [tapered.positive_low, tapered.negative_low],
        [tapered.positive_high, tapered.negative_high],
    ]
    bounds = torch.tensor(ratios, dtype=log_weight.dtype, device=log_weight.device).log()
    lower, upper = torch.where(advantages < 0, bounds[:, 1:], bounds[:, :1])
    return _clipped(log_weight, lower, upper)


def prefix_budget(
    budget: PrefixBudget, log_weight: Tensor, x: TokenInputs, ratios: LogRatios
) -> ConstrainedWeights:
    """Reject A (rho - 1) > 0 where the token or its prefix has exceeded its budget."""
    _, before = budget_weights(budget, ratios.layout, log_weight.dtype)
    spent = budget_spent(budget, x, ratios.token.detach(), ratios.layout)
    within = (spent <= budget.threshold) & (
        ratios.running("budget") <= budget.threshold + budget.average * before
    )
    return _kept(log_weight, within | (x.advantages * ratios.token.detach() <= 0))


def divergence_gate(
    gate: DivergenceGate, log_weight: Tensor, x: TokenInputs, log_ratio: Tensor
) -> ConstrainedWeights:
    """Reject A (pi - beta) > 0 where the divergence at the sampled token exceeds its bound."""
    before, after = torch.exp(x.behavior_logprobs), torch.exp(x.behavior_logprobs + log_ratio)
    if gate.divergence == "tv":
        divergence = (after - before).abs()
    else:
        # 1 - p by expm1, which is accurate for p near 1; 0 log 0 is 0.
        rest = (-torch.expm1(x.behavior_logprobs)).clamp(min=0)
        rest_after = (-torch.expm1(x.behavior_logprobs + log_ratio)).clamp(min=0)
        divergence = torch.xlogy(rest, rest) - torch.xlogy(rest, rest_after) - before * log_ratio
    bound = _by_sign(x.advantages, negative=gate.low, other=gate.high)
    return _kept(log_weight, (divergence <= bound) | (x.advantages * log_ratio <= 0))


def soft_gate(gate: SoftGate, log_weight: Tensor, advantages: Tensor) -> ConstrainedWeights:
    """Compute 4 / tau sigmoid(tau (r - 1)), with its derivative by log r as the coefficient."""
    temperature = _by_sign(
        advantages, negative=gate.negative_temperature, other=gate.positive_temperature
    )
    ratio = torch.exp(log_weight.clamp(max=80))  # value and slope are constant well below that
    moved = temperature * (ratio - 1)
    value = torch.sigmoid(moved)
    slope = 4 * value * torch.sigmoid(-moved) * ratio
    return ConstrainedWeights(
        value * 4 / temperature, slope, torch.ones_like(ratio, dtype=torch.bool)
    )


def gamma_kernel(kernel: GammaKernel, log_weight: Tensor, advantages: Tensor) -> ConstrainedWeights:
    """Compute r^k exp(lambda (1 - r)) in log space, where nothing overflows into nan."""
    power = _by_sign(advantages, negative=kernel.negative_power, other=kernel.positive_power)
    rate = _by_sign(advantages, negative=kernel.negative_rate, other=kernel.positive_rate)
    weight = torch.exp(power * log_weight - rate * torch.expm1(log_weight))
    return ConstrainedWeights(weight, weight, torch.ones_like(log_weight, dtype=torch.bool))


def scale_negative(
    constrained: ConstrainedWeights, advantages: Tensor, *, factor: float, dropped: Tensor
) -> ConstrainedWeights:
    """Multiply the weights by `factor` where A < 0, and reject the dropped tokens."""
    scale = torch.where(dropped, 0, _by_sign(advantages, negative=factor, other=1.0))
    return ConstrainedWeights(
        constrained.value * scale, constrained.coefficient * scale, constrained.inside & ~dropped
    )


def _by_sign(advantages: Tensor, *, negative: float, other: float) -> Tensor:
    """Select one number where A < 0 and the other elsewhere, in the advantages' dtype; [t]."""
    return torch.where(
        advantages < 0, advantages.new_full((), negative), advantages.new_full((), other)
    )


def _clipped(log_weight: Tensor, lower: Tensor, upper: Tensor) -> ConstrainedWeights:
    """Clamp r to the bounds."""
    inside = (lower <= log_weight) & (log_weight <= upper)
    weight = torch.exp(log_weight.clamp(lower, upper))
    return ConstrainedWeights(weight, weight, inside)


def _kept(log_weight: Tensor, inside: Tensor) -> ConstrainedWeights:
    """Keep r inside and return 0 outside; masks the exponent first to avoid inf * 0."""
    weight = torch.where(inside, torch.exp(torch.where(inside, log_weight, 0)), 0)
    return ConstrainedWeights(weight, weight, inside)


def apply_constraint(
    constraint: Constraint, log_weight: Tensor, *, x: TokenInputs, ratios: LogRatios
) -> ConstrainedWeights:
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
        case DivergenceGate():
            return divergence_gate(constraint, log_weight, x, ratios.token.detach())
        case SoftGate():
            return soft_gate(constraint, log_weight, advantages)
        case GammaKernel():
            return gamma_kernel(constraint, log_weight, advantages)
        case SecondMoment():
            raise ValueError(
                "constraint second_moment is of a whole minibatch: give this objective's resolve() "
                "the minibatch's tokens, and call what it returns"
            )
    return _kept(log_weight, torch.ones_like(log_weight, dtype=torch.bool))


@torch.no_grad()
def prior_weight(weight: Weight, constraint: Constraint, ratios: LogRatios) -> Tensor:
    """Compute the constrained weight of the prefix before each token; [t], 1 at t = 1.

    A divergence at prefix s_t is an expectation over y_t already, so only the probability of the
    prefix has to be corrected: C_{t-1} corrects it exactly, and w_{t-1} is its normalized form.
    """
    log_weight = prior_log_weight(weight, ratios)
    if isinstance(constraint, Unconstrained):
        return torch.exp(log_weight)
    assert isinstance(constraint, HardGate | Truncate), "checked with the spec"
    bounds = log_bounds(constraint, ratios.layout, log_weight.dtype, before=1)
    if isinstance(constraint, Truncate):
        return _clipped(log_weight, *bounds).value
    lower, upper = bounds
    return _kept(log_weight, (lower <= log_weight) & (log_weight <= upper)).value


def second_moment_gate(
    constraint: SecondMoment, log_ratios: Tensor, advantages: Tensor
) -> HardGate | Unconstrained:
    """Resolve M2PO's constraint for one minibatch of N tokens into a gate on ratios; [N] each.

    Rejecting the largest log-ratios rejects all above some size b: the gate [exp(-b), exp(b)] by
    the sign of A. b is halfway between the largest log-ratio kept and the smallest rejected, so
    that rounding moves neither across it; equal ones are rejected together. Non-finite log-ratios
    are ignored here and reported by the statistics.
    """
    trust = (log_ratios * advantages > 0) & torch.isfinite(log_ratios)
    # On the host: a device's cumsum may differ in the last bit between ranks and runs.
    sizes = log_ratios[trust].double().abs().sort().values.cpu()
    means = sizes.square().cumsum(0) / torch.arange(1, len(sizes) + 1, device=sizes.device)
    num_kept = int((means <= constraint.threshold).sum())  # means of sorted squares never decrease
    if num_kept == len(sizes):
        return Unconstrained()
    smallest_rejected = sizes[num_kept]
    kept = sizes[sizes < smallest_rejected]
    bound = (float(smallest_rejected) + (float(kept[-1]) if len(kept) else 0.0)) / 2
    return HardGate(low=bound, high=bound, space="log", sided="advantage")
