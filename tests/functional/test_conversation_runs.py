"""Whole runs with conversations: interrupted, killed, with lag and replay, and from files.

All but the killed run share one process and one engine (`conversation_runs.py`).
"""

import contextlib
import json
import os
import signal
import time
from collections import Counter

import psutil
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from megatron_rl.config import load_config
from megatron_rl.data.rendering import tokenize_messages
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.runs.files import read_metrics
from megatron_rl.runtime.seeds import derive_seed
from tests.functional import conversation_runs
from tests.functional.conversation_runs import CONFIG, PROMPTS, RESTARTS, SAMPLES, arguments
from tests.functional.test_conversations import save_model
from tests.functional.tiny_runs import start_training, train
from tests.ranks import start_process
from tests.running import assert_end

TIMED = ("time/", "memory/", "sync/", "rollout/tokens_per_second", "rollout/engine_imbalance",
         "environment/seconds_mean", "environment/cached_fraction")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of all runs, with their model."""
    folder = tmp_path_factory.mktemp("conversations")
    save_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    process = start_process(conversation_runs.main, folder)
    process.join(timeout=900)
    assert process.exitcode == 0
    return folder


def learned(run):
    return [
        {key: value for key, value in row.items() if not key.startswith(TIMED)}
        for row in read_metrics(run)
    ]


def notes(folder, name, kind):
    file = folder / f"{name}_notes" / kind
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def made(folder, name):
    """The calls of a run's environments, but that of the trial before each start, of seed 0."""
    return Counter(str(call) for call in notes(folder, name, "calls") if call[0] != 0)


def assert_same(one, other):
    """The same numbers, rollouts and weights, bit for bit."""
    assert learned(one) == learned(other)
    for file in sorted((one / "rollouts").iterdir()):
        assert pq.read_table(file).equals(pq.read_table(other / "rollouts" / file.name)), file
    assert_same_weights(one, other)


def assert_same_weights(one, other):
    weights = [safetensors.torch.load_file(run / "model" / "model.safetensors")
               for run in (one, other)]  # fmt: skip
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_runs_have_different_conversations_and_exact_first_ratios(runs):
    steps = learned(runs / "whole")[1:]
    assert all(row["ratio/first_minibatch_max_deviation"] == 0.0 for row in steps)
    for row in steps:
        assert row["conversation/turns_mean"] > 2 and row["reward/std"] > 0
        assert 0.2 < row["conversation/observed_fraction"] < 0.9
    assert steps[-1]["ratio/prefix_mean_log_std"] > 1e-4


def test_run_of_split_conversations_resumes_inside_a_step(runs):
    assert_same(runs / "split_asked", runs / "split")
    assert "checkpoint saved at step 2, update 2" in (runs / "split_asked" / "log.txt").read_text()
    assert made(runs, "split_asked") == made(runs, "split")
    for row in learned(runs / "split")[1:]:
        assert row["ratio/first_minibatch_max_deviation"] == 0.0
        assert row["conversation/rewrites_mean"] > 0.2
        # The engine and the actor read the same sequences.
        assert row["mismatch/logprob_abs_diff_mean"] < 1e-4


def test_evaluation_of_a_run_has_its_environment(runs):
    """And finds what the run's last evaluation found."""
    scores = json.loads((runs / "evaluation" / "scores.json").read_text())["scores"]
    assert scores["avg@2"]["heldout"]["score"] == learned(runs / "whole")[-1]["eval/heldout/avg@2"]
    files = [
        runs / name / "eval" / f"heldout_{step:06d}.parquet"
        for name, step in (("evaluation", 0), ("whole", 3))
    ]
    own, other = (
        pq.read_table(file, columns=["token_ids", "observed", "reward"]).to_pylist()
        for file in files
    )
    assert own == other and any(row["observed"] for row in own)


def contexts(row):
    """The tokens that the policy read before each turn of a conversation."""
    found, start, tokens = [], 0, [*row["prompt_token_ids"], *row["token_ids"]]
    places = [0, *(one["end"] for one in row["observed"])]
    for first, history in zip(places, [0, *(one["first"] for one in row["observed"])], strict=True):
        if history in row["restarts"]:
            start = len(row["prompt_token_ids"]) + history
        found.append(tokens[start : len(row["prompt_token_ids"]) + first])
    return found


