"""`megatron-rl convert` in both directions under different layouts changes no bit."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.functional.forked_runs import ForkedCommand
from tests.functional.test_actor_architectures import MODELS, _make_model
from tests.functional.test_actor_layouts import freeze_behavior, make_model, make_rollouts, plan
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def convert(source, target, *words):
    """Run the command; returns its output."""
    words = ["convert", "--from", str(source), "--to", str(target), *words]
    command = ForkedCommand(words, output=target.with_suffix(".txt"), cwd=ROOT)
    assert command.wait(timeout=300) == 0, command.read()
    return command.read()


def assert_same_model(folder, like):
    mine, theirs = (load_file(path / "model.safetensors") for path in (folder, like))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name
    assert (folder / "config.json").read_bytes() == (like / "config.json").read_bytes()


def test_convert_round_trip_across_layouts(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tmp_path / "model"
    make_model(model, tied=False)
    tensors = load_file(model / "model.safetensors")  # like some published models: norms in float32
    mixed = {key: x if "norm" in key else x.bfloat16() for key, x in tensors.items()}
    save_file(mixed, model / "model.safetensors", metadata={"format": "pt"})
    (model / "tokenizer.json").write_text("{}")

    output = convert(model, tmp_path / "stored", "parallel.tensor=2")
    assert f"wrote {tmp_path / 'stored'}: {len(mixed)} tensors" in output
    assert (tmp_path / "stored" / "tokenizer.json").is_file()
    assert not list((tmp_path / "stored").glob("*.safetensors"))
    convert(tmp_path / "stored", tmp_path / "back", "parallel.pipeline=2")
    assert_same_model(tmp_path / "back", model)
    assert not list((tmp_path / "back").rglob("*.distcp"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_convert_round_trip_with_experts(tmp_path):
    _make_model(tmp_path / "model", *MODELS["qwen3_moe"])
    convert(tmp_path / "model", tmp_path / "stored", "parallel.expert=2")
    convert(tmp_path / "stored", tmp_path / "back", "parallel.tensor=2")
    assert_same_model(tmp_path / "back", tmp_path / "model")


def _train(rank, world_size, root):
    """Start an actor from a converted model; save and export after an update."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.objectives import build_objective

    root = Path(root)
    topology = groups.initialise(tensor=world_size)
    settings = ActorSettings(learning_rate=1e-2, warmup_updates=0)
    plain = MegatronActor(root / "model", topology=topology, settings=settings)
    actor = MegatronActor(root / "stored", topology=topology, settings=settings)
    pairs = zip(
        plain.named_parameters_local().values(),
        actor.named_parameters_local().values(),
        strict=True,
    )
    same = [torch.equal(one, other) for one, other in pairs]
    (minibatch,) = plan(actor, *make_rollouts(), minibatches=1)
    freeze_behavior(actor, [minibatch])
    actor.update(minibatch, build_objective("grpo"))
    actor.save(root / "run" / "checkpoints" / "step_000001" / "actor")
    actor.export_hf(root / "exported")
    plain.load(root / "stored" / "actor")  # weights without an optimizer
    return json.dumps([all(same), plain.updates])


def test_run_from_converted_model_and_its_checkpoint_convert_back(tmp_path):
    make_model(tmp_path / "model", tied=True)
    convert(tmp_path / "model", tmp_path / "stored", "parallel.pipeline=2")
    for text in run_ranks(_train, 2, str(tmp_path)):
        assert json.loads(text) == [True, 0]
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("model", "exported"))
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    manifest = '{"step": 1, "files": {}, "digests": []}'
    (checkpoint / "trainer.json").write_text(manifest)
    config = f"model: {{path: {tmp_path / 'model'}}}\ndata: {{train: prompts.parquet}}\n"
    (tmp_path / "run" / "config.yaml").write_text(config)
    convert(tmp_path / "run", tmp_path / "back")  # the newest checkpoint, with the run's model
    assert_same_model(tmp_path / "back", tmp_path / "exported")
