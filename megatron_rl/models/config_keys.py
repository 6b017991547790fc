"""The keys of a config.json: defaults, keys that are read, rotary scaling, and refusals.

A key that changes the computation and that nothing here reads would make another model of the same
weights, in the actor or in vLLM, which has keys of its own (`is_causal`, `logit_scale`,
`dual_chunk_attention_config`). So every key is read, has the only supported value, is known to
change nothing, or is refused, and so are values that no model can have. Defaults are those of
transformers' configuration classes.

Keys of rotary scaling are interpreted as in transformers (`modeling_rope_utils.py`):
`rope_parameters`, or the older `rope_scaling` with a separate `rope_theta`. vLLM uses
transformers' implementation.
"""

import json
import math
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_rl.models.weights import Architecture

MISSING_KEYS = {
    "dual_chunk_attention_config": "for sequences shorter than its chunk_size attention is the "
    "ordinary one: remove the key for runs whose sequences are",
    "quantization_config": "quantized weights: use or make a copy in bfloat16",
}
# Parts of models of several modalities, and model_type of the text models that are supported.
_TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
_OTHER_PARTS = ("vision_config", "audio_config")
TEXT_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM", "mistral": "MistralForCausalLM",
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}  # fmt: skip
_DEFAULT_TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Mistral3ForConditionalGeneration": "mistral",
}


def reason_unsupported(architecture: str, config: dict[str, Any]) -> str | None:
    """Return what is missing for an architecture that is not supported; None if unknown."""
    texts = [config[part] for part in _TEXT_PARTS if isinstance(config.get(part), dict)]
    kind = _DEFAULT_TEXT_MODELS.get(architecture)
    if not texts and kind is None and not any(part in config for part in _OTHER_PARTS):
        return None
    kind = texts[0].get("model_type", kind) if texts else kind
    if kind in TEXT_MODELS:
        return (
            "a model of several modalities; its text model is supported: save it by itself as "
            f"{TEXT_MODELS[kind]}, see docs/models.md#several-modalities"
        )
    return f"a model of several modalities; its text model, {kind!r}, is not supported either"


