"""Many short runs and assemblies by hand in one process, around one engine.

What each does is in `RUNS` and `by_hand`; the tests compare what `main` leaves in a folder.
"""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.actor import groups
from megatron_rl.actor.actor import MegatronActor
from megatron_rl.advantages import group_relative_advantages
from megatron_rl.config import load_config
from megatron_rl.data.packing import plan_minibatches
from megatron_rl.engine.engine import EngineHooks, RolloutWindow
from megatron_rl.models.shape import read_model_shape
from megatron_rl.rollouts.engine_source import EngineSource
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.interruption import RunInterrupted
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.trainer import build, build_engines
from megatron_rl.trainer import checkpointing as saving
from megatron_rl.trainer.loop import Trainer
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.types import SamplingSettings
from tests.functional.tiny_runs import CONFIG, CUT, PLACES, TASK

SHORT = ("rollout.prompts_per_step=8", "rollout.responses_per_prompt=4", "trainer.steps=3",
         "logging.traced_responses=32",
         "trainer.epochs=2", "trainer.minibatches=2", "trainer.checkpoint_every=1",
         "parallel.context=1", "eval.sets={}", "logging.tensorboard=false",
         "optimizer.decay=constant", "optimizer.learning_rate=1.0e-3", "optimizer.warmup_steps=0",
         "run.resume=auto", *CUT)  # fmt: skip
LONGEST = 16  # of `CUT`
ENGINE, ONE = "behavior=engine", "trainer.steps=1"
KEEP, RECOMPUTE = (
    "lag.partial_rollouts=4",
    "lag.partial_rollouts={every_tokens: 4, cache: recompute}",
)
MASKED = ("rollout.top_k=8", "rollout.top_p=0.98")  # the sampler removes tokens
EVEN = ("trainer.steps=5", "trainer.checkpoint_every=2", "trainer.keep_checkpoints=3")
DRAWN = ("lag.policy=research.lag_policies:UniformLag", "lag.settings={low: 0, high: 2}")
CRITIC = (
    "critic={path: FOLDER/critic_model, learning_rate: 1.0e-3, warmup_steps: 1, gae_lambda: 0.9}",
    "objective=grpo", "replay={capacity: 3, fresh: 0.5}",
)  # fmt: skip
RUNS = {
    "plain": (),
    "queue": ("lag.batches=1",),
    "mixed": (*DRAWN, *MASKED, "replay={capacity: 3, fresh: 0.5}",
              "trainer.self_test_every=2"),
    "apart": (*DRAWN, *MASKED, "replay={capacity: 3, fresh: 0.5}"),
    "traced_killed": ("lag.policy=research.lag_policies:TraceLag",
                      "lag.settings={file: FOLDER/mixed/schedule.jsonl}",
                      *MASKED, "replay={capacity: 3, fresh: 0.5}"),
    "skipped": (ENGINE,),  # pushes by hand
    "every_second": (ENGINE, "lag.sync_weights_every=2"),
    "engine_queue": (ENGINE, "lag.batches=1"),
    "late_window": (ENGINE, "lag.partial_rollouts=14"),  # of 16: the last two by later weights
    "keep": (ENGINE, KEEP, *EVEN),
    "keep_killed": (ENGINE, KEEP, *EVEN),
    "recompute": (RECOMPUTE, *MASKED),
    "decoupled": (ONE, ENGINE, "objective.name=icepop",
                  "objective.constraint={low: 0.2, high: 0.28}"),
    "sao": (ONE, ENGINE, "objective={name: sao}"),
    "critic": CRITIC,
    "critic_stopped": CRITIC,
}  # fmt: skip
KILLED_AFTER, INTERRUPTED_AFTER = 2, 3
# Of 4 updates of the critic and 4 of the policy: stopped within either, then killed.
STOPPED_IN_STEP, STOPPED_AFTER, KILLED_AFTER_UPDATES = 2, (1, 6), 7


class Killed(BaseException):
    """In place of a signal: nothing is saved, nothing is cleaned up."""


class SharedParts:
    """Parts that take seconds to start and exist once in a process."""

    def __init__(self):
        self.made = {}
        self._groups, self._engine = groups.initialise, build.build_engine
        self._pool = build_engines.VerifierPool

    def pool(self, reward, workers, **settings):
        if "pool" not in self.made:
            self.made["pool"] = self._pool(reward, workers, **settings).__enter__()
        return nullcontext(self.made["pool"])

    def initialise(self, **settings):
        if "topology" not in self.made:
            self.made["topology"] = self._groups(**settings)
        return self.made["topology"]

    def build_engine(self, config, topology, *, hooks=None):
        if "engine" not in self.made:  # runs that remove no tokens may use it too
            first = [ENGINE, KEEP, "run.name=first", "rollout.max_num_seqs=2048", *MASKED,
                     "rollout.max_response_tokens=32"]  # more than in a run, by hand  # fmt: skip
            config = load_config(CONFIG, [*PLACES, *SHORT, *first])
            self.made["engine"] = self._engine(config, topology)
        engine = self.made["engine"]
        engine.drop_caches()
        engine._hooks = hooks or EngineHooks()
        return engine


