"""Model shapes read from config.json, compared with the models that transformers builds."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_rl.models.adapters import target_problems
from megatron_rl.models.config_keys import TEXT_MODELS
from megatron_rl.models.shape import read_model_shape, tensor_shapes
from megatron_rl.models.stored_tensors import (
    check_headers,
    further_tensors,
    stored_shapes,
    view_stored,
)
from tests.published_form import load_model, publish

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}
HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


GROUPED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}

LATENT = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": 10,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _config(name: str, **changes):
    sizes = SIZES | (EXPERTS if name.endswith("Moe") else {}) | changes
    if name in ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe"):
        sizes = SIZES | HYBRID | changes
    if name in ("Qwen3Next", "Qwen3_5Moe"):
        sizes |= EXPERTS | {"shared_expert_intermediate_size": 20} | changes
    if name == "DeepseekV3":
        sizes = SIZES | GROUPED | LATENT | changes
    if name == "Glm4Moe":
        sizes = SIZES | GROUPED | {"attention_bias": True, "use_qk_norm": True} | changes
    if name == "Qwen2Moe":
        sizes["shared_expert_intermediate_size"] = 20
    if name.startswith("Qwen2"):
        sizes.pop("head_dim")
    if name == "Mistral":
        sizes = {"sliding_window": None} | sizes
    if name == "GptOss":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config_class = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
    return config_class(**sizes, architectures=[f"{name}ForCausalLM"])


NAMES = [
    "Qwen2",
    "Qwen2Moe",
    "Llama",
    "Mistral",
    "Qwen3",
    "Qwen3Moe",
    "Qwen3Next",
    "Qwen3_5",
    "Qwen3_5Moe",
    "Gemma3",
    "Glm4Moe",
    "DeepseekV3",
]


@pytest.mark.parametrize(
    ("name", "tied"), [*zip(NAMES, itertools.cycle((False, True))), ("GptOss", False)]
)
def test_tensor_shapes_equal_those_saved_by_transformers(name, tied, tmp_path):
    config = _config(name, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    saved = {
        key: tuple(value.shape) for key, value in load_file(tmp_path / "model.safetensors").items()
    }
    assert stored_shapes(read_model_shape(tmp_path)) == saved


def test_read_model_shape_accepts_both_keys_of_rotary_base(tmp_path):
    config = _config("Qwen2", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config.save_pretrained(tmp_path)
    assert read_model_shape(tmp_path).rotary_base == 5e5
    old = json.loads((tmp_path / "config.json").read_text())
    del old["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(old | {"rope_theta": 7e5}))
    assert read_model_shape(tmp_path).rotary_base == 7e5


def test_yarn_positions_are_original_positions_times_factor(tmp_path):
    # Qwen2.5's model cards add yarn to 32,768 positions; other configs give the product.
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for positions in (32768, 131072):
        config = _config("Qwen2", rope_parameters=yarn, max_position_embeddings=positions)
        config.save_pretrained(tmp_path)
        assert read_model_shape(tmp_path).max_position_embeddings == 131072


FULL, LOCAL, DELTA = "full_attention", "sliding_attention", "linear_attention"


def test_read_model_shape_has_the_parts_of_each_family(tmp_path):
    def read(name):
        _config(name).save_pretrained(tmp_path)
        return read_model_shape(tmp_path)

    assert read("Glm4Moe").experts.first_layer == 1
    latent = read("DeepseekV3")
    assert (latent.latent.query_rank, latent.head_dim, latent.rotary_size) == (10, 9, 4)
    local = read("GptOss")
    assert (local.sliding_window, local.local_layers.full, local.rotary_base) == (128, (1,), 150000)
    hybrid = read("Qwen3_5Moe")
    assert hybrid.delta.layers == (0, 2) and hybrid.rotary_size == 2
    (problem,) = target_problems(hybrid, ["qkv"])
    assert "lora: adapters of Qwen3_5MoeForCausalLM are not supported" in problem


def test_latent_attention_without_a_query_latent_has_the_tensors_of_transformers(tmp_path):
    config = _config("DeepseekV3", q_lora_rank=None)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    shapes = tensor_shapes(read_model_shape(tmp_path))
    attention = {name: size for name, size in expected.items() if ".self_attn." in name}
    assert {name: size for name, size in shapes.items() if ".self_attn." in name} == attention


def test_options_of_glm_decide_its_weights(tmp_path):
    for options in ({}, {"attention_bias": True}, {"use_qk_norm": True}):
        config = {"attention_bias": False, "use_qk_norm": False} | options
        _config("Glm4Moe", **config).save_pretrained(tmp_path)
        shape = read_model_shape(tmp_path)
        assert (shape.qkv_bias, shape.qk_norm) == tuple(config.values())
        assert shape.rotary_size == 4  # half of a head


def test_sliding_window_of_mistral_defaults_to_that_of_transformers(tmp_path):
    path = tmp_path / "config.json"
    for window in (None, 8):
        _config("Mistral", sliding_window=window).save_pretrained(tmp_path)
        assert read_model_shape(tmp_path).sliding_window == window
    config = json.loads(path.read_text())
    del config["sliding_window"]
    path.write_text(json.dumps(config))
    default = transformers.AutoConfig.from_pretrained(tmp_path).sliding_window
    assert read_model_shape(tmp_path).sliding_window == default == 4096


def test_sliding_window_is_refused_where_transformers_ignores_it_and_vllm_does_not(tmp_path):
    _config("Llama", sliding_window=8).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="sliding_window=8"):
        read_model_shape(tmp_path)
    _config("Qwen2", sliding_window=8).save_pretrained(tmp_path)
    assert read_model_shape(tmp_path).sliding_window is None


def test_gemma_3_is_read_from_keys_of_earlier_releases_as_by_transformers(tmp_path):
    """The keys of the published 1B and 4B, which have neither layer types nor tied embeddings."""
    path = tmp_path / "config.json"
    config = _config("Gemma3", num_hidden_layers=7).to_dict()
    for key in ("rope_parameters", "layer_types", "tie_word_embeddings"):
        config.pop(key, None)
    scaling = {"factor": 8.0, "rope_type": "linear"}
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling,
           "sliding_window_pattern": 3}  # fmt: skip
    path.write_text(json.dumps(config | old))
    shape, theirs = read_model_shape(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert shape.tied_embeddings and theirs.tie_word_embeddings
    full = [index for index, kind in enumerate(theirs.layer_types) if kind == FULL]
    assert list(shape.local_layers.full) == full == [2, 5]
    assert theirs.rope_parameters[FULL] == {"rope_theta": shape.rotary_base, **scaling}
    assert theirs.rope_parameters[LOCAL]["rope_theta"] == shape.local_layers.rotary_base == 2e4
    assert dict(shape.rotary_scaling.parameters) == {"factor": 8.0}
    assert shape.softmax_scale == theirs.query_pre_attn_scalar**-0.5 == 256**-0.5
    path.write_text(json.dumps(config))
    shape, theirs = read_model_shape(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert list(shape.local_layers.full) == [5] == [theirs.layer_types.index(FULL)]
    assert theirs.rope_parameters[FULL]["rope_theta"] == shape.rotary_base == 1e6
    assert theirs.rope_parameters[LOCAL]["rope_theta"] == shape.local_layers.rotary_base == 1e4


def test_read_model_shape_of_folder_without_config_raises(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        read_model_shape(tmp_path)


@pytest.mark.parametrize(("name", "tied"), [("Qwen3_5", True), ("Qwen3_5Moe", False)])
def test_published_form_has_the_text_model_and_further_tensors(name, tied, tmp_path):
    """Once as published, once as transformers saves the same model: experts one by one."""
    text = _config(name, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(text, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    alone, weights = read_model_shape(tmp_path), load_file(tmp_path / "model.safetensors")
    publish(tmp_path)
    load_model(tmp_path).save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        shape, tensors = read_model_shape(folder), load_file(folder / "model.safetensors")
        further = dict(further_tensors(folder, shape))
        assert stored_shapes(shape) | further == {k: tuple(v.shape) for k, v in tensors.items()}
        assert all(key.startswith(("model.visual.", "mtp.")) for key in further)
        assert any(key.endswith("experts.down_proj") for key in tensors) == shape.fused_experts
        assert replace(shape, wrapper=None, fused_experts=False) == alone
        check_headers(folder, shape)
        views = view_stored(tensors, shape)
        assert views.keys() == weights.keys()
        assert all(torch.equal(views[key], value) for key, value in weights.items())
    assert read_model_shape(tmp_path).fused_experts == (name == "Qwen3_5Moe")


@pytest.mark.parametrize(
    ("outer", "inner", "named"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantized weights"),
        ({}, {"attn_output_gate": False}, "attn_output_gate=false"),
        ({"another_key": 3}, {}, r"another_key=3 \(unknown key\)"),
    ],
)
def test_both_levels_of_a_published_config_are_checked(outer, inner, named, tmp_path):
    text = json.loads(_config("Qwen3_5").to_json_string(use_diff=False))
    text.pop("architectures")
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
              "vision_config": {"depth": 1}, "language_model_only": False}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"text_config": text}))
    assert read_model_shape(tmp_path).wrapper == "Qwen3_5ForConditionalGeneration"
    path.write_text(json.dumps(config | outer | {"text_config": text | inner}))
    with pytest.raises(ValueError, match=named):
        read_model_shape(tmp_path)


def test_config_without_architectures_is_read_as_transformers_reads_it(tmp_path):
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert {kind: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in TEXT_MODELS} == TEXT_MODELS
    config = transformers.Qwen2Config(**SIZES | {"hidden_size": 64})
    config.save_pretrained(tmp_path)
    named = json.loads((tmp_path / "config.json").read_text())
    for given in ({}, {"architectures": None}, {"architectures": []}):
        named.pop("architectures", None)
        (tmp_path / "config.json").write_text(json.dumps(named | given))
        assert read_model_shape(tmp_path).architecture == "Qwen2ForCausalLM"
