"""What is computed of a rollout batch, and what is said where nothing can be learned."""

import pytest

from megatron_rl.config import parse_config
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives import build_objective
from megatron_rl.trainer.learning_check import describe_no_learning, describe_slow_packs
from megatron_rl.trainer.rollout_batch import build_groups, build_rollout_batch
from megatron_rl.types import Prompt, Response, Rollout, Slot, Verdict


def make_config(**sections):
    values = {
        "model": {"path": "m"}, "data": {"train": "t", "max_prompt_tokens": 8},
        "rollout": {"prompts": 2, "responses_per_prompt": 2, "max_response_tokens": 8},
        "trainer": {"minibatches": 2, "tokens_per_micro_batch": 16},
    }  # fmt: skip
    return parse_config({key: values.get(key, {}) | sections.get(key, {}) for key in
                         values.keys() | sections.keys()})  # fmt: skip


def make_batch(config, rewards, *, finish_reason="stop", objective=None):
    rollouts = [
        Rollout(
            Prompt(place // 2, (), (5, 6), "1", "toy"),
            Response(place // 2, place % 2, (7, 2), (-0.5, -0.25), "", finish_reason, 0),
            Verdict(float(reward), "wrong answer", None),
        )
        for place, reward in enumerate(rewards)
    ]
    slots = [Slot(1, group) for group in range(len(rollouts) // 2)]
    return build_rollout_batch(
        build_groups(rollouts, slots, config=config, step=1, updates=0),
        config=config,
        objective=objective or build_objective("pnpo"),
        topology=Topology.single(),
    )


@pytest.mark.parametrize(
    ("trainer", "objective", "computed"),
    [
        ({}, ("pnpo", {}), [True, True, False, False]),
        ({"zero_advantage": "compute"}, ("pnpo", {}), [True] * 4),
        ({}, ("pnpo", {"kl": {"coefficient": 0.1}}), [True] * 4),
        ({}, ("pnpo", {"entropy_coefficient": 0.1}), [True] * 4),
        ({}, ("oapl", {}), [True] * 4),
    ],
)
def test_a_group_of_equal_rewards_is_computed_where_it_is_needed(trainer, objective, computed):
    name, options = objective
    objective = build_objective(name, **options)
    batch = make_batch(make_config(trainer=trainer), (1, 0, 1, 1), objective=objective)
    assert batch.computed == computed
    packed = {index for pack in batch.packs for index in pack.rollout_indices}
    assert packed - {-1} == {index for index in range(4) if computed[index]}
    # A minibatch is a group: what it is divided by counts what is not computed.
    assert [m.denominators.tokens for m in batch.minibatches] == [4.0, 4.0]
    metrics = batch.metrics()
    assert metrics["train/computed_fraction"] == sum(computed) / 4
    assert metrics["advantage/zero_groups_fraction"] == 0.5
    assert metrics["rollout/entropy"] == 0.375  # of 0.5 and 0.25


def test_one_response_without_advantage_in_a_group_is_left_out_too():
    config = make_config(rollout={"prompts": 2, "responses_per_prompt": 2},
                         advantage={"estimator": "batch_baseline"})  # fmt: skip
    batch = make_batch(config, (0.5, 0.5, 1, 0))
    assert batch.computed == [False, False, True, True]


def test_a_batch_that_can_teach_something_is_passed_over_in_silence():
    config = make_config()
    assert describe_no_learning(make_batch(config, (1, 0, 1, 1)), config) is None


@pytest.mark.parametrize(
    ("rewards", "finish_reason", "words"),
    [
        ((0, 0, 0, 0), "stop", ["same reward, 0,", "4 of 4 verdicts say 'wrong answer'"]),
        ((1, 1, 0, 0), "stop", ["within each group", "nothing is learned"]),
        ((1, 0, 0, 1), "length", ["cut at rollout.max_response_tokens=8", "raise it"]),
        ((0, 0, 0, 0), "length", ["max_response_tokens=8", "same reward, 0,"]),
    ],
)
def test_what_keeps_a_run_from_learning_is_said_with_its_cause(rewards, finish_reason, words):
    config = make_config()
    text = describe_no_learning(make_batch(config, rewards, finish_reason=finish_reason), config)
    assert text.startswith("warning: ")
    for word in words:
        assert word in text


def test_packs_for_less_than_the_longest_sequence_are_said_to_be_slow():
    assert describe_slow_packs(make_config()) is None  # 8 + 8 tokens fit into 16
    text = describe_slow_packs(make_config(trainer={"tokens_per_micro_batch": 15}))
    assert "tokens_per_micro_batch=15" in text
    assert "16 or more" in text
