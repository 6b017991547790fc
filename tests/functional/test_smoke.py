"""Read this test first: one training step of a tiny model, from the command line to the export.

Two processes run the real Megatron-core and the real vLLM on the CPU, with every sequence split
over both (context parallelism 2). They generate, grade, freeze the behavior log-probs, train for
two epochs, send the weights to the engine, and export.
"""

import math

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.runs.files import read_metrics
from tests.functional.forked_runs import ForkedCommand

SETTINGS = (
    "run.name=smoke", "trainer.steps=1", "trainer.epochs=2", "trainer.minibatches=2",
    "rollout.prompts_per_step=8", "rollout.responses_per_prompt=4", "eval.sets={}",
)  # fmt: skip


def test_one_training_step_of_quickstart(tmp_path, monkeypatch):
    """In an empty folder: it needs no file of the repository."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))  # empty, as on a new machine
    process = ForkedCommand(["quickstart", *SETTINGS], output=tmp_path / "output", cwd=tmp_path)
    assert process.wait(timeout=600) == 0, process.read()
    assert "tiny task: 4096 + 128 prompts" in process.read()
    assert (tmp_path / ".cache" / "tiny_task" / "model" / "model.safetensors").is_file()
    run = tmp_path / "runs" / "smoke"
    _, step = read_metrics(run)

    # Generation: every response has a reward between 0 and 1.
    assert 0.0 <= step["reward/mean"] <= 1.0
    # On-policy: in the first minibatch the policy is the one that generated, so every ratio is 1.
    assert step["ratio/first_minibatch_max_deviation"] == 0.0
    # Training: four updates were made, with finite gradients.
    assert step["train/updates_skipped"] == 0
    assert math.isfinite(step["grad/norm"]) and step["grad/norm"] > 0
    # Inference: vLLM's log-probs differ from Megatron's by rounding only.
    assert step["mismatch/logprob_abs_diff_mean"] < 1e-4

    # Start: vLLM did not import itself in another process to inspect the model.
    assert not (tmp_path / "cache" / "modelinfos").exists()

    # Export: transformers loads the trained model of 0.1 M parameters, and it generates.
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    prompt = AutoTokenizer.from_pretrained(run / "model")("1 + 2 =", return_tensors="pt").input_ids
    assert torch.isfinite(model(prompt).logits).all()


def test_wrong_setting_of_quickstart_makes_nothing(tmp_path):
    process = ForkedCommand(["quickstart", "trainer.step=1"], output=tmp_path / "o", cwd=tmp_path)
    assert process.wait(timeout=60) == 1
    assert "trainer.step" in process.read() and not (tmp_path / ".cache").exists()


def test_quickstart_names_what_is_in_place_of_its_folder(tmp_path):
    (tmp_path / ".cache").touch()
    process = ForkedCommand(["quickstart"], output=tmp_path / "o", cwd=tmp_path)
    assert process.wait(timeout=60) == 1
    assert "File exists: '.cache'" in process.read() and "Traceback" not in process.read()
