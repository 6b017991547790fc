"""Planning an export: where the checkpoint is found, and what is refused."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import save_file

from megatron_rl.actor.checkpoint_contents import COMPLETE, STATE
from megatron_rl.checkpoint_export import plan_export
from megatron_rl.config import ConfigError, parse_config
from megatron_rl.models.shape import read_model_shape, tensor_shapes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 6,
    "vocab_size": 10,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
}
# Megatron's keys of this model: layers first, q k v and gate up stacked, vocabulary padded to 64.
STORED = {
    "embedding.word_embeddings.weight": (64, 8),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (2, 8),
    "decoder.layers.self_attention.linear_qkv.weight": (2, 24, 8),
    "decoder.layers.self_attention.linear_proj.weight": (2, 8, 8),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (2, 8),
    "decoder.layers.mlp.linear_fc1.weight": (2, 12, 8),
    "decoder.layers.mlp.linear_fc2.weight": (2, 8, 6),
    "decoder.final_layernorm.weight": (8,),
    "output_layer.weight": (64, 8),
}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    sizes = tensor_shapes(read_model_shape(folder))
    tensors = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    tensors["model.norm.weight"] = torch.zeros(8)
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_checkpoint(folder, **changes):
    tensors = {key: torch.zeros(size) for key, size in (STORED | changes).items() if size}
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    (folder / STATE).write_text(json.dumps({"updates": 3}))
    (folder / COMPLETE).touch()
    return folder


def make_run(folder, model):
    """Create a run directory with checkpoints of two steps."""
    folder.mkdir()
    config = parse_config({"model": {"path": str(model)}, "data": {"train": "x.parquet"}})
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump()))
    for step in (5, 10):
        checkpoint = make_checkpoint(folder / "checkpoints" / f"step_{step:06d}" / "actor")
        manifest = {"step": step, "files": {}, "digests": []}
        (checkpoint.parent / "trainer.json").write_text(json.dumps(manifest))
    return folder


def plan(source, target, *overrides, like=None):
    return plan_export(source, target, like=like, overrides=list(overrides))


def test_newest_checkpoint_of_run_is_found_with_its_model(model, tmp_path):
    run = make_run(tmp_path / "run", model)
    newest = run / "checkpoints" / "step_000010"
    for source in (run, newest, newest / "actor"):
        found = plan(source, tmp_path / "out")
        assert (found.checkpoint, found.like) == (newest / "actor", model)
    older = plan(run / "checkpoints" / "step_000005", tmp_path / "out")
    assert older.checkpoint.parent.name == "step_000005"
    # Two embeddings of 10 x 8, layers of 2 norms of 8 and 4 * 64 + 3 * 48, in two bytes; the last
    # norm of 8 in four.
    assert found.mebibytes == (2 * (160 + 2 * (16 + 256 + 144)) + 4 * 8) / 2**20


def test_critic_is_found_in_its_folder(model, tmp_path):
    run, out = make_run(tmp_path / "run", model), tmp_path / "out"
    with pytest.raises(ConfigError, match="was trained without a critic; export the policy"):
        plan_export(run, out, like=None, overrides=[], critic=True)
    newest = run / "checkpoints" / "step_000010"
    make_checkpoint(newest / "critic", **{"output_layer.weight": (1, 8)})
    for name, critic, message in (
        ("actor", True, "actor is the policy's; .* or leave out --critic"),
        ("critic", False, "critic is the critic's; .* or --critic"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_export(newest / name, out, like=None, overrides=[], critic=critic)
    for source in (run, newest, newest / "critic"):
        found = plan_export(source, out, like=None, overrides=[], critic=True)
        assert found.checkpoint == newest / "critic" and found.shape.head == "value"
    assert plan(run, out).checkpoint == newest / "actor"


def test_invalid_paths_are_refused(model, tmp_path):
    empty, out = tmp_path / "empty", tmp_path / "out"
    empty.mkdir()
    alone = make_checkpoint(tmp_path / "alone")
    with pytest.raises(ConfigError, match=r"empty is no checkpoint of a run; give a run directory"):
        plan(empty, out)
    with pytest.raises(ConfigError, match=r"model is no checkpoint of a run but a Hugging Face fo"):
        plan(model, out)
    with pytest.raises(ConfigError, match="is never overwritten"):
        plan(alone, empty, like=str(model))
    with pytest.raises(ConfigError, match=r"is not in a run directory; give .* by --like"):
        plan(alone, out)
    with pytest.raises(ConfigError, match=r"--like .* has no config.json"):
        plan(alone, out, like=str(empty))
    assert plan(alone, out, like=str(model)).like == model
    (alone / COMPLETE).unlink()
    with pytest.raises(ConfigError, match="no checkpoint"):
        plan(alone, out, like=str(model))


def test_impossible_layouts_are_refused(model, tmp_path):
    alone, out = make_checkpoint(tmp_path / "alone"), tmp_path / "out"
    for overrides, output in (
        (["parallel.tensor=3"], "parallel.tensor=3 does not divide the model's 2 attention heads"),
        (["parallel.pipeline=4"], "parallel.pipeline=4 is more than the model's 2 layers"),
        (["parallel.virtual_stages=2"], "parallel.pipeline is 1"),
        (["parallel.expert=2"], "the model has no experts"),
        (["parallel.tensro=2"], "did you mean parallel.tensor"),
        (["trainer.steps=2"], r"only parallel.\* can be set here"),
    ):
        with pytest.raises(ValueError, match=output):
            plan(alone, out, *overrides, like=str(model))
    layout = plan(alone, out, "parallel.pipeline=2", "parallel.tensor=2", like=str(model)).layout
    assert layout.world_size == 4


def test_checkpoint_of_another_model_is_refused(model, tmp_path):
    out = tmp_path / "out"
    qkv = "decoder.layers.self_attention.linear_qkv.weight"
    for name, changes, output in (
        ("wide", {qkv: (2, 32, 8)}, r"linear_qkv.weight has shape \(2, 32, 8\), .* \(2, 24, 8\)"),
        ("deep", {qkv: (3, 24, 8)}, r"linear_qkv.weight has shape \(3, 24, 8\)"),
        ("tied", {"output_layer.weight": None}, "output_layer.weight is missing"),
        ("words", {"embedding.word_embeddings.weight": (64, 9)}, r"has shape \(64, 9\)"),
    ):
        checkpoint = make_checkpoint(tmp_path / name, **changes)
        with pytest.raises(ValueError, match=output):
            plan(checkpoint, out, like=str(model))
    # Padding of the vocabulary belongs to the layout, not to the model.
    padded = make_checkpoint(tmp_path / "padded", **{"output_layer.weight": (192, 8)})
    assert plan(padded, out, like=str(model))
