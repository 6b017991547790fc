"""Evaluate an objective on one micro-batch.

J = sum over valid decisions of one term per token, divided by global denominators; the loss is
-J, so that adding the losses of all tokens, micro-batches and ranks gives what is minimised.
Shapes: t tokens on this rank, in the order of its SequenceLayout.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.constraints import (
    Constrained,
    Weighed,
    apply_constraint,
    second_moment_gate,
)
from megatron_rl.objectives.diagnostics import Terms, compute_statistics
from megatron_rl.objectives.inputs import TokenClasses, TokenInputs
from megatron_rl.objectives.spec import (
    KlPenalty,
    OaplSpec,
    ObjectiveSpec,
    RolloutCorrection,
    SecondMoment,
)
from megatron_rl.objectives.statistics import Statistics
from megatron_rl.objectives.weights import LogRatios, build_scans, compute_log_weight
from megatron_rl.types import Denominators


@dataclass(frozen=True)
class ObjectiveResult:
    """Per-token losses, already divided, and what to report about them."""

    loss: Tensor  # [t] zero off the mask
    statistics: Statistics


class PolicyObjective(ABC):
    """What the actor asks of an objective; never sees a rank."""

    @property
    def needs(self) -> Mapping[str, object]:
        """The optional inputs that it cannot do without, each with the option that asks for it."""
        return {}

    @property
    def uses_zero_advantage(self) -> bool:
        """Whether a response of advantage 0 adds to loss or gradient; if not, it needs no pass."""
        return True

    @property
    def is_fitted(self) -> bool:
        """Whether it can be called; if not, `fit` comes first, once per minibatch."""
        return True

    def fit(self, log_ratios: Tensor, advantages: Tensor) -> "PolicyObjective":
        """Itself, or what it is for a minibatch whose tokens, of all ranks, have these; [N]."""
        return self

    @abstractmethod
    def evaluate(
        self, x: TokenInputs, *, layout: SequenceLayout, denominators: Denominators
    ) -> tuple[Weighed, Terms]:
        """Weights, and terms that are already divided, from prepared inputs."""

    def __call__(
        self,
        inputs: TokenInputs,
        *,
        layout: SequenceLayout,
        denominators: Denominators,
        classes: TokenClasses | None = None,
    ) -> ObjectiveResult:
        """Per-token loss of one micro-batch, differentiable in the policy's log-probs; [t].

        Values off the response mask are ignored, whatever they are. Unusable values on it make
        `statistics.to_metrics()` raise: on every rank alike, and without a wait here. Raises
        ValueError at once for what `TokenInputs.prepared` refuses.
        """
        x = inputs.prepared(layout, denominators, needs=self.needs)
        weighed, terms = self.evaluate(x, layout=layout, denominators=denominators)
        return ObjectiveResult(terms.loss, compute_statistics(x, weighed, terms, classes))


@dataclass(frozen=True)
class Objective(PolicyObjective):
    """A choice on the axes as a function of log-probabilities."""

    spec: ObjectiveSpec

    @property
    def needs(self) -> Mapping[str, object]:
        """Those of its terms."""
        return self.spec.needs

    @property
    def uses_zero_advantage(self) -> bool:
        """KL and entropy concern every response; the policy term is a multiple of its advantage."""
        return self.spec.kl is not None or self.spec.entropy_coefficient > 0

    @property
    def is_fitted(self) -> bool:
        """False where the constraint is one of a whole minibatch."""
        return not isinstance(self.spec.constraint, SecondMoment)

    def fit(self, log_ratios: Tensor, advantages: Tensor) -> "Objective":
        """Itself, or with the gate that its constraint is for this minibatch's tokens."""
        if not isinstance(self.spec.constraint, SecondMoment):
            return self
        gate = second_moment_gate(self.spec.constraint, log_ratios, advantages)
        return Objective(replace(self.spec, constraint=gate))

    def evaluate(
        self, x: TokenInputs, *, layout: SequenceLayout, denominators: Denominators
    ) -> tuple[Weighed, Terms]:
        """-J by token: score or weight, times advantage, over the denominator; plus the terms."""
        spec = self.spec
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
        return weighed, Terms(policy_term, kl, entropy)

    def weigh(self, x: TokenInputs, layout: SequenceLayout) -> Weighed:
        """Weight and constraint of each token, from prepared inputs."""
        spec = self.spec
        # Detached, weight, gate and advantage are constants: no backward scan.
        detached = spec.gradient == "detached"
        policy = x.policy_logprobs.detach() if detached else x.policy_logprobs
        log_ratio = policy - x.behavior_logprobs
        ratios = LogRatios.of(log_ratio, layout, **build_scans(spec, x, log_ratio, layout))
        log_weight = compute_log_weight(spec.weight, ratios)
        factor = None
        if spec.rollout_correction is not None:
            factor = rollout_factor(spec.rollout_correction, x, ratios)
        constrained = apply_constraint(
            spec.constraint,
            finite_where_dropped(log_weight, x.advantages, factor),
            x=x,
            ratios=ratios,
        )
        return Weighed(ratios, log_weight, constrained, factor)


@dataclass(frozen=True)
class OaplObjective(OaplSpec, PolicyObjective):
    """1/N sum_i (beta S_L - A_i)^2 with S_L = log pi_theta(y|x) - log pi_beta(y|x).

    Regresses a response's log-ratio on its advantage instead of weighting a score, so it has none
    of the axes. arXiv 2602.19362, as re-implemented in public code: A_i = R_i - V*(x) with
    V* = beta_1 log mean exp(R / beta_1) over the group (`optimal_value_advantages`). Not checked
    against the original.
    """

    def evaluate(
        self, x: TokenInputs, *, layout: SequenceLayout, denominators: Denominators
    ) -> tuple[Weighed, Terms]:
        """Each of a response's L tokens carries 1/L of its square; [t]."""
        ratios = LogRatios.of(x.policy_logprobs - x.behavior_logprobs, layout)
        sequence_sum = ratios.total("log_ratio")
        square = (self.beta * sequence_sum - x.advantages).square()
        loss = square / (layout.length.clamp(min=1) * denominators.responses)
        one = torch.ones_like(ratios.token)
        weighed = Weighed(ratios, sequence_sum, Constrained(one, one, one.bool()))
        return weighed, Terms(torch.where(layout.mask, loss, 0))


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
