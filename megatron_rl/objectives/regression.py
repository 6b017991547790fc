"""OAPL: regress the response's log-ratio on its advantage instead of weighting a score.

Shapes: t tokens on this rank.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.by_class import sum_by_class
from megatron_rl.objectives.constraints import Constrained
from megatron_rl.objectives.diagnostics import TokenTerms, compute_statistics
from megatron_rl.objectives.inputs import TokenInputs
from megatron_rl.objectives.objective import ObjectiveResult
from megatron_rl.objectives.spec import check_number
from megatron_rl.objectives.weights import LogRatios
from megatron_rl.types import Denominators


@dataclass(frozen=True)
class OaplObjective:
    """1/N sum_i (beta S_L - A_i)^2 with S_L = log pi_theta(y|x) - log pi_beta(y|x).

    arXiv 2602.19362, as re-implemented in public code: A_i = R_i - V*(x) with
    V* = beta_1 log mean exp(R / beta_1) over the group (`optimal_value_advantages`). Not checked
    against the original.
    """

    beta: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        """No optional inputs."""
        return frozenset()

    @property
    def uses_zero_advantage(self) -> bool:
        """A log-ratio is drawn to 0 where the advantage is 0."""
        return True

    @property
    def is_fitted(self) -> bool:
        """Nothing in it depends on other responses."""
        return True

    def fit(self, log_ratios: Tensor, advantages: Tensor) -> "OaplObjective":
        """Itself."""
        return self

    def __post_init__(self) -> None:
        check_number("beta", self.beta, minimum=0, strict=True)

    def __call__(
        self, inputs: TokenInputs, *, layout: SequenceLayout, denominators: Denominators
    ) -> ObjectiveResult:
        """Per-token loss: each of a response's L tokens carries 1/L of its square; all [t]."""
        x = inputs.prepared(layout, denominators)
        ratios = LogRatios.of(x.policy_logprobs - x.behavior_logprobs, layout)
        sequence_sum = ratios.sequence_sum
        square = (self.beta * sequence_sum - x.advantages).square()
        loss = square / (layout.length.clamp(min=1) * denominators.responses)
        one = torch.ones_like(ratios.token)
        terms = TokenTerms(
            log_weight=sequence_sum,
            constrained=Constrained(one, one, one.bool()),
            policy=torch.where(layout.mask, loss, 0),
        )
        return ObjectiveResult(
            terms.loss,
            compute_statistics(x, ratios, terms),
            by_class=partial(sum_by_class, x, ratios, terms.constrained),
        )
