"""Credit by turn: advantages against a loop, exact by enumeration, and equal for one turn."""

import dataclasses
import itertools
import math
import statistics

import numpy as np
import pytest
import torch

from megatron_rl import advantages
from megatron_rl.config import parse_config
from megatron_rl.rollouts import groups as building
from megatron_rl.rollouts.engine_source import is_informative
from megatron_rl.rollouts.groups import build_groups
from megatron_rl.rollouts.values import ends_of_turns, token_rewards
from megatron_rl.types import GradeResult, Prompt, PromptSlot, Response, Rollout
from tests.unit.objectives.conversation_tree import SHORT_TURNS, ConversationTree
from tests.unit.objectives.mutate import mutated
from tests.unit.objectives.response_tree import weight_alone


def config(*, size, **sections):
    values = {
        "model": {"path": "m"}, "data": {"train": "t.jsonl", "max_prompt_tokens": 8},
        "rollout": {"responses_per_prompt": size, "max_response_tokens": 100},
        "environment": {"name": "a:B", "max_context_tokens": 200},
    } | sections  # fmt: skip
    values["advantage"] = {"credit": "turn"} | values.get("advantage", {})
    return parse_config(values)


def rollout(rewards, *, graded=True, lost=False):
    """A conversation of two tokens a turn with one observed token between turns."""
    observed = tuple((3 * turn - 1, 3 * turn) for turn in range(1, len(rewards)))
    tokens = 3 * len(rewards) - 1
    response = Response(
        0, 0, np.arange(tokens, dtype=np.int32), np.zeros(2 * len(rewards), np.float32), "",
        "lost" if lost else "stop", 0, observed=observed, messages=({"role": "user"},),
    )  # fmt: skip
    grade = GradeResult(math.fsum(rewards), "", None, turn_rewards=list(rewards) if graded else [])
    return Rollout(Prompt(0, (), (1,), "", ""), response, grade)


