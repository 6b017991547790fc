"""The optional terms beside the policy term, all off by default.

Shapes: t tokens on this rank.
"""

import math

import torch
from torch import Tensor

from megatron_rl.objectives.spec import KlPenalty, RolloutCorrection
from megatron_rl.objectives.weights import LogRatios


def kl_penalty(
    kl: KlPenalty, policy_logprobs: Tensor, *, behavior_logprobs: Tensor, reference_logprobs: Tensor
) -> Tensor:
    """coefficient * rho_t * k_t; [t], differentiable through rho and k.

    k3 alone in a loss has the gradient (1 - q) z, which is that of another divergence; rho k3 has
    rho log(pi / pi_ref) z, whose expectation under the behavior policy is grad KL(pi || pi_ref).
    """
    log_q = reference_logprobs - policy_logprobs
    estimate = {
        "k1": lambda: -log_q,
        "k2": lambda: log_q.square() / 2,
        "k3": lambda: torch.expm1(log_q) - log_q,
    }[kl.estimator]()
    return kl.coefficient * torch.exp(policy_logprobs - behavior_logprobs) * estimate


@torch.no_grad()
def rollout_factor(correction: RolloutCorrection, log_gap: Tensor, ratios: LogRatios) -> Tensor:
    """The constant that multiplies a token's policy term; [t].

    `log_gap` [t] is behavior minus rollout log-probability, 0 off the mask.
    """
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
