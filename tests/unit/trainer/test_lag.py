"""The loop under lag, around scripts: what is frozen when, trained when, pushed when.

The scripted actor's log-probs are the number of its updates, negated, so a behavior log-prob names
the very policy that computed it. A step has 3 epochs x 2 minibatches: six updates.
"""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from megatron_rl.advantages import batch_baseline_advantages
from megatron_rl.engine.requests import sampling_per_prompt
from megatron_rl.rollouts.engine_source import EngineSource
from megatron_rl.rollouts.schedule import GroupBuffer, Schedule
from megatron_rl.rollouts.scoring import score_behavior
from megatron_rl.runs.files import read_metrics, read_rows
from megatron_rl.runs.group_file import read_groups, write_groups
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.trainer.loop import BatchSelector, Trainer
from tests.unit.runs.test_group_file import plain
from tests.unit.trainer.scripted import NoCheckpoints, ScriptedEngine, run_loop

DRAWN = {"policy": "research.lag_policies:UniformLag", "settings": {"low": 0, "high": 3}}
TIMED = ("time/", "memory/", "rollout/tokens_per_second", "rollout/engine_imbalance")


def learned(run):
    return [
        {key: value for key, value in row.items() if not key.startswith(TIMED)}
        for row in read_metrics(run)
    ]


def rollouts(run, step):
    return pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet")


def frozen(run, step):
    """The behavior log-probs of a step's rollouts: minus the updates of who computed them."""
    return {value for row in rollouts(run, step)["behavior_logprobs"].to_pylist() for value in row}


def run(folder, *, steps=4, **sections):
    return run_loop(folder, trainer={"steps": steps}, sections=sections)


def test_default_has_no_lag(tmp_path):
    run_loop(tmp_path)
    for row in read_metrics(tmp_path)[1:]:
        assert (row["lag/steps_max"], row["lag/updates_mean"], row["replay/fraction"]) == (0, 0, 0)
    assert [row["updates"] for row in read_rows(tmp_path / "schedule.jsonl")] == [0, 6]


def test_behavior_log_probs_are_of_generating_policy(tmp_path):
    """Fails where log-probs are computed as a group is trained: they would be -6 and -12."""
    run(tmp_path, lag={"batches": 2})
    assert [frozen(tmp_path, step) for step in (1, 2, 3, 4)] == [{0.0}, {0.0}, {0.0}, {-6.0}]
    rows = read_metrics(tmp_path)[1:]
    assert [row["lag/steps_mean"] for row in rows] == [0, 1, 2, 2]
    assert [row["lag/updates_mean"] for row in rows] == [0, 6, 12, 12]
    assert [row["rollout/weight_version"] for row in rows] == [0, 0, 0, 1]
    assert "rollout/tokens" not in rows[3] and rows[0]["rollout/tokens"] == 3 * 16 * 2
    for step in (1, 2, 3, 4):
        versions = rollouts(tmp_path, step)["weight_version"].to_pylist()
        assert set(versions) == {max(0, step - 3)}


def test_queue_trains_prompts_of_plain_run_later(tmp_path):
    """The same prompts in the same order with the same seeds; only the weights are older."""
    plainly, _ = run(tmp_path / "plain")
    late, _ = run(tmp_path / "late", lag={"batches": 1})
    for step in (1, 2, 3, 4):
        both = [rollouts(tmp_path / name, step) for name in ("plain", "late")]
        for column in ("prompt_index", "sample_index", "response", "reward", "advantage"):
            assert both[0][column] == both[1][column]
    seeds = [
        sorted(seed for event in events if event[0] == "generate" for seed in event[2:])
        for events in (plainly, late)
    ]
    assert seeds[0] == seeds[1]
    order = [event[0] for event in late if event[0] in ("generate", "behavior", "push", "update")]
    # evaluation, both batches in one call, then one a step until none is left
    begin = ["push", "generate", "generate", "behavior", "behavior"]
    assert order[: len(begin) + 6] == [*begin, *["update"] * 6]


class SeededEngine(ScriptedEngine):
    """Its log-probs are made of the seed of each response."""

    def generate(self, prompts, *, samples, sampling, **options):
        each = sampling_per_prompt(sampling, count=len(prompts))
        seeds = [one.seed for one in each for _ in range(samples)]
        responses = super().generate(prompts, samples=samples, sampling=sampling, **options)
        return [
            replace(one, rollout_logprobs=np.array(
                [-derive_seed(seed, one.prompt_index, one.sample_index, token) % 997 / 997
                 for token in (0, 1)], np.float32))
            for seed, one in zip(seeds, responses, strict=True)
        ]  # fmt: skip


