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
    Architecture,
    Option,
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
    default_rotary_part=0.5,
    scoring="sigmoid",
    options=(Option("attention_bias", (QKV_BIAS,)), Option("use_qk_norm", QK_NORM)),
)
