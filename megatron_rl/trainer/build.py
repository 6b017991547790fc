"""Builds the trainers' side of a run from a config: the trainer and all its parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

import torch.distributed as dist

from megatron_rl.actor import groups
from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.adapter_files import export_adapters
from megatron_rl.actor.reference import ReferencePolicy, References
from megatron_rl.actor.weights import ProgressCallback
from megatron_rl.config import Config
from megatron_rl.distributed.agreement import run_on_rank_0
from megatron_rl.distributed.link import Link
from megatron_rl.distributed.topology import Topology
from megatron_rl.engine.engine import ConversationSettings, EngineHooks, WeightSink
from megatron_rl.engine.remote import RemoteEngine, build_resharder
from megatron_rl.engine.stopping import describe_generation_config
from megatron_rl.engine.vllm_engine import VllmEngine
from megatron_rl.models.adapters import peft_problem
from megatron_rl.models.shape import ModelShape, read_model_shape
from megatron_rl.models.stored_tensors import check_headers, describe_unread
from megatron_rl.objectives import PolicyObjective, build_objective
from megatron_rl.objectives.spec import needs_reference
from megatron_rl.preflight.settings import check_settings
from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.resharding.push import EnginesElsewhere
from megatron_rl.rollouts.behavior import (
    BehaviorLogprobs,
    EngineLogprobs,
    ModelLogprobs,
    WindowLogprobs,
)
from megatron_rl.rollouts.demonstration_source import DemonstrationSource
from megatron_rl.rollouts.engine_source import EngineSource
from megatron_rl.rollouts.grading import Grader
from megatron_rl.rollouts.offline import NoEngine, OfflineRollouts, OfflineSource
from megatron_rl.rollouts.partial_rollouts import PartialRolloutSource
from megatron_rl.rollouts.prompt_sets import PromptSets, share_prompt_sets
from megatron_rl.rollouts.remote_source import RemotePartialSource, RemoteSource
from megatron_rl.rollouts.schedule import GroupBuffer, build_schedule
from megatron_rl.rollouts.source import RolloutSource, RunContext
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.interruption import Interruption
from megatron_rl.runtime.processes import command_start
from megatron_rl.runtime.watchdog import Heartbeat
from megatron_rl.telemetry.console import Console
from megatron_rl.telemetry.metrics import MetricLog, PhaseClock, StartUp
from megatron_rl.trainer.actor_settings import (
    build_actor_settings,
    build_adapter_settings,
    build_critic,
    compute_dtype,
    make_groups,
)
from megatron_rl.trainer.build_engines import (
    build_engine,
    build_verifiers,
    collective_timeout,
    ranks_per_node,
    run_engines,
    start_verifiers,
)
from megatron_rl.trainer.checkpointing import CheckpointKeeper
from megatron_rl.trainer.critic import CriticTrainer
from megatron_rl.trainer.evaluation import (
    EngineAnswers,
    Evaluator,
    NoAnswers,
    RemoteAnswers,
    SetAnswers,
)
from megatron_rl.trainer.learning_check import describe_dynamic_sampling, describe_slow_packs
from megatron_rl.trainer.loop import BatchSelector, Trainer
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.trainer.startup import (
    GRACE,
    choose_verifier,
    fix_date,
    longest_silence,
    open_conversations,
    open_elsewhere,
    watch,
)
from megatron_rl.trainer.step_progress import SkippedUpdates


def run_training(
    config: Config, *, rank: int, world_size: int, interruption: Interruption | None = None
) -> None:
    """Train as this rank of `world_size`; raises ValueError for bad input before any long work.

    Raises RunInterrupted between two steps or updates if any rank received a signal.
    """
    start = StartUp(command_start())
    shape = check_settings(config, world_size=world_size)
    check_headers(config.model.path, shape)
    objective = build_objective(config.objective.name, **config.objective.overrides)
    if needs_reference(objective.needs):
        for folder in config.references.values():
            check_headers(folder, read_model_shape(folder))
    directory = RunDirectory.of(config)
    if rank == 0:
        directory.lock()
    # A barrier: no rank still checks the directory when rank 0 writes to it.
    with join_link(config) as link:
        if link is not None and link.is_engine:
            run_engines(config, link, shape, directory, interruption or Interruption())
            return
        _train(
            config, objective, shape, directory, link,
            rank=rank, start=start, interruption=interruption or Interruption(),
        )  # fmt: skip


def _train(
    config: Config,
    objective: PolicyObjective,
    shape: ModelShape,
    directory: RunDirectory,
    link: Link | None,
    *,
    rank: int,
    start: StartUp,
    interruption: Interruption,
) -> None:
    """Train on the ranks of this side of the link, or on all."""
    topology = make_groups(config, seed=config.seed, timeout=collective_timeout(config))
    log = Console(is_main_rank=True, log_file=directory.log_file).log  # of every rank
    progress, unwatched = watch(config, directory, rank=rank, link=link, log=log)
    if link is not None:
        link.watch(progress)
    console = Console(
        is_main_rank=rank == 0, log_file=directory.log_file, on_advance=progress.count
    )
    for line in (unwatched, *_describe(config, shape, topology)):
        if line is not None:
            console.echo(line)
    config = fix_date(config, directory, echo=console.echo)
    opened = open_elsewhere(config, link) if link else open_conversations(
        config, topology, echo=log, journals=directory.answers
    )  # fmt: skip
    with (
        opened as (shown, conversations),
        share_prompt_sets(shown, shape, directory.prompts, echo=console.echo) as prompts,
    ):
        for line in run_on_rank_0(lambda: directory.check_inputs(config), doing="comparing inputs"):
            console.echo(line)
        config = choose_verifier(config, directory, prompts.asked, echo=console.echo)
        if link is not None:
            link.orders.send("reward", config.reward)
        start.ended("checks")
        with build_verifiers(config, topology, directory) as pool:
            trainer = TrainingSide(
                config, objective, prompts, Grader(pool, topology, progress.count), conversations,
                directory=directory, topology=topology, console=console, link=link,
                interruption=interruption, start=start, progress=progress,
            ).build()  # fmt: skip
            with trainer.recorder:
                trainer.train()
                progress.begin("export")
                trainer.recorder.draw()
                export(trainer.actor, directory, progress.count)
                trainer.recorder.finish()
            if rank == 0:
                directory.forget(config.trainer.steps + 1)


def export(actor: MegatronActor, directory: RunDirectory, progress: ProgressCallback) -> None:
    """Write the trained model, and its adapters alone if `peft` has a format for them."""
    actor.export_hf(directory.model, progress)
    lora = actor.settings.lora
    if lora is not None and peft_problem(actor.shape, lora.targets) is None:
        export_adapters(actor, directory.adapter)


@contextmanager
def join_link(config: Config) -> Iterator[Link | None]:
    """Join the link of ranks that train and ranks that generate; None if all do both."""
    if config.parallel.engine_ranks is None:
        yield None
        return
    silence = longest_silence(config)
    with groups.join_sides(
        engine_ranks=config.parallel.engine_ranks,
        timeout=collective_timeout(config),
        patience=silence + GRACE,
    ) as link:
        yield link


@dataclass
class TrainingSide:
    """Builder of the trainer of this rank, and of the engine that it shares its device with.

    conversations: environments, None without. link: to ranks that only generate, None without.
    """

    config: Config
    objective: PolicyObjective
    prompts: PromptSets
    grader: Grader
    conversations: ConversationSettings | None
    _: KW_ONLY
    directory: RunDirectory
    topology: Topology
    console: Console
    interruption: Interruption
    start: StartUp
    progress: Heartbeat
    link: Link | None = None

    def build(self) -> Trainer:
        """Start Megatron, restore the newest checkpoint, start the engine. Collective."""
        config, console, topology = self.config, self.console, self.topology
        writer = self.directory if topology.rank == 0 else None
        with console.progress("starting Megatron"):
            actor = MegatronActor(
                config.model.path,
                topology=topology,
                settings=build_actor_settings(config, topology),
                on_micro_batch=self.progress.count,
            )
        log = MetricLog(self.directory.path, config, echo=console.echo) if writer else None
        clock = PhaseClock(topology.device, group=dist.group.WORLD, progress=self.progress)
        recorder = Recorder(config, writer, log, console, clock)
        buffer, faults = GroupBuffer(build_schedule(config)), SkippedUpdates(writer, console)
        checkpoints = CheckpointKeeper(
            config, self.directory, console, rank=topology.rank, buffer=buffer, faults=faults,
            wait_for_records=recorder.wait, interruption=self.interruption,
        )  # fmt: skip
        # First, while the actor has the weights that it read, which are often the reference's.
        compares = needs_reference(self.objective.needs)
        references = References(actor, config.references) if compares else None
        critic = checkpoints.critic = build_critic(config, actor)
        checkpoints.restore(actor)  # uses the memory that vLLM takes afterwards
        self.start.ended("megatron")
        run = RunContext(config, actor, self.objective, buffer, console, clock)
        sink, source, answers = self._build_generation(run)
        return Trainer(
            run=run,
            engine=sink,
            source=source,
            selector=BatchSelector(run, references),
            evaluator=Evaluator(config, answers, config.eval.sets, recorder, console),
            checkpoints=checkpoints,
            recorder=recorder,
            faults=faults,
            critic=None if critic is None else CriticTrainer(run, critic, checkpoints, faults),
            start=self.start,
        )

    def _build_generation(self, run: RunContext) -> tuple[WeightSink, RolloutSource, SetAnswers]:
        """Build what receives weights, what gives rollouts, and what answers evaluation sets."""
        config, behavior = self.config, build_behavior_logprobs(self.config, run.actor)
        if self.link is not None:
            return self._build_remote(run, self.link, behavior)
        if config.offline.rollouts is not None:
            rollouts = OfflineRollouts.load(config, run.console.echo)
            self.start.ended("rollouts")
        elif config.has_engine:
            start_verifiers(self.grader.pool, self.prompts.asked[0], config)
            self.start.ended("verifiers")
        run.actor.sleep()  # vLLM measures the free memory when it starts
        if config.offline.rollouts is not None:
            return NoEngine(), OfflineSource(run, rollouts, behavior), NoAnswers()
        if not config.has_engine:
            return NoEngine(), DemonstrationSource(run, self.prompts), NoAnswers()
        engine = self._start_engine(run)
        self.start.ended("vllm")
        answers = EngineAnswers(
            config, engine, self.grader, self.prompts.evaluation, self.console, self.conversations
        )
        source: RolloutSource
        if config.sft is not None:
            source = DemonstrationSource(run, self.prompts)
        elif config.lag.partial_rollouts is not None:
            source = PartialRolloutSource(run, self.grader, self.prompts, behavior, engine=engine)
        else:
            source = EngineSource(
                run, engine, self.grader, self.prompts, behavior, self.conversations
            )
        return engine, source, answers

    def _build_remote(
        self, run: RunContext, link: Link, behavior: BehaviorLogprobs
    ) -> tuple[WeightSink, RolloutSource, SetAnswers]:
        config, settings, topology = self.config, self.config.rollout, run.actor.topology
        layout = EngineLayout(
            settings.tensor, link.engines, settings.expert_parallel, link.trainers
        )
        receiver = EnginesElsewhere(layout, compute_dtype(config, topology))
        resharder = build_resharder(
            receiver, config.resharding, ranks_per_node=ranks_per_node(topology),
            link=link, adapters=build_adapter_settings(config) is not None,
        )  # fmt: skip
        engine, answers = RemoteEngine(link, receiver, resharder), RemoteAnswers(link, run.clock)
        self.start.ended("vllm")
        if config.lag.partial_rollouts is not None:
            windows = RemotePartialSource(
                run, self.grader, self.prompts, behavior, link=link, engine=engine
            )
            return engine, windows, answers
        return engine, RemoteSource(run, link, engine, self.prompts.training, behavior), answers

    def _start_engine(self, run: RunContext) -> VllmEngine:
        with self.console.progress("starting vLLM"):
            hooks = EngineHooks(
                on_step=self.progress.count,
                on_memory_released=run.clock.memory.count_without,
                should_stop=lambda: self.interruption.received is not None,
            )
            engine = build_engine(self.config, run.actor.topology, hooks=hooks)
        self.console.echo(engine.describe_stop())
        if engine.without_effect is not None:
            self.console.echo(engine.without_effect)
        return engine


def build_behavior_logprobs(config: Config, actor: MegatronActor) -> BehaviorLogprobs:
    """Choose who computes the behavior log-probs: engine, actor, file, or the files' model."""
    if config.behavior == "engine":
        return EngineLogprobs()
    if config.lag.partial_rollouts is not None:
        return WindowLogprobs(actor, config.trainer.tokens_per_micro_batch)
    if config.offline.rollouts is None:
        return ModelLogprobs(actor)
    if config.offline.behavior == "file":
        return BehaviorLogprobs()
    return ModelLogprobs(ReferencePolicy(actor, config.offline.behavior))


