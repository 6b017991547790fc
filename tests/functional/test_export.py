"""`megatron-rl export` writes a checkpoint's weights under other layouts without changing a bit."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.functional.forked_runs import ForkedCommand
from tests.functional.test_actor_architectures import MODELS, _make_model
from tests.functional.test_actor_layouts import freeze_behavior, make_rollouts, plan
from tests.published_form import load_model, publish
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def _train(rank, world_size, root):
    """Save a checkpoint and export the weights after an update."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.objectives import build_objective

    root = Path(root)
    topology = groups.initialise(expert=world_size)
    settings = ActorSettings(optimizer=OptimizerSection(learning_rate=1e-2), warmup_updates=0)
    actor = MegatronActor(root / "model", topology=topology, settings=settings)
    (minibatch,) = plan(actor, *make_rollouts(), minibatches=1)
    freeze_behavior(actor, [minibatch])
    actor.update(minibatch, build_objective("grpo"))
    actor.save(root / "run" / "checkpoints" / "step_000001" / "actor")
    actor.export_hf(root / "exported")


def _make_published(folder):
    """Experts of a layer in one tensor; norms in float32 and matrices in bfloat16, as in some."""
    _make_model(folder, *MODELS["qwen3_5_moe"])
    publish(folder)
    tensors = load_file(folder / "model.safetensors")
    mixed = {key: x if "norm" in key else x.bfloat16() for key, x in tensors.items()}
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})


def test_exported_checkpoint_equals_export_of_its_run(tmp_path):
    _make_published(tmp_path / "model")
    run_ranks(_train, 2, str(tmp_path))
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    (checkpoint / "trainer.json").write_text(json.dumps({"step": 1, "files": {}, "digests": []}))
    config = f"model: {{path: {tmp_path / 'model'}}}\ndata: {{train: prompts.parquet}}\n"
    (tmp_path / "run" / "config.yaml").write_text(config)
    words = ["export", str(tmp_path / "run"), str(tmp_path / "again"), "parallel.tensor=2"]
    command = ForkedCommand(words, output=tmp_path / "output.txt", cwd=ROOT)
    assert command.wait(timeout=300) == 0, command.read()
    assert f"wrote {tmp_path / 'again'}: " in command.read()
    before, after, again = (
        load_file(tmp_path / name / "model.safetensors") for name in ("model", "exported", "again")
    )
    norm = next(name for name in before if re.fullmatch(r"model\.(\w+\.)?norm\.weight", name))
    assert not torch.equal(before[norm], after[norm])
    assert after.keys() == again.keys() == before.keys()
    for name, tensor in after.items():
        assert again[name].dtype == tensor.dtype == before[name].dtype, name
        assert torch.equal(again[name], tensor), name
    load_model(tmp_path / "again")
