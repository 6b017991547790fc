"""From a config to a trainer: every part is made here, once, and handed its settings."""

import math
import os
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.reference import ReferencePolicy
from megatron_rl.actor.weights import check_weights
from megatron_rl.config import Config, ConfigError
from megatron_rl.console import Console
from megatron_rl.distributed.agreement import raised_together, run_on_rank_0
from megatron_rl.distributed.topology import Topology
from megatron_rl.interruption import Interruption
from megatron_rl.lag.buffer import GroupBuffer
from megatron_rl.lag.build import build_schedule
from megatron_rl.models.shape import read_model_shape
from megatron_rl.objectives import PolicyObjective, build_objective
from megatron_rl.planning.actor_settings import (
    build_actor_settings,
    compute_dtype,
    make_groups,
)
from megatron_rl.preflight.settings import check_settings
from megatron_rl.resharding.push import ReshardSettings
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import Item, VerifierError
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.trainer.collector import Collector
from megatron_rl.trainer.evaluation import Evaluator
from megatron_rl.trainer.faults import Faults
from megatron_rl.trainer.in_flight import InFlightGeneration
from megatron_rl.trainer.judge import Judge
from megatron_rl.trainer.learning_check import describe_slow_packs
from megatron_rl.trainer.loop import Trainer
from megatron_rl.trainer.metrics import MetricLog, PhaseClock
from megatron_rl.trainer.offline import NoEngine, OfflineRollouts
from megatron_rl.trainer.prompt_sets import PromptSets, share_prompt_sets
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.trainer.reuse import ReuseGuard
from megatron_rl.trainer.saving import CheckpointKeeper
from megatron_rl.trainer.start_up import StartUp
from megatron_rl.trainer.watched import GRACE, longest_silence, watch
from megatron_rl.types import Prompt
from megatron_rl.watching.board import Progress


def run_training(
    config: Config, *, rank: int, world_size: int, interruption: Interruption | None = None
) -> None:
    """Train as this rank of `world_size`; raises ValueError for bad input before any long work.

    Raises RunInterrupted between two steps if `interruption` of any rank was asked for.
    """
    start = StartUp()
    shape = check_settings(config, world_size=world_size)
    check_weights(config.model.path, shape)
    objective = build_objective(config.objective.name, **config.objective.overrides)
    if "reference_logprobs" in objective.needs:
        check_weights(config.reference_path, read_model_shape(config.reference_path))
    directory = RunDirectory.of(config)

    if rank == 0:
        directory.lock()
    # The ranks meet here, so none still checks the directory when rank 0 writes to it.
    topology = make_groups(config, seed=config.seed, timeout=collective_timeout(config))
    console = Console(speaks=rank == 0, log_file=directory.log_file)
    progress = watch(config, directory, console, rank=rank)
    console.say(_describe(config, world_size))
    if (warning := describe_slow_packs(config)) is not None:
        console.say(warning)
    prompts = share_prompt_sets(config, shape, say=console.say)
    start.ended("checks")
    with build_verifiers(config, topology, directory) as pool:
        trainer = _build_trainer(
            config,
            objective=objective,
            prompts=prompts,
            directory=directory,
            console=console,
            topology=topology,
            judge=Judge(pool, topology, progress.count),
            interruption=interruption or Interruption(),
            start=start,
            progress=progress,
        )
        trainer.train()
        progress.begin("export")
        trainer.recorder.draw()
        trainer.actor.export_hf(directory.model)
        trainer.recorder.finish()


def _ranks_per_node(topology: Topology) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size))


