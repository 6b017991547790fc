"""The named objectives, each a frozen choice on the axes, with its source.

Where a formula could not be checked against the original, its source says so.
"""

from megatron_rl.objectives.spec import (
    HardGate,
    ObjectiveSpec,
    PpoClip,
    RolloutCorrection,
    Truncate,
    TvFilter,
    Unconstrained,
)

# Weight, constraint, gradient, aggregation.
# fmt: off
NAMED: dict[str, ObjectiveSpec] = {
    # 1/N sum_i 1/L_i sum_t sg[M_t w_t A] log pi_t,  w_t = exp(S_t / t),
    # M_t = 1{1 - 7e-4 sqrt(L/t) <= w_t <= 1 + 9.5e-4 sqrt(L/t)}
    "pnpo": ObjectiveSpec(
        "prefix_mean",
        HardGate(low=7e-4, high=9.5e-4, scale="sqrt(L/t)"),
        "detached", "response_mean",
        source="Prefix-Normalized Policy Optimization, arXiv 2608.01418, section 3",
    ),
    # 1/N sum_i min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A),  s = exp(S_L / L)
    "gspo": ObjectiveSpec(
        "sequence_mean", PpoClip(low=3e-4, high=4e-4), "through_weight", "response_mean",
        source="arXiv 2507.18071",
    ),
    # sum_t min(rho_t A, clip(rho_t, 0.8, 1.28) A) / sum_i L_i, at least 10 A where A < 0
    "grpo": ObjectiveSpec(
        "token", PpoClip(low=0.2, high=0.28, dual=10.0), "through_weight", "token_mean",
        source="arXiv 2402.03300; bounds, dual clip and token mean of the PNPO paper's baseline",
    ),
    # sum_t min(rho_t A, clip(rho_t, 0.8, 1.2) A) / sum_i L_i
    "ppo": ObjectiveSpec(
        "token", PpoClip(low=0.2, high=0.2), "through_weight", "token_mean",
        source="arXiv 1707.06347, equation 7",
    ),
    # PPO with clip-higher and token mean: the loss alone, no dynamic sampling, no overlong shaping
    "dapo": ObjectiveSpec(
        "token", PpoClip(low=0.2, high=0.28), "through_weight", "token_mean",
        source="arXiv 2503.14476, equation 8",
    ),
    # C_t = exp(S_t) clipped to [exp(-0.025 sqrt(t)), exp(0.05 sqrt(t))] by the sign of A
    "ctpo": ObjectiveSpec(
        "prefix_product",
        PpoClip(low=0.025, high=0.05, dual=0.05, space="log", scale="t^p", power=0.5),
        "detached", "response_mean",
        source="arXiv 2605.07331; weight, bounds and dual clip checked against its public code "
        "(horizon-llm/CTPO, loss cum-token-cumprod-la), whose launch script leaves verl's "
        "aggregation, a token mean",
    ),
    # w_t = exp(S_t / t) clipped to [exp(-0.025 / sqrt(t)), exp(0.05 / sqrt(t))]
    "ctpo_geomean": ObjectiveSpec(
        "prefix_mean",
        PpoClip(low=0.025, high=0.05, dual=0.05, space="log", scale="t^p", power=-0.5),
        "detached", "response_mean",
        source="public code of arXiv 2605.07331 (horizon-llm/CTPO, loss cum-token-geomean-la)",
    ),
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
    # 1/N sum_i sum_t rho_t A: the occupancy of the behavior policy
    "local_surrogate": ObjectiveSpec(
        "token", Unconstrained(), "through_weight", "response_sum",
        source="arXiv 1502.05477, the surrogate inside the trust region",
    ),
    # 1/N sum_i sum_t C_t A^beta_t, whose gradient is C_t A^beta_t sum_{k<=t} z_k
    "exact_prefix_score": ObjectiveSpec(
        "prefix_product", Unconstrained(), "through_weight", "response_sum",
        source="arXiv 2608.01418, appendix B: the gradient of the performance difference",
    ),
    # 1/N sum_i sum_t sg[C_t A^theta_t] log pi_t
    "exact_token_score": ObjectiveSpec(
        "prefix_product", Unconstrained(), "detached", "response_sum",
        source="arXiv 2608.01418, appendix B: the policy gradient under a change of measure",
    ),
    # sg[min(rho_t, 5) A] log pi_t: every token keeps its gradient
    "cispo": ObjectiveSpec(
        "token", Truncate(low=None, high=4.0), "detached", "token_mean",
        source="arXiv 2506.13585, equations 4 and 5; the cap of 5 is that of arXiv 2510.13786",
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
}
# fmt: on
