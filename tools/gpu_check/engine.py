"""Checks of vLLM next to the actor (memory share, direct pushes, sleep and wake) and of a run."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.gpu_check.models import make_rollouts, save_random_model
from tools.gpu_check.numerics import one_process
from tools.gpu_check.row import DEVICE, LOW

SHARE = 0.5  # vLLM's gpu_memory_utilization
STEPS = 8


@dataclass
class EngineReport:
    """Measurements of an engine next to a sleeping actor; memory as fractions of the device."""

    share: float  # allocated by vLLM
    asleep: float  # fraction of that still allocated during sleep
    direct: bool  # whether weights were written directly into vLLM's parameters
    push_seconds: float  # duration of the second push
    push_bytes: int
    gap: float  # mean difference between its log-probs and the actor's
    repeated: bool  # whether its responses are the same after sleep, wake and push


def check_engine(row):
    """Run the 1.5B shape in one vLLM engine next to its sleeping actor."""
    with tempfile.TemporaryDirectory() as temporary:
        judge_engine(row, run_engine(Path(temporary) / "model"))


def judge_engine(row, report):
    """Check the measurements of `run_engine`; memory and direct writes exist only on CUDA."""
    row.note("seconds of a push", report.push_seconds)
    row.note("GB/s of a push", report.push_bytes / report.push_seconds / 1e9)
    row.at_most("log-prob gap", report.gap, 0.1)
    row.at_least("same answers after sleep and wake", int(report.repeated), 1)
    if DEVICE == "cuda":
        row.at_least("weights written directly", int(report.direct), 1)
        row.at_most("vLLM's share of memory", report.share, SHARE + 0.05)
        row.at_most("of it kept asleep", report.asleep, 0.1)


def run_engine(folder):
    """Start actor and engine, push twice, generate, sleep, wake, and generate again."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import RolloutSection
    from megatron_rl.engine.vllm_engine import VllmEngine
    from megatron_rl.rollouts.behavior import check_engine as compare
    from megatron_rl.types import SamplingSettings

    topology = one_process()
    config = save_random_model(folder)
    actor = MegatronActor(folder, topology=topology, settings=ActorSettings(dtype=LOW))
    actor.sleep()
    before = _free()
    engine = VllmEngine(
        folder,
        RolloutSection(kv_cache_mib=16, gpu_memory_utilization=SHARE, max_num_seqs=64),
        topology=topology,
        dtype=LOW,
        max_model_len=4096 if DEVICE == "cuda" else 64,
    )
    awake = before - _free()
    engine.sync_weights(actor, version=0)
    direct = engine.live_parameters() is not None
    stats = engine.sync_weights(actor, version=1)
    prompts = [one.prompt for one in make_rollouts([17] * 8, config["vocab_size"])]
    gap = compare(
        actor, engine, prompts, temperature=1.0, seed=0, tokens_per_micro_batch=1024, max_tokens=16
    )
    sampling = SamplingSettings(1.0, top_p=1.0, max_tokens=32, seed=0)
    first = engine.generate(prompts, samples=2, sampling=sampling)
    engine.sleep()
    kept = before - _free()
    engine.sync_weights(actor, version=2)
    second = engine.generate(prompts, samples=2, sampling=sampling)
    same = all(list(a.token_ids) == list(b.token_ids) for a, b in zip(first, second, strict=True))
    total = torch.cuda.mem_get_info()[1] if DEVICE == "cuda" else 1
    return EngineReport(
        share=awake / total,
        asleep=kept / awake if awake else 0.0,
        direct=direct,
        push_seconds=stats.seconds,
        push_bytes=stats.bytes_local + stats.bytes_sent,
        gap=gap,
        repeated=same,
    )


def _free():
    return torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0


def check_quickstart(row):
    """Create the tiny task and train on it from the command line, on one device."""
    judge_quickstart(row, train_tiny(row))


def check_sampling(row):
    """Train on the tiny task with top-k and top-p, whose sampling masks vLLM returns."""
    judge_sampling(row, train_tiny(row, "rollout.top_k=20", "rollout.top_p=0.98"))


def train_tiny(row, *settings):
    """Create the tiny task and train on it from the command line; returns the metrics."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), *(path for path in sys.path if path)])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "0"}
    runs = Path(tempfile.mkdtemp())

    def call(*arguments):
        subprocess.run([sys.executable, *arguments], cwd=root, env=environment, check=True,
                       stdout=sys.stderr)  # fmt: skip

    try:
        start = time.monotonic()
        call("-m", "megatron_rl.apps.tasks.tiny_task")
        row.note("seconds to make the task", time.monotonic() - start)
        start = time.monotonic()
        call(
            *("-m", "megatron_rl.cli", "train", "--config", "examples/pnpo/quickstart.yaml"),
            *("parallel.context=1", f"trainer.steps={STEPS}"),
            *("run.name=quickstart", f"run.dir={runs}", *settings),
        )
        row.note("seconds to train", time.monotonic() - start)
        lines = (runs / "quickstart" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]
    finally:
        shutil.rmtree(runs)


def judge_quickstart(row, metrics):
    """Check exact quantities at every step, and that the policy learns."""
    steps = [one for one in metrics if "reward/mean" in one]
    row.at_least("steps", len(steps), STEPS)
    rewards = [one["reward/mean"] for one in steps]
    row.note("reward at first", rewards[0])
    row.note("seconds of the last step", steps[-1]["time/step"])
    for key in sorted(key for key in steps[-1] if key.startswith("memory/")):
        row.note(f"{key.split('/')[1]}", steps[-1][key])
    worst = max(abs(one["ratio/first_minibatch_max_deviation"]) for one in steps)
    row.at_most("first ratio - 1", worst, 0.0)
    row.at_most("log-prob gap", max(one["mismatch/logprob_abs_diff_mean"] for one in steps), 0.1)
    row.at_least("reward at last", rewards[-1], rewards[0] + 0.1)


def judge_sampling(row, metrics):
    """Check the same of a run whose sampler removes tokens, and that it kept several."""
    judge_quickstart(row, metrics)
    row.at_least("most kept tokens", max(one.get("sampling/kept_max", 0) for one in metrics), 2)