def run(folder, name, overrides):
    config = load_config(
        CONFIG, [*PLACES, *SHORT, f"run.dir={folder}", f"run.name={name}", *overrides]
    )
    build.run_training(config, rank=0, world_size=1)


def run_killed(folder, name, overrides):
    """Killed after its second step; where there are five, interrupted after the third.

    The fourth then goes on with responses of the fifth batch.
    """
    original = saving.CheckpointKeeper.stop_if_requested

    def disturb(after, act):
        def do(keeper, actor):
            if keeper.done == after:
                act(keeper, actor)

        saving.CheckpointKeeper.stop_if_requested = do
        try:
            run(folder, name, overrides)
        except (Killed, RunInterrupted):
            pass
        finally:
            saving.CheckpointKeeper.stop_if_requested = original

    def kill(keeper, actor):
        raise Killed

    disturb(KILLED_AFTER, kill)
    if EVEN[0] in overrides:
        disturb(INTERRUPTED_AFTER, saving.CheckpointKeeper.checkpoint_and_exit)
    run(folder, name, overrides)


def run_stopped(folder, name, overrides):
    """Stopped inside a step after some updates of the critic, of the policy too, and killed."""
    original = saving.CheckpointKeeper.stop_if_requested

    def stop_after(updates, act):
        def do(keeper, actor):
            progress = keeper.step_progress
            if progress is not None and (progress.step, progress.done) == (
                STOPPED_IN_STEP, updates
            ):  # fmt: skip
                act(keeper, actor)

        saving.CheckpointKeeper.stop_if_requested = do
        try:
            run(folder, name, overrides)
        except (Killed, RunInterrupted):
            return
        finally:
            saving.CheckpointKeeper.stop_if_requested = original
        raise AssertionError("the run was not stopped")

    def kill(keeper, actor):
        raise Killed

    for updates in STOPPED_AFTER:
        stop_after(updates, saving.CheckpointKeeper.checkpoint_and_exit)
    stop_after(KILLED_AFTER_UPDATES, kill)
    run(folder, name, overrides)


def run_skipping_pushes(folder, name, overrides):
    """The plain loop, with every second push left out by hand."""
    original = Trainer.sync_weights_if_due
    Trainer.sync_weights_if_due = lambda trainer, step: (
        original(trainer, step) if step % 2 == 0 else {}
    )
    try:
        run(folder, name, overrides)
    finally:
        Trainer.sync_weights_if_due = original


def run_apart(folder, name, overrides):
    """One call of the engine for the slots of each step, although the same weights generate all."""
    original = EngineSource.fill
    EngineSource.fill = lambda source, parts, *rest: [
        batch for part in parts for batch in original(source, [part], *rest)
    ]
    try:
        run(folder, name, overrides)
    finally:
        EngineSource.fill = original


