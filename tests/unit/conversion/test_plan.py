"""Tests of planning a conversion: source formats, rejected inputs and the dry run."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import save_file

from megatron_rl.actor.checkpoint_contents import COMPLETE, STATE
from megatron_rl.config import ConfigError, parse_config
from megatron_rl.conversion.conversion_plan import describe_dry_run, plan_conversion
from megatron_rl.conversion.name_table import build_name_table
from megatron_rl.models.shape import read_model_shape, tensor_shapes
from megatron_rl.resharding.layouts import ActorLayout
from tests.unit.resharding.shapes import small_shape

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
    return plan_conversion(source, target, like=like, overrides=list(overrides))


def test_plan_conversion_finds_direction_from_source(model, tmp_path):
    to_checkpoint = plan(model, tmp_path / "out")
    assert to_checkpoint.to_checkpoint
    assert to_checkpoint.dtypes["model.norm.weight"] == torch.float32
    assert to_checkpoint.dtypes["lm_head.weight"] == torch.bfloat16
    run = make_run(tmp_path / "run", model)
    newest = run / "checkpoints" / "step_000010"
    for source in (run, newest, newest / "actor"):
        back = plan(source, tmp_path / "out")
        assert not back.to_checkpoint
        assert back.source == newest / "actor"
        assert back.like == model  # from the run's config.yaml
    assert plan(run / "checkpoints" / "step_000005", tmp_path / "out").source.parent.name[-1] == "5"


def test_plan_conversion_rejects_invalid_paths(model, tmp_path):
    empty, out = tmp_path / "empty", tmp_path / "out"
    empty.mkdir()
    alone = make_checkpoint(tmp_path / "alone")
    with pytest.raises(ConfigError, match=r"neither a Hugging Face folder .* nor a checkpoint"):
        plan(empty, out)
    with pytest.raises(ConfigError, match="is never overwritten"):
        plan(model, empty)
    with pytest.raises(ConfigError, match=r"is not in a run directory; give .* by --like"):
        plan(alone, out)
    with pytest.raises(ConfigError, match=r"--like .* has no config.json"):
        plan(alone, out, like=str(empty))
    with pytest.raises(ConfigError, match="--like is for checkpoints"):
        plan(model, out, like=str(model))
    assert plan(alone, out, like=str(model)).like == model
    (alone / COMPLETE).unlink()
    with pytest.raises(ConfigError, match="neither"):
        plan(alone, out, like=str(model))


def test_plan_conversion_rejects_impossible_layouts(model, tmp_path):
    out = tmp_path / "out"
    for overrides, output in (
        (["parallel.tensor=3"], "parallel.tensor=3 does not divide the model's 2 attention heads"),
        (["parallel.pipeline=4"], "parallel.pipeline=4 is more than the model's 2 layers"),
        (["parallel.virtual_stages=2"], "parallel.pipeline is 1"),
        (["parallel.expert=2"], "the model has no experts"),
        (["parallel.tensro=2"], "did you mean parallel.tensor"),
        (["trainer.steps=2"], r"only parallel.\* can be set here"),
    ):
        with pytest.raises(ValueError, match=output):
            plan(model, out, *overrides)
    assert plan(model, out, "parallel.pipeline=2", "parallel.tensor=2").layout.world_size == 4


def test_plan_conversion_rejects_checkpoint_of_another_model(model, tmp_path):
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


def test_describe_dry_run_lists_tensors_and_writes_nothing(model, tmp_path):
    conversion = plan(model, tmp_path / "out", "parallel.tensor=2", "parallel.pipeline=2")
    text = describe_dry_run(conversion)
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert lines["model.layers.[0-1].mlp.down_proj.weight"][1:] == [
        "8", "x", "6", "bfloat16", "decoder.layers.i.mlp.linear_fc2.weight", "columns", "/", "2",
    ]  # fmt: skip
    assert "bfloat16" not in lines["model.norm.weight"]
    # Each stage has one layer, half of it per process: norms 16, attention 4 * 32, MLP 3 * 24. The
    # first stage adds 10 x 8 embeddings, the last as many outputs and the final norm; all 10 rows
    # are on the stage's first process, which has 32 of 64 padded rows.
    assert "processes 0 to 1 (stage 0): 296 elements each" in text
    assert "processes 2 to 3 (stage 1): 304 elements each" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "architecture",
    ["Qwen2ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"],
)
def test_build_name_table_covers_every_tensor_once(architecture):
    shape = small_shape(architecture)
    sizes = tensor_shapes(shape)
    layout = ActorLayout(tensor=2, data=2, expert=2 if shape.experts else 1)
    table = build_name_table(shape, layout, dict.fromkeys(sizes, torch.float32))
    covered = 0
    for name, size, *_ in table:
        layers = shape.num_layers if "layers.[0-3]" in name else 1
        experts = shape.experts.num_experts if ".experts." in name else 1
        covered += layers * experts
        one = name.replace("layers.[0-3]", "layers.1").replace("experts.[0-3]", "experts.2")
        assert size == " x ".join(map(str, sizes[one]))
    assert covered == len(sizes)
