"""Short runs with conversations in one process, around one engine and one verifier.

What each does is in `RUNS`; the tests compare what `main` leaves in a folder.
"""

import json
from contextlib import nullcontext

from megatron_rl.actor import groups
from megatron_rl.commands.evaluate import _with_output, evaluation_config
from megatron_rl.config import load_config
from megatron_rl.engine.engine import EngineHooks
from megatron_rl.runtime.interruption import RunInterrupted
from megatron_rl.trainer import build, build_engines, evaluate_model
from megatron_rl.trainer import checkpointing as saving
from megatron_rl.trainer.recorder import Recorder
from tests.functional.tiny_runs import ROOT

CONFIG = ROOT / "examples" / "pnpo" / "ask.yaml"
PROMPTS, SAMPLES = 4, 4
SHORT = (
    f"rollout.prompts_per_step={PROMPTS}", f"rollout.responses_per_prompt={SAMPLES}",
    "rollout.max_response_tokens=24", "rollout.kv_cache_mib=8", "data.max_prompt_tokens=48",
    "environment.max_context_tokens=96", "environment.max_turns=5",
    "environment.max_turn_tokens=6", "environment.time_limit_seconds=120", "trainer.steps=3",
    "trainer.epochs=2", "trainer.minibatches=2", "trainer.checkpoint_every=1",
    "optimizer.decay=constant", "optimizer.warmup_steps=0", "eval.every=3", "eval.samples=2",
    "logging.tensorboard=false", "logging.traced_responses=32", "run.resume=auto",
    "advantage.credit=turn", "rollout.top_k=40", "rollout.min_p=0.01",
    "reward.verifier=tests.functional.sums:grade",  # only tried: the environments give rewards
)  # fmt: skip
ALL = (
    "lag.batches=1", "replay={capacity: 3, fresh: 0.5}", "dynamic_sampling.rounds=1",
    "early_stopping.kl=1.0e-6", "shaping.truncated=mask", "trainer.keep_best=eval_macro/avg@2",
    "trainer.self_test_every=1",
)  # fmt: skip
RESTARTS = ("environment.name=tests.functional.talking:RestartLedger", "environment.max_rewrites=2")
# Agents that change the history at each of their three turns; twice the prompts, so that some of
# them have rows that are flat, and some do not.
AGENTS = ("environment.name=tests.functional.forgetful:Forgetful", "environment.max_turns=4",
          f"rollout.prompts_per_step={2 * PROMPTS}",
          f"rollout.responses_per_prompt={SAMPLES // 2}",
          "environment.on_error=zero", "data.columns={prompt: question, answer: answer}",
          "trainer.steps=1", "eval.sets={}", "advantage.credit=response")  # fmt: skip
RUNS = {
    "whole": (),
    "split": RESTARTS,
    "split_asked": RESTARTS,
    "all": (*ALL, *RESTARTS),
    "all_killed": (*ALL, *RESTARTS),
    "agents": (*AGENTS, "environment.max_rewrites=2"),
    "refused": (*AGENTS, "environment.max_rewrites=1"),
}


class Killed(BaseException):
    """In place of a signal: nothing is saved, nothing is cleaned up."""


def arguments(folder, name, *overrides):
    """The settings of one run, whose environments write to a folder of its own."""
    notes = folder / f"{name}_notes"
    notes.mkdir(exist_ok=True)
    for kind, count in (("train", 3 * PROMPTS), ("heldout", 3)):
        rows = [{"question": f"{kind} {n}?" + "x" * n, "answer": "7", "folder": str(notes),
                 "flat": n % 4 == 0} for n in range(count)]  # fmt: skip
        (notes / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        *SHORT, f"model.path={folder}/model", f"data.train={notes}/train.jsonl",
        f"eval.sets={{heldout: {notes}/heldout.jsonl}}", f"run.dir={folder}", f"run.name={name}",
        "environment.name=tests.functional.talking:Ledger", *overrides,
    )  # fmt: skip


def run(folder, name):
    config = load_config(CONFIG, arguments(folder, name, *RUNS[name]))
    build.run_training(config, rank=0, world_size=1)


def run_disturbed(folder, name, *, step, updates, act):
    """Do something before an update of a step, and run again."""
    original = saving.CheckpointKeeper.stop_if_requested

    def do(keeper, actor):
        progress = keeper.step_progress
        at = (progress.step, progress.updates.count) if progress else (keeper.done + 1, 0)
        if at == (step, updates):
            act(keeper, actor)

    saving.CheckpointKeeper.stop_if_requested = do
    try:
        run(folder, name)
    except (Killed, RunInterrupted):
        pass
    else:
        raise AssertionError(f"{name} was not disturbed")
    finally:
        saving.CheckpointKeeper.stop_if_requested = original
    run(folder, name)


def kill(keeper, actor):
    raise Killed


def main(folder):
    made = {}
    initialise, build_engine = groups.initialise, build.build_engine
    build_pool = build_engines.VerifierPool

    def build_once(config, topology, *, hooks=None):
        engine = made.setdefault("engine", None) or build_engine(config, topology)
        engine._hooks = hooks or EngineHooks()
        made["engine"] = engine
        return engine

    def initialise_once(**settings):
        made["topology"] = made.get("topology") or initialise(**settings)
        return made["topology"]

    def start_pool_once(reward, workers, **settings):
        made["pool"] = made.get("pool") or build_pool(reward, workers, **settings).__enter__()
        return nullcontext(made["pool"])

    groups.initialise = initialise_once
    build.build_engine = evaluate_model.build_engine = build_once
    build_engines.VerifierPool = start_pool_once
    Recorder.draw = lambda recorder: None
    disturbed = {
        "split_asked": {
            "step": 2, "updates": 2, "act": saving.CheckpointKeeper.checkpoint_and_exit
        },
        "all_killed": {"step": 3, "updates": 0, "act": kill},
    }  # fmt: skip
    for name in RUNS:
        if name in disturbed:
            run_disturbed(folder, name, **disturbed[name])
        else:
            run(folder, name)
    run_offline(folder)
    evaluate(folder)
    made["pool"].__exit__(None, None, None)


def evaluate(folder):
    """Evaluate a run's trained model as `megatron-rl eval` does, with notes of its own."""
    arguments(folder, "evaluation")
    sets = [f"eval.sets={{heldout: {folder}/evaluation_notes/heldout.jsonl}}"]
    config = evaluation_config(f"{folder}/whole", None, sets)
    config = _with_output(config, folder / "evaluation")
    evaluate_model.run_evaluation(config, config.evaluation_files, rank=0, world_size=1)


def run_offline(folder):
    """Train on the conversations of a run, without an engine and its environment."""
    settings = [
        *(one for one in arguments(folder, "offline") if not one.startswith("environment")),
        "environment=null", f"offline.rollouts={folder}/split", "eval.sets={}",
        "rollout.max_response_tokens=96", "rollout.top_k=null", "rollout.min_p=0",
    ]  # fmt: skip
    build.run_training(load_config(CONFIG, settings), rank=0, world_size=1)
