"""The actor on Transformer Engine's own Python, against Megatron's local layers.

Every release runs under several layouts in one launch; the reference is one process
without Transformer Engine. `real_transformer_engine/` has the stand-in for the compiled module,
and what therefore cannot be seen here.
"""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from safetensors.torch import load_file

from megatron_rl.runtime.versions import SETS
from tests.functional.real_transformer_engine.install import OutOfReachError, installed
from tests.functional.test_actor_architectures import EXPERTS, _make_model, _share, check_shared
from tests.functional.test_actor_architectures import MODELS as ARCHITECTURES
from tests.functional.test_actor_layouts import (
    freeze_behavior,
    make_rollouts,
    plan,
    transformers_logprobs,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow
MODELS = {
    "qwen2": ("Qwen2Config", {"head_dim": 8}),  # biases
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    # A dense layer below the others, half-rotated heads, a shared expert, biases of experts.
    "glm4_moe": ARCHITECTURES["glm4_moe"],
}
# The first and the last supported release of Transformer Engine.
RELEASES = ("2.11.0", "2.20.2")
TENSOR = {"tp2": {"tensor": 2}}
ON_TWO = {**TENSOR, "cp2": {"context": 2}, "pp2": {"pipeline": 2, "virtual_stages": 2}}
ON_FOUR = {"tp2-cp2-ep2": {"tensor": 2, "context": 2, "expert": 2}}
ON_RINGS = ("qwen2", "qwen3_moe", "qwen2 lora")  # no sliding windows
WITH_BIASES_OR_EXPERTS = ("qwen2", "qwen3_moe", "glm4_moe")


def _train(actor, folder, others):
    """Log-probs, updates around checkpoints, and the actor's descriptions of its parameters."""
    from megatron_rl.data.packing import gather_by_rollout
    from megatron_rl.objectives import build_objective

    rollouts, advantages = make_rollouts()
    (minibatch,) = plan(actor, rollouts, advantages, minibatches=1)
    packs = freeze_behavior(actor, [minibatch])
    logprobs = [pack.behavior_logprobs for pack in packs]
    rows = gather_by_rollout(packs, logprobs, count=len(rollouts), topology=actor.topology)
    actor.sleep()
    actor.save(folder / "fresh")
    actor.export_hf(folder / "exported")
    shared = _share(actor, 480 // (actor.topology.pp_size * actor.topology.dp_size))
    results = []

    def update():
        results.append(actor.update(minibatch, build_objective("grpo")))

    update()
    # Transformer Engine added these gradients itself, and the hooks nothing.
    added = {
        name: parameter.grad_added_to_main_grad
        for name, parameter in actor.tensors().items()
        if parameter.requires_grad
    }
    actor.sleep()
    actor.save(folder / "saved")
    update()
    for saved in (folder / "fresh", folder / "saved", *others):
        actor.load(saved)
        update()
    return {
        "logprobs": [row.tolist() for row in rows],
        "shared": shared,
        "deviation": results[0].statistics.to_metrics()["ratio/max_deviation"],
        "grad_norms": [result.grad_norm for result in results],
        "continued": len(others),
        "added": added,
        "fused": any(n.endswith("layer_norm_weight") for n in actor.named_parameters_local()),
    }


def _accumulate():
    """Relative errors of a bfloat16 weight gradient of 8 micro-batches, with and without fusion.

    By Transformer Engine's own linear, with Megatron's hook after each backward pass; against the
    products in float64.
    """
    from transformer_engine.pytorch import Linear

    errors = {}
    for fused in (True, False):
        generator = torch.Generator().manual_seed(0)
        layer = Linear(64, 48, bias=False, params_dtype=torch.bfloat16, device="cpu",
                       fuse_wgrad_accumulation=fused)  # fmt: skip
        weight = layer.weight
        weight.main_grad = torch.zeros(48, 64)
        weight.grad_added_to_main_grad = False
        exact = torch.zeros(48, 64, dtype=torch.float64)
        for index in range(8):
            x, grad = (torch.randn(256, size, generator=generator).bfloat16() for size in (64, 48))
            layer(x.requires_grad_(), is_first_microbatch=index == 0).backward(grad)
            if not weight.grad_added_to_main_grad:
                weight.main_grad.add_(weight.grad)
            weight.grad = None
            exact += grad.double().t() @ x.detach().double()
        errors[fused] = ((weight.main_grad - exact).norm() / exact.norm()).item()
    return errors[True], errors[False]


def _run(rank, world_size, root, engine, layouts, models, others):
    """Reports of this rank by layout and model; `engine`: a folder, or None for local layers."""
    from tests.functional.real_transformer_engine import runtime

    if engine is not None:
        runtime.use_release(engine)
    from megatron.core import parallel_state

    from megatron_rl.actor import cpu_adaptation, groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import LoraSection, OptimizerSection

    stalls = runtime.watch_comparisons()
    reports = {}
    for name, layout in layouts.items():
        topology = groups.initialise(**layout)
        for model in models:
            adapters = LoraSection(rank=4, alpha=8.0) if "lora" in model else None
            settings = ActorSettings(
                optimizer=OptimizerSection(learning_rate=3e-2 if adapters else 1e-3, epsilon=1e-3),
                lora=adapters,
                seed=1,
                warmup_updates=0,
                recompute="full" if name == "tp2-cp2-ep2" else "none",
                transformer_engine=engine is not None,
                overlap_reduction=engine is not None,
            )
            source = Path(root) / model.split()[0]
            actor = MegatronActor(source, topology=topology, settings=settings)
            folder = Path(root) / f"{name}-{model}-{bool(engine)}"
            earlier = [Path(root) / other.format(model) for other in others]
            reports[f"{name}-{model}"] = _train(actor, folder, earlier)
        parallel_state.destroy_model_parallel()
    reports["stalls"] = len(stalls)
    if engine is not None:
        with cpu_adaptation.megatron_runtime():
            reports["errors"] = _accumulate()
    return json.dumps(reports)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, (config_class, extra) in MODELS.items():
        _make_model(folder / name, config_class, extra)
    return folder


@pytest.fixture(scope="module")
def reference(root):
    return json.loads(
        run_ranks(_run, 1, str(root), None, {"one": {}}, [*MODELS, "qwen2 lora"], [])[0]
    )


@pytest.fixture
def launch(root, reference, monkeypatch):
    """Run layouts on a release, from the reference's checkpoints too."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")

    def run(world_size, engine, layouts, models):
        try:
            engine = str(installed("transformer-engine", engine))
        except OutOfReachError as error:
            pytest.skip(f"a release is not in .cache/releases and cannot be had: {error}")
        saved = ["one-{}-False/saved"]
        return [
            json.loads(answer)
            for answer in run_ranks(
                _run, world_size, str(root), engine, layouts, models, saved, fresh=True
            )
        ]

    return run


def _agree(report, expected, root, name, model):
    """Report of a layout on Transformer Engine against the one process without it."""
    assert report["fused"] and not expected["fused"]
    theirs = transformers_logprobs(root / model.split()[0])
    for rows in (expected["logprobs"], theirs):
        for mine, other in zip(report["logprobs"], rows, strict=True):
            assert mine == pytest.approx(other, rel=1e-5, abs=1e-5), (name, model)
    assert report["deviation"] == 0.0, (name, model)
    check_shared(report["shared"])
    first, second, *_ = expected["grad_norms"]
    wanted = [first, second, first, second, *[second] * report["continued"]]
    assert report["grad_norms"] == pytest.approx(wanted, rel=1e-5), (name, model)
    assert not any(expected["added"].values())
    for parameter, is_added in report["added"].items():
        # Embedding, output layer, router and norms keep Megatron's hook or our head.
        layers = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
        by_engine = any(f"{layer}.weight" in parameter for layer in layers)  # nor have adapters
        assert is_added == by_engine, (name, model, parameter)
    assert any(report["added"].values()) != ("lora" in model), (name, model)
    source = load_file(root / model.split()[0] / "model.safetensors")
    exported = load_file(root / f"{name}-{model}-True" / "exported" / "model.safetensors")
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in source.items())


@pytest.mark.parametrize("engine", RELEASES)
def test_layers_of_transformer_engine_equal_local_layers(root, reference, launch, engine):
    report = launch(2, engine, ON_TWO, ON_RINGS)[0]
    for model in ON_RINGS:
        for name in ON_TWO:
            _agree(report[f"{name}-{model}"], reference[f"one-{model}"], root, name, model)
    assert report["stalls"] == 0
    fused, rounded = report["errors"]
    assert fused < 1e-6 < 1e-3 < rounded < 3e-3


def test_sliding_windows_with_tensor_parallelism(root, reference, launch):
    report = launch(2, RELEASES[-1], TENSOR, ["mistral"])[0]
    _agree(report["tp2-mistral"], reference["one-mistral"], root, "tp2", "mistral")


def test_all_kinds_of_parallelism_together(root, reference, launch):
    (name,) = ON_FOUR
    report = launch(4, RELEASES[-1], ON_FOUR, WITH_BIASES_OR_EXPERTS)[0]
    for model in WITH_BIASES_OR_EXPERTS:
        _agree(report[f"{name}-{model}"], reference[f"one-{model}"], root, name, model)


def test_table_of_releases_matches_tested_releases():
    (cuda,) = (one for one in SETS if one.cuda)
    assert cuda.transformer_engine_install == RELEASES[-1]
    assert all(SpecifierSet(cuda.transformer_engine).contains(one) for one in RELEASES)
    assert SpecifierSet(cuda.megatron_core).contains(version("megatron-core"))
