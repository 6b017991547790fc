"""Advantages from rewards, by hand."""

import pytest
import torch

from megatron_rl.advantages import group_relative_advantages


def test_group_relative_by_hand():
    # Mean 0.25, deviations (0.75, -0.25 x 3), squares sum to 0.75.
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    sample = (0.75 / 3) ** 0.5 + 1e-6  # 0.5
    population = (0.75 / 4) ** 0.5 + 1e-6
    for std, scale in (("sample", sample), ("population", population), ("none", 1.0)):
        wanted = [0.75 / scale] + [-0.25 / scale] * 3
        assert group_relative_advantages(rewards, std=std)[0].tolist() == pytest.approx(
            wanted, rel=1e-12
        )


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_a_group_of_equal_rewards_teaches_exactly_nothing(reward):
    # 0.1 seven times has a float32 mean that is not 0.1: divided by 1e-6 it would be a gradient.
    advantages = group_relative_advantages(torch.full((2, 7), reward))
    assert advantages.eq(0).all()


def test_one_response_per_prompt_has_no_group_signal():
    assert group_relative_advantages(torch.tensor([[3.0]])).tolist() == [[0.0]]


def test_a_bad_reward_is_named():
    rewards = torch.tensor([[0.0, 1.0], [0.0, float("nan")]])
    with pytest.raises(ValueError, match="response 1 to prompt 1 is nan"):
        group_relative_advantages(rewards)