def build(rollouts, settings):
    slots = [
        PromptSlot(1, n) for n in range(len(rollouts) // settings.rollout.responses_per_prompt)
    ]
    return build_groups(rollouts, slots, config=settings, step=1, updates=0)


def random_rollouts(seed, *, groups=3, size=4, turns=4):
    draw = np.random.default_rng(seed)
    return [rollout(draw.normal(size=draw.integers(1, turns + 1)).tolist())
            for _ in range(groups * size)]  # fmt: skip


@pytest.mark.parametrize("std", ["none", "sample"])
def test_advantage_is_the_return_from_the_turn_on_against_its_groups_mean(std):
    rollouts = random_rollouts(0)
    for number, group in enumerate(
        build(rollouts, config(size=4, advantage={"std": std, "estimator": "group_relative"}))
    ):
        members = [one.grade_result.turn_rewards for one in rollouts[4 * number : 4 * number + 4]]
        for own, found in zip(members, group.turn_advantages, strict=True):
            assert len(found) == len(own)
            for turn, value in enumerate(found):
                returns = [math.fsum(rewards[turn:]) for rewards in members]  # 0 after its end
                scale = 1.0 if std == "none" else statistics.stdev(returns) + 1e-6
                wanted = (math.fsum(own[turn:]) - statistics.fmean(returns)) / scale
                assert value == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert [row[0] for row in group.turn_advantages] == group.advantages.tolist()
        assert all(group.learns)


@pytest.mark.parametrize("without", [{}, {"environment": None}])
def test_one_turn_has_the_bits_of_a_response(without):
    rollouts = random_rollouts(1, turns=1)
    shaping = {"overlong": {"buffer": 99}, "signed": True}
    both = [
        build(rollouts, config(size=4, advantage={"credit": credit}, shaping=shaping, **without))
        for credit in ("response", "turn")
    ]
    for old, new in zip(*both, strict=True):
        assert old.advantages.tobytes() == new.advantages.tobytes()
        assert np.concatenate(new.turn_advantages).tobytes() == old.advantages.tobytes()
        assert old.turn_advantages == ()


def test_verifiers_reward_and_shaping_are_of_the_last_turn_and_lost_ones_move_no_mean():
    settings = config(size=3, advantage={"std": "none"}, shaping={"overlong": {"buffer": 98}})
    # Six tokens are 4 above 100 - 98 and cost 4 / 98, two tokens nothing.
    rollouts = [rollout([0.0, 0.0, 1.0], graded=False), rollout([0.5]), rollout([9.0], lost=True)]
    (group,) = build(rollouts, settings)
    last = 1 - 4 / 98
    # The mean is that of the other two.
    wanted = [(last - 0.5) / 2, last / 2, last / 2]
    np.testing.assert_allclose(group.turn_advantages[0], wanted, rtol=1e-5)
    np.testing.assert_allclose(group.turn_advantages[1], [(0.5 - last) / 2], rtol=1e-5)


def test_signed_rewards_double_those_of_every_turn():
    """Returns g from a turn on become 2 g - 1; after the end of a conversation they stay 0."""
    settings = config(size=2, advantage={"std": "none"}, shaping={"signed": True})
    (group,) = build([rollout([1.0, 0.0]), rollout([0.0])], settings)
    # The first has returns 1 and 0, so 1 and -1; the second has -1, and 0 after its end.
    assert [row.tolist() for row in group.turn_advantages] == [[1.0, -0.5], [-1.0]]


def test_a_last_turn_without_reward_has_exactly_none():
    """A critic's response that was cut there goes on; one with a reward is at its end."""
    for rewards, signed in (([0.1, 0.2, 0.0], False), ([0.1, 0.7, 0.5], True)):
        settings = config(
            size=1, shaping={"signed": signed}, critic={}, advantage={"credit": "response"}
        )
        one = rollout(rewards)
        wanted = [rewards[0] * (1 + signed), rewards[1] * (1 + signed), 0.0]
        assert building.turn_rewards(one, settings) == wanted
        # Two tokens a turn, of which the second ends it.
        assert token_rewards(one, settings).tolist() == [
            x for reward in np.array(wanted, np.float32).tolist() for x in (0.0, reward)
        ]
        assert ends_of_turns(one).tolist() == [False, True] * 3


def test_equal_totals_of_different_turns_teach_something():
    rollouts = [rollout([1.0, 0.0]), rollout([0.0, 1.0])]
    assert is_informative(rollouts, by_turn=True) and not is_informative(rollouts)
    (group,) = build(rollouts, config(size=2, advantage={"std": "none"}))
    assert [row.tolist() for row in group.turn_advantages] == [[0.0, -0.5], [0.0, 0.5]]
    assert group.learns == (True, True) and not group.advantages.any()
    of_two_lengths = [rollout([0.5, 0.0]), rollout([0.5])]
    assert not is_informative(of_two_lengths, by_turn=True)
    (group,) = build(of_two_lengths, config(size=2, advantage={"std": "none"}))
    assert group.learns == (False, False)


def gap_to_true_gradient():
    """Enumerate a task of one or two turns; the relative error of its expected gradient.

    Every pair of conversations with the same environment is a group; what it teaches is weighed by
    the pair's probability under the behavior policy.
    """
    tree = ConversationTree(
        turns=2, seed=3, choices=SHORT_TURNS, ends=lambda history: history == (1,)
    )
    turns = [len(observed) + 1 for observed in tree.observed]
    assert set(turns) == {1, 2}
    draw = torch.Generator().manual_seed(9)
    first = {
        key: float(torch.randn((), generator=draw)) for key in itertools.product((0, 1), (0, 1, 2))
    }
    rewards = [  # the first is given before the environment's answer
        [first[hidden, tokens[0]], float(rest)][:count]
        for hidden, tokens, rest, count in zip(
            tree.hidden, tree.tokens, tree.rewards, turns, strict=True
        )
    ]
    tree.rewards = torch.tensor([math.fsum(row) for row in rewards], dtype=torch.float64)
    policy, behavior = tree.base + 0.7 * tree.direction, tree.base
    probabilities = tree.probabilities(behavior)
    pairs = [(i, j) for i, j in itertools.product(range(len(turns)), repeat=2)
             if tree.hidden[i] == tree.hidden[j]]  # fmt: skip
    conversations = [
        dataclasses.replace(one, grade_result=rollout(row).grade_result)
        for one, row in zip(tree.rollouts, rewards, strict=True)
    ]
    groups = build(
        [conversations[place] for pair in pairs for place in pair],
        config(size=2, advantage={"estimator": "leave_one_out"}),
    )
    expected = [np.zeros(count) for count in turns]
    for (i, j), group in zip(pairs, groups, strict=True):  # a hidden state has probability 1/2
        expected[i] += 2 * float(probabilities[j]) * group.turn_advantages[0]
    found = tree.expected_gradient(
        weight_alone("sequence_product"), policy=policy, behavior=behavior,
        advantages=torch.cat([spread(*one) for one in zip(tree.rollouts, expected, strict=True)]),
    )  # fmt: skip
    truth = tree.true_gradient(policy)
    return float((found - truth).norm() / truth.norm())


def spread(one, by_turn):
    """The advantage of each token's turn, nan where the environment wrote; [K]."""
    values = np.full(len(one.response.token_ids), np.nan)
    values[one.response.own] = np.repeat(by_turn, one.response.turn_lengths)
    return torch.from_numpy(values)


def test_gradient_over_all_pairs_of_conversations_is_exact():
    assert gap_to_true_gradient() < 1e-6  # advantages are float32


MISTAKES = {
    "rewards up to the turn": (advantages.returns_to_go, "rewards.flip(1).cumsum(1).flip(1)",
                               "rewards.cumsum(1)"),
    "rewards of other turns count twice": (
        building.turn_rewards, "_shape(last,", "_shape(rollout.grade_result.reward,"
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(mistake):
    with mutated(*MISTAKES[mistake]):
        assert gap_to_true_gradient() > 1e-2
