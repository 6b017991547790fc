"""Uneven stages, shared key-value heads and experts of their own tensor size, against one rank.

5 layers, 2 key-value heads and 4 experts. Each layout computes log-probs, makes an update, exports
and saves; then it loads what another layout has saved, and makes the next update.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.test_actor_architectures import EXPERTS, SIZES
from tests.functional.test_actor_layouts import freeze_behavior, make_rollouts, plan, randomise
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow  # further shapes of what `test_actor_layouts` shows
MODELS = {
    "qwen2": ("Qwen2Config", {"head_dim": 8}),  # biases of queries, keys and values
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True}),  # norms of q and k
}
DENSE, MIXTURE = ["qwen2"], ["qwen3_moe"]
# name: layout, ranks, models, the layout whose checkpoints it loads. Megatron has one optimizer
# without expert parallelism and two with it, so their checkpoints differ.
LAYOUTS = {
    "one": ({}, 1, [*DENSE, *MIXTURE], "one"),
    "tp4": ({"tensor": 4}, 4, [*DENSE, *MIXTURE], "one"),
    "pp2-virtual2": (
        {"pipeline": 2, "virtual_stages": 2, "stage_layers": [1, 2, 1, 1]}, 2, DENSE, "tp4",
    ),
    "tp2-ep2-etp1": ({"tensor": 2, "expert": 2, "expert_tensor": 1}, 2, MIXTURE, "tp2-ep2-etp1"),
    "tp2-pp2-ep2-etp1": (
        {"tensor": 2, "pipeline": 2, "stage_layers": [3, 2], "expert": 2, "expert_tensor": 1}, 4,
        MIXTURE, "tp2-ep2-etp1",
    ),
}  # fmt: skip


def _make_model(folder, config_class, extra):
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**SIZES | {"num_hidden_layers": 5} | extra)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.save_pretrained(folder)


def _score(rank, world_size, root, name):
    """Log-probs, two updates, an export and a checkpoint of every model in one layout."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.data.packing import gather_by_rollout
    from megatron_rl.objectives import build_objective

    sizes, _, models, other = LAYOUTS[name]
    topology = groups.initialise(**sizes)
    folder, rollouts, report = Path(root) / name, make_rollouts(), {}
    for model in models:
        # A large epsilon: Adam would turn rounding of zero gradients (key biases) into full steps.
        settings = ActorSettings(
            optimizer=OptimizerSection(learning_rate=3e-3, epsilon=1e-3),
            warmup_updates=0,
            overlap_reduction=world_size > 1,
        )
        actor = MegatronActor(Path(root) / model, topology=topology, settings=settings)
        tokens = 480 // topology.pp_size  # a pack for each stage
        (minibatch,) = plan(actor, *rollouts, minibatches=1, tokens=tokens)
        packs = freeze_behavior(actor, [minibatch])
        values = [pack.behavior_logprobs for pack in packs]
        rows = gather_by_rollout(packs, values, count=len(rollouts[0]), topology=topology)
        report[model] = [row.tolist() for row in rows]
        actor.export_hf(folder / f"{model}-loaded")
        objective = build_objective("grpo")
        result = actor.update(minibatch, objective)
        assert result.statistics.to_metrics()["ratio/max_deviation"] == 0.0
        report[f"{model} norms"] = [result.grad_norm]
        actor.export_hf(folder / f"{model}-updated")
        actor.save(folder / f"{model}-checkpoint")
        actor.load(Path(root) / other / f"{model}-checkpoint")
        report[f"{model} norms"].append(actor.update(minibatch, objective).grad_norm)
    return json.dumps(report)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uneven")
    for name, (config_class, extra) in MODELS.items():
        _make_model(folder / name, config_class, extra)
    return folder


@pytest.fixture(scope="module")
def reports(root):
    """Run every layout, in this order: each loads what an earlier one has saved."""
    return {
        name: json.loads(run_ranks(_score, ranks, str(root), name)[0])
        for name, (_, ranks, _, _) in LAYOUTS.items()
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_rank(root, reports, name):
    for model in LAYOUTS[name][2]:
        for mine, one in zip(reports[name][model], reports["one"][model], strict=True):
            assert mine == pytest.approx(one, rel=1e-5, abs=1e-5)
        one = reports["one"][f"{model} norms"]
        assert reports[name][f"{model} norms"] == pytest.approx(one, rel=1e-5)
        assert one[0] > 1e-2 and one[1] != one[0]
        source = load_file(root / model / "model.safetensors")
        loaded = load_file(root / name / f"{model}-loaded" / "model.safetensors")
        assert loaded.keys() == source.keys()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in source.items())
        updated = load_file(root / name / f"{model}-updated" / "model.safetensors")
        for key, want in load_file(root / "one" / f"{model}-updated" / "model.safetensors").items():
            # The update of every weight is that of its gradient, up to Adam's epsilon.
            torch.testing.assert_close(updated[key], want, rtol=1e-5, atol=1e-5, msg=key)
            assert key == "model.embed_tokens.weight" or not torch.equal(want, source[key]), key
