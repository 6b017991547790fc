"""Given answers in place of rollouts, for supervised fine-tuning."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_rl.data.packing import plan_minibatches
from megatron_rl.distributed.collectives import reduce_sum
from megatron_rl.rollouts.groups import build_groups
from megatron_rl.rollouts.prompt_sets import PromptSets
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.source import RolloutSource, RunContext, StepInput
from megatron_rl.types import GradeResult, Minibatch, Prompt, Response, Rollout

GRADE = GradeResult(1.0, "given answer", None)  # its advantage is 1, with advantage.estimator=raw
PROMPTS_AT_ONCE = 256  # scored together


@dataclass
class DemonstrationSource(RolloutSource):
    """Fills the slots of the buffer with the demonstrations of `data.train`, in its order.

    Every rank has their tokens. There is no behavior policy: ratios are 1 (`TokenBatch.on_policy`).
    """

    run: RunContext
    prompts: PromptSets

    @property
    def can_resume_inside(self) -> bool:
        return True

    def generate(self, step: int) -> list[RolloutBatch]:
        clock, buffer = self.run.clock, self.run.buffer
        with clock.phase("pack"):
            return [
                self.run.pack(
                    build_groups(
                        [self._read(slot.step, slot.group) for slot in slots],
                        slots,
                        config=self.run.config,
                        step=step,
                        updates=self.run.actor.updates,
                    )
                )
                for slots in buffer.missing(step)
            ]

    def score(self, step: int, generated: list[RolloutBatch]) -> StepInput:
        return StepInput(generated)

    def validate(self, step: int) -> dict[str, float]:
        config = self.run.config
        if step % config.eval.every and step < config.trainer.steps:
            return {}
        return {
            f"eval/{name}/loss": self._loss(prompts)
            for name, prompts in self.prompts.validation.items()
        }

    def _read(self, step: int, group: int) -> Rollout:
        indices = self.prompts.order.indices(*self.run.buffer.schedule.prompts(step))
        return as_rollout(self.prompts.training[indices[group]])

    def _loss(self, prompts: Sequence[Prompt]) -> float:
        """Mean negative log-prob of the trained tokens, in nats; collective."""
        actor, topology = self.run.actor, self.run.actor.topology
        sums = torch.zeros(2, dtype=torch.float64, device=topology.device)
        for start in range(0, len(prompts), PROMPTS_AT_ONCE):
            minibatch = self._pack(prompts[start : start + PROMPTS_AT_ONCE])
            packs = minibatch.micro_batches
            for pack, logprobs in zip(packs, actor.compute_logprobs(packs), strict=True):
                own = logprobs[pack.response_mask.to(logprobs.device)].double()
                sums += torch.stack((own.sum(), torch.full_like(own.sum(), len(own)))).to(sums)
        total, count = reduce_sum(sums, group=topology.dp_group).tolist()
        return -total / count

    def _pack(self, prompts: Sequence[Prompt]) -> Minibatch:
        config, actor = self.run.config, self.run.actor
        (minibatch,) = plan_minibatches(
            [as_rollout(prompt) for prompt in prompts],
            torch.ones(len(prompts)),
            minibatches=1,
            tokens_per_micro_batch=config.trainer.tokens_per_micro_batch,
            topology=actor.topology,
            gemm_tokens=actor.settings.gemm_tokens,
            sharing=actor.sharing,
        )
        return minibatch


def as_rollout(prompt: Prompt) -> Rollout:
    """Return a prompt's demonstration as a response of reward 1."""
    given = prompt.demonstration
    assert given is not None, "the set was read with conversations"
    response = Response(
        prompt_index=prompt.index,
        sample_index=0,
        token_ids=np.array(given.token_ids, np.int32),
        rollout_logprobs=np.empty(0, np.float32),
        text=prompt.messages[-1]["content"],
        finish_reason="stop",
        weight_version=-1,
        observed=given.observed,
        restarts=given.restarts,
    )
    unknown = np.full(response.length, np.nan, np.float32)
    return Rollout(prompt, replace(response, rollout_logprobs=unknown), GRADE)
