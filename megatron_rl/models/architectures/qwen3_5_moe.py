"""Qwen3.5 and 3.6 with a mixture of experts in every layer, on text."""

from dataclasses import replace
from typing import Any

from megatron_rl.models.architectures.qwen2_moe import SHARED_EXPERT
from megatron_rl.models.architectures.qwen3_5 import IGNORED, TRAITS, text_keys
from megatron_rl.models.delta_net import DEFAULTS, GATED_ATTENTION, KEYS, ONLY, ROWS_BY_PART
from megatron_rl.models.weights import (
    EMBEDDING,
    FINAL_NORM,
    MIXTURE_OF_EXPERTS,
    OUTPUT_LAYER,
    Architecture,
)


def _keys(config: dict[str, Any]) -> dict[str, Any]:
    # The weights of the chosen experts are normalised, although config.json does not have the key.
    return {"norm_topk_prob": True, **text_keys(config)}


ARCHITECTURE = Architecture(
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
    ignored=IGNORED,
    traits=replace(TRAITS, keys=_keys),
    wrapper="Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip
