"""Advantages of responses from their rewards.

Shapes: N prompts, G responses to each (a group).
"""

from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-6  # of the standard deviation, in the units of the reward


def group_relative_advantages(
    rewards: Tensor, *, std: Literal["sample", "population", "none"] = "sample"
) -> Tensor:
    """A_i = (R_i - mean of the group) / (std of the group + 1e-6); [N, G] -> [N, G].

    GRPO, arXiv 2402.03300; "none" leaves out the division (Dr. GRPO, arXiv 2503.20783). A group
    whose rewards are all equal has advantage exactly 0. "sample" divides squares by G - 1.
    """
    _check(rewards)
    if std not in ("sample", "population", "none"):
        raise ValueError(f"std is {std!r}: choose one of sample, population, none")
    centered = rewards - rewards.mean(dim=1, keepdim=True)
    # A mean of equal numbers can be off by a rounding; divided by 1e-6 that would be a signal.
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    centered = torch.where(equal, 0, centered)
    if std == "none":
        return centered
    squares = centered.square().sum(dim=1, keepdim=True)
    count = rewards.shape[1] - (1 if std == "sample" else 0)
    return centered / ((squares / max(count, 1)).sqrt() + EPSILON)


def _check(rewards: Tensor) -> None:
    if rewards.dim() != 2 or rewards.numel() == 0:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}: one row per prompt, one column per sample"
        )
    finite = torch.isfinite(rewards)
    if not bool(finite.all()):
        prompt, response = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"reward of response {response} to prompt {prompt} is "
            f"{rewards[prompt, response].item()}: rewards must be finite"
        )
