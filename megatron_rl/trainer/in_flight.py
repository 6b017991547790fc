"""Generation under weights that change: every step brings what is under way a window further.

A window is `every_tokens` tokens of every response. A rollout batch takes as many windows as the
longest response has, begins so many steps early and ends when the schedule says; the batches that
are under way advance together, each one window a step, by the weights of that step.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.config import Config
from megatron_rl.data.mixing import PromptMix
from megatron_rl.data.packing import gather_by_rollout, plan_minibatches
from megatron_rl.data.prompts import PromptOrder
from megatron_rl.lag.buffer import GroupBuffer
from megatron_rl.rollout.engine import Part, RolloutEngine
from megatron_rl.seeds import derive_seed
from megatron_rl.trainer.judge import Judge
from megatron_rl.trainer.rollout_batch import build_groups
from megatron_rl.types import Group, Prompt, Response, Rollout, SamplingSettings, Slot, Verdict

NOT_JUDGED = Verdict(0.0, "under way", None)


@dataclass
class InFlightGeneration:
    """Advances the groups that the buffer holds as begun; the same walk on every rank."""

    config: Config
    engine: RolloutEngine
    actor: MegatronActor
    judge: Judge
    prompts: Sequence[Prompt]
    order: PromptOrder | PromptMix
    buffer: GroupBuffer
    new_tokens: int = 0  # that the last `advance` has added

    def advance(self, step: int) -> list[Part]:
        """One window of all that is under way, by the present weights."""
        asked = self._parts(step)
        keep, before = self.config.lag.keeps_cache, self._tokens()
        responses = self.engine.extend([part for _, part in asked], keep_cache=keep)
        for (slots, part), extended in zip(asked, responses, strict=True):
            size = part.samples
            for place, slot in enumerate(slots):
                own = slice(place * size, (place + 1) * size)
                self.buffer.begun[slot] = self._begun(
                    slot, part.prompts[place], extended[own], self.buffer.begun.get(slot)
                )
        self.new_tokens = self._tokens() - before
        return [part for _, part in asked]

    def _tokens(self) -> int:
        groups = self.buffer.begun.values()
        return sum(len(one.response.token_ids) for group in groups for one in group.rollouts)

    def _begun(
        self, slot: Slot, prompt: Prompt, responses: Sequence[Response], before: Group | None
    ) -> Group:
        nothing = (np.empty(0, np.float32),) * len(responses)
        return Group(
            slot=slot,
            rollouts=tuple(Rollout(prompt, response, NOT_JUDGED) for response in responses),
            advantages=np.zeros(len(responses), np.float32),
            behavior_logprobs=nothing if before is None else before.behavior_logprobs,
            entropy=float("nan"),
            generated=0,
            updates=0,
        )

    def _parts(self, step: int) -> list[tuple[list[Slot], Part]]:
        """What is under way in a step, those slots together that began and end together."""
        schedule, settings = self.buffer.schedule, self.config.rollout
        window, windows = self.config.lag.every_tokens, self.config.windows
        slots = [
            slot for slot in schedule.due(step, ahead=windows - 1) if slot not in self.buffer.groups
        ]
        slots.sort(key=lambda slot: (slot.step, schedule.generation(slot), slot.group))
        parts = []
        together = itertools.groupby(slots, lambda slot: (slot.step, schedule.generation(slot)))
        for (of_step, end), members in together:
            own = list(members)
            indices = self.order.indices(*schedule.prompts(of_step))
            begun = [self.buffer.begun[slot] for slot in own if slot in self.buffer.begun]
            part = Part(
                prompts=[self.prompts[indices[slot.group]] for slot in own],
                samples=settings.responses_per_prompt,
                sampling=SamplingSettings(
                    temperature=settings.temperature,
                    top_p=1.0,
                    max_tokens=settings.max_response_tokens,
                    seed=derive_seed(self.config.seed, "rollout", of_step),
                ),
                tokens=window * (windows - max(end - step, 0)),
                begun=[rollout.response for group in begun for rollout in group.rollouts],
            )
            parts.append((own, part))
        return parts

    def freeze_new_tokens(self) -> None:
        """Log-probs of what this window has added, by the actor, which has just generated it.

        Collective. For caches that are computed anew: only then one policy made each token.
        """
        grown = [
            (slot, place, rollout, known)
            for slot, group in sorted(self.buffer.begun.items())
            for place, (rollout, known) in enumerate(
                zip(group.rollouts, group.behavior_logprobs, strict=True)
            )
            if known is not None and len(rollout.response.token_ids) > len(known)
        ]
        if not grown:
            return
        rollouts = [rollout for _, _, rollout, _ in grown]
        (minibatch,) = plan_minibatches(
            rollouts,
            torch.zeros(len(rollouts)),
            minibatches=1,
            tokens_per_micro_batch=self.config.trainer.tokens_per_micro_batch,
            topology=self.actor.topology,
            sequence_parallel=self.actor.sequence_parallel,
            gemm_tokens=self.actor.settings.gemm_tokens,
        )
        packs = minibatch.micro_batches
        rows = gather_by_rollout(
            packs,
            self.actor.compute_logprobs(packs),
            count=len(rollouts),
            topology=self.actor.topology,
        )
        for (slot, place, _, known), row in zip(grown, rows, strict=True):
            assert row is not None, "each of them was packed"
            group = self.buffer.begun[slot]
            values = list(group.behavior_logprobs)
            values[place] = np.concatenate((known, row[len(known) :]))
            self.buffer.begun[slot] = replace(group, behavior_logprobs=tuple(values))

    def finish(self, step: int) -> list[list[Group]]:
        """Judge what is to be whole by now, those slots together that have one step. Collective."""
        done = [
            slot for slot in sorted(self.buffer.begun)
            if self.buffer.schedule.generation(slot) <= step
        ]  # fmt: skip
        finished = []
        for _, members in itertools.groupby(done, lambda slot: slot.step):
            groups = [self.buffer.begun.pop(slot) for slot in members]
            prompts = [group.rollouts[0].prompt for group in groups]
            responses = [rollout.response for group in groups for rollout in group.rollouts]
            submit = self.judge.begin(prompts, samples=len(groups[0].rollouts))
            topology = self.actor.topology
            for place in range(topology.rank, len(responses), topology.world_size):
                submit(place, responses[place])
            judged = build_groups(
                self.judge.finish(prompts, responses),
                [group.slot for group in groups],
                config=self.config,
                step=step,
                updates=self.actor.updates,
            )
            if self.config.behavior == "actor":
                judged = [
                    replace(group, behavior_logprobs=begun.behavior_logprobs)
                    for group, begun in zip(judged, groups, strict=True)
                ]
            finished.append(judged)
        return finished
