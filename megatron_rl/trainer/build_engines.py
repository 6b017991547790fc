"""Builds the engines' side of a run: engines, verifiers, and the ranks that only generate."""

import contextlib
import math
import os
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from megatron_rl.actor import groups
from megatron_rl.actor.actor import MegatronActor
from megatron_rl.config import Config, ConfigError
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed.agreement import (
    cores_of_rank,
    run_on_rank_0,
    sync_errors_across_ranks,
)
from megatron_rl.distributed.link import Link
from megatron_rl.distributed.topology import Topology
from megatron_rl.engine.engine import EngineHooks
from megatron_rl.engine.vllm_engine import EngineUse, SyncSettings, VllmEngine
from megatron_rl.models.shape import ModelShape
from megatron_rl.objectives import PolicyObjective
from megatron_rl.preflight.trials import vote_problems
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import Item, VerifierError
from megatron_rl.rollouts.behavior import BehaviorLogprobs
from megatron_rl.rollouts.engine_source import EngineSource
from megatron_rl.rollouts.grading import Grader
from megatron_rl.rollouts.partial_rollouts import PartialRolloutSource
from megatron_rl.rollouts.prompt_sets import share_prompt_sets
from megatron_rl.rollouts.schedule import GroupBuffer, build_schedule
from megatron_rl.rollouts.source import RunContext
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.interruption import Interruption
from megatron_rl.telemetry.console import Console
from megatron_rl.telemetry.metrics import PhaseClock
from megatron_rl.trainer.actor_settings import build_adapter_settings, compute_dtype
from megatron_rl.trainer.engine_ranks import WeightsElsewhere, actor_topology, serve
from megatron_rl.trainer.evaluation import EngineAnswers
from megatron_rl.trainer.startup import GRACE, longest_silence, open_conversations, watch
from megatron_rl.types import Prompt


def run_engines(
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
        _, config = link.orders.next()
        opened = open_conversations(config, topology, echo=log, journals=directory.answers)
        config, conversations = stack.enter_context(opened)
        link.values.send(config)
        _, reward = link.orders.next()
        config = config.model_copy(update={"reward": reward})
        prompts = stack.enter_context(share_prompt_sets(config, shape, folder, echo=console.echo))
        pool = stack.enter_context(build_verifiers(config, topology, directory))
        start_verifiers(pool, prompts.training[0], config)
        hooks = EngineHooks(on_step=progress.count, should_stop=link.is_over)
        engine = build_engine(config, topology, hooks=hooks, link=link)
        clock = PhaseClock(topology.device, group=dist.group.WORLD, progress=progress)
        run = RunContext(
            config, cast(MegatronActor, None), cast(PolicyObjective, None),
            GroupBuffer(build_schedule(config)), console, clock,
        )  # fmt: skip
        grader = Grader(pool, topology, progress.count)
        serve(
            link,
            engine,
            PartialRolloutSource(run, grader, prompts, BehaviorLogprobs(), engine=engine)
            if config.lag.partial_rollouts is not None
            else EngineSource(run, engine, grader, prompts, BehaviorLogprobs(), conversations),
            EngineAnswers(config, engine, grader, prompts.evaluation, console, conversations),
            weights=WeightsElsewhere(shape, actor_topology(config, link, topology), config.lora),
            interruption=interruption,
        )


def ranks_per_node(topology: Topology) -> int:
    """Return the number of ranks on each node, as torchrun or srun sets it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size))


def collective_timeout(config: Config) -> timedelta:
    """Timeout of collectives: longer than the watchdog's, which can name the missing rank.

    Work whose duration differs between ranks, like generation, ends in a barrier of its own
    (`distributed/agreement.py`).
    """
    longest = longest_silence(config)
    return timedelta(minutes=30) if math.isinf(longest) else timedelta(seconds=longest + GRACE)


def start_verifiers(pool: VerifierPool, prompt: Prompt, config: Config) -> None:
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
        use=EngineUse(
            partial_rollouts=config.lag.partial_rollouts is not None,
            routes=config.model.routing_replay == "engine",
            adapters=build_adapter_settings(config),
        ),
        sync=SyncSettings(config.resharding, ranks_per_node(topology), link),
        hooks=hooks,
    )
