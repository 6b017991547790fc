"""`megatron-rl export` writes a checkpoint's weights under other layouts without changing a bit."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.functional.forked_runs import ForkedCommand
from tests.functional.test_actor_architectures import MODELS, _make_model
from tests.functional.test_actor_layouts import (
    freeze_behavior,
    make_model,
    make_rollouts,
    plan,
)
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


LAYOUTS = {"before": {"tensor": 2}, "after": {"pipeline": 2}}


def _value(rank, world_size, root, name, folder, lora):
    """Values of a critic that starts from a folder; the first one is trained and saved before."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.critic import Critic
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import LoraSection, OptimizerSection
    from megatron_rl.data.packing import gather_by_rollout, scatter_to_packs
    from megatron_rl.objectives.values import GaeSettings

    root, topology = Path(root), groups.initialise(**LAYOUTS[name])
    settings = ActorSettings(
        optimizer=OptimizerSection(learning_rate=1e-2), warmup_updates=0,
        lora=LoraSection(rank=4, alpha=8.0) if lora else None,
    )  # fmt: skip
    critic = Critic(root / folder, topology=topology, settings=settings)
    rollouts, rewards = make_rollouts()
    (minibatch,) = plan(critic, rollouts, rewards, minibatches=1)
    packs = minibatch.micro_batches
    rows = [[float(one)] * r.response.length for one, r in zip(rewards, rollouts, strict=True)]
    rows = scatter_to_packs(packs, [torch.tensor(row).numpy() for row in rows])
    cut = [torch.zeros(len(pack.rollout_indices), dtype=torch.bool) for pack in packs]

    def compute():
        ends = [pack.response_mask for pack in packs]
        targets = critic.compute_targets(packs, rows, ends, cut, settings=GaeSettings())
        for pack, one in zip(packs, targets, strict=True):
            pack.values, pack.returns = one[:, 0].contiguous(), one[:, 2].contiguous()
        values = [pack.values for pack in packs]
        each = gather_by_rollout(packs, values, count=len(rollouts), topology=topology)
        for pack in packs:
            pack.values = None if name == "after" else pack.values
        return [row.tolist() for row in each]

    values = compute()
    if name == "before":
        assert not any(any(row) for row in values)
        for _ in range(3):
            critic.update(minibatch, clip=None)
        critic.save(root / "run" / "checkpoints" / "step_000001" / "critic")
        for pack in packs:
            pack.values = None
        values = compute()
    return values


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exported_critic_has_its_values_in_transformers_and_as_a_start(tmp_path, lora):
    """As a model for classification with one label, and as `critic.path` under another layout."""
    make_model(tmp_path / "model", tied=True)
    before, _ = run_ranks(_value, 2, str(tmp_path), "before", "model", lora)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    (checkpoint / "trainer.json").write_text(json.dumps({"step": 1, "files": {}, "digests": []}))
    config = (
        f"model: {{path: {tmp_path / 'model'}}}\ndata: {{train: prompts.parquet}}\ncritic: {{}}\n"
    )
    (tmp_path / "run" / "config.yaml").write_text(config + "objective: ppo\n")
    words = ["export", str(tmp_path / "run"), str(tmp_path / "critic"), "--critic"]
    command = ForkedCommand(words, output=tmp_path / "output.txt", cwd=ROOT)
    assert command.wait(timeout=300) == 0, command.read()
    tensors = load_file(tmp_path / "critic" / "model.safetensors")
    assert tensors["score.weight"].any() and "lm_head.weight" not in tensors
    _check_values(tmp_path / "critic", before)
    after, _ = run_ranks(_value, 2, str(tmp_path), "after", "critic", lora)
    for mine, want in zip(after, before, strict=True):
        assert mine == pytest.approx(want, rel=1e-5, abs=1e-5)


def _check_values(folder, values):
    from transformers import (
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    of_tokens, notes = AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True
    )
    assert not notes["unexpected_keys"] and set(notes["missing_keys"]) == {"score.bias"}
    whole, notes = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True
    )
    assert not notes["unexpected_keys"] and not notes["missing_keys"]
    of_tokens.eval(), whole.eval()
    for rollout, row in zip(make_rollouts()[0], values, strict=True):
        tokens = torch.tensor([[*rollout.prompt.token_ids, *rollout.response.token_ids]])
        start = len(rollout.prompt.token_ids) - 1
        with torch.no_grad():
            want = of_tokens(tokens).logits[0, start : start + len(row), 0]
            last = whole(tokens[:, :-1]).logits  # of its last token, which precedes the decision
        assert row == pytest.approx(want.tolist(), rel=1e-4, abs=1e-4)
        assert last.shape == (1, 1) and last.item() == pytest.approx(row[-1], rel=1e-4, abs=1e-4)