@pytest.mark.parametrize(
    "sections",
    [
        {"lag": DRAWN, "dynamic_sampling": {"rounds": 2}},
        {"lag": {"batches": 1, "sync_weights_every": 2}, "replay": {"capacity": 2, "fresh": 0.5}},
    ],
    ids=str,
)
def test_one_call_for_same_weights_equals_several_calls(tmp_path, monkeypatch, sections):
    options = {"sections": sections, "solved": (0, 1), "engine": SeededEngine}
    together, _ = run_loop(tmp_path / "together", trainer={"steps": 6}, **options)
    fill = EngineSource.fill
    monkeypatch.setattr(
        EngineSource, "fill",
        lambda self, parts, *rest: [b for one in parts for b in fill(self, [one], *rest)],
    )  # fmt: skip
    apart, _ = run_loop(tmp_path / "apart", trainer={"steps": 6}, **options)
    assert learned(tmp_path / "together") == learned(tmp_path / "apart")
    for step in range(1, 7):
        both = [rollouts(tmp_path / name, step) for name in ("together", "apart")]
        assert both[0].equals(both[1])
    calls = [[e[1:] for e in events if e[0] == "generate"] for events in (together, apart)]
    assert len(calls[0]) < len(calls[1])
    evaluations = 4  # before training and every second step
    rounds = sections.get("dynamic_sampling", {}).get("rounds", 0)
    assert len(calls[0]) <= evaluations + 6 * (1 + rounds)


@pytest.mark.parametrize(
    "sections",
    [
        {"lag": DRAWN},
        {"replay": {"capacity": 2, "fresh": 0.5}, "dynamic_sampling": {"rounds": 1}},
    ],
    ids=str,
)
def test_batch_baseline_uses_trained_batch_also_after_resume(tmp_path, sections):
    """Prompts 0 to 2 are always solved, the others every second time: no two batches are alike."""
    options = {
        "sections": sections | {"advantage": {"estimator": "batch_baseline"}},
        "solved": (0, 1, 2), "trainer": {"steps": 6},
    }  # fmt: skip
    held: list = []
    (tmp_path / "held").mkdir()
    file = tmp_path / "held" / "buffer.parquet"
    run_loop(tmp_path / "whole", **options)
    run_loop(tmp_path / "held", checkpoints=Saver(3, held, file), **options)
    run_loop(tmp_path / "rest", done=3, updates=18, held=read_groups(file), **options)
    for step in range(1, 7):
        table = rollouts(tmp_path / "whole", step)
        rewards = torch.tensor(table["reward"].to_pylist(), dtype=torch.float64).view(4, 4)
        expected = batch_baseline_advantages(rewards).flatten().float().tolist()
        assert table["advantage"].to_pylist() == expected
        logprobs = table["behavior_logprobs"].to_pylist()
        assert all(row is not None for row, one in zip(logprobs, expected, strict=True) if one)
        if step > 3:
            assert rollouts(tmp_path / "rest", step).equals(table)
    assert learned(tmp_path / "rest") == learned(tmp_path / "whole")[4:]


def test_publishing_every_second_step_pushes_and_generates_every_second_step(tmp_path):
    events, _ = run(tmp_path, lag={"sync_weights_every": 2})
    assert [event[1:] for event in events if event[0] == "push"] == [(0, 0), (2, 12), (4, 24)]
    assert [frozen(tmp_path, step) for step in (1, 2, 3, 4)] == [{0.0}, {0.0}, {-12.0}, {-12.0}]
    rows = read_metrics(tmp_path)[1:]
    assert [row["rollout/weight_version"] for row in rows] == [0, 0, 2, 2]
    assert "sync/seconds" not in rows[0] and "sync/seconds" in rows[1]


def test_replayed_groups_keep_their_log_probs_and_are_counted(tmp_path):
    run(tmp_path, replay={"capacity": 2, "fresh": 0.5})
    rows = read_metrics(tmp_path)[1:]
    assert [row["replay/fraction"] for row in rows] == [0, 0.5, 0.5, 0.5]
    # Two new groups and two of the step before: each with the log-probs of its own policy.
    assert [frozen(tmp_path, step) for step in (2, 3)] == [{0.0, -6.0}, {-6.0, -12.0}]
    for row in read_rows(tmp_path / "schedule.jsonl")[1:]:
        assert sorted(row["replays"]) == [0, 0, 1, 1]
        assert [lag > 0 for lag in row["lag"]] == [again > 0 for again in row["replays"]]


