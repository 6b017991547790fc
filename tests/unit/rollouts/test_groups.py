"""Rewards that are trained on, and responses that are not: DAPO's numbers by hand."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from megatron_rl.config import AdvantageSection, parse_config
from megatron_rl.distributed.topology import Topology
from megatron_rl.environments.interface import FAILURE_REASONS
from megatron_rl.objectives import build_objective
from megatron_rl.rewards.verifier import FAILED, TIME_LIMIT, UNPARSABLE_TRUTH
from megatron_rl.rewards.worker import LARGEST_REWARD
from megatron_rl.rollouts.batch_metrics import batch_metrics
from megatron_rl.rollouts.engine_source import is_informative
from megatron_rl.rollouts.groups import (
    advantages_without,
    build_groups,
    compute_advantages,
    is_masked,
    shape_reward,
)
from megatron_rl.rollouts.rollout_batch import build_rollout_batch
from megatron_rl.types import GradeResult, Prompt, PromptSlot, Response, Rollout


def config(**sections):
    values = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rollout": {"prompts_per_step": 2, "responses_per_prompt": 2, "max_response_tokens": 20},
        "trainer": {"minibatches": 2},
    }
    return parse_config(values | sections)


def rollout(reward, length, *, sample=0, prompt=0):
    reason = "length" if length == 20 else "stop"
    tokens = np.arange(length, dtype=np.int32) % 7
    response = Response(prompt, sample, tokens, -np.ones(length, np.float32), "", reason, 0)
    return Rollout(
        Prompt(prompt, (), (1, 2), "", "x"), response, GradeResult(float(reward), "", None)
    )


def test_lost_conversations_are_not_trained_and_do_not_move_their_group():
    lost = rollout(0, 4, sample=1)
    lost = dataclasses.replace(
        lost, response=dataclasses.replace(lost.response, finish_reason="lost")
    )
    settings = config(rollout={"prompts_per_step": 2, "responses_per_prompt": 3})
    rollouts = [rollout(1, 4), lost, rollout(0, 4, sample=2)] + [
        rollout(1, 4, prompt=1), lost, rollout(1, 4, sample=2, prompt=1)]  # fmt: skip
    slots = [PromptSlot(1, 0), PromptSlot(1, 1)]
    groups = build_groups(rollouts, slots, config=settings, step=1, updates=0)
    # Rewards 1 and 0: their sample standard deviation is 1 / sqrt(2).
    assert groups[0].advantages.tolist() == pytest.approx([0.70710, 0, -0.70710], abs=1e-4)
    assert groups[1].advantages.tolist() == [0, 0, 0]  # 1, lost, 1: nothing to learn
    assert [is_masked(one, settings) for one in rollouts[:3]] == [False, True, False]
    assert is_informative(rollouts[:3]) and not is_informative(rollouts[3:])


def test_overlong_penalty_counts_tokens_of_policy():
    one = rollout(1, 20)
    spread = dataclasses.replace(
        one.response, rollout_logprobs=np.zeros(11, np.float32), observed=((4, 10), (12, 15))
    )
    settings = config(shaping={"overlong": {"buffer": 10, "penalty": 1.0}})
    assert shape_reward(one, settings) == 0.0  # 20 tokens
    shorter = dataclasses.replace(one, response=spread)  # 20 - 6 - 3
    assert shape_reward(shorter, settings) == pytest.approx(1 - 0.1)


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        # Rewards of (1, 10 tokens), (0, 10), (1, 15), (1, 18), (0, 20 and cut).
        ({}, [1, 0, 1, 1, 0]),
        ({"signed": True}, [1, -1, 1, 1, -1]),
        # The last 10 of 20 tokens cost up to 1: 0, 0, 5/10, 8/10, 10/10.
        ({"overlong": {"buffer": 10}}, [1, 0, 0.5, 0.2, -1]),
        ({"overlong": {"buffer": 4, "penalty": 0.5}, "signed": True}, [1, -1, 1, 0.75, -1.5]),
        ({"overlong": {"buffer": 1, "penalty": 2}}, [1, 0, 1, 1, -2]),
    ],
)
def test_rewards_by_hand(shaping, expected):
    given = [(1, 10), (0, 10), (1, 15), (1, 18), (0, 20)]
    settings = config(shaping=shaping)
    shaped = [shape_reward(rollout(*one), settings) for one in given]
    assert shaped == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["group_relative", "leave_one_out", "batch_baseline", "raw"])
@pytest.mark.parametrize("std", ["sample", "population", "none"])
def test_statistics_are_those_of_the_conversations_not_lost(estimator, std):
    """Enumerated: every choice of lost ones among four, whatever their rewards are."""
    rewards = torch.tensor([[0.0, 1.0, 2.0, 5.0]])
    settings = AdvantageSection(estimator=estimator, std=std)
    for chosen in itertools.product([False, True], repeat=4):
        lost = torch.tensor([chosen])
        for value in (0.0, 100.0):
            found = advantages_without(lost, torch.where(lost, value, rewards), settings)
            assert not found[lost].any()
            kept = rewards[~lost].view(1, -1)
            is_alone = kept.numel() == 1 and estimator == "leave_one_out"
            if kept.numel() and not is_alone:
                assert torch.equal(found[~lost], compute_advantages(kept, settings).view(-1))
            elif is_alone:
                assert not found.any()  # nothing to compare with


@pytest.mark.parametrize(
    "reason", [TIME_LIMIT, FAILED, UNPARSABLE_TRUTH, *FAILURE_REASONS.values()]
)
def test_ungraded_response_is_not_wrong_answer(reason):
    one = rollout(0, 10)
    ungraded = dataclasses.replace(one, grade_result=GradeResult(0.0, reason, None))
    assert shape_reward(ungraded, config(shaping={"signed": True})) == 0.0
    assert shape_reward(ungraded, config()) == 0.0


def batch_of(rollouts, settings):
    groups = build_groups(
        rollouts, [PromptSlot(1, 0), PromptSlot(1, 1)], config=settings, step=1, updates=0
    )
    return build_rollout_batch(
        groups, config=settings, objective=build_objective("dapo"), topology=Topology.single()
    )


def test_masked_response_counts_only_in_baseline():
    rollouts = [rollout(1, 10), rollout(0, 20, sample=1),
                rollout(1, 5, prompt=1), rollout(0, 6, sample=1, prompt=1)]  # fmt: skip
    plain, masked = (
        batch_of(rollouts, config(shaping={"truncated": how})) for how in ("train", "mask")
    )
    assert torch.equal(plain.advantages, masked.advantages)
    assert masked.advantages[0, 0] > 0
    assert [plain.computed, masked.computed] == [[True] * 4, [True, False, True, True]]
    sizes = [[(m.denominators.responses, m.denominators.tokens) for m in b.minibatches]
             for b in (plain, masked)]  # fmt: skip
    assert sizes == [[(2, 30), (2, 11)], [(1, 10), (2, 11)]]
    assert batch_metrics(masked)["train/masked_fraction"] == 0.25
    assert batch_metrics(plain)["train/masked_fraction"] == 0
    packed = [i for pack in masked.packs for i in pack.rollout_indices]
    assert sorted(packed) == [0, 2, 3]


def test_minibatch_of_masked_responses_has_nonzero_sizes():
    rollouts = [rollout(1, 20), rollout(0, 20, sample=1),
                rollout(1, 5, prompt=1), rollout(0, 6, sample=1, prompt=1)]  # fmt: skip
    first, _ = batch_of(rollouts, config(shaping={"truncated": "mask"})).minibatches
    assert (first.denominators.responses, first.denominators.tokens) == (1, 1)


@pytest.mark.parametrize("estimator", ["group_relative", "leave_one_out", "batch_baseline"])
def test_advantages_of_the_largest_rewards_are_finite_and_scale(estimator):
    """Squares of 1e20 are above float32's range: the advantages would be 0 or infinite."""
    settings = config(advantage={"estimator": estimator})
    slots = [PromptSlot(1, 0), PromptSlot(1, 1)]

    def advantages(scale):
        rewards = [[1.0, -1.0], [1.0, 0.0]]
        rollouts = [
            rollout(scale * reward, 3, sample=sample, prompt=prompt)
            for prompt, group in enumerate(rewards) for sample, reward in enumerate(group)
        ]  # fmt: skip
        groups = build_groups(rollouts, slots, config=settings, step=1, updates=0)
        return np.concatenate([group.advantages for group in groups])

    largest = advantages(LARGEST_REWARD)
    assert np.isfinite(largest).all() and np.count_nonzero(largest) >= 3
    factor = LARGEST_REWARD if estimator == "leave_one_out" else 1.0
    np.testing.assert_allclose(largest / factor, advantages(1.0), rtol=1e-5)
