"""Qwen3-Next, and Qwen3.5 and 3.6 on text: gated delta nets in three of four layers.

arXiv 2412.06464; sizes and names of transformers' `modeling_qwen3_next.py` and
`modeling_qwen3_5.py`. Rotary sections of Qwen3.5 for images and video ("mrope") rotate text as
ordinary embeddings do: all three positions of a token are equal.
"""

from dataclasses import replace
from typing import Any

from megatron_rl.models.architectures.qwen2 import SHARED_EXPERT
from megatron_rl.models.delta_net import (
    DEFAULTS,
    GATED_ATTENTION,
    KEYS,
    ONLY,
    ROWS_BY_HEAD,
    ROWS_BY_PART,
    unsupported_delta_features,
)
from megatron_rl.models.weights import (
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    MIXTURE_OF_EXPERTS,
    OUTPUT_LAYER,
    Architecture,
    Traits,
)


def _text_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json without the rotary sections, which are for images and video."""
    sections = ("mrope_section", "mrope_interleaved")
    rotary = {
        name: {key: value for key, value in config[name].items() if key not in sections}
        for name in ("rope_parameters", "rope_scaling")
        if config.get(name)
    }
    return config | rotary


def _keys(config: dict[str, Any]) -> dict[str, Any]:
    # The weights of the chosen experts are normalised, although config.json does not have the key.
    return {"norm_topk_prob": True, **_text_keys(config)}


QWEN3_NEXT = Architecture(
    "Qwen3NextForCausalLM",
    (
        EMBEDDING,
        *GATED_ATTENTION,
        *ROWS_BY_HEAD,
        *MIXTURE_OF_EXPERTS,
        *SHARED_EXPERT,
        FINAL_NORM,
        OUTPUT_LAYER,
    ),
    keys=(
        *KEYS, "num_experts", "num_experts_per_tok", "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ),
    # The dense MLP's size, which no layer has.
    defaults={**DEFAULTS, "norm_topk_prob": True, "intermediate_size": 5632},
    only=ONLY,
    ignored=("sliding_window",),
    traits=Traits(
        zero_centered_norms=True,
        output_gate=True,
        local_only="gated delta nets",
        refuse=unsupported_delta_features,
    ),
)  # fmt: skip

_IGNORED = ("mtp_num_hidden_layers", "language_model_only")
_TRAITS = Traits(
    zero_centered_norms=True,
    output_gate=True,
    local_only="gated delta nets",
    engine_imports=("torchvision",),
    keys=_text_keys,
    refuse=unsupported_delta_features,
)
QWEN3_5 = Architecture(
    "Qwen3_5ForCausalLM",
    (EMBEDDING, *GATED_ATTENTION, *ROWS_BY_PART, *DENSE_MLP, FINAL_NORM, OUTPUT_LAYER),
    keys=KEYS,
    defaults=DEFAULTS,
    only=ONLY,
    ignored=_IGNORED,
    traits=_TRAITS,
    wrapper="Qwen3_5ForConditionalGeneration",
)
QWEN3_5_MOE = Architecture(
    "Qwen3_5MoeForCausalLM",
    (
        EMBEDDING,
        *GATED_ATTENTION,
        *ROWS_BY_PART,
        *MIXTURE_OF_EXPERTS,
        *SHARED_EXPERT,
        FINAL_NORM,
        OUTPUT_LAYER,
    ),
    keys=(
        *KEYS, "num_experts", "num_experts_per_tok", "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ),
    defaults={**DEFAULTS, "intermediate_size": 1},  # no layer has a dense MLP
    only={**ONLY, "norm_topk_prob": True},
    ignored=_IGNORED,
    traits=replace(_TRAITS, keys=_keys),
    wrapper="Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip
