"""DeepSeek-V3 (arXiv 2412.19437) and Moonlight (arXiv 2502.16982): latent attention and experts.

Experts are those of GLM-4.5, which may be divided into groups.
"""

from megatron_rl.models.latent import LATENT_ATTENTION, QUERY_LATENT
from megatron_rl.models.weights import (
    DENSE_MLP,
    EMBEDDING,
    EXPERT_BIAS,
    FINAL_NORM,
    MIXTURE_OF_EXPERTS,
    OUTPUT_LAYER,
    SHARED_EXPERTS,
    SIGMOID_ROUTER,
    Architecture,
    Traits,
)

ARCHITECTURE = Architecture(
    "DeepseekV3ForCausalLM",
    (
        EMBEDDING,
        *LATENT_ATTENTION,
        *DENSE_MLP,
        *MIXTURE_OF_EXPERTS,
        EXPERT_BIAS,
        *SHARED_EXPERTS,
        FINAL_NORM,
        OUTPUT_LAYER,
    ),
    keys=(
        "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
        "first_k_dense_replace", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim",
    ),
    defaults={
        "q_lora_rank": 1536, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8,
        "topk_group": 4,
    },
    only={"norm_topk_prob": True, "rope_interleave": True, **SIGMOID_ROUTER},
    ignored=("num_key_value_heads", "head_dim", "qk_head_dim"),
    scoring="sigmoid",
    latent_attention=True,
    options=(QUERY_LATENT,),
    traits=Traits(local_only="latent attention"),
)  # fmt: skip
