"""Runs of a small mixture of experts that replays its routes, in one process: whole and ended."""

import json
import shutil
from contextlib import nullcontext

import torch

from megatron_rl.config import load_config
from megatron_rl.engine.engine import EngineHooks
from megatron_rl.runtime.interruption import RunInterrupted
from megatron_rl.trainer import build, checkpointing
from megatron_rl.trainer.recorder import Recorder
from tests.functional.tiny_runs import CONFIG, PLACES, TASK

SETTINGS = (
    "model.routing_replay=behavior", "reward.verifier=tests.functional.sums:parity",
    "rollout.prompts_per_step=4", "rollout.responses_per_prompt=4", "trainer.steps=2",
    "rollout.max_response_tokens=16", "trainer.epochs=2", "trainer.minibatches=2",
    "trainer.checkpoint_every=1", "trainer.self_test_every=2", "parallel.context=1", "eval.sets={}",
    "logging.tensorboard=false", "optimizer.decay=constant", "optimizer.learning_rate=1.0e-2",
    "optimizer.warmup_steps=0", "run.resume=auto", "rollout.top_k=20", "rollout.top_p=0.9",
)  # fmt: skip
ENDS = {  # what each equals, how it ended, and the updates of the second step that were done
    "interrupted": ("whole", "interrupted", 2),
    "engine_killed": ("engine", "killed", 0),
}


class Killed(BaseException):
    """In place of a signal: nothing is saved, nothing is cleaned up."""


def make_model(folder):
    """Random weights with the tiny task's tokenizer."""
    import transformers

    shutil.copytree(TASK / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    old = json.loads((folder / "config.json").read_text())
    torch.manual_seed(7)
    config = transformers.Qwen3MoeConfig(
        vocab_size=old["vocab_size"], hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
        max_position_embeddings=old["max_position_embeddings"], eos_token_id=old["eos_token_id"],
        initializer_range=0.2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def settings_of(folder, name):
    """Settings of a run; `engine` in its name: it replays the engine's routes."""
    further = [f"model.path={folder}/moe", f"run.dir={folder}", f"run.name={name}"]
    further += ["model.routing_replay=engine"] if name.startswith("engine") else []
    return [*PLACES, *SETTINGS, *further]


def run(folder, name):
    build.run_training(load_config(CONFIG, settings_of(folder, name)), rank=0, world_size=1)


def run_ended(folder, name, act, *, updates):
    """End a run inside its second step, and resume it."""
    original = checkpointing.CheckpointKeeper.stop_if_requested

    def do(keeper, actor):
        progress = keeper.step_progress
        if progress is not None and (progress.step, progress.updates.count) == (2, updates):
            act(keeper, actor)

    checkpointing.CheckpointKeeper.stop_if_requested = do
    try:
        run(folder, name)
    except (Killed, RunInterrupted):
        pass
    finally:
        checkpointing.CheckpointKeeper.stop_if_requested = original
    run(folder, name)


def kill(keeper, actor):
    raise Killed


def main(folder):
    made = {}
    initialise, build_engine, build_pool = (
        build.make_groups, build.build_engine, build.build_verifiers,
    )  # fmt: skip

    def once(name, make):
        if name not in made:
            made[name] = make()
        return made[name]

    def engine(config, topology, *, hooks=None):
        with_routes = load_config(CONFIG, settings_of(folder, "engine"))
        shared = once("engine", lambda: build_engine(with_routes, topology))
        shared._hooks = hooks or EngineHooks()
        return shared

    build.make_groups = lambda *args, **kwargs: once("groups", lambda: initialise(*args, **kwargs))
    build.build_engine = engine
    build.build_verifiers = lambda *args: nullcontext(
        once("pool", lambda: build_pool(*args).__enter__())
    )
    Recorder.draw = lambda recorder: None
    make_model(folder / "moe")
    acts = {"killed": kill, "interrupted": checkpointing.CheckpointKeeper.checkpoint_and_exit}
    for name, (whole, end, updates) in ENDS.items():
        run(folder, whole)
        run_ended(folder, name, acts[end], updates=updates)
    made["pool"].__exit__(None, None, None)
