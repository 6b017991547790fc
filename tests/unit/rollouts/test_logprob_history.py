"""Choice of the responses traced over their epochs, and the files that a run keeps of them."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_rl.config import parse_config
from megatron_rl.rollouts.rollout_batch import choose_sampled, choose_traced
from megatron_rl.runs.rollouts import count_thinned
from tests.unit.trainer.scripted import run_loop
from tests.unit.trainer.test_learning_check import make_batch, make_config


def test_whole_groups_are_traced_chosen_by_prompt():
    rollouts = make_batch(make_config(), [0, 1] * 20).rollouts  # groups of two
    every = [True] * 40
    chosen = choose_traced(rollouts, every, count=6, seed=3)
    assert len(chosen) == 6
    assert sorted(chosen[1::2]) == [place + 1 for place in chosen[::2]]  # groups are whole
    assert set(choose_traced(rollouts, every, count=5, seed=3)) < set(chosen)
    # Among fewer rollouts a traced prompt stays traced: the next in line take others' places.
    rest = choose_traced(rollouts[:30], every[:30], count=6, seed=3)
    assert {place for place in chosen if place < 30} <= set(rest)
    seeds = {tuple(choose_traced(rollouts, every, count=6, seed=seed)) for seed in range(5)}
    assert len(seeds) > 1
    # What is not computed has no log-probs to trace.
    without = [place not in chosen for place in range(40)]
    assert not set(choose_traced(rollouts, without, count=6, seed=3)) & set(chosen)
    assert choose_traced(rollouts, [False] * 40, count=6, seed=3) == []


def test_step_sample_has_whole_groups_and_all_traced_ones():
    groups = make_batch(make_config(), [0, 1] * 20).groups  # of two
    drawn = choose_sampled(groups, [], count=6, seed=3)
    assert sum(drawn) == 6 and drawn[::2] == drawn[1::2]
    assert choose_sampled(groups, [], count=5, seed=3) == drawn
    other = drawn.index(False)
    both = choose_sampled(groups, [other], count=6, seed=3)
    assert [place for place in range(40) if both[place] > drawn[place]] == [other, other + 1]
    assert sum(choose_sampled(groups, [], count=0, seed=3)) == 2  # one group at least


@pytest.mark.parametrize(("keep", "whole"), [(3, [2, 3, 4]), ("sampled", [])])
def test_older_steps_are_thinned_as_configured(tmp_path, keep, whole):
    options = {"sections": {"logging": {"traced_responses": 4}}, "trainer": {"steps": 4}}
    run_loop(tmp_path / "all", **options)
    options["sections"]["logging"]["keep_rollouts"] = keep
    run_loop(tmp_path / "kept", **options)
    for step in range(1, 5):
        name = f"rollouts/step_{step:06d}.parquet"
        every, kept = (pq.read_table(tmp_path / run / name) for run in ("all", "kept"))
        if step in whole:
            assert kept.equals(every)
            continue
        assert len(every) == 16 and len(kept) < 16
        places = kept.column("place").to_pylist()
        assert every.take(places).equals(kept.drop_columns(["place"]))
        traced = pq.read_table(tmp_path / "kept" / "traces" / f"step_{step:06d}.parquet")
        assert set(traced.column("rollout").to_pylist()) <= set(places)


def test_resumed_run_with_smaller_setting_thins_existing_steps(tmp_path):
    options = {"trainer": {"steps": 3}}
    run_loop(tmp_path, last=2, **options)
    run_loop(tmp_path, done=2, sections={"logging": {"keep_rollouts": 1}}, **options)
    files = sorted((tmp_path / "rollouts").glob("*.parquet"))
    assert [count_thinned([file]) for file in files] == [1, 1, 0]


def test_run_keeps_log_probs_of_every_epoch(tmp_path):
    """The scripted policy's log-probs are minus the number of updates; 3 epochs x 2 minibatches."""
    run_loop(tmp_path)
    for step in (1, 2):
        table = pq.read_table(tmp_path / "traces" / f"step_{step:06d}.parquet").to_pydict()
        rollouts = pq.read_table(tmp_path / "rollouts" / f"step_{step:06d}.parquet").to_pydict()
        assert len(table["rollout"]) == 8  # by default, of 16
        for place, rows in zip(table["rollout"], table["policy_logprobs"], strict=True):
            behavior = np.array(rollouts["behavior_logprobs"][place])
            before = 6 * (step - 1) + place // 8  # updates, its minibatch's place among them
            assert [row[0] for row in rows] == [-before - 2 * epoch for epoch in range(3)]
            assert np.array(rows).shape == (3, behavior.size)


def test_zero_setting_traces_nothing(tmp_path):
    config = parse_config(make_config().model_dump() | {"logging": {"traced_responses": 0}})
    batch = make_batch(config, (1, 0, 1, 0))
    assert batch.traces() == {}
    assert all(pack.traced_logprobs is None for pack in batch.packs)
