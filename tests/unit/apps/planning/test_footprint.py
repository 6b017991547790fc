"""Memory by formula against dry runs of the actor; tools/compare_plan.py runs hundreds."""

import pytest
from megatron_rl.apps.planning.built_in import MODELS, write_config_json
from megatron_rl.apps.planning.devices import DEVICES
from megatron_rl.apps.planning.footprint import ENGINE_ASLEEP, RESERVE
from megatron_rl.apps.planning.layout_report import config_of
from megatron_rl.apps.planning.parts import Parts
from megatron_rl.apps.planning.workload import workload_of

from megatron_rl.apps.planning.fit import check_fit
from megatron_rl.apps.planning.search import search
from megatron_rl.config import parse_config
from megatron_rl.models.shape import read_model_shape
from tools.compare_plan import compare, shape_of

SMALL, DENSE = "DeepSeek-R1-Distill-Qwen-1.5B", "Qwen3-8B"
EXPERTS = "Qwen3-30B-A3B"


@pytest.mark.parametrize(
    "name,parts",
    [
        (DENSE, Parts(tensor=2, context=2, data=2, tokens=16384)),
        (DENSE, Parts(pipeline=2, context=2, data=2, tokens=16384)),
        (SMALL, Parts(data=2, recompute="full", tokens=16384)),
        (
            EXPERTS,
            Parts(tensor=2, context=2, data=1, expert=2, tokens=16384, recompute="selective"),
        ),
        # 4 key-value heads over 8 ranks, whole experts, 2 and 6 of the 8 layers.
        (
            EXPERTS,
            Parts(
                tensor=8,
                pipeline=2,
                expert=8,
                expert_tensor=1,
                tokens=16384,
                recompute="full",
                stage_layers=(2, 6),
                expert_share=1.5,
            ),
        ),
        # A dense layer below the others; that and latent attention; sinks, biases, windows.
        ("GLM-4.5-Air", Parts(data=4, expert=4, tokens=16384)),
        ("Moonlight-16B-A3B-Instruct", Parts(pipeline=2, data=2, expert=2, tokens=16384)),
        ("gpt-oss-20b-bf16", Parts(tensor=2, data=2, expert=2, expert_tensor=1, tokens=16384)),
    ],
    ids=[
        "tensor and context",
        "pipeline",
        "recomputed",
        "experts recomputed",
        "235B's kind",
        "dense first",
        "latent",
        "sinks",
    ],
)
def test_footprint_matches_dry_run(name, parts, tmp_path):
    row = compare(name, parts, write_config_json(shape_of(name), tmp_path / "model"))
    assert abs(row["states_error"]) < 0.001
    assert abs(row["error"]) < 0.01  # the documentation promises 5%


LORA = {"lora_rank": 32, "lora_targets": ("qkv", "proj", "fc1", "fc2"), "tokens": 16384}


@pytest.mark.parametrize(
    "name,parts",
    [
        (SMALL, Parts(data=2, recompute="selective", **LORA)),
        (DENSE, Parts(tensor=2, context=2, **LORA)),
        (EXPERTS, Parts(tensor=2, expert=2, expert_tensor=1, recompute="selective", **LORA)),
    ],
    ids=["selective", "tensor and context", "experts"],
)
def test_footprint_with_adapters_matches_dry_run(name, parts, tmp_path):
    row = compare(name, parts, write_config_json(shape_of(name), tmp_path / "model"))
    assert abs(row["states_error"]) < 0.001
    assert abs(row["error"]) < 0.05


def test_tightest_planned_layout_fits_in_dry_run(tmp_path):
    model = write_config_json(MODELS[SMALL], tmp_path / "model")
    base = parse_config({"model": {"path": str(model)}, "data": {"train": "none.parquet"}})
    device = DEVICES["h100"]
    options = search(read_model_shape(model), device, 8, workload_of(base)).options
    tightest = max(
        (option for option in options if option.parts.pipeline == 1),
        key=lambda option: option.memory["train"],
    )
    assert tightest.memory["train"] > 0.6
    (result,) = check_fit(config_of(tightest, base), processes=8, device_bytes=device.memory)
    needed = result.peak + ENGINE_ASLEEP + RESERVE
    assert needed / device.memory == pytest.approx(tightest.memory["train"], rel=0.05)
