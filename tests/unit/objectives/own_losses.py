"""Losses as a user writes them, for `objective.function`."""

import torch


def clip(policy_logprobs, behavior_logprobs, advantages, mask, statistics):
    """PPO's clipped surrogate with bounds of 0.2, as the loss to minimize."""
    ratio = torch.exp(policy_logprobs - behavior_logprobs)
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def sequence_ratio(policy_logprobs, behavior_logprobs, advantages, mask, statistics):
    """The geometric mean of a response's ratios times its advantage, differentiated."""
    mean = statistics.response_log_ratio / statistics.length.clamp(min=1)
    return -torch.exp(mean) * advantages


def prefix_mean(policy_logprobs, behavior_logprobs, advantages, mask, statistics):
    """The detached prefix mean times the score."""
    weight = torch.exp(statistics.prefix_log_ratio / statistics.position.clamp(min=1))
    return -(weight * advantages).detach() * policy_logprobs


def mean(policy_logprobs, behavior_logprobs, advantages, mask, statistics):
    """A loss that is already reduced, which is rejected."""
    return -(policy_logprobs * advantages).mean()


def four(policy_logprobs, behavior_logprobs, advantages, mask):
    """A loss without the last argument, which is rejected."""
    return -policy_logprobs * advantages


def advised(policy_logprobs, behavior_logprobs, advantages, mask, statistics, advice):
    """The score times a value of each token that the package does not know."""
    return -advice * policy_logprobs
