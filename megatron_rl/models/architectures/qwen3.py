"""Qwen3, dense (arXiv 2505.09388)."""

from megatron_rl.models.weights import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT_LAYER,
    QK_NORM,
    Architecture,
)

ARCHITECTURE = Architecture(
    "Qwen3ForCausalLM",
    (EMBEDDING, *ATTENTION, *QK_NORM, *DENSE_MLP, FINAL_NORM, OUTPUT_LAYER),
    defaults={"head_dim": 128},
    only={"use_qk_norm": True},
    ignored=("sliding_window",),  # without use_sliding_window
)
