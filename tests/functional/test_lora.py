"""LoRA under every kind of layout: the same numbers as on one rank, and the base's at the start.

One launch per number of ranks, in which the actor is rebuilt in several layouts.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config.sections import LoraSection, ReshardingSection
from megatron_rl.models.shape import read_model_shape
from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.resharding.push import Resharder
from tests.functional.test_actor_architectures import MODELS, _make_model
from tests.functional.test_actor_layouts import freeze_behavior, make_model, make_rollouts, plan
from tests.ranks import run_ranks
from tests.unit.models.test_adapters import make_folder
from tests.unit.resharding.test_push import Live, Slices

ONE = [("one", {})]
FOUR = [
    ("tp2-pp2-vp2", {"tensor": 2, "pipeline": 2, "virtual_stages": 2, "recompute": "full"}),
    ("tp2-cp2", {"tensor": 2, "context": 2}),
]
EXPERTS_ON_FOUR = [
    ("tp2-ep2", {"tensor": 2, "expert": 2, "expert_tensor": 1}),
    ("tp2-etp2", {"tensor": 2, "expert": 1, "expert_tensor": 2}),
]


def settings(path=None, rank=4, alpha=8.0, **further):
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection

    return ActorSettings(
        optimizer=OptimizerSection(learning_rate=3e-2, epsilon=1e-3, max_grad_norm=0.5),
        warmup_updates=0,
        lora=LoraSection(rank=rank, alpha=alpha, path=path),
        seed=1,
        **further,
    )


def build(folder, layout, **further):
    """Build an actor after destroying the groups of the previous layout."""
    from megatron.core import parallel_state

    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.groups import initialise

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    chosen = settings(**further)
    return MegatronActor(folder, topology=initialise(**layout), settings=chosen)


def score(actor, minibatch):
    from megatron_rl.data.packing import gather_by_rollout

    packs = minibatch.micro_batches
    rows = gather_by_rollout(
        packs, actor.compute_logprobs(packs), count=16, topology=actor.topology
    )
    return [row.tolist() for row in rows]


def push(actor, exported, dtype=torch.float32):
    """Push to receivers of two kinds, which get the bits of the export."""
    for kind in (Slices, Live):
        layout = EngineLayout(actor.topology.world_size, actor.topology.world_size)
        receiver = kind(actor.shape, layout, actor.topology.rank, dtype)
        settings = ReshardingSection(bucket_mib=12000 / 2**20)
        Resharder(receiver, settings, full_check_every=1).push(actor, version=1)
        assert receiver.differs_from(exported) == []


def observe(actor, folder, stored):
    """Scores, gradient norms, exports and checkpoints of one layout; `stored`: of one rank."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.adapter_files import export_adapters
    from megatron_rl.actor.reference import ReferencePolicy
    from megatron_rl.models.adapters import peft_problem
    from megatron_rl.objectives import build_objective

    objective = build_objective("grpo")
    tokens = 480 // actor.topology.pp_size  # a pack for each stage
    (minibatch,) = plan(actor, *make_rollouts(), minibatches=1, tokens=tokens)
    packs = freeze_behavior(actor, [minibatch])
    full = MegatronActor(
        actor.model_folder, topology=actor.topology, settings=replace(actor.settings, lora=None)
    ).compute_logprobs(packs)
    reference = ReferencePolicy(actor, actor.model_folder)
    start = reference.compute_logprobs(packs)
    for pack, base, want in zip(packs, start, full, strict=True):
        assert torch.equal(pack.behavior_logprobs, base), "B = 0 changes log-probs"
        # Megatron computes the products of frozen weights by another function.
        torch.testing.assert_close(
            base, want, rtol=0, atol=0 if actor.topology.tp_size == 1 else 1e-5
        )
    actor.export_hf(folder / "start")
    before = {name: value.clone() for name, value in actor.tensors().items() if "lora" not in name}

    def update():
        result = actor.update(minibatch, objective)
        return result.grad_norm, result.statistics.to_metrics()["loss/policy"]

    reports = [update(), update()]
    actor.sleep()
    actor.save(folder / "checkpoint")
    digest = actor.digest()
    reports.append(update())
    last = actor.digest()
    scores = score(actor, minibatch)
    actor.export_hf(folder / "trained")
    push(actor, load_file(folder / "trained" / "model.safetensors"))
    if peft_problem(actor.shape, actor.settings.lora.targets) is None:
        export_adapters(actor, folder / "adapter")
    actor.load(folder / "checkpoint")
    assert actor.digest() == digest
    assert update() == reports[-1] and actor.digest() == last, "not resumed bit for bit"
    assert all(map(torch.equal, reference.compute_logprobs(packs), start)), "not the base"
    actor.load(stored)  # of another layout
    resharded = update()
    for name, value in actor.tensors().items():
        assert "lora" in name or torch.equal(value, before[name]), f"{name} is not frozen"
    return {"reports": reports, "scores": scores, "resharded": resharded}


