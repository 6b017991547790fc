"""Comparison of the engine's log-probs with the actor's, before the first step.

Checksums show that weights arrived; only log-probs show that they arrived in the right places.
"""

from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np
import torch

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.data.packing import gather_by_rollout, plan_minibatches
from megatron_rl.engine.engine import RolloutEngine
from megatron_rl.rollouts.source import RunContext
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import GradeResult, Prompt, Rollout, SamplingSettings

# Mean absolute gap of a sampled token's log-prob. Right weights give 1e-7 in float32 and some 1e-2
# in bfloat16, where two engines round differently; one misplaced matrix gives more than 1.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
PROMPTS_PER_ENGINE = 8


def check_engine_of_run(run: RunContext, engine: RolloutEngine, prompts: Sequence[Prompt]) -> float:
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
    engine: RolloutEngine,
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
        sequence_parallel=actor.sequence_parallel,
        gemm_tokens=actor.settings.gemm_tokens,
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
