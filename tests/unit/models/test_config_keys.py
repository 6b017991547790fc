"""Every key of a config.json is read as transformers reads it, or refused by name."""

import json

import pytest
import torch
import transformers

from megatron_rl.errors import UserError
from megatron_rl.models.architectures import ARCHITECTURES
from megatron_rl.models.config_keys import _ONLY, _ONLY_OF_EXPERTS, SIZES
from megatron_rl.models.shape import read_model_shape
from tests.unit.models.test_architectures import _config

NAMES = ["Qwen2", "Qwen2Moe", "Llama", "Mistral", "Qwen3", "Qwen3Moe", "Gemma3", "Glm4Moe",
         "DeepseekV3", "GptOss", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe"]  # fmt: skip
# No default of a configuration class, so that a missing key changes what is read.
OTHER = {
    "rms_norm_eps": 3e-4, "max_position_embeddings": 96, "sliding_window": 5,
    "query_pre_attn_scalar": 7, "tie_word_embeddings": True, "norm_topk_prob": True,
}  # fmt: skip
OTHER_OF_NAME = {
    "GptOss": {"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "Gemma3": {"tie_word_embeddings": False},
    "DeepseekV3": {"routed_scaling_factor": 1.5, "n_shared_experts": 2},
    "Glm4Moe": {"routed_scaling_factor": 1.5, "n_shared_experts": 2},
}
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 24,
        "beta_fast": 20.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.9}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 3.0, "original_max_position_embeddings": 24,
          "low_freq_factor": 1.5, "high_freq_factor": 3.5}  # fmt: skip


def base(name, **changes):
    """Return a config.json with every key of the class, in the form of earlier releases."""
    read = ARCHITECTURES[f"{name}ForCausalLM"]
    known = {*read.keys, *read.defaults, *SIZES, "tie_word_embeddings"}
    other = {key: value for key, value in OTHER.items() if key in known}
    config = json.loads(
        _config(name, **(other | OTHER_OF_NAME.get(name, {}))).to_json_string(use_diff=False)
    )
    rope = config.pop("rope_parameters")
    config["rope_theta"], config["rope_scaling"] = 1234.0, None
    if name == "Gemma3":
        config |= {"rope_local_base_freq": 567.0, "sliding_window_pattern": 2}
        del config["layer_types"], config["_sliding_window_pattern"]
    if name == "GptOss":
        config["rope_scaling"] = {key: rope[key] for key in rope if key != "rope_theta"}
    return config | changes


def read(config, folder):
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_shape(folder)


