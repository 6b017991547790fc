"""Shapes of published models, copied from their config.json on the Hugging Face hub.

Planning uses only sizes, so the rotary embedding values are placeholders.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.models.architectures import ARCHITECTURES
from megatron_rl.models.config_keys import RotaryScaling
from megatron_rl.models.shape import ExpertShape, ModelShape, build_shape, read_model_shape
from megatron_rl.models.weights import LocalLayers
from megatron_rl.preflight.hub_names import find_cached_config

# Models whose config.json has more keys than `write_config_json` writes.
_GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "vocab_size": 151552,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 131072,
}
_GLM_LARGE: dict[str, Any] = _GLM | {
    "hidden_size": 5120,
    "num_hidden_layers": 92,
    "intermediate_size": 12288,
    "n_routed_experts": 160,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
_LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
# Sizes of transformers' configuration classes, whose defaults are those of these two models. Of
# Qwen3.5 it is the text model, without the vision tower of the published folder.
_HYBRID: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rope_theta": 1e7,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "GLM-4.5-Air": _GLM
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "intermediate_size": 10944,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
    "Qwen3-Next-80B-A3B-Instruct": _HYBRID
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "vocab_size": 151936,
    },
    "Qwen3.5-35B-A3B": _HYBRID
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 248320,
    },
    "GLM-4.5": _GLM_LARGE,
    "GLM-4.7": _GLM_LARGE | {"max_position_embeddings": 202752},
    "Moonlight-16B-A3B-Instruct": _LATENT
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "intermediate_size": 11264,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "vocab_size": 163840,
        "rope_theta": 50000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "num_nextn_predict_layers": 0,
    },
    "DeepSeek-V3": _LATENT
    | {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "intermediate_size": 18432,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "vocab_size": 129280,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        "num_nextn_predict_layers": 1,
    },
}


def _dense(
    architecture: str, layers: int, hidden: int, heads: int, groups: int, ffn: int, vocabulary: int,
    *, head_dim: int | None = None, tied: bool = False, experts: ExpertShape | None = None,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=head_dim or hidden // heads,
        ffn_hidden_size=ffn,
        vocab_size=vocabulary,
        max_position_embeddings=131072,
        rotary_base=1e6,
        norm_epsilon=1e-6,
        tied_embeddings=tied,
        experts=experts,
    )


def _gemma3(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocabulary: int,
    *, window: int, head_dim: int = 256, query_scalar: int = 256,
) -> ModelShape:  # fmt: skip
    shape = _dense(
        "Gemma3ForCausalLM", layers, hidden, heads, groups, ffn, vocabulary,
        head_dim=head_dim, tied=True,
    )  # fmt: skip
    return replace(
        shape,
        sliding_window=window,
        local_layers=LocalLayers(tuple(range(5, layers, 6)), rotary_base=1e4),
        softmax_scale=None if query_scalar == head_dim else query_scalar**-0.5,
    )


def _gpt_oss(layers: int, experts: int) -> ModelShape:
    shape = _dense(
        "GptOssForCausalLM", layers, 2880, 64, 8, 2880, 201088,
        head_dim=64, experts=ExpertShape(experts, 4, 2880, True),
    )  # fmt: skip
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "truncate": False}  # fmt: skip
    return replace(
        shape,
        sliding_window=128,
        local_layers=LocalLayers(tuple(range(1, layers, 2))),
        rotary_base=150000.0,
        rotary_scaling=RotaryScaling("yarn", tuple(yarn.items())),
        norm_epsilon=1e-5,
    )


_QWEN2, _QWEN3, _MOE = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
_LLAMA, _MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
MODELS = {
    "Qwen2.5-0.5B": _dense(_QWEN2, 24, 896, 14, 2, 4864, 151936, tied=True),
    "Qwen2.5-1.5B": _dense(_QWEN2, 28, 1536, 12, 2, 8960, 151936, tied=True),
    "DeepSeek-R1-Distill-Qwen-1.5B": _dense(_QWEN2, 28, 1536, 12, 2, 8960, 151936),
    "Qwen2.5-3B": _dense(_QWEN2, 36, 2048, 16, 2, 11008, 151936, tied=True),
    "Qwen2.5-7B": _dense(_QWEN2, 28, 3584, 28, 4, 18944, 152064),
    "Qwen2.5-14B": _dense(_QWEN2, 48, 5120, 40, 8, 13824, 152064),
    "Qwen2.5-32B": _dense(_QWEN2, 64, 5120, 40, 8, 27648, 152064),
    "Qwen2.5-72B": _dense(_QWEN2, 80, 8192, 64, 8, 29568, 152064),
    "Qwen3-4B": _dense(_QWEN3, 36, 2560, 32, 8, 9728, 151936, head_dim=128, tied=True),
    "Qwen3-8B": _dense(_QWEN3, 36, 4096, 32, 8, 12288, 151936),
    "Qwen3-32B": _dense(_QWEN3, 64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "Qwen3-30B-A3B": _dense(
        _MOE, 48, 2048, 32, 4, 6144, 151936, head_dim=128, experts=ExpertShape(128, 8, 768, True)
    ),
    "Qwen3-235B-A22B": _dense(
        _MOE, 94, 4096, 64, 4, 12288, 151936, head_dim=128, experts=ExpertShape(128, 8, 1536, True)
    ),
    "Llama-3.1-8B": _dense(_LLAMA, 32, 4096, 32, 8, 14336, 128256),
    "Llama-3.1-70B": _dense(_LLAMA, 80, 8192, 64, 8, 28672, 128256),
    "Mistral-7B-Instruct-v0.3": _dense(_MISTRAL, 32, 4096, 32, 8, 14336, 32768),
    "Mistral-Small-24B-Instruct-2501": _dense(
        _MISTRAL, 40, 5120, 32, 8, 32768, 131072, head_dim=128
    ),
    "gpt-oss-20b-bf16": _gpt_oss(24, 32),
    "gpt-oss-120b-bf16": _gpt_oss(36, 128),
    # The sizes from 4B are those of the text models in checkpoints that also have a vision tower.
    "Gemma-3-1B-it": _gemma3(26, 1152, 4, 1, 6912, 262144, window=512),
    "Gemma-3-4B-it-text": _gemma3(34, 2560, 8, 4, 10240, 262208, window=1024),
    "Gemma-3-12B-it-text": _gemma3(48, 3840, 16, 8, 15360, 262208, window=1024),
    "Gemma-3-27B-it-text": _gemma3(
        62, 5376, 32, 16, 21504, 262208, window=1024, head_dim=128, query_scalar=168
    ),
} | {name: build_shape(config) for name, config in CONFIGS.items()}


def find_shape(model: str) -> ModelShape:
    """Return the shape of a Hugging Face folder, of a built-in name, or of a cached hub model.

    A config.json is enough. Leading folders of built-in names are ignored: `models/Qwen2.5-7B` and
    `Qwen/Qwen2.5-7B` both mean Qwen2.5-7B.
    """
    if Path(model).is_dir():
        return read_model_shape(model)
    by_lower_case = {name.lower(): shape for name, shape in MODELS.items()}
    if shape := by_lower_case.get(model.split("/")[-1].lower()):
        return shape
    if cached := find_cached_config(model):
        return read_model_shape(cached)
    raise UserError(
        f"{model} is neither a folder with a config.json, nor in the Hugging Face cache, nor one "
        f"of {', '.join(MODELS)}"
    )


def with_built_in_model(config: Config, folder: Path) -> Config:
    """Return the config with a folder that has a config.json, if its model does not exist here.

    `model.path` may be a hub model in the cache, or a path whose last part is a built-in name: its
    config.json is written to `folder`.
    """
    if Path(config.model.path).exists():
        return config
    source = find_cached_config(config.model.path)
    source = source or write_config_json(find_shape(config.model.path), folder)
    model = config.model.model_copy(update={"path": str(source)})
    return config.model_copy(update={"model": model})


def write_config_json(shape: ModelShape, folder: Path) -> Path:
    """Write the config.json of a shape to `folder` and return the folder.

    Published models with experts behind dense layers may have other numbers of layers and experts.
    """
    sizes = {"num_hidden_layers": shape.num_layers}
    if shape.experts is not None:
        key = "num_experts" if shape.delta else "n_routed_experts"
        sizes[key] = shape.experts.num_experts
    candidates = (published | sizes for published in CONFIGS.values())
    known = next((config for config in candidates if build_shape(config) == shape), None)
    values: dict[str, Any] = known or {
        "architectures": [shape.architecture],
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_hidden_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rotary_base,
        "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied_embeddings,
        "sliding_window": shape.sliding_window,  # a missing key would mean Mistral's default
    }
    if shape.local_layers is not None:
        flags = shape.local_layers.flags(shape.num_layers)
        kinds = {1: "sliding_attention", 0: "full_attention"}
        values["layer_types"] = [kinds[flag] for flag in flags]
        if shape.local_layers.rotary_base is not None:
            values["rope_local_base_freq"] = shape.local_layers.rotary_base
    values = {"dtype": "bfloat16"} | values  # as published models have
    architecture = ARCHITECTURES[shape.architecture]
    if "query_pre_attn_scalar" in architecture.defaults:
        scale = shape.softmax_scale
        values["query_pre_attn_scalar"] = shape.head_dim if scale is None else scale**-2
    if shape.experts is not None and known is None:
        experts = {
            "num_experts": shape.experts.num_experts,
            "num_experts_per_tok": shape.experts.experts_per_token,
            "moe_intermediate_size": shape.experts.ffn_hidden_size,
            "norm_topk_prob": shape.experts.normalize_top_k,
        }
        read = {*architecture.keys, *architecture.defaults}
        values |= {key: value for key, value in experts.items() if key in read}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder
