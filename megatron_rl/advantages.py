"""Advantages of responses from their rewards.

Shapes: N prompts, G responses to each (a group).
"""

import math
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-6  # of the standard deviation, in the units of the reward


def group_relative_advantages(
    rewards: Tensor,
    *,
    std: Literal["sample", "population", "none"] = "sample",
    shift: float = 0.0,
) -> Tensor:
    """Compute A_i = (R_i - mean of the group - shift) / (std of the group + 1e-6); [N, G].

    GRPO, arXiv 2402.03300; std "none" skips the division (Dr. GRPO, arXiv 2503.20783), "sample"
    divides squares by G - 1. Without a shift, a group of equal rewards has advantages of exactly 0.
    `shift` is delta V of AsymRE (arXiv 2506.20520) and needs std "none".
    """
    _check(rewards)
    if std not in ("sample", "population", "none"):
        raise ValueError(f"std is {std!r}: choose one of sample, population, none")
    centered = rewards - rewards.mean(dim=1, keepdim=True)
    # The mean of equal numbers can have a rounding error, which dividing by 1e-6 would amplify.
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    centered = torch.where(equal, 0, centered)
    if std == "none":
        return centered - shift if shift else centered
    if shift:
        raise ValueError(
            f"shift is {shift} with std {std!r}: a shift is in units of reward; use none"
        )
    squares = centered.square().sum(dim=1, keepdim=True)
    count = rewards.shape[1] - (1 if std == "sample" else 0)
    return centered / ((squares / max(count, 1)).sqrt() + EPSILON)


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """Compute A_i = R_i - mean of the other responses' rewards; [N, G] -> [N, G], G >= 2.

    RLOO, arXiv 2402.14740. Equals G / (G - 1) times the deviation from the group's mean.
    """
    _check(rewards)
    group = rewards.shape[1]
    if group < 2:
        raise ValueError("leave-one-out needs at least two responses per prompt, got one")
    return group_relative_advantages(rewards, std="none") * (group / (group - 1))


def batch_baseline_advantages(
    rewards: Tensor, *, std: Literal["sample", "population", "none"] = "sample"
) -> Tensor:
    """Compute A_i = (R_i - mean of the batch) / (std of the batch + 1e-6); [N, G] -> [N, G].

    REINFORCE with the batch as its baseline (REINFORCE++, arXiv 2501.03262, without its KL
    reward); `std` as of `group_relative_advantages`. `rewards` must be the rewards of the whole
    rollout batch, not one rank's or one call's.
    """
    _check(rewards)
    return group_relative_advantages(rewards.reshape(1, -1), std=std).reshape(rewards.shape)


def optimal_value_advantages(rewards: Tensor, *, beta: float) -> Tensor:
    """Compute A_i = R_i - beta log mean_j exp(R_j / beta); [N, G] -> [N, G].

    The advantage that OAPL regresses on (arXiv 2602.19362): the soft optimal value of the group,
    between its mean (large beta) and its best reward (small beta). `beta` is in units of reward.
    """
    _check(rewards)
    if not beta > 0:
        raise ValueError(f"beta is {beta}: it must be above 0")
    value = beta * (torch.logsumexp(rewards / beta, dim=1) - math.log(rewards.shape[1]))
    return rewards - value[:, None]


def raw_advantages(rewards: Tensor, *, shift: float) -> Tensor:
    """Compute A_i = R_i - shift; [N, G] -> [N, G]. REINFORCE with a constant baseline."""
    _check(rewards)
    return rewards - shift


def returns_to_go(rewards: Tensor) -> Tensor:
    """Compute G_k = r_k + ... + r_n, the rewards from turn k on; [N, n] -> [N, n].

    A turn's decisions cannot change earlier rewards, and a baseline that they do not influence
    leaves the gradient's expectation unchanged: GPOMDP (Baxter and Bartlett, 2001) with a baseline
    for each time step. With an estimator per turn and without its standard deviation, these are the
    advantages of MT-GRPO (arXiv 2505.11821). Rewards after a conversation's last turn are 0, so
    conversations that have ended count in the baseline: how many continue depends on the policy.
    """
    return rewards.flip(1).cumsum(1).flip(1)


def _check(rewards: Tensor) -> None:
    if rewards.dim() != 2 or rewards.numel() == 0:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}: one row per prompt, one column per sample"
        )
    if not rewards.is_floating_point():
        raise ValueError(f"rewards are {rewards.dtype}: they must be floating-point numbers")
    finite = torch.isfinite(rewards)
    if not bool(finite.all()):
        prompt, response = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"reward of response {response} to prompt {prompt} is "
            f"{rewards[prompt, response].item()}: rewards must be finite"
        )
