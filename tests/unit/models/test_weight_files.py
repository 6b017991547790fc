"""Weight files: what they have besides a model's tensors is compared, named or refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_rl.errors import UserError
from megatron_rl.models.safetensors_headers import find_files
from megatron_rl.models.shape import read_critic_shape, read_model_shape
from megatron_rl.models.stored_tensors import check_headers, describe_unread

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "tied"
    torch.manual_seed(5)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=8,
            num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


def write(tied, folder, change, *, index=None):
    """Copy the tied model with other tensors; index: the file that it names for all of them."""
    shutil.copytree(tied, folder)
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file(tensors, file, metadata={"format": "pt"})
    if index is not None:
        named = dict.fromkeys(tensors, index)
        (folder / f"{file.name}.index.json").write_text(json.dumps({"weight_map": named}))
    return folder


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, None),
        ({"score.weight": torch.ones(1, 16)}, None),
        ({"score.weight": torch.ones(2, 16)}, r"score.weight has shape \(2, 16\), but .* \(1, 16"),
        ({"score.weight": torch.ones(1, 16), "score.bias": torch.ones(1)}, "has no score.bias"),
    ],
)
def test_a_critic_starts_from_a_classifier_with_one_label(tied, tmp_path, tensors, message):
    folder = write(tied, tmp_path / "critic", lambda w: w | tensors)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="architecture Qwen3ForSequenceClassification is not sup"):
        read_model_shape(folder)
    shape = read_critic_shape(folder)
    assert shape.head == ("value" if tensors else "none") and not shape.tied_embeddings
    if message is None:
        check_headers(folder, shape)
        return
    with pytest.raises(UserError, match=message):
        check_headers(folder, shape)


def check(folder):
    shape = read_model_shape(folder)
    check_headers(folder, shape)
    return describe_unread(folder, shape)


def renamed(start, before=""):
    return lambda w: {start + name.removeprefix(before): one for name, one in w.items()}


def with_row_changed(w):
    head = w[EMBEDDING].clone()
    head[39, 15] += 1e-3
    return w | {HEAD: head}


def in_bfloat16(w):
    rounded = w[EMBEDDING].bfloat16()
    return w | {EMBEDDING: rounded, HEAD: rounded.double()}


@pytest.mark.parametrize("change", [lambda w: w | {HEAD: w[EMBEDDING].clone()}, in_bfloat16])
def test_an_output_layer_with_the_values_of_the_tied_embeddings_is_accepted(tied, tmp_path, change):
    assert check(write(tied, tmp_path / "m", change)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_row_changed, "tie_word_embeddings=true, but lm_head.weight is stored with other"),
        (lambda w: w | {HEAD: torch.zeros(48, 16)}, "set tie_word_embeddings to false"),
        (lambda w: {HEAD: w.pop(EMBEDDING), **w},
         "only lm_head.weight is stored: store it as model.embed_tokens.weight"),
        (lambda w: w | {"model.layers.1.mlp.down_proj.bias": torch.ones(16)},
         "Qwen3ForCausalLM has no model.layers.1.mlp.down_proj.bias"),
        (lambda w: w | {HEAD.replace("weight", "bias"): torch.ones(40)}, "has no lm_head.bias"),
        (renamed("_fsdp_wrapped_module."), r"wrapped model \(_fsdp_wrapped_module\)"),
        (renamed("base_model.model."), r"the file has base_model.model.model.embed_tokens.weight"),
        (lambda w: {name.replace("mlp", "mlp.inner"): one for name, one in w.items()},
         r"has model.layers.0.mlp.inner.gate_proj.weight instead of .* \(inner\)"),
        (renamed("", "model."), "saved from the model without its head"),
        (lambda w: {name: one for name, one in w.items() if "1.mlp.up" not in name},
         "a file may be missing: download it again"),
    ],
)  # fmt: skip
def test_a_file_of_another_model_is_refused_with_its_own_cure(tied, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        check(write(tied, tmp_path / "m", change))


def test_transformers_uses_an_output_layer_that_is_there_though_the_key_ties_it(tied, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write(tied, tmp_path / "m", with_row_changed))
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_tensors_that_nothing_reads_are_named_once_with_their_number(tied, tmp_path):
    more = {f"model.layers.{n}.self_attn.cache.scale": torch.ones(1) for n in range(2)}
    (line,) = check(write(tied, tmp_path / "m", lambda w: w | more))
    assert "2 tensors are not read" in line
    assert line.endswith("Qwen3ForCausalLM: model.layers.N.self_attn.cache.scale (2)")


def test_a_whole_file_beside_shards_is_refused_and_beside_a_stale_index_read(tied, tmp_path):
    stale = write(tied, tmp_path / "stale", dict, index=SHARD)
    (line,) = check(stale)
    assert f"names 1 files that are not there ({SHARD}" in line
    assert set(find_files(stale).values()) == {"model.safetensors"}
    both = write(tied, tmp_path / "both", dict, index=SHARD)
    save_file({name: 2 * one for name, one in load_file(both / "model.safetensors").items()},
              both / SHARD)  # fmt: skip
    with pytest.raises(UserError, match=r"embed_tokens.weight twice, in model.safetensors and"):
        check(both)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"adapter_config.json": "{}"}, "it has an adapter: merge it"),
        ({"model_index.json": "{}"}, "a pipeline of several models"),
        ({"consolidated.00.pth": ""}, r"convert consolidated.00.pth to model.safetensors"),
        ({}, "download it again"),
    ],
)
def test_a_folder_of_something_else_is_named(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        find_files(tmp_path)
