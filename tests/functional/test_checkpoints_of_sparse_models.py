"""Checkpoints of models whose layers differ: written under tensor 2, read by two stages."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.test_actor_architectures import MODELS, _make_model
from tests.functional.test_actor_layouts import freeze_behavior, make_rollouts, plan
from tests.ranks import run_ranks

# Dense first layers, latents and biases of experts; norms after attention and MLP; sinks; gated
# delta nets, of which both stages have one.
NAMES = ("deepseek_v3", "gemma3", "gpt_oss", "qwen3_5_moe")
WRITER = {"tensor": 2, "expert": 2, "expert_tensor": 1}
READER = {"pipeline": 2}


def _train_or_load(rank, world_size, root, layout):
    """Update and save, or load; return log-probs there and one update later."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.checkpoint_contents import check_stored
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.data.packing import gather_by_rollout
    from megatron_rl.objectives import build_objective

    topology = groups.initialise(**layout)
    report = {}
    for name in NAMES:
        folder = Path(root) / f"{name}-checkpoint"
        settings = ActorSettings(
            optimizer=OptimizerSection(learning_rate=1e-3, epsilon=1e-4), warmup_updates=0
        )
        actor = MegatronActor(Path(root) / name, topology=topology, settings=settings)
        rollouts, advantages = make_rollouts()
        tokens = 480 // topology.pp_size  # a pack for each stage
        (minibatch,) = plan(actor, rollouts, advantages, minibatches=1, tokens=tokens)
        if layout == WRITER:
            freeze_behavior(actor, [minibatch])
            assert actor.update(minibatch, build_objective("grpo")).done
            actor.save(folder)
        else:
            check_stored(folder, actor.shape)
            actor.load(folder)
        actor.export_hf(Path(root) / f"{name}-{next(iter(layout))}")
        packs = freeze_behavior(actor, [minibatch])
        stored = [pack.behavior_logprobs for pack in packs]
        actor.update(minibatch, build_objective("grpo"))
        for moment, values in (("stored", stored), ("continued", actor.compute_logprobs(packs))):
            rows = gather_by_rollout(packs, values, count=len(rollouts), topology=topology)
            report[f"{name} {moment}"] = [value for row in rows for value in row.tolist()]
    return json.dumps(report)


def test_checkpoint_of_another_layout_continues_the_model(tmp_path):
    for name in NAMES:
        _make_model(tmp_path / name, *MODELS[name])
    written = json.loads(run_ranks(_train_or_load, 2, str(tmp_path), WRITER)[0])
    read = json.loads(run_ranks(_train_or_load, 2, str(tmp_path), READER)[0])
    for case, logprobs in written.items():
        assert read[case] == pytest.approx(logprobs, abs=2e-5), case
    for name in NAMES:
        source, saved, loaded = (
            load_file(tmp_path / folder / "model.safetensors")
            for folder in (name, f"{name}-tensor", f"{name}-pipeline")
        )
        assert source.keys() == saved.keys() == loaded.keys()
        for key, tensor in saved.items():
            assert torch.equal(loaded[key], tensor), (name, key)
            # Biases of experts are constant, all else has been trained.
            constant = key.endswith("e_score_correction_bias")
            assert torch.equal(source[key], tensor) == constant, (name, key)
