"""Objectives: built from a config's name and overrides, evaluated on one micro-batch.

J = sum over valid decisions of one term per token, divided by global denominators. The loss is -J;
the quantity to minimize is the sum of the losses of all tokens, micro-batches and ranks.
Shapes: t tokens on this rank, in the order of its SequenceLayout.
"""

import importlib
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.errors import UserError
from megatron_rl.objectives.constraints import (
    ConstrainedWeights,
    TokenWeights,
    apply_constraint,
    prior_weight,
    scale_negative,
    second_moment_gate,
)
from megatron_rl.objectives.inputs import MinibatchTokens, TokenClasses, TokenInputs
from megatron_rl.objectives.named import choose_objective
from megatron_rl.objectives.spec import (
    FunctionSpec,
    KlPenalty,
    OaplSpec,
    ObjectiveSpec,
    RolloutCorrection,
    SecondMoment,
    check_function,
)
from megatron_rl.objectives.statistics import Statistics, Terms, compute_statistics
from megatron_rl.objectives.weights import LogRatios, build_scans, compute_log_weight
from megatron_rl.types import Denominators, Divergence


@dataclass(frozen=True)
class ObjectiveResult:
    """Per-token losses, divided by the global denominators, and their statistics."""

    loss: Tensor  # [t] zero off the mask
    statistics: Statistics


class PolicyObjective(ABC):
    """The interface of an objective to the actor; independent of ranks."""

    @property
    def needs(self) -> Mapping[str, object]:
        """Optional inputs this objective requires, mapped to the option that requires them."""
        return {}

    @property
    def divergence(self) -> Divergence | None:
        """The divergence from the reference over the whole vocabulary that the objective needs."""
        return None

    @property
    def top_k(self) -> int | None:
        """Number of the reference's likeliest tokens that the divergence has; None: all tokens."""
        return None

    @property
    def uses_zero_advantage(self) -> bool:
        """True if responses with advantage 0 contribute to the loss; otherwise they are skipped."""
        return True

    def resolve(self, tokens: MinibatchTokens) -> "PolicyObjective":
        """Return the objective of this update, if it depends on the whole minibatch; collective."""
        return self

    def with_teacher(self, x: TokenInputs) -> TokenInputs:
        """Return prepared inputs whose advantages include the reference's, if it gives any."""
        return x

    @abstractmethod
    def evaluate(
        self, x: TokenInputs, *, layout: SequenceLayout, denominators: Denominators
    ) -> tuple[TokenWeights, Terms]:
        """Compute weights, and terms divided by the denominators, from prepared inputs."""

    def __call__(
        self,
        inputs: TokenInputs,
        *,
        layout: SequenceLayout,
        denominators: Denominators,
        classes: TokenClasses | None = None,
    ) -> ObjectiveResult:
        """Compute the loss of one micro-batch, differentiable in the policy's log-probs; [t].

        Values off the response mask are ignored. Invalid values on it make
        `statistics.to_metrics()` raise, on every rank, without a device synchronization here.
        Raises ValueError immediately for inputs that `TokenInputs.prepared` rejects.
        """
        x = self.with_teacher(inputs.prepared(layout, denominators, needs=self.needs))
        weighed, terms = self.evaluate(x, layout=layout, denominators=denominators)
        return ObjectiveResult(terms.loss, compute_statistics(x, weighed, terms, classes))


