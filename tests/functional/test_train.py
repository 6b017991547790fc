"""The whole system on the tiny task: it learns, survives a kill, and exports what it trained."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import time
from collections import defaultdict

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch

import megatron_rl
from megatron_rl.apps.report.runs import find_runs
from megatron_rl.apps.report.traces import objective_of, read_traced_groups, replay_constraint
from megatron_rl.runs.files import read_metrics
from tests.functional.forked_runs import ForkedCommand
from tests.functional.tiny_runs import (
    CONFIG,
    CUT,
    PLACES,
    ROOT,
    TASK,
    make_task,
    start_training,
    train,
)
from tests.unit.rewards.misbehaving_verifiers import score_by_parts

# What a clock or the machine decides; everything else must repeat bit for bit.
TIMED = ("time/", "memory/", "sync/", "rollout/tokens_per_second", "rollout/engine_imbalance")
SHORT = ("rollout.prompts_per_step=16", "eval.sets={}", "logging.tensorboard=false",
         "trainer.checkpoint_every=1", "optimizer.decay=constant",
         "logging.traced_responses=128", "trainer.minibatches=2", *CUT)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def tiny_task():
    make_task()


def learned(rows):
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows]


def test_run_learns_from_fresh_weights_only(tmp_path, capfd):
    """Fails on a flipped sign of objective or advantage (the reward falls), on a stale engine (the
    gap opens) and on a gate that rejects nothing, everything, or the wrong tokens (acceptance)."""
    questions = tmp_path / "heldout.parquet"
    pq.write_table(pq.read_table(TASK / "heldout.parquet").slice(0, 64), questions)
    run = megatron_rl.train(  # as a user starts it: new interpreters
        CONFIG,
        reward=score_by_parts,
        overrides=[
            *PLACES[:2], f"eval.sets={{heldout: {questions}}}", f"run.dir={tmp_path}",
            "run.name=a", "rollout.prompts_per_step=32", "trainer.steps=3", "eval.samples=4",
            "eval.every=3", "reward.weights={correct: 1, boxed: 0}",
        ],
    )  # fmt: skip
    assert run == tmp_path / "a"
    assert "Trained a: 3 rollout batches" in capfd.readouterr().out
    rows = read_metrics(tmp_path / "a")
    steps = rows[1:]
    assert [row["step"] for row in rows] == list(range(4))
    # The first minibatch of every step sees the very log-probs that were frozen.
    assert all(row["ratio/first_minibatch_max_deviation"] == 0.0 for row in steps)
    # vLLM computes with the actor's present weights: one update at this rate moves log-probs by
    # more than 1e-3, while float32 in two implementations differs by about 1e-6.
    assert all(row["mismatch/logprob_abs_diff_mean"] < 1e-5 for row in steps)
    assert all(row["rollout/weight_version"] == row["step"] - 1 for row in steps)
    assert steps[-1]["ratio/prefix_mean_log_std"] > 1e-4  # reuse does move the policy
    # The gate rejects some tokens of a policy that moves, and most of none.
    accepted = [row["gate/acceptance"] for row in steps]
    assert 0.5 < min(accepted) < 1.0, accepted
    # Three rollout batches gain more than 30 points on every seed tried; chance wobbles by 5.
    before, after = rows[0]["eval/heldout/avg@4"], rows[-1]["eval/heldout/avg@4"]
    assert after > before + 0.15, (before, after)
    # The one with a weight of 0 is only recorded; half a character in a reason was no obstacle.
    assert all(row["reward/correct_mean"] == row["reward/mean"] for row in steps)
    assert any(row["reward/boxed_mean"] != row["reward/mean"] for row in steps)
    kept = pq.read_table(tmp_path / "a" / "rollouts" / "step_000003.parquet").to_pylist()
    assert all(row["rewards"]["correct"] == row["reward"] for row in kept)
    assert all(row["reason"].endswith(" ?") for row in kept)
    assert (tmp_path / "a" / "curves.png").stat().st_size > 10_000
    assert "heldout/avg@4" in (tmp_path / "a" / "log.txt").read_text()
    assert_evaluated_alike(tmp_path, rows[-1])


def assert_evaluated_alike(folder, last):
    """`megatron-rl eval` of the run, on one engine, finds what training found on two."""
    words = ["eval", "--model", str(folder / "a"), "--output", str(folder / "e")]
    command = ForkedCommand(words, output=folder / "output.txt", cwd=ROOT)
    assert command.wait(timeout=300) == 0, command.read()
    scores = json.loads((folder / "e" / "scores.json").read_text())["scores"]
    assert set(scores) == {"avg@4", "pass@2", "pass@4", "maj@4"}
    for name, sets in scores.items():
        assert sets["heldout"]["score"] == last[f"eval/heldout/{name}"]
        assert sets["macro"]["score"] == last[f"eval_macro/{name}"]
        assert sets["heldout"]["low"] <= sets["heldout"]["score"] <= sets["heldout"]["high"]
    step = last["step"]
    files = (
        folder / "e" / "eval" / "heldout_000000.parquet",
        (folder / "a" / "eval" / f"heldout_{step:06d}.parquet"),
    )
    given = [pq.read_table(file, columns=["prompt_index", "token_ids", "reward"]) for file in files]
    assert given[0].equals(given[1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run directory of three steps without an interruption."""
    runs = tmp_path_factory.mktemp("runs")
    train(f"run.dir={runs}", "run.name=whole", "trainer.steps=3", *SHORT)
    return runs / "whole"


