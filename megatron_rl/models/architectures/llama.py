"""Llama 2 and 3 (arXiv 2407.21783), and Mistral: 7B, Nemo, Small 24B (arXiv 2310.06825)."""

from megatron_rl.models.weights import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT_LAYER,
    Architecture,
)

LLAMA = Architecture(
    "LlamaForCausalLM",
    (EMBEDDING, *ATTENTION, *DENSE_MLP, FINAL_NORM, OUTPUT_LAYER),
    defaults={"head_dim": None, "num_key_value_heads": None},
)
MISTRAL = Architecture(
    "MistralForCausalLM",
    (EMBEDDING, *ATTENTION, *DENSE_MLP, FINAL_NORM, OUTPUT_LAYER),
    defaults={"head_dim": None, "sliding_window": 4096},  # of 7B v0.1
)
