"""Evaluate an objective on one micro-batch.

J = sum over valid decisions of one term per token, divided by global denominators; the loss is
-J, so that adding the losses of all tokens, micro-batches and ranks gives what is minimised.
Shapes: t tokens on this rank, in the order of its SequenceLayout.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.by_class import sum_by_class
from megatron_rl.objectives.constraints import Constrained, apply_constraint
from megatron_rl.objectives.diagnostics import TokenTerms, compute_statistics
from megatron_rl.objectives.inputs import TokenInputs
from megatron_rl.objectives.second_moment import second_moment_gate
from megatron_rl.objectives.spec import KlPenalty, ObjectiveSpec, RolloutCorrection, SecondMoment
from megatron_rl.objectives.statistics import Statistics
from megatron_rl.objectives.weights import LogRatios, compute_log_weight
from megatron_rl.types import Denominators


@dataclass(frozen=True)
class ObjectiveResult:
    """Per-token losses, already divided, and what to report about them."""

    loss: Tensor  # [t] zero off the mask
    statistics: Statistics
    by_class: Callable[..., Tensor]  # `sum_by_class` of this micro-batch


@dataclass(frozen=True)
class Weighed:
    """What an objective makes of its tokens before anything is added up."""

    ratios: LogRatios
    log_weight: Tensor  # [t]
    constrained: Constrained
    factor: Tensor | None  # [t] of a rollout correction

    @property
    def kept(self) -> Tensor:
        """Where neither the constraint nor a correction changed or dropped the weight; [t] bool."""
        inside = self.constrained.inside
        return inside if self.factor is None else inside & (self.factor != 0)


class PolicyObjective(Protocol):
    """What the actor asks of an objective; never sees a rank."""

    @property
    def needs(self) -> frozenset[str]:
        """The optional inputs that it cannot do without."""
        ...

    @property
    def uses_zero_advantage(self) -> bool:
        """Whether a response of advantage 0 adds to loss or gradient; if not, it needs no pass."""
        ...

    @property
    def is_fitted(self) -> bool:
        """Whether it can be called; if not, `fit` comes first, once per minibatch."""
        ...

    def fit(self, log_ratios: Tensor, advantages: Tensor) -> "PolicyObjective":
        """Itself, or what it is for a minibatch whose tokens, of all ranks, have these; [N]."""
        ...

    def __call__(
        self, inputs: TokenInputs, *, layout: SequenceLayout, denominators: Denominators
    ) -> ObjectiveResult:
        """Per-token loss of one micro-batch, differentiable in the policy's log-probs; [t]."""
        ...


@dataclass(frozen=True)
class Objective:
    """A policy objective as a function of log-probabilities."""

    spec: ObjectiveSpec

    @property
    def needs(self) -> frozenset[str]:
        """The optional inputs that its terms cannot do without."""
        return frozenset(self.spec.needs)

    @property
    def uses_zero_advantage(self) -> bool:
        """KL and entropy concern every response; the policy term is a multiple of its advantage."""
        return self.spec.kl is not None or self.spec.entropy_coefficient > 0

    @property
    def is_fitted(self) -> bool:
        """False where the constraint is one of a whole minibatch."""
        return not isinstance(self.spec.constraint, SecondMoment)

    def fit(self, log_ratios: Tensor, advantages: Tensor) -> "Objective":
        """Itself, or with the gate that its constraint is for this minibatch's tokens; [N] each."""
        if not isinstance(self.spec.constraint, SecondMoment):
            return self
        gate = second_moment_gate(self.spec.constraint, log_ratios, advantages)
        return Objective(replace(self.spec, constraint=gate))

    def __call__(
        self, inputs: TokenInputs, *, layout: SequenceLayout, denominators: Denominators
    ) -> ObjectiveResult:
        """Per-token loss of one micro-batch, differentiable in the policy's log-probs; [t].

        Values off the response mask are ignored, whatever they are. Unusable values on it make
        `statistics.to_metrics()` raise: on every rank alike, and without a wait here. Raises
        ValueError at once for what `TokenInputs.prepared` refuses.
        """
        spec = self.spec
        x = inputs.prepared(layout, denominators, needs=spec.needs)
        weighed = self.weigh(x, layout)
        constrained, factor = weighed.constrained, weighed.factor
        if spec.gradient == "detached":  # sg[weight * A] * log pi
            coefficient = constrained.coefficient * x.advantages
            # Not 0 * log pi where rejected: log pi may be anything there.
            term = torch.where(coefficient == 0, 0, coefficient * x.policy_logprobs)
        else:  # weight * A
            term = constrained.value * x.advantages
        if factor is not None:
            term = term * factor

        denominator = token_denominator(spec, layout, denominators)
        kl = entropy = None
        if spec.kl is not None:
            kl = torch.where(layout.mask, kl_penalty(spec.kl, x) / denominator, 0)
        if spec.entropy_coefficient:
            assert x.entropy is not None, "checked with the inputs"
            entropy = -spec.entropy_coefficient * x.entropy / denominator
        policy_term = -torch.where(layout.mask, term / denominator, 0)
        terms = TokenTerms(weighed.log_weight, constrained, policy_term, kl, entropy)
        return ObjectiveResult(
            terms.loss,
            compute_statistics(x, weighed.ratios, terms),
            by_class=partial(sum_by_class, x, weighed.ratios, constrained),
        )

    def weigh(self, x: TokenInputs, layout: SequenceLayout) -> Weighed:
        """Weight and constraint of each token, from prepared inputs."""
        spec = self.spec
        # Detached, weight, gate and advantage are constants: no backward scan.
        detached = spec.gradient == "detached"
        policy = x.policy_logprobs.detach() if detached else x.policy_logprobs
        ratios = LogRatios.of(
            policy - x.behavior_logprobs,
            layout,
            spec=spec,
            log_gap=x.log_gap,
            behavior_logprobs=x.behavior_logprobs,
        )
        log_weight = compute_log_weight(spec.weight, ratios)
        factor = None
        if spec.rollout_correction is not None:
            factor = rollout_factor(spec.rollout_correction, x, ratios)
        constrained = apply_constraint(
            spec.constraint,
            finite_where_dropped(log_weight, x.advantages, factor),
            advantages=x.advantages,
            ratios=ratios,
        )
        return Weighed(ratios, log_weight, constrained, factor)


