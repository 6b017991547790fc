"""Qwen3-Next: gated delta nets in three of four layers, many experts in all.

arXiv 2412.06464; sizes and names of transformers' `modeling_qwen3_next.py`.
"""

from megatron_rl.models.architectures.qwen2_moe import SHARED_EXPERT
from megatron_rl.models.delta_net import (
    DEFAULTS,
    GATED_ATTENTION,
    KEYS,
    ONLY,
    ROWS_BY_HEAD,
    unsupported_delta_features,
)
from megatron_rl.models.weights import (
    EMBEDDING,
    FINAL_NORM,
    MIXTURE_OF_EXPERTS,
    OUTPUT_LAYER,
    Architecture,
    Traits,
)

ARCHITECTURE = Architecture(
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
