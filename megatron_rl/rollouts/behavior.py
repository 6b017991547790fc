"""Behavior log-probs: the denominators of all ratios, fixed when rollouts are generated.

Before the first step the engine's log-probs are compared with the actor's: checksums show that
weights arrived; only log-probs show that they arrived in the right places.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import ClassVar

import numpy as np
import torch

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.reference import ReferencePolicy
from megatron_rl.data.packing import gather_by_rollout, plan_minibatches
from megatron_rl.data.token_rows import is_local, remote_row
from megatron_rl.engine.engine import Responder
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.scoring import score_behavior, score_behavior_by_engine
from megatron_rl.rollouts.source import RunContext
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import (
    GradeResult,
    Prompt,
    PromptGroup,
    PromptSlot,
    Rollout,
    SamplingSettings,
)


class BehaviorLogprobs:
    """Log-probs that come with the rollouts, as from files; subclasses determine them."""

    can_resume_inside: ClassVar[bool] = True  # see RolloutSource
    empty_logprobs: ClassVar[np.ndarray | None] = None  # a response before its first token

    def score(self, batch: RolloutBatch) -> RolloutBatch:
        """Return a batch that was just generated with its log-probs. Collective."""
        return batch

    def score_window(self, unfinished: MutableMapping[PromptSlot, PromptGroup]) -> None:
        """Fix the log-probs of the tokens that unfinished groups have gained. Collective."""


@dataclass
class ModelLogprobs(BehaviorLogprobs):
    """Log-probs computed by the actor that generated, or by the model that wrote the files."""

    model: MegatronActor | ReferencePolicy

    def score(self, batch: RolloutBatch) -> RolloutBatch:
        return score_behavior(batch, self.model)


class EngineLogprobs(BehaviorLogprobs):
    """Log-probs that the engine reported for the tokens it sampled."""

    # A decoupled objective centers ratios on the policy before the step's first update, which a
    # run that resumes after a later one no longer has.
    can_resume_inside = False

    def score(self, batch: RolloutBatch) -> RolloutBatch:
        return score_behavior_by_engine(batch)


@dataclass
class WindowLogprobs(BehaviorLogprobs):
    """Log-probs by the actor of each window, for partial rollouts.

    The engine must recompute its caches after each weight sync: only then did a single policy
    generate each token.
    """

    actor: MegatronActor
    tokens_per_micro_batch: int
    empty_logprobs = np.empty(0, np.float32)

    def score_window(self, unfinished: MutableMapping[PromptSlot, PromptGroup]) -> None:
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
            gemm_tokens=self.actor.settings.gemm_tokens,
            sharing=self.actor.sharing,
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
            unfinished[slot] = group.with_column("behavior_logprobs", values)


# Mean absolute gap of a sampled token's log-prob. Right weights give 1e-7 in float32 and some 1e-2
# in bfloat16, where two engines round differently; one misplaced matrix gives more than 1.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
PROMPTS_PER_ENGINE = 8


def check_engine_of_run(run: RunContext, engine: Responder, prompts: Sequence[Prompt]) -> float:
    """Call `check_engine` with the settings of a run; collective."""
    return check_engine(
        run.actor,
        engine,
        prompts,
        temperature=run.config.rollout.temperature,
        seed=derive_seed(run.config.seed, "engine check"),
        tokens_per_micro_batch=run.config.trainer.tokens_per_micro_batch,
        max_tokens=min(32, run.config.rollout.max_response_tokens),
    )


def check_engine(
    actor: MegatronActor,
    engine: Responder,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    seed: int,
    tokens_per_micro_batch: int,
    max_tokens: int = 32,
) -> float:
    """The largest of all engines' mean gaps between the two log-probs of its tokens; collective.

    Every engine answers PROMPTS_PER_ENGINE prompts, the same ones where there are too few.
    temperature: the actor's. Raises RuntimeError on every rank when a gap is too large.
    """
    engines = engine.layout.world_size // engine.layout.tensor
    prompts = list(islice(cycle(prompts), PROMPTS_PER_ENGINE * engines))
    sampling = SamplingSettings(temperature, top_p=1.0, max_tokens=max_tokens, seed=seed)
    responses = engine.generate(prompts, samples=1, sampling=sampling)
    rollouts = [
        Rollout(prompt, response, GradeResult(0.0, "engine check", None))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    (minibatch,) = plan_minibatches(
        rollouts,
        torch.zeros(len(rollouts)),
        minibatches=1,
        tokens_per_micro_batch=tokens_per_micro_batch,
        topology=actor.topology,
        gemm_tokens=actor.settings.gemm_tokens,
        sharing=actor.sharing,
    )
    packs = minibatch.micro_batches
    computed = gather_by_rollout(
        packs, actor.compute_logprobs(packs), count=len(rollouts), topology=actor.topology
    )
    gaps = [
        np.abs(ours - np.asarray(response.rollout_logprobs))
        for ours, response in zip(computed, responses, strict=True)
        if ours is not None  # each of them was packed
    ]
    # One wrong engine must not disappear in a mean over many.
    means = [float(np.concatenate(gaps[one::engines]).mean()) for one in range(engines)]
    tolerance = _TOLERANCE[engine.dtype]
    wrong = [one for one, mean in enumerate(means) if not mean <= tolerance]
    if wrong:
        raise RuntimeError(
            f"after the weight push the log-probs of engine {wrong[0]} differ from the actor's by "
            f"{means[wrong[0]]:.3g} on average (at most {tolerance:g} is expected of "
            f"{engine.dtype}); {len(wrong)} of {engines} engines do not compute with the actor's "
            f"weights: {engine.layout}"
        )
    return max(means)