@dataclass(frozen=True)
class Objective(PolicyObjective):
    """An objective specified by weight, constraint, gradient and aggregation."""

    spec: ObjectiveSpec

    @property
    def needs(self) -> Mapping[str, object]:
        return self.spec.needs

    @property
    def divergence(self) -> Divergence | None:
        return None if self.spec.kl is None else self.spec.kl.divergence

    @property
    def top_k(self) -> int | None:
        return None if self.spec.kl is None else self.spec.kl.top_k

    @property
    def uses_zero_advantage(self) -> bool:
        # The policy term is proportional to the advantage; KL and entropy are not.
        return self.spec.kl is not None or self.spec.entropy_coefficient > 0

    def resolve(self, tokens: MinibatchTokens) -> "Objective":
        """Decide the factor of `balanced` and the gate of `second_moment`."""
        spec = self.spec
        if spec.balanced:
            noise = tokens.sum(sign_noise(tokens.advantages(), tokens.behavior_logprobs()))
            spec = replace(spec, balanced=False, negative=balance(*noise.tolist()))
        if isinstance(spec.constraint, SecondMoment):
            columns = tokens.gather(tokens.log_ratios()), tokens.gather(tokens.advantages())
            spec = replace(spec, constraint=second_moment_gate(spec.constraint, *columns))
        return Objective(spec)

    def with_teacher(self, x: TokenInputs) -> TokenInputs:
        """Add coefficient * (log pi_ref - log pi) of the sampled token to the advantages.

        The policy's log-prob is its present one, so that the expectation over its own actions is
        minus the gradient of KL(pi || pi_ref); a constant, like every advantage.
        """
        spec = self.spec
        if spec.kl is None or not spec.kl.is_advantage:
            return x
        assert x.reference_logprobs is not None, "checked with the inputs"
        teacher = spec.kl.coefficient * (x.reference_logprobs - x.policy_logprobs.detach())
        rewards = spec.advantage_coefficient * x.advantages
        return replace(x, advantages=rewards + teacher)

    def evaluate(
        self, x: TokenInputs, *, layout: SequenceLayout, denominators: Denominators
    ) -> tuple[TokenWeights, Terms]:
        """Compute -J per token: score or weight, times advantage, over the denominator."""
        spec = self.spec
        if spec.balanced:
            raise ValueError(
                "balanced is a factor of a whole minibatch: give this objective's resolve() the "
                "minibatch's tokens, and call what it returns"
            )
        weighed = self.compute_weights(x, layout)
        constrained, factor = weighed.constrained, weighed.factor
        if spec.gradient == "detached":  # sg[weight * A] * log pi
            coefficient = constrained.coefficient * x.advantages
            # Avoid 0 * log pi for rejected tokens: log pi may be infinite there.
            term = torch.where(coefficient == 0, 0, coefficient * x.policy_logprobs)
        else:  # weight * A
            term = constrained.value * x.advantages
        if factor is not None:
            term = term * factor
        has_teacher = spec.kl is not None and spec.kl.is_advantage  # the advantages have both
        if not spec.advantage_coefficient and not has_teacher:
            term = torch.zeros_like(term)  # without a gradient, and not inf * 0
        elif spec.advantage_coefficient != 1 and not has_teacher:
            term = term * spec.advantage_coefficient

        denominator = token_denominator(spec, layout, denominators)
        kl = entropy = None
        if spec.kl is not None and not has_teacher:
            penalty = kl_penalty(spec.kl, x)
            if spec.kl.weighted:
                penalty = penalty * prior_weight(spec.weight, spec.constraint, weighed.ratios)
            kl = torch.where(layout.mask, penalty / denominator, 0)
        if spec.entropy_coefficient:
            assert x.entropy is not None, "checked with the inputs"
            entropy = -spec.entropy_coefficient * x.entropy / denominator
        policy_term = -torch.where(layout.mask, term / denominator, 0)
        return weighed, Terms(policy_term, kl, entropy)

    def compute_weights(self, x: TokenInputs, layout: SequenceLayout) -> TokenWeights:
        """Compute the weight of each token and apply the constraint, from prepared inputs."""
        spec = self.spec
        # With a detached gradient, weight, gate and advantage are constants: no backward scan.
        detached = spec.gradient == "detached"
        policy = x.policy_logprobs.detach() if detached else x.policy_logprobs
        log_ratio = policy - x.behavior_logprobs
        ratios = LogRatios.of(log_ratio, layout, **build_scans(spec, x, log_ratio, layout))
        log_weight = compute_log_weight(spec.weight, ratios)
        factor = None
        if spec.rollout_correction is not None:
            factor = rollout_factor(spec.rollout_correction, x, ratios)
        dropped = dropped_negatives(spec, x, ratios)
        constrained = apply_constraint(
            spec.constraint,
            zero_masked_log_weights(log_weight, dropped | (x.advantages == 0), factor),
            x=x,
            ratios=ratios,
        )
        if spec.negative != 1 or spec.off_policy_mask is not None:
            constrained = scale_negative(
                constrained, x.advantages, factor=spec.negative, dropped=dropped
            )
        return TokenWeights(ratios, log_weight, constrained, factor)


