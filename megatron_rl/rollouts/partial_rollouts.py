"""Partial rollouts: generation continues while the weights change, by one window a step.

A window is `every_tokens` tokens of every response. A rollout batch takes as many windows as the
longest response needs and starts that many steps early, so that it ends when it is scheduled. All
unfinished batches advance together, by one window a step with the weights of that step.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.columns import ARRAYS
from megatron_rl.engine.engine import RolloutEngine, RolloutWindow
from megatron_rl.rollouts.batch_metrics import generation_metrics
from megatron_rl.rollouts.behavior import BehaviorLogprobs, check_engine_of_run
from megatron_rl.rollouts.grading import Grader
from megatron_rl.rollouts.groups import build_groups
from megatron_rl.rollouts.prompt_sets import PromptSets
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.source import RolloutSource, RunContext, StepInput
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import (
    GradeResult,
    PromptGroup,
    PromptSlot,
    Rollout,
)

BY_TRAINER = [column.name for column in ARRAYS if column.by == "trainer"]
UNFINISHED = GradeResult(0.0, "unfinished", None)


@dataclass
class WindowSource(RolloutSource):
    """Unfinished groups of the buffer, which gain one window a step."""

    run: RunContext
    grader: Grader
    prompts: PromptSets
    behavior: BehaviorLogprobs
    new_tokens: int = 0  # added by the last window
    _restored_step: int | None = None  # its window and its groups came from a checkpoint

    # Between two checkpoints the engine may have caches that no checkpoint contains.
    can_resume_inside = False

    def resume(self, step: int) -> None:
        self._restored_step = step

    def score_window(
        self, step: int, *, updates: int, seconds: float, engine_seconds: Sequence[float]
    ) -> StepInput:
        """Compute log-probs of the window of `step`, and pack the groups that it has completed.

        updates: before the window. seconds: of generation; engine_seconds: of each engine.
        """
        clock = self.run.clock
        with clock.phase("behavior"):
            self.behavior.score_window(self.run.buffer.unfinished)
        with clock.phase("reward"):
            finished = self.finish(step, updates=updates)
        with clock.phase("pack"):
            each = tuple(engine_seconds)
            packed = [self.run.pack(groups, engine_seconds=each) for groups in finished]
            batches = [self.behavior.score(batch) for batch in packed]
        metrics = generation_metrics(batches, {}, seconds=seconds, tokens=self.new_tokens)
        # Only checkpoints contain the unfinished groups too.
        return StepInput(batches, metrics, is_restorable=False)

    def due(self, step: int, *, arrived: Collection[PromptSlot] = ()) -> list[PromptSlot]:
        """Slots of the responses that gain a window in a step.

        arrived: slots whose groups are finished and not inserted into the buffer yet.
        """
        windows, buffer = self.run.config.windows, self.run.buffer
        finished = buffer.groups.keys() | set(arrived)
        return [
            slot for slot in buffer.schedule.due(step, ahead=windows - 1) if slot not in finished
        ]

    def insert(self, slots: Sequence[PromptSlot], rollouts: Sequence[Rollout]) -> None:
        """Put the rollouts of slots, group after group, in the place of the rollouts before."""
        size, unfinished = self.run.config.rollout.responses_per_prompt, self.run.buffer.unfinished
        for place, slot in enumerate(slots):
            own = rollouts[place * size : (place + 1) * size]
            unfinished[slot] = self._build_group(slot, own, unfinished.get(slot))

    def _tokens(self) -> int:
        groups = self.run.buffer.unfinished.values()
        return sum(one.response.length for group in groups for one in group.rollouts)

    def _build_group(
        self,
        slot: PromptSlot,
        rollouts: Sequence[Rollout],
        before: PromptGroup | None,
    ) -> PromptGroup:
        group = PromptGroup(
            slot=slot,
            rollouts=tuple(rollouts),
            advantages=np.zeros(len(rollouts), np.float32),
            entropy=float("nan"),
            generated_at_step=0,
            updates=0,
        )
        if before is None:
            return group.with_column(
                "behavior_logprobs", [self.behavior.empty_logprobs] * len(rollouts)
            )
        for name in BY_TRAINER:  # engines on other ranks do not have them
            group = group.with_column(name, [one.response.row(name) for one in before.rollouts])
        return group

    def _parts(
        self, step: int, due: Sequence[PromptSlot]
    ) -> list[tuple[list[PromptSlot], RolloutWindow]]:
        """Windows of a step with their slots: one for slots that start and end together."""
        config, buffer = self.run.config, self.run.buffer
        schedule, settings = buffer.schedule, config.rollout
        window, windows = config.lag.every_tokens, config.windows
        slots = sorted(due, key=lambda slot: (slot.step, schedule.generation(slot), slot.group))
        parts = []
        together = itertools.groupby(slots, lambda slot: (slot.step, schedule.generation(slot)))
        for (of_step, end), members in together:
            own = list(members)
            indices = self.prompts.order.indices(*schedule.prompts(of_step))
            started = [buffer.unfinished[slot] for slot in own if slot in buffer.unfinished]
            part = RolloutWindow(
                prompts=[self.prompts.training[indices[slot.group]] for slot in own],
                samples=settings.responses_per_prompt,
                sampling=self.run.sampling(
                    max_tokens=settings.max_response_tokens,
                    seed=derive_seed(config.seed, "rollout", of_step),
                ),
                tokens=window * (windows - max(end - step, 0)),
                started=[rollout.response for group in started for rollout in group.rollouts],
            )
            parts.append((own, part))
        return parts

    def finish(self, step: int, *, updates: int) -> list[list[PromptGroup]]:
        """Build the groups that end by `step`; one list for each step of slots. Collective."""
        finished = []
        for groups in self.pop_finished(step):
            finished.append(
                build_groups(
                    self.grade(groups),
                    [group.slot for group in groups],
                    config=self.run.config,
                    step=step,
                    updates=updates,
                )
            )
        return finished

    def pop_finished(self, step: int) -> list[list[PromptGroup]]:
        """Remove the groups that end by `step`; one list for each step of slots."""
        buffer = self.run.buffer
        done = [
            slot for slot in sorted(buffer.unfinished) if buffer.schedule.generation(slot) <= step
        ]
        together = itertools.groupby(done, lambda slot: slot.step)
        return [[buffer.unfinished.pop(slot) for slot in members] for _, members in together]

    def grade(self, groups: Sequence[PromptGroup]) -> list[Rollout]:
        """Grade the responses of finished groups, group after group. Collective."""
        prompts = [group.rollouts[0].prompt for group in groups]
        responses = [rollout.response for group in groups for rollout in group.rollouts]
        submit = self.grader.begin(prompts, samples=len(groups[0].rollouts))
        topology = self.grader.topology
        for place, response in enumerate(responses):
            has_text = response.owner if response.owner >= 0 else place % topology.world_size
            if topology.rank == has_text:
                submit(place, response)
        rollouts = self.grader.finish(prompts, responses)
        self.grader.check(prompts=self.run.min_prompts_to_check)
        return rollouts


@dataclass
class PartialRolloutSource(WindowSource):
    """Continues the unfinished groups by an engine on the ranks that train."""

    engine: RolloutEngine = field(kw_only=True)

    def check(self) -> None:
        check_engine_of_run(self.run, self.engine, self.prompts.training)

    def generate(self, step: int) -> list[RolloutBatch]:
        if step != self._restored_step:
            with self.run.clock.phase("rollout"):
                self.advance(step, self.due(step))
        return []  # `score` grades what this window has completed

    def score(self, step: int, generated: list[RolloutBatch]) -> StepInput:
        if step == self._restored_step:
            return StepInput([], is_restorable=False)
        return self.score_window(
            step,
            updates=self.run.actor.updates,
            seconds=self.run.clock.seconds.get("rollout", 0.0),
            engine_seconds=self.engine.engine_seconds,
        )

    def advance(self, step: int, slots: Sequence[PromptSlot]) -> None:
        """Generate one window of the groups of these slots with the current weights."""
        parts = self._parts(step, slots)
        keep, before = self.run.config.lag.keeps_cache, self._tokens()
        responses = self.engine.continue_generation([part for _, part in parts], keep_cache=keep)
        for (members, part), continued in zip(parts, responses, strict=True):
            prompts = (prompt for prompt in part.prompts for _ in range(part.samples))
            pairs = zip(prompts, continued, strict=True)
            self.insert(members, [Rollout(prompt, one, UNFINISHED) for prompt, one in pairs])
        self.new_tokens = self._tokens() - before

    def after_checkpoint(self, step: int) -> None:
        self.engine.drop_caches()
