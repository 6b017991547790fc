"""Qwen1.5-MoE and Qwen2-MoE: routed experts plus a gated shared expert for every token.

arXiv 2407.10671, section 2.2.2; the output is routed(x) + sigmoid(gate x) * shared(x).
"""

from megatron_rl.models.weights import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    MIXTURE_OF_EXPERTS,
    OUTPUT_LAYER,
    QKV_BIAS,
    Architecture,
    Weight,
)

_HF, _MEGATRON = "model.layers.{layer}.mlp.", "decoder.layers.{layer}.mlp.shared_experts."

SHARED_EXPERT = (
    Weight(
        "layer", "gate_up", ("shared_ffn", "hidden"),
        (_HF + "shared_expert.gate_proj.weight", _HF + "shared_expert.up_proj.weight"),
        _MEGATRON + "linear_fc1.weight",
        _HF + "shared_expert.gate_up_proj.weight",
        layers="experts",
    ),
    Weight(
        "layer", "columns", ("hidden", "shared_ffn"),
        (_HF + "shared_expert.down_proj.weight",),
        _MEGATRON + "linear_fc2.weight",
        _HF + "shared_expert.down_proj.weight",
        layers="experts",
    ),
    Weight(
        "layer", "replicated", ("one", "hidden"),
        (_HF + "shared_expert_gate.weight",),
        _MEGATRON + "gate_weight",
        _HF + "shared_expert_gate.weight",
        layers="experts",
    ),
)  # fmt: skip

ARCHITECTURE = Architecture(
    "Qwen2MoeForCausalLM",
    (
        EMBEDDING,
        *ATTENTION,
        QKV_BIAS,
        *MIXTURE_OF_EXPERTS,
        *SHARED_EXPERT,
        FINAL_NORM,
        OUTPUT_LAYER,
    ),
)