@dataclass(frozen=True)
class OaplObjective(OaplSpec, PolicyObjective):
    """OAPL: 1/N sum_i (beta S_L - A_i)^2 with S_L = log pi_theta(y|x) - log pi_beta(y|x).

    A regression of each response's log-ratio on its advantage, without the axes of the other
    objectives. arXiv 2602.19362, as re-implemented in public code: A_i = R_i - V*(x) with
    V* = beta_1 log mean exp(R / beta_1) over the group (`optimal_value_advantages`). Not checked
    against the original.
    """

    def evaluate(
        self, x: TokenInputs, *, layout: SequenceLayout, denominators: Denominators
    ) -> tuple[TokenWeights, Terms]:
        """Assign 1/L of a response's square to each of its L tokens; [t]."""
        ratios = LogRatios.of(x.policy_logprobs - x.behavior_logprobs, layout)
        sequence_sum = ratios.total("log_ratio")
        square = (self.beta * sequence_sum - x.advantages).square()
        loss = square / (layout.length.clamp(min=1) * denominators.responses)
        one = torch.ones_like(ratios.token)
        weighed = TokenWeights(ratios, sequence_sum, ConstrainedWeights(one, one, one.bool()))
        return weighed, Terms(torch.where(layout.mask, loss, 0))


def token_denominator(
    spec: ObjectiveSpec | FunctionSpec, layout: SequenceLayout, denominators: Denominators
) -> Tensor | float:
    """Compute the divisor of each token's term (the aggregation axis); [t] or a number.

    Denominators cover the whole minibatch, over data-parallel ranks and micro-batches, so that
    terms are only added afterwards. N counts responses with at least one valid decision.
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


def sign_noise(advantages: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """Sum A^2 (1 - beta)^2 over the tokens with A > 0 and with A < 0; [N] each to [2], float64.

    (1 - pi)^2 bounds the squared score of a token's logits, so these sums bound the contribution
    of each sign to the variance of the gradient.
    """
    square = (advantages.double() * torch.expm1(behavior_logprobs.double())).square()
    signs = advantages > 0, advantages < 0
    return torch.stack([torch.where(sign, square, 0).sum() for sign in signs])


def balance(positive: float, negative: float) -> float:
    """Return the factor of terms with A < 0 whose noise is then at most that of A > 0."""
    return min(1.0, math.sqrt(positive / negative)) if negative else 1.0


def dropped_negatives(spec: ObjectiveSpec, x: TokenInputs, ratios: LogRatios) -> Tensor:
    """Mask of tokens with A < 0 that the objective drops before its constraint; [t] bool."""
    negative = x.advantages < 0
    if spec.negative == 0:
        return negative
    if spec.off_policy_mask is None:
        return torch.zeros_like(negative)
    mean = ratios.total("log_ratio").detach() / ratios.layout.length.clamp(min=1)
    return negative & (mean < -spec.off_policy_mask)


def zero_masked_log_weights(log_weight: Tensor, dropped: Tensor, factor: Tensor | None) -> Tensor:
    """Clamp log-weights where the term is 0 anyway, to avoid inf * 0; [t]."""
    if factor is not None:
        dropped = dropped | (factor == 0)
    return torch.where(dropped, log_weight.clamp(max=80), log_weight)


def kl_penalty(kl: KlPenalty, x: TokenInputs) -> Tensor:
    """Compute coefficient * rho_t * k_t; [t], differentiable in rho and k.

    k3 alone in a loss has the gradient (1 - q) z of another divergence; rho k3 has
    rho log(pi / pi_ref) z, whose expectation under the behavior policy is grad KL(pi || pi_ref).
    Divergences over the vocabulary have the expectation over actions already.
    """
    if kl.divergence is not None:
        assert x.divergence is not None, "checked with the inputs"
        return kl.coefficient * x.divergence
    assert x.reference_logprobs is not None, "checked with the inputs"
    log_q = x.reference_logprobs - x.policy_logprobs
    log_ratio = x.policy_logprobs - x.behavior_logprobs
    # Where pi = pi_ref the estimate is 0, but rho may overflow: avoid inf * 0.
    rho = torch.exp(torch.where(log_q == 0, log_ratio.clamp(max=80), log_ratio))
    match kl.estimator:
        case "k1":
            return kl.coefficient * rho * -log_q
        case "k2":
            return kl.coefficient * rho * (log_q.square() / 2)
        case "k3":
            # For large q, rho q = pi_ref / pi_beta stays finite: avoid 0 * inf. Near q = 1 only
            # expm1 is exact.
            large = log_q > 40
            near = torch.where(large, 0, log_q)
            product = torch.exp(x.reference_logprobs - x.behavior_logprobs)
            far = kl.coefficient * (product - rho * (1 + log_q))
            return torch.where(large, far, kl.coefficient * rho * (torch.expm1(near) - near))
    raise AssertionError(f"unknown estimator {kl.estimator}")


@torch.no_grad()
def rollout_factor(correction: RolloutCorrection, x: TokenInputs, ratios: LogRatios) -> Tensor:
    """Compute the constant factor of each token's policy term; [t]."""
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


