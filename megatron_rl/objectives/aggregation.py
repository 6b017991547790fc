"""The aggregation axis: what a token's term is divided by.

Denominators are those of the whole minibatch, over data-parallel ranks and micro-batches, so
that terms only ever have to be added. N responses with at least one valid decision.
"""

from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.spec import Aggregation
from megatron_rl.types import Denominators


def token_denominator(
    aggregation: Aggregation, layout: SequenceLayout, denominators: Denominators, constant: float
) -> Tensor | float:
    """Divisor of each token's term; [t] or a number."""
    match aggregation:
        case "response_mean":  # 1/N sum_i 1/L_i sum_t; L counts rejected decisions too
            return layout.length.clamp(min=1) * denominators.responses
        case "token_mean":  # sum_i sum_t / sum_i L_i
            return denominators.tokens
        case "response_sum":  # 1/N sum_i sum_t / constant
            return denominators.responses * constant
        case "token_sum":  # sum_i sum_t / constant
            return constant
    raise AssertionError(f"unknown aggregation {aggregation}")
