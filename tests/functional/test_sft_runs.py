"""Supervised fine-tuning through the real command: resumed inside a step, with adapters, scored."""

import json
import os
import random
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron_rl.apps.tasks import tiny_task
from megatron_rl.data.demonstrations import ConversationTokenizer
from megatron_rl.runs.files import read_metrics
from tests.functional.test_train import learned
from tests.functional.tiny_runs import HELDOUT, TASK, make_task, start_training, train
from tests.published_form import load_model

SETTINGS = tiny_task.Settings(shortest=4, longest=5)  # two of them fit the model
STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Conversations of one and two turns about the tiny task."""
    make_task()
    folder = tmp_path_factory.mktemp("sft")
    generator = random.Random(3)

    def talk(turns):
        for _ in range(turns):
            problem = tiny_task.draw_problem(generator, SETTINGS)
            yield {"role": "user", "content": problem.question}
            yield {"role": "assistant", "content": problem.solution(generator, 0.0)}

    def write(name, count):
        rows = [{"messages": [*talk(1 + n % 2)]} for n in range(count)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("train.jsonl", 96)
    write("held.jsonl", 20)
    file = folder / "sft.yaml"
    file.write_text(
        f"""
seed: 1
model: {{path: {TASK}/model}}
data: {{train: {folder}/train.jsonl, max_prompt_tokens: 64}}
sft: {{validation: {{held: {folder}/held.jsonl}}}}
rollout: {{prompts_per_step: 32, max_response_tokens: 64, kv_cache_mib: 64}}
optimizer: {{learning_rate: 1.0e-3, warmup_steps: 0, weight_decay: 0.0}}
trainer: {{steps: {STEPS}, minibatches: 4, tokens_per_micro_batch: 1024, checkpoint_every: 10}}
eval: {{every: 2, samples: 1, sets: {{sums: {HELDOUT}}}}}
reward: {{verifier: tests.functional.sums:grade}}
logging: {{tensorboard: false}}
parallel: {{data: 2}}
"""
    )
    return file


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("runs")
    train(f"run.dir={folder}", "run.name=whole", config=config, places=())
    return folder / "whole"


def test_losses_fall_and_the_engine_scores(whole):
    rows = read_metrics(whole)
    validation = [row["eval/held/loss"] for row in rows if "eval/held/loss" in row]
    assert [row["step"] for row in rows if "eval/held/loss" in row] == [0, 2, 4]
    assert validation[2] < validation[1] < validation[0]
    assert [row["step"] for row in rows if "eval/sums/avg@1" in row] == [0, 2, 4]
    for row in rows[1:]:
        assert row["ratio/max_deviation"] == 0.0  # in every update: there is no behavior policy
        assert row["reward/mean"] == 1.0 and row["train/updates"] == 4
        assert row["sync/bytes_local"] > 0
    assert rows[-1]["loss/policy"] < rows[1]["loss/policy"]


def loss_by_transformers(config, turns):
    """Mean negative log-prob of the trained tokens of the held-out conversations."""
    model = load_model(TASK / "model")
    tokenizer = AutoTokenizer.from_pretrained(TASK / "model")
    reader = ConversationTokenizer(tokenizer, turns=turns, stop=(tokenizer.eos_token_id,))
    losses = []
    for line in (config.parent / "held.jsonl").read_text().splitlines():
        prompt, given = reader.tokenize((json.loads(line)["messages"], ()))
        assert not given.restarts
        tokens = torch.tensor([*prompt, *given.token_ids])
        labels = tokens.clone()
        labels[: len(prompt)] = -100
        for first, end in given.observed:
            labels[len(prompt) + first : len(prompt) + end] = -100
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, labels[1:], reduction="none")
        losses.append(each[labels[1:] != -100])
    return torch.cat(losses).mean().item()


def test_validation_loss_is_that_of_transformers(whole, config):
    """Over two data-parallel ranks."""
    assert read_metrics(whole)[0]["eval/held/loss"] == pytest.approx(
        loss_by_transformers(config, "all"), rel=1e-5
    )


ADAPTERS = ("lora={rank: 4, alpha: 8}", "eval.sets={}", "optimizer.learning_rate=5.0e-3",
            "parallel={data: 1, context: 2}", "sft.turns=last")  # fmt: skip


@pytest.fixture(scope="module")
def adapters(config, tmp_path_factory):
    """A run of adapters under context parallelism, without an engine, that nothing interrupts."""
    folder = tmp_path_factory.mktemp("adapters")
    train(f"run.dir={folder}", "run.name=lora", *ADAPTERS, config=config, places=())
    return folder / "lora"


@pytest.mark.slow  # beside the interrupted run of test_train.py, whose loop is the same
def test_interrupted_run_continues_inside_its_step(adapters, config, tmp_path):
    arguments = (f"run.dir={tmp_path}", "run.name=lora", "run.resume=auto", *ADAPTERS)
    process = start_training(*arguments, config=config, places=())
    run, deadline = tmp_path / "lora", time.monotonic() + 300
    while len(read_metrics(run)) < 2:  # of steps 0 and 1
        assert process.poll() is None and time.monotonic() < deadline, process.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == os.EX_TEMPFAIL, process.read()
    train(*arguments, config=config, places=())
    assert learned(read_metrics(run)) == learned(read_metrics(adapters))
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        mine, wanted = (load_file(one / file) for one in (run, adapters))
        assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def test_adapters_under_context_parallelism_without_an_engine(adapters, config):
    rows = read_metrics(adapters)
    before = loss_by_transformers(config, "last")
    assert rows[0]["eval/held/loss"] == pytest.approx(before, rel=1e-5)
    assert rows[-1]["eval/held/loss"] < before
    assert not any(key.startswith("eval/sums") for row in rows for key in row)
    assert rows[-1]["sync/bytes_local"] == 0
    unused = "no effect without eval.sets: reward.verifier (sft grades nothing)"
    assert unused in (adapters / "log.txt").read_text()
    before = load_file(TASK / "model" / "model.safetensors")
    after = load_file(adapters / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert (adapters / "adapter" / "adapter_config.json").is_file()