def start_and_wait(arguments, folder, *, rows):
    """A training process that has recorded this many rows; step 0 is the first."""
    process = start_training(*arguments)
    deadline = time.monotonic() + 300
    while len(read_metrics(folder)) < rows:
        assert process.poll() is None and time.monotonic() < deadline, process.read()
        time.sleep(0.02)
    return process


def assert_same_run(run, whole):
    assert learned(read_metrics(run)) == learned(read_metrics(whole))
    names = [f"step_{step:06d}.parquet" for step in (1, 2, 3)]
    assert [file.name for file in sorted((run / "rollouts").iterdir())] == names
    for name in names:
        for kind in ("rollouts", "traces"):
            tables = [pq.read_table(folder / kind / name) for folder in (run, whole)]
            assert tables[0].equals(tables[1])


def test_traces_and_report_match_counts_of_updates(whole):
    """Every computed response is traced: by epoch, counted again, acceptance and drift are equal.

    Two shards add up a prefix in another order than the report does: two tokens at a bound may
    be judged otherwise.
    """
    [run] = find_runs([whole])
    objective = objective_of(run)
    for row in run.steps:
        kept, prefix_means = defaultdict(list), defaultdict(list)
        for response in itertools.chain(*read_traced_groups(run, row["step"])):
            if response.policy is None:  # of a group of equal rewards
                continue
            positions = np.arange(1, response.behavior.size + 1)
            for epoch, decisions in enumerate(replay_constraint(response, objective)[1], start=1):
                kept[epoch].append(decisions)
                prefix_means[epoch].append(response.log_ratio[epoch - 1].cumsum() / positions)
        assert sorted(kept) == [1, 2, 3, 4]
        for epoch in kept:
            decisions, values = np.concatenate(kept[epoch]), np.concatenate(prefix_means[epoch])
            accepted = row[f"epoch_{epoch}/gate/acceptance"]
            assert abs(decisions.sum() - accepted * decisions.size) < 2.5
            drift = row[f"epoch_{epoch}/ratio/prefix_mean_log_std"]
            assert values.std() == pytest.approx(drift, rel=1e-3)
        assert 4 * values.size == row["tokens"]


