"""Which responses are followed through their reuse, and what a run keeps of them."""

import numpy as np
import pyarrow.parquet as pq

from megatron_rl.config import parse_config
from megatron_rl.trainer.traces import choose_traced
from tests.unit.trainer.scripted import run_loop
from tests.unit.trainer.test_learning_check import make_batch, make_config


def test_whole_groups_are_traced_and_the_lot_belongs_to_the_prompt():
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


def test_a_run_keeps_log_probs_of_every_epoch(tmp_path):
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


def test_nothing_is_traced_where_nothing_is_asked_for(tmp_path):
    config = parse_config(make_config().model_dump() | {"logging": {"traced_responses": 0}})
    batch = make_batch(config, (1, 0, 1, 0))
    assert batch.traces() == {}
    assert all(pack.traced_logprobs is None for pack in batch.packs)
