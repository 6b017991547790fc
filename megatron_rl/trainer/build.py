"""Builds a trainer and all its parts from a config."""

import contextlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from megatron_rl.actor import groups
from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.adapter_files import export_adapters
from megatron_rl.actor.reference import ReferencePolicy, References
from megatron_rl.actor.weights import ProgressCallback
from megatron_rl.config import Config, ConfigError
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed.agreement import (
    cores_of_rank,
    run_on_rank_0,
    sync_errors_across_ranks,
)
from megatron_rl.distributed.link import Link
from megatron_rl.distributed.topology import Topology
from megatron_rl.engine.engine import ConversationSettings, EngineHooks, RolloutEngine
from megatron_rl.engine.remote import RemoteEngine, build_resharder
from megatron_rl.engine.vllm_engine import VllmEngine
from megatron_rl.models.adapters import peft_problem
from megatron_rl.models.shape import ModelShape, read_model_shape
from megatron_rl.models.stored_tensors import check_headers, describe_unread
from megatron_rl.objectives import PolicyObjective, build_objective
from megatron_rl.objectives.spec import needs_reference
from megatron_rl.preflight.settings import check_settings
from megatron_rl.preflight.trials import vote_problems
from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.resharding.push import EnginesElsewhere
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import Item, VerifierError
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
from megatron_rl.trainer.checkpointing import CheckpointKeeper
from megatron_rl.trainer.critic import CriticTrainer
from megatron_rl.trainer.engine_ranks import WeightsElsewhere, actor_topology, serve
from megatron_rl.trainer.evaluation import Evaluator, RemoteEvaluator
from megatron_rl.trainer.learning_check import describe_slow_packs
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
from megatron_rl.types import Prompt


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
            _generate(config, link, shape, directory, interruption or Interruption())
            return
        _train(
            config, objective, shape, directory, link,
            rank=rank, start=start, interruption=interruption or Interruption(),
        )  # fmt: skip


def _generate(
    config: Config,
    link: Link,
    shape: ModelShape,
    directory: RunDirectory,
    interruption: Interruption,
) -> None:
    """Generate on the ranks of this side of the link until the trainers end."""
    topology = groups.initialise(seed=config.seed, timeout=collective_timeout(config))
    log = Console(is_main_rank=True, log_file=directory.log_file).log  # of every rank
    progress, _ = watch(config, directory, rank=link.rank, link=link, log=log)
    link.watch(progress)
    console = Console(is_main_rank=False, log_file=directory.log_file, on_advance=progress.count)
    folder = directory.prompts.with_name("prompts_of_engines")
    with contextlib.ExitStack() as stack:
        _, config = link.next_order()
        opened = open_conversations(config, topology, echo=log, journals=directory.answers)
        config, conversations = stack.enter_context(opened)
        link.post(config)
        _, reward = link.next_order()
        config = config.model_copy(update={"reward": reward})
        prompts = stack.enter_context(share_prompt_sets(config, shape, folder, echo=console.echo))
        pool = stack.enter_context(build_verifiers(config, topology, directory))
        _start_verifiers(pool, prompts.training[0], config)
        hooks = EngineHooks(on_step=progress.count, should_stop=link.is_over)
        engine = build_engine(config, topology, hooks=hooks, link=link)
        clock = PhaseClock(topology.device, group=dist.group.WORLD, progress=progress)
        run = RunContext(
            config, cast(MegatronActor, None), cast(PolicyObjective, None),
            GroupBuffer(build_schedule(config)), console, clock,
        )  # fmt: skip
        grader = Grader(pool, topology, progress.count)
        recorder = cast(Recorder, None)  # the trainers record
        serve(
            link,
            PartialRolloutSource(run, engine, grader, prompts, BehaviorLogprobs())
            if config.lag.partial_rollouts is not None
            else EngineSource(run, engine, grader, prompts, BehaviorLogprobs(), conversations),
            Evaluator(config, engine, grader, prompts.evaluation, recorder, console, conversations),
            weights=WeightsElsewhere(shape, actor_topology(config, link, topology), config.lora),
            interruption=interruption,
        )


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
            link.order("reward", config.reward)
        start.ended("checks")
        with build_verifiers(config, topology, directory) as pool:
            trainer = _build_trainer(
                config,
                objective=objective,
                prompts=prompts,
                directory=directory,
                console=console,
                topology=topology,
                grader=Grader(pool, topology, progress.count),
                conversations=conversations,
                interruption=interruption,
                start=start,
                progress=progress,
                link=link,
            )
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