# What nothing reads where no engine generates.
OF_REWARDS = (
    "reward.verifier",
    "reward.on_error",
    "reward.weights",
    "workers.variables",
    "lora.push",
)


def _describe(config: Config, shape: ModelShape, topology: Topology) -> list[str | None]:
    """Describe the run, and what of it has no effect."""
    unread: list[str | None] = []
    if topology.rank == 0:
        unread += describe_unread(config.model.path, shape)
    if topology.rank == 0 and config.has_engine:
        unread.append(describe_generation_config(config.model.path, config.rollout))
    if config.sft and not config.eval.sets and (unused := config.given(*OF_REWARDS)):
        unread.append(f"no effect without eval.sets: {', '.join(unused)} (sft grades nothing)")
    warnings = describe_slow_packs(config), describe_dynamic_sampling(config)
    return [_describe_layout(config, topology.world_size), *warnings, *unread]


def _describe_layout(config: Config, world_size: int) -> str:
    parallel = config.parallel
    replicas = world_size // parallel.model_size
    rollout, trainer, engines = config.rollout, config.trainer, parallel.engine_ranks
    extra = f", expert {parallel.expert}" if parallel.expert > 1 else ""
    if parallel.expert > 1 and parallel.expert_tensor_size > 1:
        extra += f" x tensor {parallel.expert_tensor_size}"
    if parallel.virtual_stages > 1:
        extra += f", {parallel.virtual_stages} virtual stages"
    return (
        f"{config.run.name}: {config.objective.name}, {trainer.epochs} epochs x "
        f"{trainer.minibatches} minibatches of {rollout.prompts_per_step} prompts x "
        f"{rollout.responses_per_prompt} responses\n"
        f"{world_size} process{'es' if world_size > 1 else ''}: "
        f"Megatron tensor {parallel.tensor}, pipeline {parallel.pipeline}, "
        f"context {parallel.context}, data {replicas}{extra}; "
        + (f"{engines} more: " if engines else "")
        + (
            f"vLLM {(engines or world_size) // rollout.tensor} x tensor {rollout.tensor}"
            if config.has_engine
            else "no engine"
        )
    )