def read_as_transformers(config, folder):
    """Read what transformers' class makes of a config.json; None: it accepts no such file."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        theirs = transformers.AutoConfig.from_pretrained(folder)
        text = theirs.to_json_string(use_diff=False)
    except Exception:
        return None
    return read(json.loads(text), folder)


def keys_of(name):
    architecture = ARCHITECTURES[f"{name}ForCausalLM"]
    only = {**_ONLY, **_ONLY_OF_EXPERTS, **architecture.only}
    read = {*SIZES, *architecture.keys, *architecture.defaults, *only, "head_dim", "rope_theta",
            "rope_scaling", "tie_word_embeddings", "layer_types"}  # fmt: skip
    return sorted(key for key in read if key in base(name))


@pytest.mark.parametrize("name", NAMES)
def test_missing_and_null_keys_are_read_as_by_transformers_or_refused(name, tmp_path):
    config = base(name)
    assert read(config, tmp_path) == read_as_transformers(config, tmp_path)
    keys = keys_of(name)
    assert len(keys) > 12
    refused = set()
    for key in keys:
        without = {k: v for k, v in config.items() if k != key}
        for what, changed in (("missing", without), ("null", config | {key: None})):
            try:
                ours = read(changed, tmp_path)
            except UserError as error:
                assert key.removeprefix("num_local_") in str(error)
                refused.add((key, what))
                continue
            assert ours == read_as_transformers(changed, tmp_path), f"{key} {what}"
    assert ("rms_norm_eps", "null") in refused
    assert ("tie_word_embeddings", "missing") not in refused


@pytest.mark.parametrize(
    ("name", "rope"),
    [("Llama", LLAMA3), ("DeepseekV3", YARN), ("GptOss", YARN | {"truncate": False})],
)
def test_missing_and_null_rope_keys_are_read_as_by_transformers_or_refused(name, rope, tmp_path):
    accepted = 0
    for form in ("rope_scaling", "rope_parameters"):
        for key in (None, *rope):
            for changed in ({k: v for k, v in rope.items() if k != key}, rope | {key: None}):
                changed.pop(None, None)
                config = base(name, rope_scaling=None) | {form: changed}
                try:
                    ours = read(config, tmp_path)
                except UserError:
                    continue
                assert ours == read_as_transformers(config, tmp_path), f"{form} {key}"
                accepted += 1
    assert accepted >= 4


@pytest.mark.parametrize(
    "changes",
    [
        {"unsloth_version": "2026.1", "_name_or_path": "x", "transformers.js_config": {"a": 1}},
        {"torch_dtype": "bfloat16", "attention_dropout": 0.1, "pretraining_tp": 2},
        {"dual_chunk_attention_config": None, "clip_qkv": None, "qkv_bias": None},
        {"bias": False, "activation": "swiglu", "logit_scale": 1, "use_mrope": False},
        {"rope_scaling": {**YARN, "attn_factor": 1.0, "extrapolation_factor": 1}},
        {"rope_scaling": YARN, "rope_parameters": YARN},
        {"gradient_checkpointing": False, "loss_type": "ForCausalLM", "max_new_tokens": 20},
        {"use_cache": False, "quantization_config": None, "tokenizer_padding_side": "right"},
        # Exports of DeepSeek's dense models have keys of its mixtures of experts.
        {"first_k_dense_replace": 0, "moe_layer_freq": 1, "n_routed_experts": None},
        {"qkv_bias": False, "residual_multiplier": 1.0, "rotary_pct": 1},
    ],
)
def test_keys_that_change_nothing_are_accepted(changes, tmp_path):
    config = base("Llama")
    assert read(config | changes, tmp_path).hidden_size == 32


def test_qwen3_coder_is_read_with_the_keys_of_its_published_config(tmp_path):
    published = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert read(base("Qwen3Moe", **published), tmp_path) == read(base("Qwen3Moe"), tmp_path)


def test_quantized_weights_of_modelopt_are_refused_by_their_file(tmp_path):
    read(base("Qwen2"), tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UserError, match="quantized weights"):
        read(base("Qwen2"), tmp_path)


@pytest.mark.parametrize(
    ("architecture", "config", "named"),
    [
        ("Mistral3ForConditionalGeneration", {}, "save it by itself as MistralForCausalLM"),
        (
            "Mistral3ForConditionalGeneration",
            {"text_config": {"model_type": "ministral3"}},
            "its text model, 'ministral3', is not supported either",
        ),
        ("Qwen2_5_VLForConditionalGeneration", {"vision_config": {}}, "text model, None, is not"),
    ],
)
def test_models_of_several_modalities_are_refused_with_what_can_be_done(
    architecture, config, named, tmp_path
):
    with pytest.raises(UserError, match=named):
        read({"architectures": [architecture], **config}, tmp_path)


def test_text_model_of_mistral_small_3_1_is_saved_by_the_lines_of_the_docs(tmp_path):
    vision = {
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "head_dim": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Mistral3Config(
        vision_config=vision, text_config=_config("Mistral").to_dict(), tie_word_embeddings=False,
        image_token_index=3, architectures=["Mistral3ForConditionalGeneration"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="save it by itself as MistralForCausalLM"):
        read_model_shape(tmp_path)
    both = transformers.Mistral3ForConditionalGeneration(config).eval()
    text = transformers.MistralForCausalLM(both.config.text_config).eval()
    text.model.load_state_dict(both.model.language_model.state_dict())
    text.lm_head.load_state_dict(both.lm_head.state_dict())
    tokens = torch.tensor([[5, 9, 30, 7, 11]])
    assert torch.equal(text(tokens).logits, both(tokens).logits)
    text.save_pretrained(tmp_path / "text")
    assert read_model_shape(tmp_path / "text").architecture == "MistralForCausalLM"