def start_from_folders(actor, root, folder):
    """Start from adapters of one process, and from a folder whose modules have an A each."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.adapter_files import export_adapters

    for name, rank in (("qwen2 one/adapter", 4), ("foreign", 12)):
        lora = LoraSection(path=str(root / name), rank=rank, alpha=2.0 * rank)
        chosen = replace(actor.settings, lora=lora)
        started = MegatronActor(actor.model_folder, topology=actor.topology, settings=chosen)
        export_adapters(started, folder / name / "again")
        started.export_hf(folder / name / "merged")


def observe_layouts(rank, world_size, root, model, layouts):
    root, reports = Path(root), []
    for name, options in layouts:
        recompute = {"recompute": options["recompute"]} if "recompute" in options else {}
        layout = {key: value for key, value in options.items() if key not in recompute}
        actor = build(root / model, layout, **recompute)
        folder = root / f"{model} {name}"
        # Megatron's optimizer of experts under expert parallelism is another one.
        first = layouts[0][0] if "expert" in options and options["expert"] > 1 else "one"
        reports.append(observe(actor, folder, root / f"{model} {first}" / "checkpoint"))
        if model == "qwen2" and name != "tp2-cp2":  # which reads what tensor parallel ranks read
            start_from_folders(actor, root, folder)
    return json.dumps(reports)


def close(got, want):
    if isinstance(want, list):
        for mine, theirs in zip(got, want, strict=True):
            close(mine, theirs)
    else:
        assert got == pytest.approx(want, rel=1e-4, abs=1e-5)


def check(root, model, layouts, reports, want):
    source = load_file(root / model / "model.safetensors")
    trained = load_file(root / f"{model} one" / "trained" / "model.safetensors")
    for (name, *_), report in zip(layouts, reports, strict=True):
        close(report["reports"], want["reports"])
        close(report["scores"], want["scores"])
        close(report["resharded"], want["reports"][2])
        folder = root / f"{model} {name}"
        start = load_file(folder / "start" / "model.safetensors")
        assert all(torch.equal(start[key], value) for key, value in source.items())
        for key, value in load_file(folder / "trained" / "model.safetensors").items():
            torch.testing.assert_close(value, trained[key], rtol=1e-4, atol=1e-4, msg=key)
            is_adapted = "_proj" in key and key.endswith("weight")
            assert torch.equal(value, source[key]) != is_adapted, key


def check_started(root, layouts):
    """Folders of adapters give W + alpha / r B A, and their own bits when they are written."""
    base = load_file(root / "qwen2" / "model.safetensors")
    factors = load_file(root / "foreign" / "adapter_model.safetensors")
    own = "qwen2 one/adapter"
    (written,) = (root / own).glob("*.safetensors")
    trained = load_file(root / "qwen2 one" / "trained" / "model.safetensors")
    for name, *_ in layouts:
        folder = root / f"qwen2 {name}"
        again = folder / own / "again"
        assert (again / written.name).read_bytes() == written.read_bytes()
        assert (again / "base_model.json").read_bytes() == (
            root / own / "base_model.json"
        ).read_bytes()
        merged = load_file(folder / own / "merged" / "model.safetensors")
        assert all(torch.equal(merged[key], value) for key, value in trained.items())
        for key, value in load_file(folder / "foreign" / "merged" / "model.safetensors").items():
            stem = f"base_model.model.{key.removesuffix('.weight')}"
            update = torch.zeros(())
            if f"{stem}.lora_A.weight" in factors:
                a, b = (factors[f"{stem}.lora_{letter}.weight"] for letter in "AB")
                update = 2.0 * b @ a
            torch.testing.assert_close(value, base[key] + update, rtol=0, atol=1e-4, msg=key)


@pytest.mark.parametrize("model", ["qwen2", pytest.param("qwen2_moe", marks=pytest.mark.slow)])
def test_layouts_equal_one_process(tmp_path, model):
    if model == "qwen2":
        make_model(tmp_path / model, tied=True)
        shape = read_model_shape(tmp_path / model)
        factors = make_folder(tmp_path / "foreign", shape, rank=4, shared=False)
        save_file(  # peft's default targets do not include k
            {key: value for key, value in factors.items() if "k_proj" not in key},
            tmp_path / "foreign" / "adapter_model.safetensors",
        )
    else:
        kind, sizes = MODELS[model]
        _make_model(tmp_path / model, kind, {**sizes, "num_hidden_layers": 2})
    (text,) = run_ranks(observe_layouts, 1, str(tmp_path), model, ONE)
    reports = json.loads(text)
    want = reports[0]
    assert all(norm > 1e-2 for norm, _ in want["reports"])
    check(tmp_path, model, ONE, reports, want)
    layouts = FOUR if model == "qwen2" else EXPERTS_ON_FOUR
    texts = run_ranks(observe_layouts, 4, str(tmp_path), model, layouts)
    assert len(set(texts)) == 1  # every rank reports the same
    check(tmp_path, model, layouts, json.loads(texts[0]), want)
    if model == "qwen2":
        check_started(tmp_path, [*ONE, layouts[0]])


def store(rank, world_size, root):
    """Merge in bfloat16, export the checkpoint, and load what does not belong together."""
    from megatron_rl.actor.export import export_checkpoint
    from megatron_rl.actor.reference import ReferencePolicy
    from megatron_rl.objectives import build_objective

    actor = build(root / "model16", {}, dtype=torch.bfloat16)
    (minibatch,) = plan(actor, *make_rollouts(), minibatches=1)
    freeze_behavior(actor, [minibatch])
    before = actor.digest()
    for _ in range(2):
        actor.update(minibatch, build_objective("grpo"))
    assert actor.digest() != before
    actor.save(root / "checkpoint16")
    actor.export_hf(root / "exported16")
    exported = load_file(root / "exported16" / "model.safetensors")
    push(actor, exported, dtype=torch.bfloat16)
    options = {"like": root / "model16", "shape": actor.shape, "topology": actor.topology}
    export_checkpoint(root / "checkpoint16", root / "again16", progress=lambda *_: None, **options)
    again = load_file(root / "again16" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in exported.items())
    for folder, changes, message in (
        ("other16", {}, "adapters of another model"),
        (
            "model16",
            {"lora": settings().lora.model_copy(update={"rank": 8})},
            "adapters with rank 4",
        ),
        (
            "model16",
            {"lora": settings().lora.model_copy(update={"targets": ["qkv"]})},
            "with targets",
        ),
        ("model16", {"lora": None}, "contains adapters, but this run trains weights"),
    ):
        chosen = replace(actor.settings, **changes)
        other = type(actor)(root / folder, topology=actor.topology, settings=chosen)
        with pytest.raises(ValueError, match=message):
            other.load(root / "checkpoint16")
    other.save(root / "full16")  # without adapters
    other = type(actor)(root / "other16", topology=actor.topology, settings=chosen)
    before, packs = actor.digest(), minibatch.micro_batches
    got = ReferencePolicy(actor, root / "other16").compute_logprobs(packs)
    assert all(map(torch.equal, got, other.compute_logprobs(packs)))
    assert actor.digest() == before
    with pytest.raises(ValueError, match="contains weights, but this run trains adapters"):
        actor.load(root / "full16")


def cast(source, target, factor=1.0):
    """Copy a model with its tensors in bfloat16, times a factor."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    tensors = {name: (factor * value).bfloat16() for name, value in tensors.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def test_checkpoints_in_bfloat16_and_of_other_adapters(tmp_path):
    make_model(tmp_path / "model", tied=True)
    cast(tmp_path / "model", tmp_path / "model16")
    cast(tmp_path / "model", tmp_path / "other16", factor=2.0)
    run_ranks(store, 1, tmp_path)
