"""Rollouts from engines on ranks of their own, which generate while a step is trained.

Step s lets the engines generate what a run on shared ranks generates before the training of step s,
with the same weights, seeds and slots. It takes the result after its updates, before the next
weight sync: from then on buffer and metrics are those of the run on shared ranks.

    engines   | generate of step s | sync s | generate of step s + 1     | sync s + 1
    trainers  | train step s       | sync s | score s | train step s + 1 | sync s + 1
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_rl.actor.reference import KeptWeights
from megatron_rl.distributed.link import Link
from megatron_rl.engine.remote import RemoteEngine, share_rollouts
from megatron_rl.rollouts.batch_metrics import generation_metrics
from megatron_rl.rollouts.behavior import (
    BehaviorLogprobs,
    ModelLogprobs,
    WindowLogprobs,
    check_engine_of_run,
)
from megatron_rl.rollouts.engine_source import Filled, pack_filled
from megatron_rl.rollouts.partial_rollouts import PartialRolloutSource, WindowSource
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.source import RolloutSource, RunContext, StepInput
from megatron_rl.telemetry.metrics import PhaseClock, PhaseInterval
from megatron_rl.types import Prompt, PromptGroup, PromptSlot, Rollout


class Generated(NamedTuple):
    """Result of one step: the rollouts of all parts, and the slots and seconds of each."""

    rollouts: list[Rollout]
    parts: list[tuple[Sequence[PromptSlot], tuple[float, ...]]]
    costs: dict[str, float]  # of `EngineSource.pop_costs`
    seconds: float  # of generation
    intervals: list[PhaseInterval]  # of the engines' first rank since the last result


@dataclass
class RemoteSource(RolloutSource):
    """Orders the responses that the buffer is missing; takes them when a step needs them or ends.

    A step needs them if what it trains may depend on them (`Schedule.selects_without`).

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
    _coming: Sequence[PromptSlot] = ()  # all slots that may be filled by what was ordered
    _updates: int = 0  # before the generation
    _arrived: Sequence[PromptSlot] = ()  # slots of the result taken last
    _costs: Sequence[Any] = ({}, 0.0)  # and seconds, of the result taken last

    def __post_init__(self) -> None:
        self.kept = KeptWeights(self.run.actor)

    def check(self) -> None:
        check_engine_of_run(self.run, self.engine, self.training)

    def start(self, step: int) -> None:
        buffer, arrived = self.run.buffer, self._arrived
        missing, spare = (
            buffer.missing(step, arrived=arrived),
            buffer.next_empty_slots(step, arrived=arrived),
        )
        self._ordered, self._updates = (step, missing), self.run.actor.updates
        surplus = spare if self.run.config.dynamic_sampling.rounds else []
        self._coming = [*itertools.chain(*missing), *surplus]
        if missing:
            self.link.orders.send("rollouts", step, missing, spare)

    def generate(self, step: int) -> list[RolloutBatch]:
        if self._ordered[0] != step:  # the first step of this start of the run
            self.start(step)
        missing, longest = self._ordered[1], self.run.config.rollout.max_response_tokens
        if missing and not self.run.buffer.selects_without(step, self._coming, longest=longest):
            return self.collect(step) or []
        if missing and isinstance(self.behavior, ModelLogprobs):
            with self.run.clock.phase("behavior"):
                self.kept.keep()
        return []

    def collect(self, step: int) -> list[RolloutBatch] | None:
        if not self._ordered[1]:
            self._arrived = ()
            return None
        self._ordered = step, []
        filled, *self._costs = take_generated(self.run, self.link)
        self._arrived = [slot for one in filled for slot in one.slots]
        return pack_filled(self.run, filled, step, updates=self._updates)

    def score(self, step: int, generated: list[RolloutBatch]) -> StepInput:
        if not generated:
            return StepInput([])
        with self.run.clock.phase("behavior"), self.kept.active():
            batches = [self.behavior.score(batch) for batch in generated]
        costs, seconds = self._costs
        return StepInput(batches, generation_metrics(batches, costs, seconds=seconds))


