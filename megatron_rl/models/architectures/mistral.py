"""Mistral, dense: 7B, Nemo, Small 24B (arXiv 2310.06825). 7B v0.1 has a sliding window."""

from megatron_rl.models.weights import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT_LAYER,
    Architecture,
)

ARCHITECTURE = Architecture(
    "MistralForCausalLM",
    (EMBEDDING, *ATTENTION, *DENSE_MLP, FINAL_NORM, OUTPUT_LAYER),
    defaults={"head_dim": None, "sliding_window": 4096},
)