def cores_of_rank(topology: Topology) -> int:
    """What a rank may use of its node's cores."""
    return max(1, len(os.sched_getaffinity(0)) // _ranks_per_node(topology))


def collective_timeout(config: Config) -> timedelta:
    """How long a collective waits for a rank: the watcher, which can say who is missing, is first.

    Work that takes ranks very different times, as generating, is waited for in another way
    (`distributed/unequal_work.py`).
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
    judge: Judge,
    interruption: Interruption,
    start: StartUp,
    progress: Progress,
) -> Trainer:
    writer = directory if topology.rank == 0 else None
    settings = build_actor_settings(config, topology)
    with console.progress("starting Megatron"):
        actor = MegatronActor(config.model.path, topology=topology, settings=settings)
    log = MetricLog(directory.path, config.logging, config=config.model_dump()) if writer else None
    actor.packs.on_prepare = progress.count
    clock = PhaseClock(topology.device, group=dist.group.WORLD, progress=progress)
    recorder = Recorder(config, writer, log, console, clock)
    buffer, reuse = GroupBuffer(build_schedule(config)), ReuseGuard.of(config)
    faults = Faults(writer, console, config.trainer.skipped_updates)
    checkpoints = CheckpointKeeper(
        config, directory, console, topology.rank, recorder.wait, interruption, buffer, reuse,
        faults,
    )  # fmt: skip
    done = checkpoints.restore(actor)  # takes the memory that vLLM will have
    kl = "reference_logprobs" in objective.needs
    reference = ReferencePolicy(actor, config.reference_path) if kl else None
    start.ended("megatron")
    offline = OfflineRollouts.of(config, actor, console.say)
    if offline is None:
        _start_verifiers(judge.pool, prompts.training[0])
    start.ended("verifiers")
    actor.sleep()  # so that vLLM, which looks at the free memory, sees what it will have
    engine = _start_engine(config, topology, console, clock, progress, interruption)
    start.ended("vllm")
    collector = Collector(
        config=config, actor=actor, reference=reference, engine=engine, objective=objective,
        judge=judge, prompts=prompts.training, order=prompts.order, buffer=buffer,
        in_flight=_build_in_flight(config, engine, actor, judge, prompts, buffer),
        console=console, clock=clock, offline=offline,
    )  # fmt: skip
    return Trainer(
        config=config,
        actor=actor,
        engine=engine,
        objective=objective,
        collector=collector,
        evaluator=Evaluator(config, engine, judge, prompts.evaluation, recorder, console),
        checkpoints=checkpoints,
        done=done,
        recorder=recorder,
        console=console,
        faults=faults,
        reuse=reuse,
        clock=clock,
        start=start,
    )


def _start_engine(
    config: Config,
    topology: Topology,
    console: Console,
    clock: PhaseClock,
    progress: Progress,
    interruption: Interruption,
) -> RolloutEngine:
    if config.offline.rollouts is not None:
        return cast(RolloutEngine, NoEngine())
    with console.progress("starting vLLM"):
        engine = build_engine(config, topology)
    engine.on_step = progress.count
    engine.on_given_back = clock.memory.count_without
    engine.should_stop = lambda: interruption.received is not None
    console.say(engine.describe_stop())
    return engine


def _build_in_flight(
    config: Config,
    engine: RolloutEngine,
    actor: MegatronActor,
    judge: Judge,
    prompts: PromptSets,
    buffer: GroupBuffer,
) -> InFlightGeneration | None:
    """What generates where weights change under generations; None where they do not."""
    if config.lag.in_flight is None:
        return None
    return InFlightGeneration(config, engine, actor, judge, prompts.training, prompts.order, buffer)


def _start_verifiers(pool: VerifierPool, prompt: Prompt) -> None:
    """Wait until all have loaded the verifier, and try it: before vLLM starts, and generates."""

    def start_and_try() -> None:
        try:
            pool.start()
            pool.try_on(Item("", prompt.ground_truth, prompt.data_source, prompt.row))
        except VerifierError as error:
            raise ConfigError(f"reward.verifier={pool.verifier}: {error}") from None

    run_on_rank_0(start_and_try, doing="trying the verifier")
    with raised_together(doing="starting the verifiers"):
        pool.start()


def build_verifiers(config: Config, topology: Topology, directory: RunDirectory) -> VerifierPool:
    """This rank's verifiers; what they print goes to the log of the run."""
    return VerifierPool(
        workers=config.reward.workers or cores_of_rank(topology),
        time_limit=config.reward.time_limit_seconds,
        verifier=config.reward.verifier,
        batch_size=config.reward.batch_size,
        on_error=config.reward.on_error,
        environment=config.reward.environment,
        say=Console(speaks=True, log_file=directory.log_file).log,
    )


def build_engine(config: Config, topology: Topology) -> VllmEngine:
    """The rollout engine of this rank; its weights arrive with the first push."""
    on_cuda = topology.device.type == "cuda"
    return VllmEngine(
        config.model.path,
        tensor=config.rollout.tensor,
        expert_parallel=config.rollout.expert_parallel,
        topology=topology,
        dtype=compute_dtype(config, topology),
        max_model_len=config.max_model_tokens,
        seed=config.seed,
        kv_cache_bytes=None if on_cuda else config.rollout.kv_cache_mib * 2**20,
        memory_fraction=config.rollout.memory_fraction,
        max_sequences=config.rollout.max_sequences,
        time_limit=config.rollout.time_limit_seconds,
        stall_limit=config.rollout.stall_seconds,
        further_arguments=config.rollout.engine,
        stop_token_ids=config.rollout.stop_token_ids,
        stop=config.rollout.stop,
        mismatch=config.rollout.mismatch,
        in_flight=config.lag.in_flight is not None,
        resharding=ReshardSettings(
            bucket_bytes=config.resharding.bucket_mib * 2**20,
            full_check_every=config.resharding.full_check_every,
            time_limit=config.resharding.time_limit_seconds,
            ranks_per_node=_ranks_per_node(topology),
        ),
    )


def _describe(config: Config, world_size: int) -> str:
    parallel = config.parallel
    replicas = world_size // parallel.model_size
    rollout, trainer = config.rollout, config.trainer
    extra = f", expert {parallel.expert}" if parallel.expert > 1 else ""
    if parallel.virtual_stages > 1:
        extra += f", {parallel.virtual_stages} virtual stages"
    return (
        f"{config.run.name}: {config.objective.name}, {trainer.epochs} epochs x "
        f"{trainer.minibatches} minibatches of {rollout.prompts} prompts x "
        f"{rollout.responses_per_prompt} responses\n"
        f"{world_size} process{'es' if world_size > 1 else ''}: "
        f"Megatron tensor {parallel.tensor}, pipeline {parallel.pipeline}, "
        f"context {parallel.context}, data {replicas}{extra}; "
        f"vLLM {world_size // rollout.tensor} x tensor {rollout.tensor}"
    )