@dataclass
class RemotePartialSource(WindowSource):
    """Partial rollouts on ranks of their own: orders a window, and takes it once a step is trained.

    The trainers have all unfinished responses, for checkpoints and behavior log-probs. So have the
    engines, which get those of a checkpoint when a run is resumed.
    """

    link: Link = field(kw_only=True)
    engine: RemoteEngine = field(kw_only=True)
    _ordered: tuple[int, Sequence[PromptSlot]] = (0, ())  # step, and slots that are not taken yet
    _ordered_after: int = 0  # updates
    _arrived: Sequence[PromptSlot] = ()  # slots of the groups that the last window has finished
    _updates: int = 0  # before the window that was taken last
    _seconds: Sequence[float] = (0.0,)  # of that window, and of each engine
    _is_taken: bool = False  # the window is to be scored
    _is_known: bool = False  # the engines have the unfinished responses

    def __post_init__(self) -> None:
        self.kept = KeptWeights(self.run.actor)

    def check(self) -> None:
        check_engine_of_run(self.run, self.engine, self.prompts.training)

    def start(self, step: int) -> None:
        slots = self.due(step, arrived=self._arrived)
        self._ordered, self._ordered_after = (step, slots), self.run.actor.updates
        if not self._is_known:
            self._is_known, unfinished = True, self.run.buffer.unfinished
            self.link.orders.send("resume", list(unfinished))
            self.link.values.send([one for group in unfinished.values() for one in group.rollouts])
        elif (step - 1) % self.run.config.trainer.checkpoint_every == 0:
            self.engine.drop_caches()  # a run that resumes from the checkpoint does not have them
        if slots:
            self.link.orders.send("window", step, slots)

    def generate(self, step: int) -> list[RolloutBatch]:
        if step == self._restored_step:
            return []
        if self._ordered[0] != step:  # the first step of this start of the run
            self.start(step)
        slots, buffer = self._ordered[1], self.run.buffer
        longest = self.run.config.rollout.max_response_tokens
        if slots and not buffer.selects_without(step, self._ending(), longest=longest):
            self._take()
        elif slots and isinstance(self.behavior, WindowLogprobs):
            with self.run.clock.phase("behavior"):
                self.kept.keep()
        return []

    def collect(self, step: int) -> list[RolloutBatch] | None:
        self._arrived = ()
        if not self._ordered[1]:
            return None
        self._take()
        return []  # `score` makes the batches

    def _take(self) -> None:
        """Wait for the window that was ordered last. Collective."""
        self._arrived, before = self._ending(), self._tokens()
        self._ordered, self._updates = (self._ordered[0], ()), self._ordered_after
        (window,), _, seconds = take_generated(self.run, self.link)
        self.insert(window.slots, window.rollouts)
        self.new_tokens = self._tokens() - before
        self._seconds, self._is_taken = (seconds, *window.engine_seconds), True

    def _ending(self) -> list[PromptSlot]:
        """Slots of the window that was ordered last whose groups it finishes."""
        step, slots = self._ordered
        return [slot for slot in slots if self.run.buffer.schedule.generation(slot) <= step]

    def score(self, step: int, generated: list[RolloutBatch]) -> StepInput:
        if not self._is_taken:
            return StepInput([], is_restorable=False)
        self._is_taken = False
        seconds, *of_engines = self._seconds
        with self.kept.active():
            return self.score_window(
                step, updates=self._updates, seconds=seconds, engine_seconds=of_engines
            )

    def grade(self, groups: Sequence[PromptGroup]) -> list[Rollout]:
        """Return the rollouts of finished groups, which the engines have graded."""
        return [rollout for group in groups for rollout in group.rollouts]

    def after_checkpoint(self, step: int) -> None:
        """Do nothing: `start` has dropped the caches before the next window."""


def generate_window(source: PartialRolloutSource, step: int, slots: Sequence[PromptSlot]) -> Filled:
    """Generate one window of these slots, and grade those that it completes. Collective."""
    source.advance(step, slots)
    rollouts = {slot: source.run.buffer.unfinished[slot].rollouts for slot in slots}
    for groups in source.pop_finished(step):
        graded = iter(source.grade(groups))
        for group in groups:
            rollouts[group.slot] = tuple(itertools.islice(graded, len(group.rollouts)))
    flat = [rollout for slot in slots for rollout in rollouts[slot]]
    return Filled(slots, flat, tuple(source.engine.engine_seconds))


def flatten(filled: Sequence[Filled], costs: dict[str, float], clock: PhaseClock) -> Generated:
    """Return the message for what engines have generated by their clock's phase `rollout`."""
    rollouts = [rollout for one in filled for rollout in one.rollouts]
    parts = [(one.slots, one.engine_seconds) for one in filled]
    return Generated(rollouts, parts, costs, clock.seconds["rollout"], clock.pop_intervals())


def take_generated(run: RunContext, link: Link) -> tuple[list[Filled], dict[str, float], float]:
    """Wait for the next result of the engines. Collective over the trainers.

    Returns the filled parts, the costs and the seconds of generation.
    """
    with run.clock.phase("rollout"):
        generated = link.values.take()
        if generated is not None:
            run.clock.of_engines += generated.intervals
        return _share_generated(generated)


def _share_generated(generated: Generated | None) -> tuple[list[Filled], dict[str, float], float]:
    """Share what the first trainer has received; the others get no tokens."""
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
