"""Layers of Transformer Engine against Megatron's local ones, with a double of Transformer Engine.

`transformer_engine_double/` says what the double stands for and what it cannot tell.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.test_actor_architectures import EXPERTS, YARN, _make_model
from tests.functional.test_actor_layouts import make_rollouts, transformers_logprobs
from tests.ranks import run_ranks

DOUBLE = Path(__file__).parent / "transformer_engine_double"
MODELS = {
    "qwen2": ("Qwen2Config", {}),  # biases
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True, "rope_parameters": YARN}),  # q, k norms
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True}),
}
LAYOUTS = {
    "one": ({}, 1),
    "pp2-virtual2": ({"pipeline": 2, "virtual_stages": 2}, 2),
    "tp2-cp2-ep2": ({"tensor": 2, "context": 2, "expert": 2}, 4),
}


def _report(actor, root, name, topology):
    """Log-probs, an update, an exported and a saved model of one actor; then one more update."""
    from megatron_rl.data.packing import gather_by_rollout, plan_minibatches
    from megatron_rl.objectives import build_objective

    rollouts, advantages = make_rollouts()
    (minibatch,) = plan_minibatches(
        rollouts,
        advantages,
        minibatches=1,
        tokens_per_micro_batch=160,
        topology=topology,
        sequence_parallel=actor.sequence_parallel,
    )
    packs = minibatch.micro_batches
    logprobs = actor.compute_logprobs(packs)
    rows = gather_by_rollout(packs, logprobs, count=len(rollouts), topology=topology)
    actor.export_hf(root / f"{name}-exported")
    for pack, behavior in zip(packs, logprobs, strict=True):
        pack.behavior_logprobs = behavior
    first = actor.update(minibatch, build_objective("grpo"))
    actor.save(root / f"{name}-saved")
    second = actor.update(minibatch, build_objective("grpo"))
    actor.load(root / f"{name}-saved".replace("engine", "local"))  # what the other kind saved
    actor.export_hf(root / f"{name}-loaded")
    repeated = actor.update(minibatch, build_objective("grpo"))
    return {
        "logprobs": [row.tolist() for row in rows],
        "deviation": first.statistics.to_metrics()["ratio/max_deviation"],
        "grad_norms": [first.grad_norm, second.grad_norm, repeated.grad_norm],
        "fused": [n.endswith("layer_norm_weight") for n in actor.named_parameters_local()],
    }


def _compare(rank, world_size, root, models, layout):
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings

    topology = groups.initialise(**layout)
    reports = {}
    for model in MODELS:
        for kind in ("local", "engine"):
            settings = ActorSettings(
                learning_rate=1e-3,
                warmup_updates=0,
                recompute="full" if layout else "none",
                transformer_engine=kind == "engine",
            )
            actor = MegatronActor(Path(models) / model, topology=topology, settings=settings)
            name = f"{model}-{kind}"
            reports[name] = _report(actor, Path(root), name, topology)
    return json.dumps(reports)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, (config_class, extra) in MODELS.items():
        _make_model(folder / name, config_class, extra)
    return folder


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS.values(), ids=LAYOUTS)
def test_transformer_engine_layers_equal_local_layers(
    models, tmp_path, monkeypatch, layout, world_size
):
    monkeypatch.syspath_prepend(DOUBLE)  # spawned ranks take over the path
    answer = run_ranks(_compare, world_size, str(tmp_path), str(models), layout)[0]
    reports = json.loads(answer)
    for model in MODELS:
        local, engine = (reports[f"{model}-{kind}"] for kind in ("local", "engine"))
        assert any(engine["fused"]) and not any(local["fused"]), model
        expected = transformers_logprobs(models / model)
        for mine, others, theirs in zip(
            engine["logprobs"], local["logprobs"], expected, strict=True
        ):
            assert mine == pytest.approx(others, rel=1e-5, abs=1e-5), model
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5), model
        assert engine["deviation"] == 0.0, model
        assert engine["grad_norms"] == pytest.approx(local["grad_norms"], rel=1e-5), model
        source = load_file(models / model / "model.safetensors")
        exported = load_file(tmp_path / f"{model}-engine-exported" / "model.safetensors")
        assert exported.keys() == source.keys()
        assert all(torch.equal(exported[key], tensor) for key, tensor in source.items()), model
        ours, others = (
            load_file(tmp_path / f"{model}-{kind}-loaded" / "model.safetensors")
            for kind in ("engine", "local")
        )
        assert all(torch.equal(ours[key], tensor) for key, tensor in others.items()), model
