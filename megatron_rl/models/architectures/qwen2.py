"""Qwen2 and Qwen2.5, and DeepSeek-R1-Distill-Qwen (arXiv 2407.10671).

Qwen1.5-MoE and Qwen2-MoE have routed experts plus a gated shared expert for every token (section
2.2.2); the output is routed(x) + sigmoid(gate x) * shared(x).
"""

from megatron_rl.models.weights import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    MIXTURE_OF_EXPERTS,
    OUTPUT_LAYER,
    QKV_BIAS,
    Architecture,
    Weight,
    gated_mlp,
)

QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    (EMBEDDING, *ATTENTION, QKV_BIAS, *DENSE_MLP, FINAL_NORM, OUTPUT_LAYER),
    only={"qkv_bias": True},
    ignored=("sliding_window",),  # without use_sliding_window
)

SHARED_EXPERT = (
    *gated_mlp(
        "shared_ffn", "mlp.shared_experts", layers="experts", stored="mlp.shared_expert"
    ),
    Weight(
        "layer", "replicated", ("one", "hidden"),
        ("model.layers.{layer}.mlp.shared_expert_gate.weight",),
        "decoder.layers.{layer}.mlp.shared_experts.gate_weight",
        "model.layers.{layer}.mlp.shared_expert_gate.weight",
        layers="experts",
    ),
)  # fmt: skip

QWEN2_MOE = Architecture(
    "Qwen2MoeForCausalLM",
    (
        EMBEDDING,
        *ATTENTION,
        QKV_BIAS,
        *MIXTURE_OF_EXPERTS,
        *SHARED_EXPERT,
        FINAL_NORM,
        OUTPUT_LAYER,
    ),
    keys=(
        "num_experts", "num_experts_per_tok", "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ),
    defaults={"norm_topk_prob": False},
    only={"qkv_bias": True},
    ignored=("sliding_window",),  # without use_sliding_window
)  # fmt: skip
