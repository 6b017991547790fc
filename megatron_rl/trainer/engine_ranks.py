"""The program of ranks that only generate: it executes the orders of the ranks that train.

    start             start the environments of a config; the result shows their tools in prompts
    reward            the verifier that the trainers have chosen, after which vLLM starts
    weights           take part in a weight sync
    responses         generate, for the comparison of the engine with the actor
    rollouts          generate and grade the rollouts of one step
    resume            take the unfinished responses of a checkpoint, which come as a value
    window            generate one window of unfinished responses, and grade those that it completes
    drop caches       recompute the KV caches of unfinished responses
    evaluate          generate and grade the rollouts of an evaluation set
    interrupted, end  exit

Between two orders engines have their weights and, of partial rollouts, what the trainers have too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.actor.lora import push_sources
from megatron_rl.config import Config
from megatron_rl.config.sections import LoraSection
from megatron_rl.distributed.link import Link
from megatron_rl.distributed.topology import Topology
from megatron_rl.engine.engine import GenerationStopped, WeightSink
from megatron_rl.engine.remote import share_rollouts
from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.adapted import LocalWeight
from megatron_rl.resharding.push import LocalWeights, WeightSource
from megatron_rl.rollouts.engine_source import EngineSource
from megatron_rl.rollouts.partial_rollouts import PartialRolloutSource
from megatron_rl.rollouts.remote_source import flatten, generate_window
from megatron_rl.runtime.interruption import Interruption, RunInterrupted
from megatron_rl.trainer.evaluation import EngineAnswers


@dataclass(frozen=True)
class WeightsElsewhere:
    """The trainers' weights as an engine rank sees them: it has none of them."""

    shape: ModelShape
    topology: Topology
    lora: LoraSection | None

    def named_parameters_local(self) -> Mapping[str, LocalWeight]:
        """Return no parameters."""
        return {}

    def push_sources(self) -> tuple[LocalWeights, LocalWeights]:
        """Return the model's and the adapters' weights, none of which are on these ranks."""
        return push_sources((), self.lora, shape=self.shape, topology=self.topology)


def serve(
    link: Link,
    sink: WeightSink,
    source: EngineSource | PartialRolloutSource,
    answers: EngineAnswers,
    *,
    weights: WeightSource,
    interruption: Interruption,
) -> None:
    """Execute orders until the trainers end; raises RunInterrupted if they are interrupted.

    sink: receives weights. weights: the trainers' layout. interruption: of this rank, which leaves
    the end to the trainers from the first rollouts on. Collective over the ranks that generate.
    """
    while (order := link.orders.next())[0] != "end":
        if order[0] in ("rollouts", "window"):
            interruption.defer()  # as the trainers have done before
        elif order[0] == "interrupted":
            interruption.ignore_further_signals()
            raise RunInterrupted
        try:
            _execute(order, link, sink, source, answers, weights)
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
    sink: WeightSink,
    source: EngineSource | PartialRolloutSource,
    answers: EngineAnswers,
    weights: WeightSource,
) -> None:
    kind, *arguments = order
    engine, clock = source.engine, source.run.clock
    match kind:
        case "weights":
            link.values.flush()
            with clock.phase("sync"):
                sink.sync_weights(weights, version=arguments[0])
        case "responses":
            prompts, samples, sampling = arguments
            link.values.send(engine.generate(prompts, samples=samples, sampling=sampling))
        case "resume":
            assert isinstance(source, PartialRolloutSource)
            source.insert(arguments[0], share_rollouts(link.values.take()))
        case "window":
            assert isinstance(source, PartialRolloutSource)
            clock.reset()
            with clock.phase("rollout"):
                filled = [generate_window(source, *arguments)]
            link.values.send(flatten(filled, {}, clock))
        case "drop caches":
            engine.drop_caches()
        case "rollouts":
            assert isinstance(source, EngineSource)
            step, parts, spare = arguments
            clock.reset()
            filled = source.fill(parts, spare, step)
            link.values.send(flatten(filled, source.pop_costs(), clock))
        case "evaluate":
            with clock.phase("eval"):
                rollouts = answers.answer(*arguments)
                answers.check()
            link.values.send((rollouts, clock.pop_intervals()))
        case _:
            raise AssertionError(f"order {kind}")
