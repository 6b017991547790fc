"""Evaluate an objective on one micro-batch.

J = sum over valid decisions of one term per token, divided by global denominators; the loss is
-J, so that adding the losses of all tokens, micro-batches and ranks gives what is minimised.
Shapes: t tokens on this rank, in the order of its SequenceLayout.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.aggregation import token_denominator
from megatron_rl.objectives.constraints import apply_constraint
from megatron_rl.objectives.spec import ObjectiveSpec
from megatron_rl.objectives.statistics import Statistics, compute_statistics
from megatron_rl.objectives.weights import LogRatios, compute_log_weight
from megatron_rl.types import Denominators


@dataclass(frozen=True)
class ObjectiveResult:
    """Per-token losses, already divided, and what to report about them."""

    loss: Tensor  # [t] zero off the mask
    statistics: Statistics


@dataclass(frozen=True)
class Objective:
    """A policy objective as a function of log-probabilities."""

    spec: ObjectiveSpec

    def __call__(
        self,
        policy_logprobs: Tensor,
        *,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        layout: SequenceLayout,
        denominators: Denominators,
        rollout_logprobs: Tensor | None = None,
    ) -> ObjectiveResult:
        """Per-token loss of one micro-batch, differentiable in `policy_logprobs`; all [t].

        Values off the response mask are ignored, whatever they are.
        """
        spec = self.spec
        policy = torch.where(layout.mask, at_least_float32(policy_logprobs), 0)
        behavior = torch.where(layout.mask, at_least_float32(behavior_logprobs), 0)
        advantages = torch.where(layout.mask, advantages.to(policy.dtype), 0)
        denominator = token_denominator(spec.aggregation, layout, denominators, spec.constant)

        # Under the token score weight, gate and advantage are constants: no backward scan.
        log_ratio = (policy.detach() if spec.score == "token" else policy) - behavior.detach()
        ratios = LogRatios.of(log_ratio, layout)
        constrained = apply_constraint(
            spec.constraint,
            compute_log_weight(spec.weight, ratios),
            advantages=advantages,
            layout=layout,
        )
        if spec.score == "token":  # sg[weight * A] * log pi
            term = constrained.score_weight * advantages * policy
        else:  # weight * A
            term = constrained.weight * advantages
        loss = -torch.where(layout.mask, term / denominator, 0)
        statistics = compute_statistics(
            loss=loss, ratios=ratios, constrained=constrained, layout=layout
        )
        return ObjectiveResult(loss, statistics)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision cannot tell 1 from 1 + 7e-4: compute in float32 or, if given, float64."""
    return x if x.dtype == torch.float64 else x.float()
