"""Before the first step: does the engine compute what the actor computes?

Checksums show that weights arrived; only log-probs show that they arrived in the right places.
"""

from collections.abc import Sequence

import torch

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.data.packing import build_pack
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.types import Prompt, Rollout, SamplingSettings, Verdict

# Mean absolute gap of a sampled token's log-prob. Right weights give 1e-7 in float32 and some 1e-2
# in bfloat16, where two engines round differently; one misplaced matrix gives more than 1.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def check_engine(
    actor: MegatronActor,
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    seed: int,
    max_tokens: int = 32,
) -> float:
    """Mean gap between the two log-probs of one sampled response per prompt; collective.

    temperature: the actor's. Raises RuntimeError on every rank when the gap is too large.
    """
    sampling = SamplingSettings(temperature, top_p=1.0, max_tokens=max_tokens, seed=seed)
    responses = engine.generate(prompts, samples=1, sampling=sampling)
    rollouts = [
        Rollout(prompt, response, Verdict(0.0, "engine check", None))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    pack = build_pack(
        rollouts,
        torch.zeros(len(rollouts)),
        indices=range(len(rollouts)),
        alignment=actor.topology.alignment(sequence_parallel=actor.sequence_parallel),
        gemm_tokens=actor.settings.gemm_tokens,
    )
    computed = actor.compute_logprobs([pack])[0].cpu()[pack.response_mask]
    gap = (computed - pack.rollout_logprobs[pack.response_mask]).abs().mean().item()
    tolerance = _TOLERANCE[engine.dtype]
    if not gap <= tolerance:
        raise RuntimeError(
            f"after the weight push the engine's log-probs differ from the actor's by {gap:.3g} on "
            f"average (at most {tolerance:g} is expected of {engine.dtype}): {engine.layout} does "
            "not compute with the actor's weights"
        )
    return gap
