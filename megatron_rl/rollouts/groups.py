"""Prompt groups with their advantages, built from graded rollouts."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.advantages import (
    batch_baseline_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    optimal_value_advantages,
    raw_advantages,
    returns_to_go,
)
from megatron_rl.config import AdvantageSection, Config
from megatron_rl.rollouts.shaping import shape_reward
from megatron_rl.types import PromptGroup, PromptSlot, Rollout


def build_groups(
    rollouts: Sequence[Rollout],
    slots: Sequence[PromptSlot],
    *,
    config: Config,
    step: int,
    updates: int,
) -> list[PromptGroup]:
    """Build groups of graded rollouts with their advantages, before log-probs are frozen.

    `rollouts` come group after group, `rollout.responses_per_prompt` each, in the order of `slots`.
    step, updates: the step, and the updates before it, in which they were generated.
    """
    size = config.rollout.responses_per_prompt
    groups = [
        PromptGroup(
            slot=slot,
            rollouts=tuple(rollouts[place * size : (place + 1) * size]),
            advantages=np.full(size, np.nan, np.float32),
            behavior_logprobs=(None,) * size,
            entropy=math.nan,
            generated_at_step=step,
            updates=updates,
        )
        for place, slot in enumerate(slots)
    ]
    return groups if config.has_late_advantages else compute_all_advantages(groups, config)


def compute_all_advantages(groups: Sequence[PromptGroup], config: Config) -> list[PromptGroup]:
    """Compute advantages over all groups that a step trains.

    With `advantage.credit=turn` the estimator is applied to the returns of every turn; those of the
    first turn are also the response's.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if config.advantage.credit == "response":
        rows = _advantages(
            [shape_reward(rollout, config) for rollout in rollouts], rollouts, config
        )
        return [replace(group, advantages=row) for group, row in zip(groups, rows, strict=True)]
    returns = _turn_returns(rollouts, config)
    by_turn = [_advantages(column, rollouts, config) for column in returns.T.tolist()]
    return [
        replace(
            group,
            advantages=by_turn[0][place],
            turn_advantages=tuple(
                np.array([column[place, sample] for column in by_turn[: one.response.turns]])
                for sample, one in enumerate(group.rollouts)
            ),
        )
        for place, group in enumerate(groups)
    ]


def _turn_returns(rollouts: Sequence[Rollout], config: Config) -> Tensor:
    """Return the rewards from each turn on, 0 after the last one; [rollouts, turns] float64.

    What shaping adds to a reward, and the reward of a verifier, are those of the last turn.
    """
    turns = max(rollout.response.turns for rollout in rollouts)
    rewards = torch.zeros(len(rollouts), turns, dtype=torch.float64)
    for row, rollout in zip(rewards, rollouts, strict=True):
        *earlier, _ = rollout.turn_rewards
        row[: len(earlier)] = torch.tensor(earlier, dtype=torch.float64)
        row[len(earlier)] = shape_reward(rollout, config) - math.fsum(earlier)
    return returns_to_go(rewards)


def _advantages(
    rewards: Sequence[float], rollouts: Sequence[Rollout], config: Config
) -> np.ndarray:
    """Advantages of rollouts in group order; [groups, responses to each] float32."""
    grouped = torch.tensor(rewards).view(-1, config.rollout.responses_per_prompt)
    lost = torch.tensor([rollout.response.finish_reason == "lost" for rollout in rollouts])
    if lost.any():
        grouped = fill_lost(grouped, lost.view_as(grouped))
    return compute_advantages(grouped, config.advantage).float().numpy()


def fill_lost(rewards: Tensor, lost: Tensor) -> Tensor:
    """Replace the rewards of lost conversations by the mean of the others of their group.

    So they do not move the group's mean; without others they become 0. rewards, lost: [prompts,
    responses_per_prompt].
    """
    known = (~lost).sum(dim=1, keepdim=True).clamp(min=1)
    mean = torch.where(lost, 0, rewards).sum(dim=1, keepdim=True) / known
    return torch.where(lost, mean, rewards)


def compute_advantages(rewards: Tensor, settings: AdvantageSection) -> Tensor:
    """Advantages of [prompts, responses_per_prompt] rewards by the configured estimator."""
    match settings.estimator:
        case "group_relative":
            return group_relative_advantages(rewards, std=settings.std, shift=settings.shift)
        case "leave_one_out":
            return leave_one_out_advantages(rewards)
        case "batch_baseline":
            return batch_baseline_advantages(rewards, std=settings.std)
        case "optimal_value":
            return optimal_value_advantages(rewards, beta=settings.beta)
        case "raw":
            return raw_advantages(rewards, shift=settings.shift)
