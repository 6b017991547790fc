"""Optional terms of the loss: the KL penalty, and the factor of a rollout correction.

Shapes: t tokens on this rank.
"""

import math

import torch
from torch import Tensor

from megatron_rl.objectives.inputs import TokenInputs
from megatron_rl.objectives.optional_terms import KlPenalty, RolloutCorrection
from megatron_rl.objectives.weights import LogRatios


def kl_penalty(kl: KlPenalty, x: TokenInputs) -> Tensor:
    """Compute coefficient * rho_t * k_t; [t], differentiable in rho and k.

    k3 alone in a loss has the gradient (1 - q) z of another divergence; rho k3 has
    rho log(pi / pi_ref) z, whose expectation under the behavior policy is grad KL(pi || pi_ref).
    """
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
