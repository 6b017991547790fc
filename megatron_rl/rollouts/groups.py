"""Prompt groups with their advantages, from graded rollouts and the rewards that are trained on.

Reward shaping is DAPO's (arXiv 2503.14476): rewards of +1 and -1 (equation 7), soft overlong
punishment (equation 13) and overlong filtering (section 3.4).
"""

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
from megatron_rl.environments.interface import FAILURE_REASONS
from megatron_rl.rewards.verifier import UNGRADED
from megatron_rl.types import PromptGroup, PromptSlot, Rollout

NOT_GRADED = {*UNGRADED, *FAILURE_REASONS.values()}


def shape_reward(rollout: Rollout, config: Config) -> float:
    """Reward of a rollout after `shaping`; without it the reward of the grader."""
    return _shape(rollout.grade_result.reward, rollout, config)


def _shape(reward: float, rollout: Rollout, config: Config) -> float:
    """Return a reward, of a rollout or its last turn, after `shaping`."""
    shaping, limit = config.shaping, config.rollout.max_response_tokens
    # 0 is halfway between wrong and right: a failure to grade is not an error of the response.
    if shaping.signed and is_graded(rollout):
        reward = 2 * reward - 1
    if shaping.overlong is None:
        return reward
    penalty = shaping.overlong.penalty
    length = rollout.response.length
    return reward - penalty * overlong_fraction(length, limit=limit, buffer=shaping.overlong.buffer)


def is_graded(rollout: Rollout) -> bool:
    """True if the reward is that of the response: neither grader nor environment failed."""
    return rollout.grade_result.reason not in NOT_GRADED


def overlong_fraction(length: int, *, limit: int, buffer: int) -> float:
    """0 up to `limit - buffer` tokens, then linearly to 1 at `limit`."""
    return min(max((length - (limit - buffer)) / buffer, 0.0), 1.0)


def is_truncated(rollout: Rollout) -> bool:
    """True if the response was truncated at the token limit."""
    return rollout.response.finish_reason == "length"


def is_masked(rollout: Rollout, config: Config) -> bool:
    """True if the tokens of the response are not trained.

    A lost environment is a failure of the machines and not of the response; all other failures of
    an environment are trained, because what the policy wrote may have caused them.
    """
    if rollout.response.finish_reason == "lost":
        return True
    return config.shaping.truncated == "mask" and is_truncated(rollout)


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
            entropy=math.nan,
            generated_at_step=step,
            updates=updates,
        )
        for place, slot in enumerate(slots)
    ]
    if config.has_late_advantages or config.critic is not None:
        return groups
    return compute_all_advantages(groups, config)


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

    `shaping.signed` doubles every turn's reward. What else shaping adds to a reward, and the reward
    of a verifier, are those of the last turn.
    """
    turns = max(rollout.response.turns for rollout in rollouts)
    rewards = torch.zeros(len(rollouts), turns, dtype=torch.float64)
    for row, rollout in zip(rewards, rollouts, strict=True):
        own = turn_rewards(rollout, config)
        row[: len(own)] = torch.tensor(own, dtype=torch.float64)
    return returns_to_go(rewards)


def turn_rewards(rollout: Rollout, config: Config) -> list[float]:
    """Return the training reward of each turn; they sum to that of the response.

    Each is exact: a last turn without a reward has 0, and not the rounding error of a sum.
    """
    *earlier, last = rollout.turn_rewards
    if config.shaping.signed and is_graded(rollout):
        earlier = [2 * reward for reward in earlier]
    return [*earlier, _shape(last, rollout, config)]


def _advantages(
    rewards: Sequence[float], rollouts: Sequence[Rollout], config: Config
) -> np.ndarray:
    """Advantages of rollouts in group order; [groups, responses to each] float32."""
    size = config.rollout.responses_per_prompt
    # float64: float32 has no room for the squares of rewards from 1e19 on.
    grouped = torch.tensor(rewards, dtype=torch.float64).view(-1, size)
    lost = torch.tensor([rollout.response.finish_reason == "lost" for rollout in rollouts])
    return advantages_without(lost.view_as(grouped), grouped, config.advantage).float().numpy()


def advantages_without(lost: Tensor, rewards: Tensor, settings: AdvantageSection) -> Tensor:
    """Advantages with means and standard deviations over conversations that were not lost.

    A lost conversation has advantage 0. So has the only conversation left of a group, if the
    estimator compares within a group: it has no baseline.
    rewards, lost: [prompts, responses_per_prompt].
    """
    if not lost.any():
        return compute_advantages(rewards, settings)
    advantages = torch.zeros_like(rewards)
    if settings.estimator == "batch_baseline":
        if not lost.all():
            advantages[~lost] = compute_advantages(rewards[~lost].view(1, -1), settings).view(-1)
        return advantages
    for row, values, kept in zip(advantages, rewards, ~lost, strict=True):
        is_alone = settings.estimator == "leave_one_out" and int(kept.sum()) == 1
        if kept.any() and not is_alone:
            row[kept] = compute_advantages(values[kept].view(1, -1), settings).view(-1)
    return advantages


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
