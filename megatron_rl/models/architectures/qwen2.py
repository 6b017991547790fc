"""Qwen2 and Qwen2.5, and DeepSeek-R1-Distill-Qwen (arXiv 2407.10671)."""

from megatron_rl.models.weights import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT_LAYER,
    QKV_BIAS,
    Architecture,
)

ARCHITECTURE = Architecture(
    "Qwen2ForCausalLM",
    (EMBEDDING, *ATTENTION, QKV_BIAS, *DENSE_MLP, FINAL_NORM, OUTPUT_LAYER),
    only={"qkv_bias": True},
    ignored=("sliding_window",),  # without use_sliding_window
)