def token_denominator(
    spec: ObjectiveSpec, layout: SequenceLayout, denominators: Denominators
) -> Tensor | float:
    """The aggregation axis: what each token's term is divided by; [t] or a number.

    Denominators are those of the whole minibatch, over data-parallel ranks and micro-batches, so
    that terms only ever have to be added. N responses with at least one valid decision.
    """
    match spec.aggregation:
        case "response_mean":  # 1/N sum_i 1/L_i sum_t; L counts rejected decisions too
            return layout.length.clamp(min=1) * denominators.responses
        case "token_mean":  # sum_i sum_t / sum_i L_i
            return denominators.tokens
        case "response_sum":  # 1/N sum_i sum_t / constant
            return denominators.responses * spec.constant
        case "token_sum":  # sum_i sum_t / constant
            return spec.constant
    raise AssertionError(f"unknown aggregation {spec.aggregation}")


def finite_where_dropped(log_weight: Tensor, advantages: Tensor, factor: Tensor | None) -> Tensor:
    """Log-weights whose exponential is finite where the term is 0 anyway: never inf * 0; [t]."""
    dropped = advantages == 0
    if factor is not None:
        dropped = dropped | (factor == 0)
    return torch.where(dropped, log_weight.clamp(max=80), log_weight)


def kl_penalty(kl: KlPenalty, x: TokenInputs) -> Tensor:
    """coefficient * rho_t * k_t; [t], differentiable through rho and k.

    k3 alone in a loss has the gradient (1 - q) z, which is that of another divergence; rho k3 has
    rho log(pi / pi_ref) z, whose expectation under the behavior policy is grad KL(pi || pi_ref).
    """
    assert x.reference_logprobs is not None, "checked with the inputs"
    log_q = x.reference_logprobs - x.policy_logprobs
    log_ratio = x.policy_logprobs - x.behavior_logprobs
    # Where pi = pi_ref the estimate is 0, and rho may overflow: never inf * 0.
    rho = torch.exp(torch.where(log_q == 0, log_ratio.clamp(max=80), log_ratio))
    match kl.estimator:
        case "k1":
            return kl.coefficient * rho * -log_q
        case "k2":
            return kl.coefficient * rho * (log_q.square() / 2)
        case "k3":
            # Where q is large rho q = pi_ref / pi_beta is not: never 0 * inf. Near q = 1 only
            # expm1 is exact.
            large = log_q > 40
            near = torch.where(large, 0, log_q)
            product = torch.exp(x.reference_logprobs - x.behavior_logprobs)
            far = kl.coefficient * (product - rho * (1 + log_q))
            return torch.where(large, far, kl.coefficient * rho * (torch.expm1(near) - near))
    raise AssertionError(f"unknown estimator {kl.estimator}")


@torch.no_grad()
def rollout_factor(correction: RolloutCorrection, x: TokenInputs, ratios: LogRatios) -> Tensor:
    """The constant that multiplies a token's policy term; [t]."""
    log_gap = x.log_gap
    assert log_gap is not None, "checked with the inputs"
    if correction.level != "token":
        log_gap = ratios.total("log_gap")
    if correction.level == "sequence_mean":
        log_gap = log_gap / ratios.layout.length.clamp(min=1)
    low = -math.inf if correction.low is None else math.log(correction.low)
    high = math.log(correction.high)
    truncated = torch.exp(log_gap.clamp(low, high))
    if correction.mode == "truncate":
        return truncated
    return torch.where((log_gap >= low) & (log_gap <= high), truncated, 0)
