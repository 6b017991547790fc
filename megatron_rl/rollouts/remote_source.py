"""Rollouts from engines on ranks of their own, which generate while a step is trained.

Step s lets the engines generate what a run on shared ranks generates before the training of step s,
with the same weights, seeds and slots. It takes the result after its updates, before the next
weight sync: from then on buffer and metrics are those of the run on shared ranks.

    engines   | generate of step s | sync s | generate of step s + 1     | sync s + 1
    trainers  | train step s       | sync s | score s | train step s + 1 | sync s + 1
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from megatron_rl.actor.reference import KeptWeights
from megatron_rl.distributed.link import Link
from megatron_rl.engine.engine import RolloutEngine
from megatron_rl.engine.remote import RemoteEngine, share_rollouts
from megatron_rl.rollouts.batch_metrics import generation_metrics
from megatron_rl.rollouts.behavior import BehaviorLogprobs, ModelLogprobs
from megatron_rl.rollouts.dynamic_sampling import Filled
from megatron_rl.rollouts.engine_check import check_engine_of_run
from megatron_rl.rollouts.engine_source import pack_filled
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.source import RolloutSource, RunContext
from megatron_rl.types import Prompt, PromptSlot, Rollout


class Generated(NamedTuple):
    """What engines send for one step: rollouts of all parts, and the slots and seconds of each."""

    rollouts: list[Rollout]
    parts: list[tuple[Sequence[PromptSlot], tuple[float, ...]]]
    costs: dict[str, float]  # of `EngineSource.pop_costs`
    seconds: float  # of generation


@dataclass
class RemoteSource(RolloutSource):
    """Orders the responses that the buffer is missing; takes them when a step needs them or ends.

    Behavior log-probs of what was generated during a step come from the engine, or from a copy of
    the weights that the step started with.
    """

    run: RunContext
    link: Link
    engine: RemoteEngine
    training: Sequence[Prompt]
    behavior: BehaviorLogprobs
    can_resume_inside = False  # what a step generates by its first weights is not there yet
    _ordered: tuple[int, list[list[PromptSlot]]] = (0, [])  # step, and what is not taken yet
    _updates: int = 0  # before the generation
    _arrived: Sequence[PromptSlot] = ()  # slots of the result taken last
    _costs: Sequence[Any] = ({}, 0.0)  # and seconds, of the result taken last

    def __post_init__(self) -> None:
        self.kept = KeptWeights(self.run.actor)

    def check(self) -> None:
        check_engine_of_run(self.run, cast(RolloutEngine, self.engine), self.training)

    def start(self, step: int) -> None:
        buffer, arrived = self.run.buffer, self._arrived
        missing, spare = (
            buffer.missing(step, arrived=arrived),
            buffer.next_empty_slots(step, arrived=arrived),
        )
        self._ordered, self._updates = (step, missing), self.run.actor.updates
        if missing:
            self.link.order("rollouts", step, missing, spare)

    def generate(self, step: int) -> list[RolloutBatch]:
        if self._ordered[0] != step:  # the first step of this start of the run
            self.start(step)
        missing = self._ordered[1]
        if any(slot.step == step for part in missing for slot in part):
            return self.collect(step)
        if missing and isinstance(self.behavior, ModelLogprobs):
            with self.run.clock.phase("behavior"):
                self.kept.keep()
        return []

    def collect(self, step: int) -> list[RolloutBatch]:
        if not self._ordered[1]:
            self._arrived = ()
            return []
        self._ordered = step, []
        with self.run.clock.phase("rollout"):
            filled, *self._costs = share_generated(self.link.take())
        self._arrived = [slot for one in filled for slot in one.slots]
        return pack_filled(self.run, filled, step, updates=self._updates)

    def score(self, step: int, generated: list[RolloutBatch]) -> list[RolloutBatch]:
        if generated:
            with self.run.clock.phase("behavior"), self.kept.active():
                for batch in generated:
                    self.behavior.freeze(batch)
        return generated

    def metrics(self, fresh: Sequence[RolloutBatch]) -> dict[str, float]:
        costs, seconds = self._costs
        return generation_metrics(fresh, costs, seconds=seconds)


def flatten(filled: Sequence[Filled], costs: dict[str, float], *, seconds: float) -> Generated:
    """Return the message for what engines have generated."""
    rollouts = [rollout for one in filled for rollout in one.rollouts]
    return Generated(rollouts, [(one.slots, one.engine_seconds) for one in filled], costs, seconds)


def share_generated(generated: Generated | None) -> tuple[list[Filled], dict[str, float], float]:
    """Share what the first trainer has received; the others get no tokens. Collective.

    Returns the filled parts, the costs and the seconds of generation.
    """
    box = [generated and generated._replace(rollouts=[])]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box)
    about = box[0]
    assert about is not None
    rollouts = share_rollouts(generated and generated.rollouts)
    size = len(rollouts) // sum(len(slots) for slots, _ in about.parts)
    each = iter(rollouts)
    filled = [
        Filled(slots, list(itertools.islice(each, size * len(slots))), seconds)
        for slots, seconds in about.parts
    ]
    return filled, about.costs, about.seconds
