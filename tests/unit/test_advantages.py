"""Advantages from rewards, by hand."""

import math

import pytest
import torch

from megatron_rl.advantages import (
    batch_baseline_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    optimal_value_advantages,
    raw_advantages,
)


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


@pytest.mark.parametrize("reward", [1.0, 0.1])
def test_group_of_equal_rewards_has_zero_advantages(reward):
    # 0.1 seven times has a float32 mean that is not 0.1: divided by 1e-6 it would be a gradient.
    advantages = group_relative_advantages(torch.full((2, 7), reward))
    assert advantages.eq(0).all()


@pytest.mark.parametrize("factor", [0.0, 0.1])
def test_constant_baseline_weights_right_answers_against_wrong_ones(factor):
    """NSR and W-REINFORCE (arXiv 2506.01347): +factor and -1, here divided by 1 + factor."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    wanted = [[factor if reward else -1.0 for reward in row] for row in rewards.tolist()]
    found = (1 + factor) * raw_advantages(rewards, shift=1 / (1 + factor))
    assert found[0].tolist() == pytest.approx(wanted[0], abs=1e-15)


def test_baseline_can_be_shifted_or_constant():
    # AsymRE: V = the group's mean 0.25 - 0.1; where all are equal what is left is the shift.
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0] * 4], dtype=torch.float64)
    shifted = group_relative_advantages(rewards, std="none", shift=-0.1)
    assert shifted[0].tolist() == pytest.approx([0.85, -0.15, -0.15, -0.15], rel=1e-12)
    assert shifted[1].tolist() == [0.1] * 4
    assert raw_advantages(rewards, shift=0.5)[0].tolist() == [0.5, -0.5, -0.5, -0.5]
    with pytest.raises(ValueError, match=r"shift is -0\.1 with std 'sample'"):
        group_relative_advantages(rewards, shift=-0.1)


def test_one_response_per_prompt_has_no_group_signal():
    assert group_relative_advantages(torch.tensor([[3.0]])).tolist() == [[0.0]]


def test_bad_reward_is_named():
    rewards = torch.tensor([[0.0, 1.0], [0.0, float("nan")]])
    with pytest.raises(ValueError, match="response 1 to prompt 1 is nan"):
        group_relative_advantages(rewards)


def test_leave_one_out_by_hand():
    # (1, 0, 0.5): minus the means of the others 0.25, 0.75, 0.5.
    rewards = torch.tensor([[1.0, 0.0, 0.5]], dtype=torch.float64)
    assert leave_one_out_advantages(rewards)[0].tolist() == pytest.approx([0.75, -0.75, 0.0])
    with pytest.raises(ValueError, match="at least two responses"):
        leave_one_out_advantages(rewards[:, :1])


def test_batch_baseline_by_hand():
    # Mean 0.5 over both prompts; squares sum to 1, over 3 degrees of freedom.
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    wanted = 0.5 / ((1 / 3) ** 0.5 + 1e-6)
    assert batch_baseline_advantages(rewards).tolist() == [
        pytest.approx([wanted] * 2),
        pytest.approx([-wanted] * 2),
    ]
    # The population's deviation is sqrt(1 / 4) = 0.5.
    wanted = 0.5 / (0.5 + 1e-6)
    assert batch_baseline_advantages(rewards, std="population").tolist() == [
        pytest.approx([wanted] * 2),
        pytest.approx([-wanted] * 2),
    ]
    assert batch_baseline_advantages(rewards, std="none").tolist() == [[0.5] * 2, [-0.5] * 2]


def test_optimal_value_lies_between_mean_and_best():
    rewards = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    value = math.log((math.e + 1) / 2)
    assert optimal_value_advantages(rewards, beta=1.0)[0].tolist() == pytest.approx(
        [1 - value, -value], rel=1e-12
    )
    assert optimal_value_advantages(rewards, beta=1e-4)[0, 0].item() == pytest.approx(
        7e-5, abs=1e-5
    )
    assert optimal_value_advantages(rewards, beta=1e4)[0, 0].item() == pytest.approx(0.5, abs=1e-4)