@dataclass(frozen=True)
class LayoutStatistics:
    """Per-token statistics of whole responses, under any layout; [t] each, 0 off the mask.

    The sums of log-ratios are differentiable in the policy's log-probs.
    """

    position: Tensor  # int, t: valid decisions of the response up to this token, from 1
    length: Tensor  # int, L: valid decisions of the response
    prefix_log_ratio: Tensor  # S_t, the sum of policy minus behavior log-probs up to this token
    response_log_ratio: Tensor  # S_L, the sum over the whole response


LossFunction = Callable[..., Tensor]  # of `spec.PARAMETERS`, then of further values by name


@dataclass(frozen=True)
class FunctionObjective(PolicyObjective):
    """A user's own loss: a pure function of the tokens of one micro-batch on this rank."""

    spec: FunctionSpec
    function: LossFunction

    @classmethod
    def load(cls, spec: FunctionSpec) -> "FunctionObjective":
        """Import the function; raise UserError if it does not exist or takes other arguments."""
        check_function(spec.function)
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        module, _, name = spec.function.partition(":")
        function = getattr(importlib.import_module(module), name, None)
        if not callable(function):
            raise UserError(f"objective.function={spec.function}: {name} is not a function")
        return cls(spec, function)

    @cached_property
    def needs(self) -> Mapping[str, object]:
        return self.spec.needs

    def evaluate(
        self, x: TokenInputs, *, layout: SequenceLayout, denominators: Denominators
    ) -> tuple[TokenWeights, Terms]:
        """Divide the function's losses by the denominators; its weights are reported as 1."""
        ratios = LogRatios.of(x.policy_logprobs - x.behavior_logprobs, layout)
        zero = torch.zeros_like(ratios.token)
        statistics = LayoutStatistics(
            position=torch.where(layout.mask, layout.position, 0),
            length=torch.where(layout.mask, layout.length, 0),
            prefix_log_ratio=torch.where(layout.mask, ratios.prefix_sum, zero),
            response_log_ratio=torch.where(layout.mask, ratios.total("log_ratio"), zero),
        )
        further = [x.value(name) for name in self.needs]
        loss = self.function(
            x.policy_logprobs, x.behavior_logprobs, x.advantages, layout.mask, statistics, *further
        )
        if not isinstance(loss, Tensor) or loss.shape != zero.shape:
            returned = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise UserError(
                f"objective.function={self.spec.function} returned {returned}; return one loss "
                f"per token, {tuple(zero.shape)}, without a mean or a sum"
            )
        loss = loss / token_denominator(self.spec, layout, denominators)
        one = torch.ones_like(zero)
        weights = TokenWeights(ratios, ratios.token, ConstrainedWeights(one, one, one.bool()))
        return weights, Terms(torch.where(layout.mask, loss, 0))


def build_objective(name: str, **overrides: Any) -> PolicyObjective:
    """Build the named objective with some of its fields replaced.

    `overrides` are fields of ObjectiveSpec as plain values, as in a config (see
    `choose_objective`). Raises ValueError with the nearest known name.
    """
    choice = choose_objective(name, overrides)
    if isinstance(choice, FunctionSpec):
        return FunctionObjective.load(choice)
    return Objective(choice) if isinstance(choice, ObjectiveSpec) else OaplObjective(choice.beta)
