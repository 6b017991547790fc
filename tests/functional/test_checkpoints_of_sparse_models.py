"""Checkpoints of models with dense first layers: written under tensor 2, read by one process."""

import json
from pathlib import Path

import pytest

from tests.functional.test_actor_architectures import MODELS, _make_model
from tests.functional.test_actor_layouts import freeze_behavior, make_rollouts, plan
from tests.ranks import run_ranks

NAMES = ("glm4_moe", "deepseek_v3")


def _train_or_load(rank, world_size, root, layout):
    """Update and save, or load; return log-probs and the routers' biases."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.checkpoint_contents import check_stored
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.data.packing import gather_by_rollout
    from megatron_rl.objectives import build_objective

    topology = groups.initialise(**layout)
    report = {}
    for name in NAMES:
        folder = Path(root) / f"{name}-checkpoint"
        settings = ActorSettings(learning_rate=1e-3, warmup_updates=0)
        actor = MegatronActor(Path(root) / name, topology=topology, settings=settings)
        rollouts, advantages = make_rollouts()
        (minibatch,) = plan(actor, rollouts, advantages, minibatches=1)
        packs = freeze_behavior(actor, [minibatch])
        if layout:
            assert actor.update(minibatch, build_objective("grpo")).done
            actor.save(folder)
        else:
            check_stored(folder, actor.shape)
            actor.load(folder)
        logprobs = actor.compute_logprobs(packs)
        rows = gather_by_rollout(packs, logprobs, count=len(rollouts), topology=topology)
        report[name] = [value for row in rows for value in row.tolist()]
        parameters = actor.named_parameters_local()
        report[f"{name} biases"] = {
            key: value.tolist() for key, value in parameters.items() if "expert_bias" in key
        }
    return json.dumps(report)


def test_checkpoint_of_another_layout_continues_the_model(tmp_path):
    from safetensors.torch import load_file

    for name in NAMES:
        _make_model(tmp_path / name, *MODELS[name])
    written = json.loads(run_ranks(_train_or_load, 2, str(tmp_path), {"tensor": 2})[0])
    read = json.loads(run_ranks(_train_or_load, 1, str(tmp_path), {})[0])
    for name in NAMES:
        assert read[name] == pytest.approx(written[name], abs=2e-5), name
        source = load_file(tmp_path / name / "model.safetensors")
        # Constant in the update, bit for bit.
        assert read[f"{name} biases"] == {
            f"decoder.layers.{key.split('.')[2]}.mlp.router.expert_bias": value.tolist()
            for key, value in source.items()
            if key.endswith("e_score_correction_bias")
        }
