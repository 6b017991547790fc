"""gpt-oss (arXiv 2508.10925): sinks, windows in every other layer, biases, clamped experts.

Files have one tensor for all experts of a layer, with each expert's matrices transposed and the
rows of gate and up in turn. Megatron's parameter has the rows in turn, too (`actor/clamped.py`), so
that shards are rectangles. An expert's name is that by which vLLM loads it alone.
"""

from dataclasses import replace
from typing import Any

from megatron_rl.models.local_layers import LocalPattern
from megatron_rl.models.traits import Traits
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

ALPHA, LIMIT = 1.702, 7.0  # vLLM's kernels have no others
_HF, _MEGATRON = "model.layers.{layer}.", "decoder.layers.{layer}."


def _as_in_vllm(weight: Weight) -> Weight:
    return replace(weight, vllm=weight.vllm.replace(".self_attn.", ".attn."), fused=None)


def _expert(cut: Any, size: tuple, stored: str, name: str, megatron: str) -> Weight:
    return Weight(
        "expert", cut, size,
        (f"{_HF}mlp.experts.{{expert}}.{name}",),
        f"{_MEGATRON}mlp.experts.local_experts.{{expert}}.linear_{megatron}",
        f"{_HF}mlp.experts.routed_experts.{name}",
        stored=f"{_HF}mlp.experts.{stored}",
    )  # fmt: skip


WEIGHTS = (
    replace(EMBEDDING, vllm="model.embedding.weight"),
    *map(_as_in_vllm, (*ATTENTION, QKV_BIAS)),
    Weight(
        "layer", "replicated", ("hidden",),
        (_HF + "self_attn.o_proj.bias",),
        _MEGATRON + "self_attention.linear_proj.bias",
        _HF + "attn.o_proj.bias",
    ),
    Weight(
        "layer", "rows", ("heads",),
        (_HF + "self_attn.sinks",),
        _MEGATRON + "self_attention.core_attention.sinks",
        _HF + "attn.sinks",
    ),
    MIXTURE_OF_EXPERTS[0],
    Weight(
        "layer", "replicated", ("experts", "hidden"),
        (_HF + "mlp.router.weight",),
        _MEGATRON + "mlp.router.weight",
        _HF + "mlp.router.weight",
    ),
    Weight(
        "layer", "replicated", ("experts",),
        (_HF + "mlp.router.bias",),
        _MEGATRON + "mlp.router.bias",
        _HF + "mlp.router.bias",
    ),
    _expert("rows", ("expert_gate_up", "hidden"), "gate_up_proj", "w13_weight", "fc1.weight"),
    _expert("rows", ("expert_gate_up",), "gate_up_proj_bias", "w13_bias", "fc1.bias"),
    _expert("columns", ("hidden", "expert_ffn"), "down_proj", "w2_weight", "fc2.weight"),
    _expert("replicated", ("hidden",), "down_proj_bias", "w2_bias", "fc2.bias"),
    FINAL_NORM,
    OUTPUT_LAYER,
)  # fmt: skip


def _keys(config: dict[str, Any]) -> dict[str, Any]:
    experts = config.get("num_local_experts") or config.get("num_experts") or 128
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096}  # fmt: skip
    rotary = config.get("rope_scaling") or config.get("rope_parameters") or yarn
    base = rotary.get("rope_theta") or config.get("rope_theta") or 150000.0
    return config | {
        "num_experts": experts,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,  # softmax of the chosen experts' scores
        "sliding_window": config.get("sliding_window", 128),
        "rope_parameters": rotary | {"rope_theta": base},
        "rope_scaling": None,
    }


def _refuse(config: dict[str, Any]) -> list[str]:
    quantized = (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    dequantize = "transformers converts them with Mxfp4Config(dequantize=True): docs/models.md"
    features = {
        f"MXFP4 experts ({dequantize})": quantized,
        "attention_bias false": config.get("attention_bias", True) is False,
        f"swiglu_alpha {config.get('swiglu_alpha')}": config.get("swiglu_alpha", ALPHA) != ALPHA,
        f"swiglu_limit {config.get('swiglu_limit')}": config.get("swiglu_limit", LIMIT) != LIMIT,
        f"rms_norm_eps {config.get('rms_norm_eps')}": config.get("rms_norm_eps", 1e-5) != 1e-5,
        "tied embeddings": bool(config.get("tie_word_embeddings")),
        "rope parameters other than yarn": config["rope_parameters"].get("rope_type") != "yarn",
    }
    return [feature for feature, present in features.items() if present]


ARCHITECTURE = Architecture(
    "GptOssForCausalLM",
    WEIGHTS,
    default_head_dim=64,
    default_sliding_window=128,
    traits=Traits(
        activation="clamped_silu",
        biases=True,
        local_pattern=LocalPattern(2, fixed=True),
        engine_shares_key_heads=False,
        local_only="attention sinks and experts with a clamped activation",
        keys=_keys,
        refuse=_refuse,
    ),
)
