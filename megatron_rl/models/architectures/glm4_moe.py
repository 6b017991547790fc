"""GLM-4.5, 4.6 and 4.7: a mixture of experts behind dense first layers (arXiv 2508.06471).

Experts are scored by sigmoids and chosen with a bias of each expert; one more expert processes
every token. Half of each head is rotated.
"""

from megatron_rl.models.weights import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERT_BIAS,
    FINAL_NORM,
    MIXTURE_OF_EXPERTS,
    OUTPUT_LAYER,
    QK_NORM,
    QKV_BIAS,
    SHARED_EXPERTS,
    SIGMOID_ROUTER,
    Architecture,
    OptionalWeights,
)

ARCHITECTURE = Architecture(
    "Glm4MoeForCausalLM",
    (
        EMBEDDING,
        *ATTENTION,
        QKV_BIAS,
        *QK_NORM,
        *DENSE_MLP,
        *MIXTURE_OF_EXPERTS,
        EXPERT_BIAS,
        *SHARED_EXPERTS,
        FINAL_NORM,
        OUTPUT_LAYER,
    ),
    keys=(
        "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
        "first_k_dense_replace",
    ),
    defaults={
        "head_dim": None, "partial_rotary_factor": 0.5, "attention_bias": False,
        "use_qk_norm": False, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1,
    },
    only={"norm_topk_prob": True, **SIGMOID_ROUTER},
    scoring="sigmoid",
    options=(
        OptionalWeights("attention_bias", (QKV_BIAS,)), OptionalWeights("use_qk_norm", QK_NORM),
    ),
)  # fmt: skip