def _ranks_per_node(topology: Topology) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size))


def collective_timeout(config: Config) -> timedelta:
    """Timeout of collectives: longer than the watchdog's, which can name the missing rank.

    Work whose duration differs between ranks, like generation, ends in a barrier of its own
    (`distributed/agreement.py`).
    """
    longest = longest_silence(config)
    return timedelta(minutes=30) if math.isinf(longest) else timedelta(seconds=longest + GRACE)


def _build_trainer(
    config: Config,
    *,
    objective: PolicyObjective,
    prompts: PromptSets,
    directory: RunDirectory,
    console: Console,
    topology: Topology,
    grader: Grader,
    conversations: ConversationSettings | None,
    interruption: Interruption,
    start: StartUp,
    progress: Heartbeat,
    link: Link | None = None,
) -> Trainer:
    writer = directory if topology.rank == 0 else None
    settings = build_actor_settings(config, topology)
    with console.progress("starting Megatron"):
        actor = MegatronActor(
            config.model.path,
            topology=topology,
            settings=settings,
            on_micro_batch=progress.count,
        )
    log = MetricLog(directory.path, config, echo=console.echo) if writer else None
    clock = PhaseClock(topology.device, group=dist.group.WORLD, progress=progress)
    recorder = Recorder(config, writer, log, console, clock)
    buffer = GroupBuffer(build_schedule(config))
    faults = SkippedUpdates(writer, console)
    checkpoints = CheckpointKeeper(
        config, directory, console, topology.rank, recorder.wait, buffer, faults, interruption
    )
    # First, while the actor has the weights that it read, which are often the reference's.
    compares = needs_reference(objective.needs)
    references = References(actor, config.references) if compares else None
    critic = checkpoints.critic = build_critic(config, actor)
    checkpoints.restore(actor)  # uses the memory that vLLM takes afterwards
    start.ended("megatron")
    run = RunContext(config, actor, objective, buffer, console, clock)
    engine, source = _build_source(
        run, grader, prompts, conversations,
        start=start, progress=progress, interruption=interruption, link=link,
    )  # fmt: skip
    return Trainer(
        run=run,
        engine=engine,
        source=source,
        selector=BatchSelector(run, references),
        evaluator=(Evaluator if link is None else RemoteEvaluator)(
            config, cast(Any, engine), grader, prompts.evaluation, recorder, console, conversations
        ),
        checkpoints=checkpoints,
        recorder=recorder,
        faults=faults,
        critic=None if critic is None else CriticTrainer(run, critic, checkpoints, faults),
        start=start,
    )


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


