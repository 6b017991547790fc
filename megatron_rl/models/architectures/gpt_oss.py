"""gpt-oss (arXiv 2508.10925): sinks, windows in every other layer, biases, clamped experts.

Files have one tensor for all experts of a layer, with each expert's matrices transposed and the
rows of gate and up in turn. Megatron's parameter has the rows in turn, too (`actor/layers.py`), so
that shards are rectangles. An expert's name is that by which vLLM loads it alone.
"""

from dataclasses import replace
from typing import Any

from megatron_rl.models.weights import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    MIXTURE_OF_EXPERTS,
    OUTPUT_LAYER,
    QKV_BIAS,
    Architecture,
    LocalPattern,
    Traits,
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
    experts = config.get("num_local_experts", config.get("num_experts", 128))
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096}  # fmt: skip
    names = ("rope_scaling", "rope_parameters")
    given = {name: config[name] for name in names if config.get(name)} or {"rope_parameters": yarn}
    theta = {"rope_theta": config.get("rope_theta", 150000.0)}
    rotary = {name: theta | given[name] if name in given else None for name in names}
    return config | {
        "num_experts": experts,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,  # softmax of the chosen experts' scores
        **rotary,
    }


def _refuse(config: dict[str, Any]) -> list[str]:
    quantized = (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    dequantize = "transformers converts them with Mxfp4Config(dequantize=True): docs/models.md"
    rotary = config["rope_scaling"] or config["rope_parameters"]
    features = {
        f"MXFP4 experts ({dequantize})": quantized,
        "rope parameters other than yarn": rotary.get("rope_type") != "yarn",
        "experts_per_token other than num_experts_per_tok": config.get("experts_per_token")
        not in (None, config["num_experts_per_tok"]),
    }
    return [feature for feature, present in features.items() if present]


ARCHITECTURE = Architecture(
    "GptOssForCausalLM",
    WEIGHTS,
    keys=("num_local_experts", "num_experts", "num_experts_per_tok", "experts_per_token"),
    defaults={"head_dim": 64, "sliding_window": 128},
    # vLLM has these values in its code.
    only={
        "attention_bias": True, "swiglu_alpha": ALPHA, "swiglu_limit": LIMIT, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    traits=Traits(
        activation="clamped_silu",
        biases=True,
        local_pattern=LocalPattern(2, fixed=True),
        engine_shares_key_heads=False,
        local_only="attention sinks and experts with a clamped activation",
        keys=_keys,
        refuse=_refuse,
    ),
)  # fmt: skip
