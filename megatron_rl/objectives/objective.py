"""Evaluate an objective on one micro-batch.

J = sum over valid decisions of one term per token, divided by global denominators; the loss is
-J, so that adding the losses of all tokens, micro-batches and ranks gives what is minimised.
Shapes: t tokens on this rank, in the order of its SequenceLayout.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.aggregation import token_denominator
from megatron_rl.objectives.constraints import apply_constraint
from megatron_rl.objectives.diagnostics import Losses, compute_statistics
from megatron_rl.objectives.inputs import Observed, Prepared, prepare
from megatron_rl.objectives.spec import ObjectiveSpec
from megatron_rl.objectives.statistics import Statistics
from megatron_rl.objectives.terms import kl_penalty, rollout_factor
from megatron_rl.objectives.weights import LogRatios, compute_log_weight
from megatron_rl.types import Denominators


@dataclass(frozen=True)
class ObjectiveResult:
    """Per-token losses, already divided, and what to report about them."""

    loss: Tensor  # [t] zero off the mask
    statistics: Statistics


class PolicyObjective(Protocol):
    """What the actor asks of an objective; never sees a rank."""

    @property
    def needs(self) -> frozenset[str]:
        """The optional arguments below that it cannot do without."""
        ...

    @property
    def uses_zero_advantage(self) -> bool:
        """Whether a response of advantage 0 adds to loss or gradient; if not, it needs no pass."""
        ...

    def __call__(
        self,
        policy_logprobs: Tensor,
        *,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        layout: SequenceLayout,
        denominators: Denominators,
        rollout_logprobs: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> ObjectiveResult:
        """Per-token loss of one micro-batch, differentiable in `policy_logprobs`; all [t]."""
        ...


@dataclass(frozen=True)
class Objective:
    """A policy objective as a function of log-probabilities."""

    spec: ObjectiveSpec

    @property
    def needs(self) -> frozenset[str]:
        """The optional arguments that its terms cannot do without."""
        return frozenset(self.spec.needs)

    @property
    def uses_zero_advantage(self) -> bool:
        """KL and entropy concern every response; the policy term is a multiple of its advantage."""
        return self.spec.kl is not None or self.spec.entropy_coefficient > 0

    def __call__(
        self,
        policy_logprobs: Tensor,
        *,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        layout: SequenceLayout,
        denominators: Denominators,
        rollout_logprobs: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> ObjectiveResult:
        """Per-token loss of one micro-batch, differentiable in `policy_logprobs`; all [t].

        Values off the response mask are ignored, whatever they are. Unusable values on it make
        `statistics.to_metrics()` raise: on every rank alike, and without a wait here. Raises
        ValueError at once for shapes, denominators and inputs that an option needs.
        """
        observed = Observed(
            policy_logprobs,
            behavior_logprobs,
            advantages,
            rollout_logprobs,
            reference_logprobs,
            entropy,
        )
        x = prepare(observed, layout, denominators, spec=self.spec)
        spec = self.spec

        # Under the token score weight, gate and advantage are constants: no backward scan.
        policy = x.policy.detach() if spec.score == "token" else x.policy
        ratios = LogRatios.of(policy - x.behavior, layout, spec=spec, log_gap=x.log_gap)
        log_weight = compute_log_weight(spec.weight, ratios)
        constrained = apply_constraint(
            spec.constraint, log_weight, advantages=x.advantages, ratios=ratios
        )
        if spec.score == "token":  # sg[weight * A] * log pi
            coefficient = constrained.score_weight * x.advantages
            # Not 0 * log pi where rejected: log pi may be anything there.
            term = torch.where(coefficient == 0, 0, coefficient * x.policy)
        else:  # weight * A
            term = constrained.weight * x.advantages
        if spec.rollout_correction is not None:
            assert x.log_gap is not None, "checked with the inputs"
            term = term * rollout_factor(spec.rollout_correction, x.log_gap, ratios)

        losses = self._losses(x, term, layout, denominators)
        loss = losses.total()
        statistics = compute_statistics(
            x,
            losses=losses,
            loss=loss,
            ratios=ratios,
            log_weight=log_weight,
            constrained=constrained,
        )
        return ObjectiveResult(loss, statistics)

    def _losses(
        self, x: Prepared, term: Tensor, layout: SequenceLayout, denominators: Denominators
    ) -> Losses:
        spec = self.spec
        denominator = token_denominator(spec.aggregation, layout, denominators, spec.constant)
        policy = -torch.where(layout.mask, term / denominator, 0)
        kl = entropy = None
        if spec.kl is not None:
            assert x.reference is not None, "checked with the inputs"
            penalty = kl_penalty(
                spec.kl, x.policy, behavior_logprobs=x.behavior, reference_logprobs=x.reference
            )
            kl = torch.where(layout.mask, penalty / denominator, 0)
        if spec.entropy_coefficient:
            assert x.entropy is not None, "checked with the inputs"
            entropy = -spec.entropy_coefficient * x.entropy / denominator
        return Losses(policy, kl, entropy)
