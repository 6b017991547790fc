"""Runs that train adapters: the engine samples from merged weights, or computes with adapters."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron_rl.apps.tasks import tiny_task
from megatron_rl.runs.files import read_metrics
from tests.functional.test_train import SHORT, assert_same_run, train_killed
from tests.functional.tiny_runs import TASK, make_task, train

LORA = (*SHORT, "rollout.prompts_per_step=8", "trainer.steps=3", "trainer.epochs=2",
        "trainer.minibatches=2", "lora={rank: 8, alpha: 16}", "optimizer.learning_rate=2.0e-3",
        "objective.kl={coefficient: 1.0e-3, estimator: jsd}", "run.resume=auto",
        f"model.reference={{tiny_running_sum: {TASK}_teacher}}")  # fmt: skip
DEEPER = tiny_task.Settings(layers=3)  # the teacher
ADAPTER_PARAMETERS = 17408  # of rank 8 on the tiny model


def make_teacher():
    """A random model of another depth than the student's."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TASK / "model")
    model = tiny_task.build_model(DEEPER, tokenizer, 128)
    for saved in (model, tokenizer):
        saved.save_pretrained(f"{TASK}_teacher")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    make_task()
    make_teacher()
    runs = tmp_path_factory.mktemp("runs")
    train(f"run.dir={runs}", "run.name=whole", *LORA)
    return runs / "whole"


def test_the_engine_samples_from_base_plus_adapters(whole):
    rows = read_metrics(whole)[1:]
    assert all(row["ratio/first_minibatch_max_deviation"] == 0.0 for row in rows)
    assert all(row["mismatch/logprob_abs_diff_mean"] < 1e-5 for row in rows)
    assert rows[0]["ratio/prefix_mean_log_std"] > 1e-4  # the updates move the policy
    base = load_file(TASK / "model" / "model.safetensors")
    merged = load_file(whole / "model" / "model.safetensors")
    factors = load_file(whole / "adapter" / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    for name, value in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}.lora"
        if f"{stem}_A.weight" in factors:
            update = factors[f"{stem}_B.weight"] @ factors[f"{stem}_A.weight"]
            assert update.abs().max() > 1e-4
            torch.testing.assert_close(merged[name], value + 2.0 * update, rtol=0, atol=1e-6)
        else:
            assert torch.equal(merged[name], value)


def assert_same_adapters(ours, theirs):
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        mine, wanted = load_file(ours / name), load_file(theirs / name)
        assert all(torch.equal(mine[key], value) for key, value in wanted.items())


@pytest.mark.slow
def test_a_run_that_sends_adapters_starts_from_those_of_another(tmp_path, whole):
    """Two runs from the adapters of `whole`, one of them killed, with the same results."""
    lora = f"lora={{rank: 8, alpha: 16, path: '{whole / 'adapter'}', push: adapters}}"
    arguments = (f"run.dir={tmp_path}", *LORA, lora)
    train(*arguments, "run.name=sent")
    rows = read_metrics(tmp_path / "sent")[1:]
    assert all(row["ratio/first_minibatch_max_deviation"] == 0.0 for row in rows)
    assert all(row["mismatch/logprob_abs_diff_mean"] < 1e-5 for row in rows)
    assert rows[0]["ratio/prefix_mean_log_std"] > 1e-4  # the updates move the policy
    # Both ranks need every factor, in float32, and none of the weights.
    assert [row["sync/bytes_sent"] + row["sync/bytes_local"] for row in rows] == [
        2 * 4 * ADAPTER_PARAMETERS
    ] * 3
    train_killed(*arguments, "run.name=sent_killed", folder=tmp_path / "sent_killed")
    assert_same_run(tmp_path / "sent_killed", tmp_path / "sent")
    assert_same_adapters(tmp_path / "sent_killed", tmp_path / "sent")
