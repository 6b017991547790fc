"""Evaluate a user's own loss, `objective.function`, with our masks and global denominators.

Shapes: t tokens on this rank, in the order of its SequenceLayout.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.errors import UserError
from megatron_rl.objectives.constraints import ConstrainedWeights, TokenWeights
from megatron_rl.objectives.diagnostics import Terms
from megatron_rl.objectives.function_spec import FunctionSpec, check_function
from megatron_rl.objectives.inputs import TokenInputs
from megatron_rl.objectives.objective import PolicyObjective, token_denominator
from megatron_rl.objectives.weights import LogRatios
from megatron_rl.types import Denominators


@dataclass(frozen=True)
class LayoutStatistics:
    """Per-token statistics of whole responses, under any layout; [t] each, 0 off the mask.

    The sums of log-ratios are differentiable in the policy's log-probs.
    """

    position: Tensor  # int, t: valid decisions of the response up to this token, from 1
    length: Tensor  # int, L: valid decisions of the response
    prefix_log_ratio: Tensor  # S_t, the sum of policy minus behavior log-probs up to this token
    response_log_ratio: Tensor  # S_L, the sum over the whole response


LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, LayoutStatistics], Tensor]


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
        loss = self.function(
            x.policy_logprobs, x.behavior_logprobs, x.advantages, layout.mask, statistics
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
