"""Qwen3 with a mixture of experts in every layer (arXiv 2505.09388)."""

from megatron_rl.models.weights import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    MIXTURE_OF_EXPERTS,
    OUTPUT_LAYER,
    QK_NORM,
    Architecture,
)

ARCHITECTURE = Architecture(
    "Qwen3MoeForCausalLM",
    (EMBEDDING, *ATTENTION, *QK_NORM, *MIXTURE_OF_EXPERTS, FINAL_NORM, OUTPUT_LAYER),
)