def test_agents_that_change_their_history_are_trained_as_often_as_allowed(runs):
    """The policy has read each request exactly; a conversation is one response of its group."""
    (row,) = learned(runs / "agents")[1:]
    table = pq.read_table(runs / "agents" / "rollouts" / "step_000001.parquet").to_pylist()
    assert len(table) == PROMPTS * SAMPLES
    changes = [len(one["restarts"]) for one in table]
    assert set(changes) == {1, 2} and row["conversation/rewrites_max"] == 2
    assert row["conversation/rewrites_mean"] == sum(changes) / len(changes)
    assert row["conversation/turns_mean"] == 3 and row["conversation/rewritten_fraction"] == 0
    assert row["ratio/first_minibatch_max_deviation"] == 0.0
    assert row["mismatch/logprob_abs_diff_mean"] < 1e-4
    tokenizer = load_tokenizer(runs / "model")
    sent = Counter()
    for requests, last in notes(runs, "agents", "requests"):
        tokens = [tokenize_messages(one, tokenizer, arguments={}) for one in requests]
        sent[json.dumps([tokens, last])] += 1
    assert sent == Counter(json.dumps([contexts(one), one["response"]]) for one in table)
    # With one change allowed, the second is refused and ends the conversation.
    (row,) = learned(runs / "refused")[1:]
    assert row["conversation/rewritten_fraction"] == changes.count(2) / len(changes)
    assert row["conversation/rewrites_max"] == 1 and row["conversation/turns_mean"] < 3


def test_run_with_lag_replay_and_dynamic_sampling_resumes_with_the_same_bits(runs):
    assert_same(runs / "all", runs / "all_killed")
    steps = learned(runs / "all")[1:]
    for name in ("dynamic/rounds", "train/early_stopped", "train/masked_fraction"):
        assert sum(row.get(name, 0) for row in steps) > 0, name
    assert steps[-1]["lag/steps_mean"] > 0 and steps[-1]["replay/max_uses"] > 1
    assert all(row["conversation/rewrites_mean"] > 0.2 for row in steps)


def test_offline_run_on_conversations_equals_the_run_that_generated_them(runs):
    """The files of a run give the updates and the weights of that run."""
    unknown = {"rollout/weight_version": -1, "policy/entropy": None}  # of another run
    steps = [learned(runs / name)[1:] for name in ("split", "offline")]
    for online, offline in zip(*steps, strict=True):
        assert offline == {name: online[name] for name in offline} | unknown
    assert_same_weights(runs / "offline", runs / "split")


def wait_until(condition, process):
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.read()
        time.sleep(0.02)


QUEUE = ("lag.batches=1", *RESTARTS)


@pytest.mark.slow
def test_run_with_engines_apart_killed_while_generating(folder):
    """Rollouts of step 3, which engines on ranks of their own generate during step 2."""
    train(*arguments(folder, "queue", *QUEUE), config=CONFIG, places=())
    check_kill(folder, "apart", (*QUEUE, "parallel.engine_ranks=1"), same="queue", batch=3)


@pytest.mark.slow
def test_run_killed_while_generating_repeats_no_side_effect(runs):
    check_kill(runs, "killed", (), same="whole", batch=2)


def recorded(run):
    return [row["step"] for row in read_metrics(run)]


def check_kill(runs, name, overrides, *, same, batch):
    """Kill in step 2 when half of the conversations are over and half wait for an answer.

    Engines on ranks of their own may come that far while the trainers still record step 1.
    """
    settings = arguments(runs, name, *overrides)
    folder = runs / f"{name}_notes"
    seed = derive_seed(load_config(CONFIG, settings).seed, "rollout", batch)
    seeds = [derive_seed(seed, "environment", n) for n in range(3 * PROMPTS)]
    (folder / "hold").write_text(json.dumps(seeds[::2]))
    process = start_training(*settings, config=CONFIG, places=())

    def is_waiting():
        over = sum(one in seeds for one in notes(runs, name, "closed"))
        held = over + len(notes(runs, name, "waiting")) == PROMPTS * SAMPLES
        return held and recorded(runs / name) == [0, 1]

    wait_until(is_waiting, process)
    calls = len(notes(runs, name, "calls"))
    assert 0 < len(notes(runs, name, "waiting")) < PROMPTS * SAMPLES
    launcher = psutil.Process(process.pid)
    ranks, below = launcher.children(), launcher.children(recursive=True)
    for group in (process.pid, *(rank.pid for rank in ranks)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    process.wait()
    assert_end(one.pid for one in below)  # also the environments, which wait in their calls
    assert recorded(runs / name) == [0, 1]
    (folder / "hold").unlink()
    again = start_training(*settings, config=CONFIG, places=())
    assert again.wait(timeout=300) == 0, again.read()
    assert_same(runs / name, runs / same)
    assert made(runs, name) == made(runs, same)
    assert calls < made(runs, name).total()
    assert [file for file in (runs / name / "answers").rglob("*") if file.is_file()] == []