# Read for all architectures.
SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
_ROTARY = (
    "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
    "partial_rotary_factor",
)  # fmt: skip
_READ = {"architectures", "head_dim", "layer_types", "tie_word_embeddings", *SIZES, *_ROTARY}
# The only supported values of keys that change the computation.
_ONLY: dict[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False,
    "use_mrope": False, "rope_interleaved": False, "is_causal": True, "add_cross_attention": False,
    "is_encoder_decoder": False, "tie_encoder_decoder": False, "use_bidirectional_attention": False,
    "activation": "swiglu", "bias": False, "qk_norm": False, "logit_scale": 1.0,
}  # fmt: skip
# Of other models, which are off if null or if they have this value.
_OFF: dict[str, Any] = {
    "qkv_bias": False, "use_bias": False, "use_qkv_bias": False, "lm_head_bias": False,
    "use_qk_norm": False, "logits_scaling": 1.0, "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0, "rotary_pct": 1.0, "parallel_attn": False, "alibi": False,
    "use_parallel_residual": False, "use_logn_attn": False, "use_dynamic_ntk": False,
}  # fmt: skip
_ONLY_OF_EXPERTS: dict[str, Any] = {
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_layer_freq": 1,
    "scoring_func": "softmax",
}  # fmt: skip
# Of a mixture of experts, which change nothing in a dense model; not the numbers of its experts.
_IGNORED_IF_DENSE = {
    "moe_intermediate_size", "moe_layer_freq", "first_k_dense_replace", "norm_topk_prob",
    "n_group", "topk_group", "topk_method", "scoring_func", "routed_scaling_factor",
    "num_experts_per_tok", "decoder_sparse_step", "mlp_only_layers",
}  # fmt: skip
# Names, kernels, tokens, generation, training and heads that a language model does not have.
# Sources: transformers' PretrainedConfig since release 3, published folders, several trainers.
_IGNORED = {
    "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map", "use_cache",
    "cache_implementation", "attn_implementation", "use_flash_attn", "use_flash_attention",
    "pretraining_tp", "ep_size", "tokenizer_class", "model_max_length", "max_sequence_length",
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "return_dict", "return_dict_in_generate", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "prefix",
    "task_specific_params", "problem_type", "finetuning_task", "id2label", "label2id", "num_labels",
    "chunk_size_feed_forward", "torchscript", "use_bfloat16", "pruned_heads", "is_decoder",
    "tf_legacy_loss", "initializer_range", "initializer_factor", "router_aux_loss_coef",
    "aux_loss_alpha", "seq_aux", "router_jitter_noise", "num_nextn_predict_layers",
    "num_mtp_layers", "max_window_layers", "is_llama_config", "transformers.js_config",
    "initial_context_length", "license", "language", "gradient_checkpointing", "loss_type",
    "max_new_tokens", "min_new_tokens", "renormalize_logits", "penalty_alpha", "num_beam_hyps",
    "cross_attention_hidden_size", "low_memory", "use_safetensors", "trust_remote_code",
    "use_flash_attention_2", "flash_attn", "flash_attention", "use_sdpa", "use_liger_kernel",
    "experts_implementation", "fused_mlp", "use_fused_rms_norm", "use_fused_rope",
    "use_memory_efficient_attention", "name_or_path", "base_model_name_or_path", "model_name",
    "name", "description", "author", "version", "datasets", "tags", "library_name", "pipeline_tag",
    "chat_template", "bos_token", "eos_token", "pad_token", "unk_token", "padding_side",
    "tokenizer_padding_side", "tokenizer_model_max_length", "bf16", "fp16", "fp32",
    "init_device", "init_std",
    "z_loss", "z_loss_coef", "router_z_loss_coef", "moe_aux_loss_coeff", "mtp_loss_scaling_factor",
    "keys_to_ignore_at_inference", "attribute_map", "base_model_tp_plan", "base_model_pp_plan",
    "transformers_weights", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "ignore_index", "xla_device", "gradient_checkpointing_kwargs",
    "use_reentrant",
}  # fmt: skip
UNKNOWN = "unknown key"
_IGNORED_ENDINGS = ("_token_id", "_token_ids", "dropout", "_pdrop", "dropout_prob", "_version")
_IGNORED_STARTS = ("_", "output_", "unsloth_")


