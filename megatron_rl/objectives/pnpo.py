"""PNPO's equation as printed in the paper, on [B, T]; tests compare the named objective with it.

Training uses `build_objective("pnpo")`, which computes it on packs, under every layout, with
diagnostics. Section 3 of arXiv 2608.01418; B responses of at most T tokens.
"""

import torch
from torch import Tensor


def pnpo_loss(
    policy_logprobs: Tensor,  # [B, T] log pi_theta(y_t | x, y_<t)
    behavior_logprobs: Tensor,  # [B, T] log pi_beta(y_t | x, y_<t)
    advantages: Tensor,  # [B] A_i
    mask: Tensor,  # [B, T] bool, True where y_t is a decision
    *,
    low: float = 7e-4,  # epsilon_-
    high: float = 9.5e-4,  # epsilon_+
) -> Tensor:
    """Compute -1/B sum_i 1/L_i sum_t sg[M_t w_t A_i] log pi_theta(y_t | x, y_<t); []."""
    log_ratio = torch.where(mask, policy_logprobs - behavior_logprobs, 0)
    t = mask.cumsum(dim=1).clamp(min=1)  # position of each decision
    L = mask.sum(dim=1, keepdim=True)  # noqa: N806 - the paper's name
    w = torch.exp(log_ratio.cumsum(dim=1) / t)  # w_t = (rho_1 ... rho_t)^(1/t)
    h = torch.sqrt(L / t)
    M = (1 - low * h <= w) & (w <= 1 + high * h)  # noqa: N806
    coefficient = (M * w * advantages[:, None]).detach()
    score = torch.where(mask, coefficient * policy_logprobs, 0)
    return -(score / L).sum(dim=1).mean()
