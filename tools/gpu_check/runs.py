"""Rows that run the command line: LoRA on one device, layouts of two devices."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch

from tools.gpu_check.models import PUBLISHED, TINY, save_random_model
from tools.gpu_check.row import DEVICE, Skipped

ROOT = Path(__file__).parents[2]
ON_GPU = DEVICE == "cuda"
TINY_VOCABULARY = 64
DENSE_7B = {  # Qwen2.5-7B's
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}


def _call(*arguments, limit=None):
    """Run a Python command in the repository; after `limit` seconds ask it to save and stop."""
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths},
        stdout=sys.stderr, start_new_session=True,
    )  # fmt: skip
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        return
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if status:
        raise RuntimeError(f"{' '.join(arguments[:4])} exited with status {status}")


@contextmanager
def _random_model(shape, vocabulary=None):
    """Yield a folder with a random model of this shape, a tokenizer of its size, and prompts."""
    from megatron_rl.apps.tasks import tiny_task as tiny

    folder = Path(tempfile.mkdtemp())
    try:
        _call(
            "-m", "megatron_rl.apps.tasks.tiny_task", "--output", str(ROOT / ".cache" / "tiny_task")
        )
        tokenizer = tiny.build_tokenizer(32768)
        size = vocabulary or shape["vocab_size"]
        tokenizer.add_tokens([f" w{index}" for index in range(size - len(tokenizer))])
        ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
        qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        save_random_model(folder / "model", {**qwen, **shape, "vocab_size": size, **ends})
        tokenizer.save_pretrained(folder / "model")
        shutil.copy(ROOT / ".cache" / "tiny_task" / "train.parquet", folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def _train(folder, name, *settings, steps=2):
    """Train the model in `folder`; return the metrics of each step."""
    memory = ("rollout.kv_cache_mib=null",) if ON_GPU else ("rollout.kv_cache_mib=64",)
    _call(
        *("-m", "megatron_rl.cli", "train", "--config", "examples/pnpo/quickstart.yaml"),
        *(f"model.path={folder}/model", f"data.train={folder}/train.parquet", "eval.sets={}"),
        *("parallel.context=1", f"trainer.steps={steps}", "trainer.checkpoint_every=1000"),
        *("reward.verifier=tools.benchmarks.against_trl:score", "logging.tensorboard=false"),
        *(f"run.dir={folder}", f"run.name={name}", *memory, *settings),
    )
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "time/step" in row]


def _judge(row, name, steps):
    """Note seconds and peak of the last step; the first ratio must be exactly 1."""
    last = steps[-1]
    worst = max(abs(one["ratio/first_minibatch_max_deviation"]) for one in steps)
    row.at_most(f"{name}, first ratio - 1", worst, 0.0)
    gap = max(one["mismatch/logprob_abs_diff_mean"] for one in steps)
    row.at_most(f"{name}, log-prob gap", gap, 0.1)
    row.note(f"{name}, seconds a step", last["time/step"])
    row.note(f"{name}, reward", last["reward/mean"])
    row.note(f"{name}, peak GiB", max(last[key] for key in last if key.startswith("memory/")))


def check_lora_7b(row):
    """Train adapters of a 7B on one device."""
    with _random_model(DENSE_7B if ON_GPU else TINY, None if ON_GPU else TINY_VOCABULARY) as folder:
        sizes = _small_batch()
        if ON_GPU:
            sizes += ("rollout.max_response_tokens=1024", "trainer.recompute=full")
        _judge(row, "LoRA", _train(folder, "lora", "lora.rank=16", *sizes))


def _small_batch():
    return (
        "rollout.prompts_per_step=8",
        "rollout.responses_per_prompt=4",
        "rollout.max_response_tokens=32",
        "trainer.epochs=1",
        "trainer.minibatches=2",
    )


def check_decode_graphs(row):
    """Time generation with vLLM's CUDA graphs, as it is started, and without them."""
    sizes, responses = _small_batch(), 8 * 4
    if ON_GPU:
        sizes += ("rollout.prompts_per_step=32", "rollout.max_response_tokens=512")
        responses = 32 * 4
    rates = {}
    with _random_model(
        PUBLISHED if ON_GPU else TINY, None if ON_GPU else TINY_VOCABULARY
    ) as folder:
        for name, settings in (
            ("as started", ()), ("eager", ("rollout.engine={enforce_eager: true}",))
        ):  # fmt: skip
            last = _train(folder, name.replace(" ", "_"), *sizes, *settings)[-1]
            rates[name] = responses * last["response/length_mean"] / last["time/rollout"]
            row.note(f"{name}: tokens/s of generation", rates[name])
            row.note(f"{name}: log-prob gap", last["mismatch/logprob_abs_diff_mean"])
    row.note("tokens/s as started / eager", rates["as started"] / rates["eager"])


def check_layouts(row):
    """Train with context parallelism 2 and tensor parallelism 2: collectives, pushes, engines."""
    if ON_GPU and torch.cuda.device_count() < 2:
        raise Skipped("one device")
    shape, vocabulary = (PUBLISHED, None) if ON_GPU else ({**TINY, "num_key_value_heads": 2}, 64)
    with _random_model(shape, vocabulary) as folder:
        for layout in ("context", "tensor"):
            steps = _train(
                folder, layout, *_small_batch(), "parallel.context=1", f"parallel.{layout}=2"
            )
            _judge(row, f"{layout} 2", steps)
