"""Qwen3, dense or with a mixture of experts in every layer (arXiv 2505.09388)."""

from megatron_rl.models.weights import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    MIXTURE_OF_EXPERTS,
    OUTPUT_LAYER,
    QK_NORM,
    Architecture,
)

QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    (EMBEDDING, *ATTENTION, *QK_NORM, *DENSE_MLP, FINAL_NORM, OUTPUT_LAYER),
    defaults={"head_dim": 128},
    only={"use_qk_norm": True},
    ignored=("sliding_window",),  # without use_sliding_window
)
QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    (EMBEDDING, *ATTENTION, *QK_NORM, *MIXTURE_OF_EXPERTS, FINAL_NORM, OUTPUT_LAYER),
    # transformers 5 writes num_local_experts, earlier releases num_experts.
    keys=("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    defaults={"head_dim": None, "norm_topk_prob": False},
    # Qwen3-Coder-30B-A3B has these keys.
    only={"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    ignored=("sliding_window",),  # without use_sliding_window
)
