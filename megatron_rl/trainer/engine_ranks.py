"""The program of ranks that only generate: it executes the orders of the ranks that train.

    config            the config with everything that the trainers resolved; the first order
    weights           take part in a weight sync
    responses         generate, for the comparison of the engine with the actor
    rollouts          generate and grade the rollouts of one step
    evaluate          generate and grade the rollouts of an evaluation set
    interrupted, end  exit

Engines have no state but the weights between two orders: a resumed run needs none of it.
"""

from typing import Any

from megatron_rl.config import Config
from megatron_rl.distributed.link import Link
from megatron_rl.distributed.topology import Topology
from megatron_rl.engine.engine import GenerationStopped
from megatron_rl.resharding.push import WeightSource
from megatron_rl.rollouts.engine_source import EngineSource
from megatron_rl.rollouts.remote_source import flatten
from megatron_rl.runtime.interruption import Interruption, RunInterrupted
from megatron_rl.trainer.evaluation import Evaluator


def serve(
    link: Link,
    source: EngineSource,
    evaluator: Evaluator,
    *,
    weights: WeightSource,
    interruption: Interruption,
) -> None:
    """Execute orders until the trainers end; raises RunInterrupted if they are interrupted.

    weights: the trainers' layout. interruption: of this rank, which leaves the end to the trainers
    from the first rollouts on. Collective over the ranks that generate.
    """
    while (order := link.next_order())[0] != "end":
        if order[0] == "rollouts":
            interruption.defer()  # as the trainers have done before
        elif order[0] == "interrupted":
            interruption.ignore_further_signals()
            raise RunInterrupted
        try:
            _execute(order, link, source, evaluator, weights)
        except GenerationStopped:  # the order that ends this rank, or an error, comes next
            continue


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
    weights: WeightSource,
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
            link.post(flatten(filled, source.pop_costs(), seconds=seconds))
        case "evaluate":
            with clock.phase("eval"):
                rollouts = evaluator.generate(arguments[0])
                evaluator.grader.check(prompts=2)
            link.post(rollouts)
        case _:
            raise AssertionError(f"order {kind}")
