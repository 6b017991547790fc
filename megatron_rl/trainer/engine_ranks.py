"""The program of ranks that only generate: it executes the orders of the ranks that train.

    config            the config with everything that the trainers resolved; the first order
    weights           take part in a weight sync
    responses         generate, for the comparison of the engine with the actor
    rollouts          generate and grade the rollouts of one step
    evaluate          generate and grade the rollouts of an evaluation set
    interrupted, end  exit

Apart from the weights, engines have no state between two orders: a resumed run needs none of it.
"""

from typing import Any, cast

import torch.distributed as dist

from megatron_rl.actor import groups
from megatron_rl.actor.actor import MegatronActor
from megatron_rl.config import Config
from megatron_rl.distributed.link import Link
from megatron_rl.distributed.topology import Topology
from megatron_rl.engine.engine import EngineHooks
from megatron_rl.models.shape import ModelShape
from megatron_rl.objectives import PolicyObjective
from megatron_rl.resharding.push import LocalWeights
from megatron_rl.rollouts.behavior import BehaviorLogprobs
from megatron_rl.rollouts.buffer import GroupBuffer
from megatron_rl.rollouts.engine_source import EngineSource
from megatron_rl.rollouts.grading import Grader
from megatron_rl.rollouts.prompt_sets import share_prompt_sets
from megatron_rl.rollouts.remote_source import flatten
from megatron_rl.rollouts.schedule import build_schedule
from megatron_rl.rollouts.source import RunContext
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.interruption import RunInterrupted
from megatron_rl.telemetry.console import Console
from megatron_rl.telemetry.metrics import PhaseClock
from megatron_rl.trainer import build
from megatron_rl.trainer.evaluation import Evaluator
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.trainer.watchdog import watch


def run_engine_rank(
    config: Config, link: Link, *, shape: ModelShape, directory: RunDirectory
) -> None:
    """Generate as this rank until the trainers end; raises RunInterrupted if they are interrupted.

    Collective over the ranks that generate.
    """
    topology = groups.initialise(seed=config.seed, timeout=build.collective_timeout(config))
    progress, _ = watch(config, directory, rank=topology.rank, first=link.trainers)
    link.on_wait, progress.also = progress.count, link.advance
    console = Console(is_main_rank=False, log_file=directory.log_file, on_advance=progress.count)
    _, config = link.next_order()
    folder = directory.prompts.with_name("prompts_of_engines")
    with (
        share_prompt_sets(config, shape, folder, echo=console.echo) as prompts,
        build.build_verifiers(config, topology, directory) as pool,
    ):
        build.start_verifiers(pool, prompts.training[0], config)
        hooks = EngineHooks(on_step=progress.count)
        engine = build.build_engine(config, topology, hooks=hooks, link=link)
        clock = PhaseClock(topology.device, group=dist.group.WORLD, progress=progress)
        run = RunContext(
            config, cast(MegatronActor, None), cast(PolicyObjective, None),
            GroupBuffer(build_schedule(config)), console, clock,
        )  # fmt: skip
        grader = Grader(pool, topology, progress.count)
        source = EngineSource(run, engine, grader, prompts, BehaviorLogprobs())
        evaluator = Evaluator(
            config, engine, grader, prompts.evaluation, cast(Recorder, None), console
        )
        weights = LocalWeights(shape, actor_topology(config, link, topology), {})
        while (order := link.next_order())[0] != "end":
            _execute(order, link, source, evaluator, weights)


def actor_topology(config: Config, link: Link, topology: Topology) -> Topology:
    """Return the layout of the trainers with the number of this rank, which is none of them."""
    parallel = config.parallel
    return Topology(
        world_size=link.trainers,
        rank=link.rank,
        device=topology.device,
        tp_size=parallel.tensor,
        cp_size=parallel.context,
        pp_size=parallel.pipeline,
        dp_size=link.trainers // parallel.model_size,
        ep_size=parallel.expert,
        expert_tp_size=parallel.expert_tensor_size,
        virtual_stages=parallel.virtual_stages,
        stage_layers=None if parallel.stage_layers is None else tuple(parallel.stage_layers),
    )


def _execute(
    order: tuple[Any, ...],
    link: Link,
    source: EngineSource,
    evaluator: Evaluator,
    weights: LocalWeights,
) -> None:
    kind, *arguments = order
    engine, clock = source.engine, source.run.clock
    match kind:
        case "weights":
            link.flush()
            with clock.phase("sync"):
                engine.sync_weights(weights, version=arguments[0])
        case "responses":
            prompts, samples, sampling = arguments
            link.post(engine.generate(prompts, samples=samples, sampling=sampling))
        case "rollouts":
            step, parts, spare = arguments
            clock.reset()
            filled = source.fill(parts, spare, step)
            seconds = clock.seconds["rollout"]
            link.post(flatten(filled, source.take_costs(), seconds=seconds))
        case "evaluate":
            with clock.phase("eval"):
                rollouts = evaluator.generate(arguments[0])
                evaluator.grader.check(prompts=2)
            link.post(rollouts)
        case "interrupted":
            raise RunInterrupted
        case _:
            raise AssertionError(f"order {kind}")
