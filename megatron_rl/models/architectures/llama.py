"""Llama 2 and 3 (arXiv 2407.21783)."""

from megatron_rl.models.weights import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT_LAYER,
    Architecture,
)

ARCHITECTURE = Architecture(
    "LlamaForCausalLM",
    (EMBEDDING, *ATTENTION, *DENSE_MLP, FINAL_NORM, OUTPUT_LAYER),
    defaults={"head_dim": None, "num_key_value_heads": None},
)