@pytest.mark.parametrize(
    "sections",
    [
        {"lag": DRAWN},
        {"lag": {"sync_weights_every": 2}},
        {"replay": {"capacity": 3, "fresh": 0.5}, "lag": {"batches": 1}},
    ],
    ids=str,
)
def test_run_resumed_with_full_buffer_equals_uninterrupted_run(tmp_path, sections):
    """The buffer goes through a file, as in a checkpoint."""
    _, trainer = run(tmp_path / "whole", **sections)
    for done in (1, 3):
        folder = tmp_path / str(done)
        held: list = []
        saver = Saver(done, held, folder / "buffer.parquet")
        folder.mkdir()
        run_loop(folder, trainer={"steps": 4}, sections=sections, checkpoints=saver)
        assert plain(read_groups(folder / "buffer.parquet")) == plain(held[0])
        rest = tmp_path / f"rest{done}"
        run_loop(
            rest, trainer={"steps": 4}, sections=sections, done=done, updates=6 * done,
            held=read_groups(folder / "buffer.parquet"),
        )  # fmt: skip
        assert learned(rest) == learned(tmp_path / "whole")[1 + done :]
        for step in range(done + 1, 5):
            assert rollouts(rest, step).equals(rollouts(tmp_path / "whole", step))
        assert read_rows(rest / "schedule.jsonl") == read_rows(
            tmp_path / "whole" / "schedule.jsonl"
        )[done:]  # fmt: skip
    assert not trainer.run.buffer.groups or "replay" in sections


def test_engine_log_probs_are_denominator_if_configured(tmp_path):
    """The scripted engine reports -0.1 for every token; the actor scores nothing."""
    events, _ = run(tmp_path, behavior="engine", lag={"batches": 1})
    assert "behavior" not in {event[0] for event in events}
    assert frozen(tmp_path, 1) == frozen(tmp_path, 4) == {float(np.float32(-0.1))}


def test_decoupled_ratios_start_at_current_policy_and_keep_engine_log_probs(tmp_path):
    correction = {"high": 2.0}
    events, _ = run_loop(
        tmp_path, trainer={"steps": 3}, sections={"behavior": "engine", "lag": {"batches": 1}},
        rollout_correction=correction,
    )  # fmt: skip
    centers = [event[1] for event in events if event[0] == "update"]
    assert centers == [{0.0}] * 6 + [{-6.0}] * 6 + [{-12.0}] * 6
    assert frozen(tmp_path, 3) == {float(np.float32(-0.1))}


def freeze_late(monkeypatch):
    """Denominators of the policy that trains."""
    original = BatchSelector.select

    def late(selector, step, fresh):
        batch = original(selector, step, fresh)
        return score_behavior(batch, selector.run.actor)

    monkeypatch.setattr(BatchSelector, "select", late)


def tell_another_version(monkeypatch):
    original = Trainer.sync_weights
    monkeypatch.setattr(
        Trainer, "sync_weights", lambda trainer, version: original(trainer, version=version + 1)
    )


def lose_the_order(monkeypatch):
    """Metrics of the buffer without the current batch."""
    original = Schedule.select

    def select(schedule, step, held):
        chosen = original(schedule, step, held)
        return chosen[::-1] if len(held) > len(chosen) else chosen

    monkeypatch.setattr(Schedule, "select", select)


def count_no_replay(monkeypatch):
    monkeypatch.setattr(GroupBuffer, "evict", lambda buffer, step, made: None)


@pytest.mark.parametrize(
    ("mutate", "check"),
    [
        (freeze_late, test_behavior_log_probs_are_of_generating_policy),
        (tell_another_version, test_behavior_log_probs_are_of_generating_policy),
        (lose_the_order, test_queue_trains_prompts_of_plain_run_later),
        (count_no_replay, test_replayed_groups_keep_their_log_probs_and_are_counted),
    ],
)
def test_broken_contract_raises(tmp_path, monkeypatch, mutate, check):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(tmp_path)


class Saver(NoCheckpoints):
    """Keeps the buffer after one step, on disk too."""

    def __init__(self, step, held, file):
        super().__init__(None)
        self.step, self.held, self.file, self.buffer = step, held, file, None

    def finish(self, step):
        super().finish(step)
        if step == self.step:
            groups = list(self.buffer.groups.values())
            self.held.append(groups)
            write_groups(self.file, groups)


def test_order_of_buffer_does_not_matter(tmp_path):
    """A buffer that lost its order would train other groups: the schedule sorts for itself."""
    sections = {"replay": {"capacity": 3, "fresh": 0.5}}
    held: list = []
    run_loop(
        tmp_path / "a", trainer={"steps": 4}, sections=sections,
        checkpoints=Saver(2, held, tmp_path / "buffer.parquet"),
    )  # fmt: skip
    for name, groups in (("b", held[0]), ("c", held[0][::-1])):
        run_loop(
            tmp_path / name, trainer={"steps": 4}, sections=sections, done=2, updates=12,
            held=groups,
        )  # fmt: skip
    assert learned(tmp_path / "b") == learned(tmp_path / "c") == learned(tmp_path / "a")[3:]