def with_defaults(config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return config.json with the values that transformers takes for missing keys."""
    return {"tie_word_embeddings": False, **architecture.defaults, **config}


def _is_ignored(key: str, architecture: Architecture) -> bool:
    return (
        key in _IGNORED
        or key in architecture.ignored
        or (key in _IGNORED_IF_DENSE and not architecture.mixture_of_experts)
        or key.endswith(_IGNORED_ENDINGS)
        or key.startswith(_IGNORED_STARTS)
    )


def _accepts_null(key: str, architecture: Architecture) -> bool:
    if key in architecture.defaults:
        return architecture.defaults[key] is None or key in ("sliding_window", "q_lora_rank")
    return key in ("layer_types", "rope_scaling", "rope_parameters", "partial_rotary_factor")


def unsupported_keys(config: dict[str, Any], architecture: Architecture) -> list[str]:
    """List keys of this config.json, before its defaults, whose values nothing here supports."""
    read = {*_READ, *architecture.keys, *architecture.defaults}
    of_experts = _ONLY_OF_EXPERTS if architecture.mixture_of_experts else {}
    only = {**_ONLY, **_OFF, **of_experts, **architecture.only}
    only = {key: value for key, value in only.items() if key not in architecture.defaults}
    unsupported = []
    for key, value in config.items():
        if key in only:
            null_is_off = only[key] == [] or (key in _OFF and key not in architecture.only)
            supported = value == only[key] or (value is None and null_is_off)
            hint = f"supported: {json.dumps(only[key])}"
        elif key in read:
            supported = value is not None or _accepts_null(key, architecture)
            hint = "null: give its value"
        else:
            supported = value is None or _is_ignored(key, architecture)
            hint = MISSING_KEYS.get(key, UNKNOWN)
        if not supported:
            text = json.dumps(value)
            text = text if len(text) <= 60 else f"{text[:57]}..."
            unsupported.append(f"{key}={text} ({hint})")
    return unsupported


_NUMBERS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "rope_local_base_freq",
            "routed_scaling_factor", "query_pre_attn_scalar")  # fmt: skip
# JSON types of the keys that are read; of those without a type here, a whole number.
_TYPES = {
    **dict.fromkeys(("model_type", "output_gate_type", "mamba_ssm_dtype"), "a text"),
    **dict.fromkeys(("architectures", "layer_types"), "a list of texts"),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), "an object"),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "norm_topk_prob", "use_qk_norm",
                     "mtp_use_dedicated_embeddings"), "true or false"),
    **dict.fromkeys(_NUMBERS, "a number"),
}  # fmt: skip
_CLASSES: dict[str, type | tuple[type, ...]] = {
    "a text": str, "a list of texts": list, "an object": dict, "true or false": bool,
    "a number": (int, float), "a whole number": int,
}  # fmt: skip
NAMES = frozenset(("architectures", "model_type"))


def wrong_types(config: dict[str, Any], keys: Set[str]) -> list[str]:
    """List the values whose JSON type is not that of their key, each with the correction.

    Null is no wrong type: other checks accept or refuse it.
    """
    problems = []
    for key in [key for key in config if key in keys and config[key] is not None]:
        value, wanted = config[key], _TYPES.get(key, "a whole number")
        if _has_type(value, wanted):
            continue
        cure = "correct it"
        if isinstance(value, str) and wanted == "a list of texts":
            cure = f"write {json.dumps([value])}"
        elif isinstance(value, str):
            with suppress(ValueError):
                if _has_type(json.loads(value), wanted):
                    cure = f"write {value} without quotes"
        problems.append(f"{key} is {json.dumps(value)}; it must be {wanted}: {cure}")
    return problems


def wrong_types_of_model(config: dict[str, Any], architecture: Architecture) -> list[str]:
    """List the values of another JSON type among all keys that are read, also of rotary scaling."""
    only = {*_ONLY, *_OFF, *architecture.only} - architecture.defaults.keys()
    problems = wrong_types(config, {*_READ, *architecture.keys, *architecture.defaults} - only)
    for rope in (config.get("rope_scaling"), config.get("rope_parameters")):
        if isinstance(rope, dict):
            nested = [each for each in rope.values() if isinstance(each, dict)]
            problems += [
                line for each in (rope, *nested) for line in wrong_types(each, {*_NUMBERS})
            ]
    return problems


def _has_type(value: Any, wanted: str) -> bool:
    if wanted == "a list of texts" and isinstance(value, list):
        return all(isinstance(each, str) for each in value)
    if wanted == "a whole number" and isinstance(value, int) and value < 0:
        return False
    is_switch = isinstance(value, bool)
    return isinstance(value, _CLASSES[wanted]) and is_switch == (wanted == "true or false")


# Fields of ModelShape, ExpertShape, LatentShape and DeltaShape, and their keys in config.json.
_SIZES = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "head_dim": "head_dim",
    "num_attention_heads": "num_attention_heads", "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size", "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}  # fmt: skip
_SIZES_OF_EXPERTS = {
    "num_experts": "num_experts (num_local_experts, n_routed_experts)",
    "experts_per_token": "num_experts_per_tok", "ffn_hidden_size": "moe_intermediate_size",
    "groups": "n_group", "chosen_groups": "topk_group",
}  # fmt: skip
_SIZES_OF_LATENTS = {
    "rank": "kv_lora_rank", "rotated": "qk_rope_head_dim", "value": "v_head_dim",
}  # fmt: skip
_SIZES_OF_DELTA_NETS = {
    "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim", "value_dim": "linear_value_head_dim",
}  # fmt: skip


def shape_problems(shape: Any) -> list[str]:
    """List the values of a shape that are no sizes, no positive numbers, or do not fit together.

    shape: a ModelShape, whose module imports this one.
    """
    experts, latent = shape.experts, shape.latent
    problems = _non_integers(shape, _SIZES)
    problems += _non_integers(experts, _SIZES_OF_EXPERTS) if experts else []
    problems += _non_integers(latent, _SIZES_OF_LATENTS) if latent else []
    problems += _non_integers(shape.delta, _SIZES_OF_DELTA_NETS) if shape.delta else []
    window, numbers = shape.sliding_window, _numbers(shape)
    if window is not None and not _is_whole(window):
        problems.append(
            f"sliding_window is {window!r}; it must be null or a whole number, 1 or more"
        )
    problems += [
        f"{key} is {value!r}; it must be a number above 0"
        for key, value in numbers.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0
    ]
    if not isinstance(shape.tied_embeddings, bool):
        problems.append(
            f"tie_word_embeddings is {shape.tied_embeddings!r}; it must be true or false"
        )
    if problems:
        return problems
    if shape.num_attention_heads % shape.num_query_groups:
        problems.append(
            f"num_key_value_heads={shape.num_query_groups} does not divide "
            f"num_attention_heads={shape.num_attention_heads}"
        )
    if experts and experts.experts_per_token > experts.num_experts:
        problems.append(
            f"num_experts_per_tok={experts.experts_per_token} of {experts.num_experts} experts"
        )
    if experts and (experts.num_experts % experts.groups or experts.chosen_groups > experts.groups):
        problems.append(
            f"topk_group={experts.chosen_groups} of n_group={experts.groups} for "
            f"{experts.num_experts} experts"
        )
    return problems


def _numbers(shape: Any) -> dict[str, Any]:
    numbers: dict[str, Any] = {"rms_norm_eps": shape.norm_epsilon, "rope_theta": shape.rotary_base}
    scaling = dict(shape.rotary_scaling.parameters) if shape.rotary_scaling else {}
    numbers |= {key: value for key, value in scaling.items() if key != "truncate"}
    if shape.experts is not None:
        numbers["routed_scaling_factor"] = shape.experts.scale
    return numbers | {"partial_rotary_factor": shape.rotary_part}


def _non_integers(of: object, sizes: dict[str, str]) -> list[str]:
    values = {key: getattr(of, field) for field, key in sizes.items()}
    return [
        f"{key} is {value!r}; it must be a whole number, 1 or more"
        for key, value in values.items()
        if not _is_whole(value)
    ]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


DEFAULT_BASE = 10000.0
# Required and optional keys of each supported type.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_ORIGINAL = "original_max_position_embeddings"
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL)
# Keys of YaRN's own code: transformers and vLLM use neither, 1 is what they compute.
_ONE = ("attn_factor", "extrapolation_factor")
# vLLM's code for latent attention does not read these keys of yarn.
_NOT_WITH_LATENTS = ("attention_factor", "truncate")
# Frequencies that depend on the longest sequence of a batch would differ between the actor's packs
# and the engine's batches, and so would the log-prob of the same token.
_BY_LENGTH = ("dynamic", "longrope", "su")


@dataclass(frozen=True)
class RotaryScaling:
    """A supported scaling type; parameters are sorted pairs of transformers' names and values."""

    kind: str
    parameters: tuple[tuple[str, float | bool], ...]

    def positions(self, max_position_embeddings: int) -> int:
        """Return the number of positions the model supports, given config.json's value.

        For yarn some configs give the number before scaling and others after it; like vLLM, use the
        original number times the factor.
        """
        if self.kind != "yarn":
            return max_position_embeddings
        values = dict(self.parameters)
        return int(values["original_max_position_embeddings"] * values["factor"])


def _rope_config(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _kind(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def unsupported_rotary_features(config: dict[str, Any], architecture: Architecture) -> list[str]:
    """List the rotary features in this config.json that the actor does not support."""
    rope = _rope_config(config)
    kind = _kind(rope)
    if any(isinstance(value, dict) for value in rope.values()):
        return ["rope parameters per layer type"]
    if kind in _BY_LENGTH:
        return [f"rope type {kind!r} (its frequencies depend on the sequence length)"]
    if kind not in _KEYS:
        return [f"rope type {kind!r}"]
    unsupported = _contradictions(config, rope)
    unsupported += [
        f"rope type {kind!r} without {key}" for key in _KEYS[kind][0] if rope.get(key) is None
    ]
    unsupported += [
        f"{key}=null of rope type {kind!r}"
        for key in ("rope_type", "type", "rope_theta", _ORIGINAL)
        if key in rope and rope[key] is None
    ]
    latent = architecture.latent_attention
    for key, value in rope.items():
        is_read = key in (*_COMMON, *_KEYS[kind][0], *_KEYS[kind][1])
        is_read = is_read and not (latent and key in _NOT_WITH_LATENTS)
        if value is not None and not is_read and not (key in _ONE and value == 1):
            hint = _hint(rope) if key == "attn_factor" and kind == "yarn" else ""
            unsupported.append(f"{key}={json.dumps(value)} of rope type {kind!r}{hint}")
    part = read_rotary_part(config)
    if part != 1 and "partial_rotary_factor" not in architecture.defaults:
        unsupported.append("partial rotary embeddings")
    return unsupported


def _hint(rope: dict[str, Any]) -> str:
    """Return the cure for `attn_factor`, as in R1-0528-Qwen3-8B, with the value its authors meant.

    YaRN's own code multiplies its factor of attention, 0.1 ln(factor) + 1, by it.
    """
    given, factor = rope["attn_factor"], rope.get("factor")
    if rope.get("attention_factor") is not None or not isinstance(given, int | float):
        return ""
    if not isinstance(factor, int | float) or factor <= 0:
        return ""
    meant = given * (0.1 * math.log(factor) + 1)
    return (
        " (neither transformers nor vLLM reads it: for what YaRN's own code computes, replace it "
        f'by "attention_factor": {meant:.6g}; to compute as transformers does, remove it)'
    )


def _contradictions(config: dict[str, Any], rope: dict[str, Any]) -> list[str]:
    """List keys with two values, of which transformers and vLLM would each choose one."""
    found = []
    if config.get("rope_scaling") and config.get("rope_parameters"):
        plain = {"rope_theta": config.get("rope_theta", DEFAULT_BASE)}
        first, second = (
            {**plain, **{("rope_type" if key == "type" else key): v for key, v in each.items()}}
            for each in (config["rope_scaling"], config["rope_parameters"])
        )
        if first != second:
            found.append("rope_scaling other than rope_parameters")
    for key in ("rope_theta", _ORIGINAL):
        values = [each[key] for each in (config, rope) if each.get(key) is not None]
        if len(values) == 2 and values[0] != values[1]:
            found.append(f"{key} {values[0]} and {values[1]}")
    if None not in (kinds := (rope.get("rope_type"), rope.get("type"))) and len({*kinds}) == 2:
        found.append(f"rope_type {kinds[0]!r} and type {kinds[1]!r}")
    return found


def read_rotary_part(config: dict[str, Any]) -> float:
    """Return the part of each head that is rotated."""
    part = _rope_config(config).get("partial_rotary_factor")
    part = config.get("partial_rotary_factor") if part is None else part
    return 1.0 if part is None else float(part)


def read_rotary_base(config: dict[str, Any]) -> float:
    """Return the base of the rotary frequencies."""
    base = _rope_config(config).get("rope_theta")
    return float(config.get("rope_theta", DEFAULT_BASE) if base is None else base)


def read_rotary_scaling(config: dict[str, Any]) -> RotaryScaling | None:
    """Read the scaling from a config.json without unsupported features; None for the default."""
    rope = _rope_config(config)
    kind = _kind(rope)
    if kind == "default":
        return None
    required, optional = _KEYS[kind]
    values = {key: rope[key] for key in (*required, *optional) if rope.get(key) is not None}
    if kind != "linear":
        values[_ORIGINAL] = (
            config.get(_ORIGINAL) or rope.get(_ORIGINAL) or config["max_position_embeddings"]
        )
    return RotaryScaling(kind, tuple(sorted(values.items())))