def test_updates_increase_objective_of_rewards(whole):
    """In float64 from rewards and traces alone: what each step minimised, and where it led to.

    A sign, an advantage or a gate that is not as defined gives another loss; an optimizer that
    goes the wrong way, or by other advantages, makes what was rewarded less likely.
    """
    [run] = find_runs([whole])
    low, high = run.config["objective"]["constraint"].values()
    for row in run.steps:
        loss, advantages, moves, rejected = 0.0, [], [], 0
        for group in read_traced_groups(run, row["step"]):
            rewards = np.array([response.row["reward"] for response in group])
            if rewards.min() == rewards.max():
                continue
            relative = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            for advantage, response in zip(relative, group, strict=True):
                length = response.behavior.size
                position = np.arange(1, length + 1)
                weight = np.exp(response.log_ratio.cumsum(axis=1) / position)  # [updates, L]
                width = np.sqrt(length / position)
                kept = (1 - low * width <= weight) & (weight <= 1 + high * width)
                terms = np.where(kept, weight * advantage * response.policy, 0)
                loss -= terms.mean(axis=1).sum()
                rejected += (~kept).sum()
                advantages.append(advantage)
                moves.append(response.log_ratio[-1].mean())
        # Means over 8 updates of sums over a minibatch's 64 responses, divided by their number.
        assert loss / 8 / 64 == pytest.approx(row["loss/policy"], rel=1e-3)
        assert rejected > 10  # the comparison would notice a gate that does nothing
        # Shuffled within groups they would be uncorrelated, of opposite sign anticorrelated.
        assert np.corrcoef(advantages, moves)[0, 1] > 0.3