def make_critic(folder):
    """A model of another size and architecture than the policy, with its vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    vocabulary = read_model_shape(f"{TASK}/model").vocab_size
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in Path(TASK, "model").glob("tokenizer*"):
        shutil.copy(file, folder)


def read_prompts(config, actor, folder):
    with build.share_prompt_sets(config, actor.shape, folder / "sets", echo=print) as sets:
        return sets  # what is mapped can be used after the files are removed


def queue_by_hand(folder, shared):
    """The run "queue" without its loop: batches 1 and 2 by the first weights, 3 by the second."""
    config = load_config(CONFIG, [*PLACES, *SHORT, "run.name=hand"])
    topology, engine = shared.made["topology"], shared.build_engine(config, shared.made["topology"])
    actor = MegatronActor(
        config.model.path, topology=topology, settings=build.build_actor_settings(config, topology)
    )
    sets = read_prompts(config, actor, folder)
    grader = build.Grader(shared.made["pool"], topology)
    objective = build.build_objective(config.objective.name, **config.objective.overrides)

    def generate(batch):
        prompts = [sets.training[place] for place in sets.order.indices(batch - 1, 8)]
        seed = derive_seed(config.seed, "rollout", batch)
        submit = grader.begin(prompts, samples=4)
        responses = engine.generate(
            prompts,
            samples=4,
            sampling=SamplingSettings(1.0, 1.0, LONGEST, seed),
            on_response=submit,
        )
        rollouts = grader.finish(prompts, responses)
        rewards = torch.tensor([rollout.grade_result.reward for rollout in rollouts]).view(8, 4)
        advantages = group_relative_advantages(rewards).flatten()
        minibatches = plan_minibatches(
            rollouts, advantages, minibatches=2, tokens_per_micro_batch=16384, topology=topology,
            computed=(advantages != 0).tolist(), sharing=actor.sharing,
        )  # fmt: skip
        for minibatch in minibatches:  # frozen here, while the actor is what generated
            packs = minibatch.micro_batches
            for pack, logprobs in zip(packs, actor.compute_logprobs(packs), strict=True):
                pack.behavior_logprobs = logprobs
        return minibatches

    def train(minibatches):
        for minibatch in minibatches * 2:  # epochs
            actor.update(minibatch, objective)

    engine.sync_weights(actor, version=0)
    first, second = generate(1), generate(2)
    train(first)
    engine.sync_weights(actor, version=1)
    third = generate(3)
    train(second)
    train(third)
    (folder / "queue_by_hand.json").write_text(json.dumps(actor.digest()))


def in_flight_by_hand(folder, shared):
    """Eight tokens by one set of weights, the rest by another; kept, recomputed, and by hand."""
    config = load_config(CONFIG, [*PLACES, *SHORT, "run.name=hand"])
    topology = shared.made["topology"]
    engine = shared.build_engine(config, topology)
    actor = MegatronActor(
        config.model.path, topology=topology, settings=build.build_actor_settings(config, topology)
    )
    prompts = read_prompts(config, actor, folder).training[:6]
    sampling = SamplingSettings(1.0, 1.0, max_tokens=30, seed=0)

    def push(version):
        engine.sync_weights(actor, version=version)

    def change():
        generator = torch.Generator().manual_seed(3)
        for tensor in actor.named_parameters_local().values():
            tensor.data += 0.02 * torch.randn(tensor.shape, generator=generator)

    push(0)
    requests = {
        keep: RolloutWindow(prompts, 2, replace(sampling, seed=keep), tokens=8) for keep in (1, 0)
    }
    # What is not kept comes first: it leaves nothing behind.
    begun = {
        keep: engine.continue_generation([requests[keep]], keep_cache=bool(keep))[0]
        for keep in (0, 1)
    }
    plain = engine.generate(prompts, samples=2, sampling=replace(sampling, max_tokens=8, seed=1))
    actor.export_hf(folder / "before")
    change()
    push(1)
    rest = [replace(requests[keep], tokens=30, started=begun[keep]) for keep in (0, 1)]
    scheduler = engine._partial._scheduler
    places = scheduler.max_num_running_reqs
    # Fewer places than responses: they continue one after the other.
    scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = 3
    found = dict(enumerate(engine.continue_generation(rest, keep_cache=True)))
    scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = places
    actor.export_hf(folder / "after")
    # By hand: the new weights go on with prompt and tokens as a prompt of their own.
    by_hand = []
    for prompt in range(len(prompts)):
        for sample in range(2):
            start = begun[0][2 * prompt + sample]
            longer = replace(
                prompts[prompt],
                token_ids=(*prompts[prompt].token_ids, *start.token_ids.tolist()),
            )
            seed = derive_seed(0, "continued after", len(start.token_ids))
            rest = engine.generate(
                [longer], samples=sample + 1, sampling=replace(sampling, max_tokens=22, seed=seed)
            )[sample]
            by_hand.append((start, rest))
    torch.save(
        {
            "prompts": prompts, "plain": plain, "begun": begun, "found": found,
            "by_hand": by_hand,
        },
        folder / "partial_rollouts.pt",
    )  # fmt: skip


def main(folder):
    shared = SharedParts()
    groups.initialise, build.build_engine = shared.initialise, shared.build_engine
    build_engines.VerifierPool = shared.pool
    Recorder.draw = lambda recorder: None
    make_critic(folder / "critic_model")
    for name, overrides in RUNS.items():
        how = run_killed if name.endswith("_killed") else run
        own = [override.replace("FOLDER", str(folder)) for override in overrides]
        special = {
            "skipped": run_skipping_pushes,
            "apart": run_apart,
            "critic_stopped": run_stopped,
        }
        special.get(name, how)(folder, name, own)
        last = 1 if ONE in overrides else 5 if EVEN[0] in overrides else 3
        assert RunDirectory(folder / name).checkpoints.intact_steps()[-1] == last
    queue_by_hand(folder, shared)
    in_flight_by_hand(folder, shared)
    shared.made["pool"].__exit__(None, None, None)
