"""Models in GGUF files, compared with the models that the files were written from."""

import os
import socket
import subprocess

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron_rl.apps.planning.models import find_shape
from megatron_rl.config import ConfigError, parse_config
from megatron_rl.errors import UserError
from megatron_rl.preflight import gguf_models
from megatron_rl.preflight.gguf_models import find_gguf, folder_of_gguf, read_gguf
from megatron_rl.preflight.hub_names import resolve_hub_names, with_gguf_folders

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
}
TOKENS = ["<|end|>", *bytes_to_unicode().values(), "12", "34"]
MERGES = ["1 2"]  # never used where every digit is split off


def model_of(kind):
    """A random model: of Llama, Qwen2 or Qwen3."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind.capitalize()}Config")(vocab_size=len(TOKENS), **SIZES)
    return transformers.AutoModelForCausalLM.from_config(config)


def permuted(weight, heads):
    """Rows in the order of llama.cpp, in which a rotation's pairs are adjacent."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(file, model, *, settings=(), tensors=(), split="smollm", kind=None, quantize=False):
    """Write a model and a byte-level tokenizer as llama.cpp's converter does."""
    config, name = model.config, kind or model.config.model_type
    writer = gguf.GGUFWriter(file, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(SIZES["head_dim"])
    writer.add_key_length(SIZES["head_dim"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in settings:
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        add(key, value)
    writer.add_name("tiny")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers
    )
    for key, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name == "llama" and ("q_proj" in key or "k_proj" in key):
            values = permuted(values, values.shape[0] // SIZES["head_dim"])
        wanted = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if quantize and values.ndim == 2:
            kinds = gguf.GGMLQuantizationType
            writer.add_tensor(wanted, gguf.quantize(values, kinds.Q8_0), raw_dtype=kinds.Q8_0)
        else:
            writer.add_tensor(wanted, values)
    for key in tensors:
        writer.add_tensor(key, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_folder_has_the_model_that_the_file_was_written_from(tmp_path, kind):
    model = model_of(kind)
    read_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "folder")
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    expected = model.state_dict()
    assert made.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in made.state_dict().items())
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(made(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("split", "pieces"), [("smollm", ["1", "2"]), ("default", ["12"])])
def test_digits_are_split_as_the_file_says(tmp_path, split, pieces):
    read_gguf(write_gguf(tmp_path / "m.gguf", model_of("llama"), split=split), tmp_path / "folder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer.tokenize("a  12") == ["a", *"\u0120\u0120", *pieces]
    assert tokenizer.decode(tokenizer("a  12<|end|>").input_ids) == "a  12<|end|>"


BOS = ("tokenizer.ggml.bos_token_id", 0)


@pytest.mark.parametrize(
    ("split", "settings", "pieces"),
    [
        ("llama-bpe", [BOS], ["<|end|>", "34"]),
        ("llama-bpe", [BOS, ("tokenizer.ggml.add_bos_token", False)], ["34"]),
        ("default", [BOS, ("tokenizer.ggml.add_bos_token", True)], ["<|end|>", "3", "4"]),
        ("default", [BOS], ["3", "4"]),
    ],
)
def test_words_and_the_first_token_are_those_of_llama_cpp(tmp_path, split, settings, pieces):
    """34 is in the vocabulary, and no merge makes it."""
    file = write_gguf(tmp_path / "m.gguf", model_of("llama"), split=split, settings=settings)
    read_gguf(file, tmp_path / "folder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer.convert_ids_to_tokens(tokenizer("34").input_ids) == pieces


@pytest.mark.slow
def test_quantized_file_is_read_once_and_described(tmp_path):
    """Q8_0 has a scale of half precision for 32 values of 8 bits."""
    model, lines = model_of("llama"), []
    file = write_gguf(tmp_path / "m.gguf", model, quantize=True)
    config = parse_config({"model": {"path": str(tmp_path)}, "data": {"train": "t.jsonl"}})
    resolved, overrides, _ = resolve_hub_names(config, echo=lines.append)
    folder = resolved.model.path
    assert overrides == [f'model.path="{folder}"'] and find_gguf(folder) is None
    assert len(lines) == 1 and "Q8_0 (16), F32 (5)" in lines[0] and "trainer.dtype" in lines[0]
    assert folder_of_gguf(file, echo=lines.append) == gguf_models.Path(folder) and len(lines) == 1
    made = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(made[key], value, rtol=0, atol=value.abs().max() / 120)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"settings": [("llama.rope.scaling.type", "linear")]}, "llama.rope.scaling.type"),
        ({"settings": [("tokenizer.ggml.add_eos_token", True)]}, "add_eos_token=true, which"),
        ({"settings": [("tokenizer.ggml.add_space_prefix", True)]}, "add_space_prefix=true, which"),
        ({"settings": [("tokenizer.ggml.add_bos_token", True)]}, "has no tokenizer.ggml.bos_tok"),
        ({"tensors": ["rope_freqs.weight"]}, "rope_freqs.weight is not a tensor of Llama"),
        ({"split": "poro-chat"}, "tokenizer \\(gpt2, text split as poro-chat\\) cannot be rebuilt"),
        ({"kind": "gpt2"}, "architecture gpt2 is not supported; choose from"),
        ({"cut": 0.9}, "is not a complete GGUF file .* bytes"),
        ({"cut": 0.02}, "is not a complete GGUF file .* bytes"),
        ({"cut": 0.0}, "is not a complete GGUF file .* bytes"),
    ],
)
def test_unknown_and_incomplete_files_leave_nothing(tmp_path, problem, message):
    cut = problem.pop("cut", 1.0)
    file = write_gguf(tmp_path / "m.gguf", model_of("llama"), **problem)
    file.write_bytes(file.read_bytes()[: int(cut * file.stat().st_size)])
    with pytest.raises(UserError, match=message):
        read_gguf(file, tmp_path / "models" / "folder")
    assert not [*tmp_path.glob("models/*")]


def test_damaged_text_is_named_with_its_file(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", model_of("llama"))
    file.write_bytes(file.read_bytes().replace(b"gpt2", b"gp\xff2", 1))
    with pytest.raises(
        UserError, match=r"m.gguf is not a complete GGUF file .* codec can't decode"
    ):
        read_gguf(file, tmp_path / "folder")


def test_full_disk_is_found_before_anything_is_read(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "m.gguf", model_of("llama"))
    usage = gguf_models.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(gguf_models.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(UserError, match=r"no space left .* and 1,000 are free"):
        read_gguf(file, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_nodes_that_read_one_file_leave_each_other_alone(tmp_path):
    """They share the folder, but no locks and no process ids."""
    file = write_gguf(tmp_path / "m.gguf", model_of("llama"))
    here, parent = f"{gguf_models.TEMPORARY}{socket.gethostname()}", tmp_path / "models"
    ended = subprocess.Popen(["true"])
    ended.wait()
    others = [f"{gguf_models.TEMPORARY}node-1-7-x", f"{here}-{os.getpid()}-x"]
    for name in (*others, f"{here}-{ended.pid}-x"):
        (parent / name).mkdir(parents=True)
    read_gguf(file, parent / "folder")
    made = parent / "folder" / "model.safetensors"
    before = made.stat().st_mtime_ns
    read_gguf(file, parent / "folder")  # another node's, complete before this one's
    assert made.stat().st_mtime_ns == before
    assert sorted(one.name for one in parent.iterdir()) == sorted([*others, "folder"])


def test_folder_with_several_files_is_ambiguous(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    config = parse_config({"model": {"path": str(tmp_path)}, "data": {"train": "t.jsonl"}})
    with pytest.raises(ConfigError, match=r"model.path: .* has 2 GGUF files .*: a.gguf; b.gguf"):
        resolve_hub_names(config)


@pytest.mark.parametrize("key", ["path", "reference"])
def test_missing_file_is_named_and_not_searched_on_the_hub(tmp_path, key):
    values = {"path": str(tmp_path), key: "models/m.gguf"}  # has the form of a name on the hub
    kl = {"kl": {"coefficient": 0.1}}  # for which a reference is read
    config = parse_config({"model": values, "data": {"train": "t.jsonl"}, "objective": kl})
    with pytest.raises(ConfigError, match=rf"model.{key}: /.*/models/m.gguf does not exist; give"):
        resolve_hub_names(config)


def test_commands_that_plan_read_the_file_of_the_config(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", model_of("llama"))
    config = parse_config({"model": {"path": str(file)}, "data": {"train": "t.jsonl"}})
    folder = with_gguf_folders(config, echo=print).model.path
    assert folder != str(file) and find_shape(folder).architecture == "LlamaForCausalLM"
