"""Behavior log-probs: the denominators of all ratios, fixed when rollouts are generated."""

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.reference import ReferencePolicy
from megatron_rl.data.packing import gather_by_rollout, plan_minibatches
from megatron_rl.data.token_rows import is_local, remote_row
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.types import PromptGroup, PromptSlot


class BehaviorLogprobs:
    """Log-probs that come with the rollouts, as from files; subclasses determine them."""

    can_resume_inside: ClassVar[bool] = True  # see RolloutSource
    empty_logprobs: ClassVar[np.ndarray | None] = None  # a response before its first token

    def freeze(self, batch: RolloutBatch) -> None:
        """Fix the log-probs of a batch that was just generated. Collective."""

    def freeze_window(self, unfinished: MutableMapping[PromptSlot, PromptGroup]) -> None:
        """Fix the log-probs of the tokens that unfinished groups have gained. Collective."""


@dataclass
class ModelLogprobs(BehaviorLogprobs):
    """Log-probs computed by the actor that generated, or by the model that wrote the files."""

    model: MegatronActor | ReferencePolicy

    def freeze(self, batch: RolloutBatch) -> None:
        batch.freeze_behavior_logprobs(self.model)


class EngineLogprobs(BehaviorLogprobs):
    """Log-probs that the engine reported for the tokens it sampled."""

    # A decoupled objective centers ratios on the policy before the step's first update, which a
    # run that resumes after a later one no longer has.
    can_resume_inside = False

    def freeze(self, batch: RolloutBatch) -> None:
        batch.freeze_engine_logprobs()


@dataclass
class WindowLogprobs(BehaviorLogprobs):
    """Log-probs by the actor of each window, for partial rollouts.

    The engine must recompute its caches after each weight sync: only then did a single policy
    generate each token.
    """

    actor: MegatronActor
    tokens_per_micro_batch: int
    empty_logprobs = np.empty(0, np.float32)

    def freeze_window(self, unfinished: MutableMapping[PromptSlot, PromptGroup]) -> None:
        grown = [
            (slot, index, rollout, known)
            for slot, group in sorted(unfinished.items())
            for index, (rollout, known) in enumerate(
                zip(group.rollouts, group.behavior_logprobs, strict=True)
            )
            if known is not None and rollout.response.length > len(known)
        ]
        if not grown:
            return
        rollouts = [rollout for _, _, rollout, _ in grown]
        (minibatch,) = plan_minibatches(
            rollouts,
            torch.zeros(len(rollouts)),
            minibatches=1,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
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
            owners=[rollout.response.owner for rollout in rollouts],
        )
        for (slot, index, _, known), row in zip(grown, rows, strict=True):
            assert row is not None, "all of them were packed"
            group = unfinished[slot]
            values = list(group.behavior_logprobs)
            values[index] = (
                np.concatenate((known, row[len(known) :]))
                if is_local(row)
                else remote_row(len(row))
            )
            unfinished[slot] = replace(group, behavior_logprobs=tuple(values))
