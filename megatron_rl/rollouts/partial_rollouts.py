"""Partial rollouts: generation continues while the weights change, by one window a step.

A window is `every_tokens` tokens of every response. A rollout batch takes as many windows as the
longest response needs and starts that many steps early, so that it ends when it is scheduled. All
unfinished batches advance together, by one window a step with the weights of that step.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.engine.engine import RolloutEngine, RolloutWindow
from megatron_rl.rollouts.batch_metrics import generation_metrics
from megatron_rl.rollouts.behavior import BehaviorLogprobs
from megatron_rl.rollouts.engine_check import check_engine_of_run
from megatron_rl.rollouts.grading import Grader
from megatron_rl.rollouts.groups import build_groups
from megatron_rl.rollouts.prompt_sets import PromptSets
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.source import RolloutSource, RunContext
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import (
    GradeResult,
    Prompt,
    PromptGroup,
    PromptSlot,
    Response,
    Rollout,
)

UNFINISHED = GradeResult(0.0, "unfinished", None)


@dataclass
class PartialRolloutSource(RolloutSource):
    """Continues the unfinished groups of the buffer by one window a step."""

    run: RunContext
    engine: RolloutEngine
    grader: Grader
    prompts: PromptSets
    behavior: BehaviorLogprobs
    new_tokens: int = 0  # added by the last `advance`
    _restored_step: int | None = None  # its window and its groups came from a checkpoint

    # Between two checkpoints the engine may have caches that no checkpoint contains.
    can_resume_inside = False

    def check(self) -> None:
        check_engine_of_run(self.run, self.engine, self.prompts.training)

    def resume(self, step: int) -> None:
        self._restored_step = step

    def generate(self, step: int) -> list[RolloutBatch]:
        if step != self._restored_step:
            with self.run.clock.phase("rollout"):
                self.advance(step)
        return []  # `score` grades what this window has completed

    def score(self, step: int, generated: list[RolloutBatch]) -> list[RolloutBatch]:
        clock, buffer = self.run.clock, self.run.buffer
        if step == self._restored_step:
            return []
        with clock.phase("behavior"):
            self.behavior.freeze_window(buffer.unfinished)
        with clock.phase("reward"):
            finished = self.finish(step)
            self.grader.check(prompts=self.run.min_prompts_to_check)
        with clock.phase("pack"):
            seconds = tuple(self.engine.engine_seconds)
            fresh = [self.run.pack(groups, engine_seconds=seconds) for groups in finished]
            for batch in fresh:
                self.behavior.freeze(batch)
        return fresh

    def metrics(self, fresh: Sequence[RolloutBatch]) -> dict[str, float]:
        seconds = self.run.clock.seconds.get("rollout", 0.0)
        return generation_metrics(fresh, {}, seconds=seconds, tokens=self.new_tokens)

    def restorable(self, fresh: Sequence[RolloutBatch]) -> list[PromptGroup]:
        return []  # only checkpoints contain the unfinished groups too

    def after_checkpoint(self, step: int) -> None:
        self.engine.drop_caches()

    def advance(self, step: int) -> list[RolloutWindow]:
        """Generate one window of all unfinished groups with the current weights."""
        parts = self._parts(step)
        keep, before = self.run.config.lag.keeps_cache, self._tokens()
        responses = self.engine.continue_generation([part for _, part in parts], keep_cache=keep)
        for (slots, part), continued in zip(parts, responses, strict=True):
            size = part.samples
            for place, slot in enumerate(slots):
                own = slice(place * size, (place + 1) * size)
                self.run.buffer.unfinished[slot] = self._build_group(
                    slot, part.prompts[place], continued[own], self.run.buffer.unfinished.get(slot)
                )
        self.new_tokens = self._tokens() - before
        return [part for _, part in parts]

    def _tokens(self) -> int:
        groups = self.run.buffer.unfinished.values()
        return sum(one.response.length for group in groups for one in group.rollouts)

    def _build_group(
        self,
        slot: PromptSlot,
        prompt: Prompt,
        responses: Sequence[Response],
        before: PromptGroup | None,
    ) -> PromptGroup:
        return PromptGroup(
            slot=slot,
            rollouts=tuple(Rollout(prompt, response, UNFINISHED) for response in responses),
            advantages=np.zeros(len(responses), np.float32),
            behavior_logprobs=(self.behavior.empty_logprobs,) * len(responses)
            if before is None
            else before.behavior_logprobs,
            entropy=float("nan"),
            generated_at_step=0,
            updates=0,
        )

    def _parts(self, step: int) -> list[tuple[list[PromptSlot], RolloutWindow]]:
        """Windows of a step with their slots: one for slots that start and end together."""
        config, buffer = self.run.config, self.run.buffer
        schedule, settings = buffer.schedule, config.rollout
        window, windows = config.lag.every_tokens, config.windows
        slots = [
            slot for slot in schedule.due(step, ahead=windows - 1) if slot not in buffer.groups
        ]
        slots.sort(key=lambda slot: (slot.step, schedule.generation(slot), slot.group))
        parts = []
        together = itertools.groupby(slots, lambda slot: (slot.step, schedule.generation(slot)))
        for (of_step, end), members in together:
            own = list(members)
            indices = self.prompts.order.indices(*schedule.prompts(of_step))
            started = [
                self.run.buffer.unfinished[slot]
                for slot in own
                if slot in self.run.buffer.unfinished
            ]
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

    def finish(self, step: int) -> list[list[PromptGroup]]:
        """Grade the groups that end by `step`; one list for each step of slots. Collective."""
        done = [
            slot for slot in sorted(self.run.buffer.unfinished)
            if self.run.buffer.schedule.generation(slot) <= step
        ]  # fmt: skip
        finished = []
        for _, members in itertools.groupby(done, lambda slot: slot.step):
            groups = [self.run.buffer.unfinished.pop(slot) for slot in members]
            prompts = [group.rollouts[0].prompt for group in groups]
            responses = [rollout.response for group in groups for rollout in group.rollouts]
            submit = self.grader.begin(prompts, samples=len(groups[0].rollouts))
            topology = self.run.actor.topology
            for place, response in enumerate(responses):
                has_text = response.owner if response.owner >= 0 else place % topology.world_size
                if topology.rank == has_text:
                    submit(place, response)
            graded = build_groups(
                self.grader.finish(prompts, responses),
                [group.slot for group in groups],
                config=self.run.config,
                step=step,
                updates=self.run.actor.updates,
            )
            graded = [
                replace(group, behavior_logprobs=unfinished.behavior_logprobs)
                for group, unfinished in zip(graded, groups, strict=True)
            ]
            finished.append(graded)
        return finished
