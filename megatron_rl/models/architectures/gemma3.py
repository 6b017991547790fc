"""Gemma 3, text (arXiv 2503.19786): windows in 5 of 6 layers, norms around every part."""

from typing import Any

from megatron_rl.models.weights import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT_LAYER,
    QK_NORM,
    Architecture,
    LocalPattern,
    Traits,
    Weight,
    common_rotary_keys,
)

_HF, _MEGATRON = "model.layers.{layer}.", "decoder.layers.{layer}."

NORMS = tuple(
    Weight(
        "layer", "replicated", ("hidden",),
        (f"{_HF}{name}.weight",), f"{_MEGATRON}{megatron}.weight", f"{_HF}{name}.weight",
    )
    for name, megatron in (
        ("post_attention_layernorm", "self_attention.post_layernorm"),
        ("pre_feedforward_layernorm", "pre_mlp_layernorm"),
        ("post_feedforward_layernorm", "mlp.post_layernorm"),
    )
)  # fmt: skip


def _keys(config: dict[str, Any]) -> dict[str, Any]:
    return common_rotary_keys(config, default_base=1e6, default_local_base=1e4)


ARCHITECTURE = Architecture(
    "Gemma3ForCausalLM",
    (EMBEDDING, *ATTENTION, *QK_NORM, *NORMS, *DENSE_MLP[1:], FINAL_NORM, OUTPUT_LAYER),
    keys=("rope_local_base_freq", "sliding_window_pattern"),
    defaults={
        "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
    only={"hidden_activation": "gelu_pytorch_tanh"},
    traits=Traits(
        activation="gelu_tanh",
        zero_centered_norms=True,
        post_norms=True,
        scaled_embeddings=True,
        local_pattern=LocalPattern(6, key="sliding_window_pattern"),
        local_only="norms after attention and MLP",
        keys=_keys,
    ),
)  # fmt: skip