def train_killed(*arguments, folder):
    """Kill the run after its second step, and continue it."""
    process = start_and_wait(arguments, folder, rows=3)
    ranks = psutil.Process(process.pid).children()
    for group in (process.pid, *(rank.pid for rank in ranks)):  # all, as when a node is lost
        with contextlib.suppress(ProcessLookupError):  # a rank ends with its launcher
            os.killpg(group, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(ranks, timeout=60)
    return train(*arguments)


@pytest.mark.slow
def test_partial_rollouts_of_two_ranks_resume_with_tokens_on_other_ranks(tmp_path):
    """One engine of two ranks: each has half of the tokens, and both continue every response.

    After a checkpoint every rank has those that it contains, and each of the new ones is on one.
    """
    arguments = (f"run.dir={tmp_path}", "run.resume=auto", "trainer.steps=3", *SHORT,
                 "rollout.tensor=2",
                 "lag.partial_rollouts={every_tokens: 4, cache: recompute}")  # fmt: skip
    train(*arguments, "run.name=whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for lost in ("model", "checkpoints/step_000003"):  # as if killed before these were there
        shutil.rmtree(tmp_path / "killed" / lost)
    rows = train(*arguments, "run.name=killed")
    assert "continuing killed after step 2" in (tmp_path / "killed" / "log.txt").read_text()
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    for row in rows[1:]:
        assert row["mismatch/logprob_abs_diff_mean"] < 1e-5
    assert rows[-1]["lag/versions_mean"] > 0


def test_interrupted_and_killed_run_resumes_bit_for_bit(tmp_path, whole):
    """No checkpoint is due before the last step: the signal alone saves one, wherever it comes.

    The kill loses what came after it. Self-tests in every step, which the other run does not have,
    change nothing.
    """
    run = tmp_path / "interrupted"
    arguments = (f"run.dir={tmp_path}", "run.name=interrupted", "run.resume=auto",
                 "trainer.steps=3", *SHORT, "trainer.checkpoint_every=10",
                 "trainer.self_test_every=1")  # fmt: skip
    process = start_and_wait(arguments, run, rows=2)
    process.send_signal(signal.SIGINT)  # which the ranks receive as SIGTERM
    status, output = process.wait(timeout=300), process.read()
    assert status == os.EX_TEMPFAIL, output
    # Most likely out of generating for step 2, or between two of its updates.
    printed = r"checkpoint saved at step (\d)(, update \d+)?\. Resume with:"
    where = re.search(printed, output)
    assert where is not None and "Traceback" not in output, output
    step = int(where[1])
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == [f"step_{step:06d}"]
    assert read_metrics(run)[-1]["step"] == step - (where[2] is not None)
    train_killed(*arguments, folder=run)
    assert_same_run(run, whole)


@torch.no_grad()
def score_with_transformers(model, tokenizer, row):
    """Log-probabilities and entropies of a rollout's tokens; two [L]."""
    messages = [{"role": "user", "content": row["prompt"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    logits = model(torch.tensor([prompt + row["token_ids"]])).logits[0, len(prompt) - 1 : -1]
    table = logits.log_softmax(-1)
    labels = torch.tensor(row["token_ids"])[:, None]
    return table.gather(1, labels)[:, 0], -(table.exp() * table).sum(-1)


def test_exported_model_is_trained_model(tmp_path, whole):
    """Under another layout: step 2 starts from the model that a run of one step exported.

    Its prompts are those of a run that never changed its layout.

    With KL and entropy terms, whose reference stays the initial model over the resume. A step is
    one update, so its terms are those of the frozen rollout batch, which transformers computes
    from the two folders: same tokens, same weights, nothing that depends on what was sampled.
    """
    terms = ("objective.kl={coefficient: 1.0e-3}", "objective.entropy_coefficient=1.0e-3",
             "trainer.epochs=1", "trainer.minibatches=1", "optimizer.learning_rate=1.0e-3",
             "optimizer.warmup_steps=0")  # fmt: skip
    arguments = (f"run.dir={tmp_path}", "run.name=a", "run.resume=auto", *SHORT, *terms)
    train(*arguments, "trainer.steps=1", "parallel.context=1", "parallel.tensor=2")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported, initial = (
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        for folder in (tmp_path / "a", TASK)
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a" / "model")
    # Continued with two whole copies: neither the checkpoint nor the order of data minds.
    metrics = train(*arguments, "trainer.steps=2", "parallel.context=1", "parallel.data=2")[-1]
    for step in ("step_000001.parquet", "step_000002.parquet"):
        positions = [
            pq.read_table(run / "rollouts" / step, columns=["prompt_index", "prompt"])
            for run in (tmp_path / "a", whole)
        ]
        assert positions[0].equals(positions[1])
    rows = pq.read_table(tmp_path / "a" / "rollouts" / "step_000002.parquet").to_pylist()
    assert len(rows) == 16 * 8
    moved, kl, entropies = 0.0, [], []
    for row in rows:
        behavior = torch.tensor(row["behavior_logprobs"])
        logprobs, entropy = score_with_transformers(exported, tokenizer, row)
        torch.testing.assert_close(logprobs, behavior, atol=5e-5, rtol=0)
        log_q = score_with_transformers(initial, tokenizer, row)[0] - logprobs
        moved = max(moved, log_q.abs().max().item())
        kl.append((torch.expm1(log_q.double()) - log_q.double()).mean().item())
        entropies += entropy.tolist()
    assert moved > 1e-3  # the comparison would notice the untrained model
    # PNPO's mean over responses of the mean over their tokens; log-probs differ by some 1e-5.
    assert metrics["loss/kl"] == pytest.approx(1e-3 * sum(kl) / len(kl), rel=1e-2)
    assert metrics["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)
    assert metrics["time/reference"] > 0 and metrics["memory/train_peak_gib"] > 0.1


def test_error_of_user_verifier_ends_every_rank_and_is_logged(tmp_path):
    broken = "reward.verifier=tests.unit.rewards.misbehaving_verifiers:break_in_a_run"
    process = start_training(f"run.dir={tmp_path}", "run.name=a", *SHORT, broken)
    status, output = process.wait(timeout=300), process.read()
    assert status == 1
    *_, error, frames, to_continue, command = output.splitlines()
    assert (
        error.startswith("megatron-rl: error: rank ") and "grading responses: the verifier" in error
    )
    assert "LookupError: broken on purpose; correct the verifier, or set reward.on_error=" in error
    assert frames == f"  stack traces: {tmp_path}/a/log.txt" and "Traceback" not in output, output
    assert to_continue == "megatron-rl: nothing is saved yet; restart with"
    assert command == f"  megatron-rl train --config {tmp_path}/a/config.yaml run.resume=auto"
    log = (tmp_path / "a" / "log.txt").read_text()
    assert "rank 0 failed" in log or "rank 1 failed" in log  # the first one ends the other
    assert "Traceback" in log and "grading responses" in log and "broken on purpose" in log
    assert "misbehaving_verifiers:break_in_a_run: judging\n" in log  # what it printed, by its name