def _build_source(
    run: RunContext,
    grader: Grader,
    prompts: PromptSets,
    conversations: ConversationSettings | None,
    *,
    start: StartUp,
    progress: Heartbeat,
    interruption: Interruption,
    link: Link | None,
) -> tuple[RolloutEngine, RolloutSource]:
    """Build the source of rollouts and its engine: files, partial rollouts, or whole responses."""
    config = run.config
    behavior = build_behavior_logprobs(config, run.actor)
    if link is not None:
        first, settings = link.trainers, config.rollout
        layout = EngineLayout(settings.tensor, link.engines, settings.expert_parallel, first)
        receiver = EnginesElsewhere(layout, compute_dtype(config, run.actor.topology))
        resharder = build_resharder(
            receiver, config.resharding, ranks_per_node=_ranks_per_node(run.actor.topology),
            link=link, adapters=build_adapter_settings(config) is not None,
        )  # fmt: skip
        remote = RemoteEngine(link, receiver, resharder)
        start.ended("vllm")
        engine = cast(RolloutEngine, remote)
        if config.lag.partial_rollouts is not None:
            return engine, RemotePartialSource(run, engine, grader, prompts, behavior, link=link)
        return engine, RemoteSource(run, link, remote, prompts.training, behavior)
    if config.offline.rollouts is not None:
        rollouts = OfflineRollouts.load(config, run.console.echo)
        start.ended("rollouts")
        run.actor.sleep()
        return cast(RolloutEngine, NoEngine()), OfflineSource(run, rollouts, behavior)
    if not config.has_engine:
        run.actor.sleep()
        return cast(RolloutEngine, NoEngine()), DemonstrationSource(run, prompts)
    _start_verifiers(grader.pool, prompts.asked[0], config)
    start.ended("verifiers")
    run.actor.sleep()  # vLLM measures the free memory when it starts
    engine = _start_engine(run, progress, interruption)
    start.ended("vllm")
    if config.sft is not None:
        return engine, DemonstrationSource(run, prompts)
    if config.lag.partial_rollouts is not None:
        return engine, PartialRolloutSource(run, engine, grader, prompts, behavior)
    return engine, EngineSource(run, engine, grader, prompts, behavior, conversations)


def _start_engine(
    run: RunContext, progress: Heartbeat, interruption: Interruption
) -> RolloutEngine:
    console = run.console
    with console.progress("starting vLLM"):
        hooks = EngineHooks(
            on_step=progress.count,
            on_memory_released=run.clock.memory.count_without,
            should_stop=lambda: interruption.received is not None,
        )
        engine = build_engine(run.config, run.actor.topology, hooks=hooks)
    console.echo(engine.describe_stop())
    return engine


def _start_verifiers(pool: VerifierPool, prompt: Prompt, config: Config) -> None:
    """Wait until all workers have loaded the verifier, and try it, before vLLM starts."""

    def start_and_try() -> None:
        try:
            pool.start()
            grade_results = pool.try_on(
                Item("", prompt.ground_truth, prompt.data_source, prompt.row)
            )
        except VerifierError as error:
            raise ConfigError(f"reward.verifier={pool.name}: {error}") from None
        if problems := vote_problems(
            grade_results, config.reward, keep_best=config.trainer.keep_best
        ):
            raise ConfigError("\n".join(problems))

    run_on_rank_0(start_and_try, doing="trying the verifier")
    with sync_errors_across_ranks(doing="starting the verifiers"):
        pool.start()


def build_verifiers(config: Config, topology: Topology, directory: RunDirectory) -> VerifierPool:
    """Build the verifier pool of this rank; its output goes to the log of the run."""
    log = Console(is_main_rank=True, log_file=directory.log_file).log
    return VerifierPool(config.reward, config.workers, cores=cores_of_rank(), echo=log)


def build_engine(
    config: Config,
    topology: Topology,
    *,
    hooks: EngineHooks | None = None,
    link: Link | None = None,
) -> VllmEngine:
    """Start this rank's rollout engine; its weights arrive with the first weight sync."""
    return VllmEngine(
        config.model.path,
        config.rollout,
        tokenizer=load_tokenizer(config.model.path, **config.tokenizer_options),
        topology=topology,
        dtype=compute_dtype(config, topology),
        max_model_len=config.max_model_tokens,
        seed=config.seed,
        partial_rollouts=config.lag.partial_rollouts is not None,
        routes=config.model.routing_replay == "engine",
        adapters=build_adapter_settings(config),
        resharding=config.resharding,
        ranks_per_node=_ranks_per_node(topology),
        hooks=hooks,
        link=link,
    )


def _describe(config: Config, shape: ModelShape, topology: Topology) -> list[str | None]:
    """Describe the run, and what of it has no effect."""
    unread = describe_unread(config.model.path, shape) if topology.rank == 0 else []
    return [_describe_layout(config, topology.world_size), describe_slow_packs(config), *unread]


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
