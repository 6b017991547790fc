"""Experimental objectives: not checked against the original paper or code.

They are used by name like the others; `docs/objectives.md` lists them in a table of their own.
"""

from megatron_rl.objectives.optional_terms import RolloutCorrection
from megatron_rl.objectives.spec import (
    HardGate,
    OaplSpec,
    ObjectiveSpec,
    PpoClip,
    TvFilter,
)

# Weight, constraint, gradient, aggregation.
# fmt: off
EXPERIMENTAL: dict[str, ObjectiveSpec | OaplSpec] = {
    # w_t with PPO's clip
    "tepo_prefix": ObjectiveSpec(
        "prefix_mean", PpoClip(low=0.2, high=0.28), "detached", "token_mean",
        source="the ablation 'Sentence Prefix IS' of arXiv 2604.12736 as the PNPO paper describes "
        "it; formula and bounds not checked against the original",
    ),
    # rho_t * min_{k<t} rho_k with PPO's clip
    "minpro": ObjectiveSpec(
        "prefix_min", PpoClip(low=0.2, high=0.28), "detached", "token_mean",
        source="arXiv 2601.22718 as the PNPO paper describes it; formula and bounds not checked "
        "against the original",
    ),
    # f(rho_t) A log pi_t with f zero outside [1 - 0.3, 1 + 5]
    "sao": ObjectiveSpec(
        "token", HardGate(low=0.3, high=5.0), "detached", "token_mean",
        source="SAO's direct double-sided importance sampling, checked against public "
        "re-implementations, not against the original, where the bounds are strict and the "
        "ratio is taken to the engine's log-probabilities: give those as behavior_logprobs",
    ),
    # GRPO whose tokens are dropped where trainer and engine disagree by more than [0.5, 5]
    "icepop": ObjectiveSpec(
        "token", PpoClip(low=0.2, high=0.28), "through_weight", "token_mean",
        rollout_correction=RolloutCorrection(level="token", mode="mask", low=0.5, high=5.0),
        source="arXiv 2510.18855; factor and bounds as re-implemented in allenai/open-instruct, "
        "not checked against the original",
    ),
    # rho_t, except tokens that would push a response's total variation beyond 0.05 further
    "vaco": ObjectiveSpec(
        "token", TvFilter(threshold=0.05), "detached", "token_mean",
        source="arXiv 2603.01365, not checked against the original: without its advantage "
        "realignment; the total variation is taken per response, as in allenai/open-instruct; "
        "threshold ours",
    ),
    # 1/N sum_i (beta S_L - A_i)^2
    "oapl": OaplSpec(),
}
# fmt: on
