"""The search over layouts: nothing is left out, what fits is a config, what does not says why."""

import math
from dataclasses import replace

import pytest

from megatron_rl.config import load_config, parse_config
from megatron_rl.planning.built_in import MODELS
from megatron_rl.planning.devices import DEVICES
from megatron_rl.planning.layout_report import config_text, describe, plan
from megatron_rl.planning.parts import Parts
from megatron_rl.planning.push_time import push_bytes
from megatron_rl.planning.search import layouts, search
from megatron_rl.planning.workload import workload_of
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.plan import plan_for_rank

BASE = parse_config({"model": {"path": "models/m"}, "data": {"train": "data/train.parquet"}})
WORKLOAD = workload_of(BASE)
SMALL, H100 = MODELS["DeepSeek-R1-Distill-Qwen-1.5B"], DEVICES["h100"]


@pytest.fixture(scope="module")
def found():
    return search(SMALL, H100, 8, WORKLOAD)


def test_every_layout_fits_or_says_why_not(found):
    seen = [one.parts for one in (*found.options, *found.rejected)]
    keys = {(p.tensor, p.pipeline, p.context, p.expert, p.data, p.rollout_tensor) for p in seen}
    assert len(keys) == len(seen)
    # (tp, pp, cp) of powers of two whose product divides 8: 20; vLLM 1, 2, 4 or 8.
    assert len(keys) == 20 * 4
    assert all(each.reason for each in found.rejected)
    assert found.options and found.rejected


def test_what_fits_is_the_fastest_first_and_fits(found):
    times = [option.step_seconds for option in found.options]
    assert times == sorted(times)
    for option in found.options:
        assert max(option.memory.values()) <= 1.0
        assert option.parts.world_size == 8
        assert all(seconds > 0 for seconds in option.seconds.values())


def test_reasons_name_the_rule(found):
    reasons = {each.reason for each in found.rejected}
    assert any(
        "parallel.tensor=4 does not divide the model's 2 key-value heads" in r for r in reasons
    )
    assert any("parallel.pipeline=8 does not divide the model's 28 layers" in r for r in reasons)


def test_a_layout_becomes_a_whole_config_that_loads(found, tmp_path):
    option = found.options[0]
    file = tmp_path / "planned.yaml"
    file.write_text(config_text(option, BASE, found))
    config = load_config(file)
    assert config.parallel.tensor == option.parts.tensor
    assert config.parallel.model_size * config.parallel.data == 8
    assert config.rollout.memory_fraction == option.memory_fraction
    assert config.trainer.tokens_per_micro_batch >= config.max_model_tokens
    assert file.read_text().startswith("# Planned for 8 x h100")


def test_more_epochs_train_longer_and_generate_as_long(found):
    once = search(SMALL, H100, 8, replace(WORKLOAD, epochs=1))
    parts = found.options[0].parts
    other = next(option for option in once.options if option.parts == parts)
    four = found.options[0].seconds
    assert four["train"] == pytest.approx(4 * other.seconds["train"])
    assert four["rollout"] == other.seconds["rollout"]


def test_what_is_given_is_kept():
    found = search(SMALL, H100, 8, WORKLOAD, {"tensor": 2, "recompute": "full"})
    assert {option.parts.tensor for option in found.options} == {2}
    assert {option.parts.recompute for option in found.options} == {"full"}


def test_nothing_fits_says_how_much_is_missing_and_what_would_fit():
    with pytest.raises(ValueError) as error:
        plan(MODELS["Qwen2.5-32B"], H100, 1, WORKLOAD, {})
    text = str(error.value)
    assert "nothing fits on 1 x h100: the least needs " in text
    ratio = float(text.split("needs ")[1].split("x the memory")[0])
    # Weights and gradients of 32.76B at 6 bytes, 12 more of optimizer: 549 GiB of 79 alone.
    assert ratio > 549 / 79.1
    smallest = int(text.split("smallest that fits: ")[1].split(" devices")[0])
    assert search(MODELS["Qwen2.5-32B"], H100, smallest, WORKLOAD).options
    assert not search(MODELS["Qwen2.5-32B"], H100, smallest // 2, WORKLOAD).options


def test_nodes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="which do not divide 12; take 8 or 16"):
        search(SMALL, H100, 12, WORKLOAD)


def test_expert_layouts_are_looked_at():
    shape = MODELS["Qwen3-30B-A3B"]
    sizes = {parts.expert for parts in layouts(shape, 16, {})}
    assert sizes == {1, 2, 4, 8, 16}
    best = search(shape, H100, 32, WORKLOAD, {"tensor": 1, "pipeline": 1}).options[0]
    assert best.parts.expert > 1


def test_the_report_has_a_row_for_each_and_the_reasons(found):
    text = describe(found, top=3, show_rejected=False)
    assert len([line for line in text.splitlines() if line[:3].strip().isdigit()]) >= 3
    assert "by formula, not measured" in text and "key-value heads" in text
    assert len(describe(found, top=3, show_rejected=True).splitlines()) > len(found.rejected)


@pytest.mark.parametrize("parts", [Parts(2, 2, 1, 2, rollout_tensor=4), Parts(1, 2, 2, 2)])
def test_bytes_of_a_push_are_those_of_the_plan(parts):
    # As many layers as stages, so that nothing is scaled: the plan's own count, at 2 bytes.
    shape = replace(SMALL, num_layers=2)
    layout = ActorLayout(tensor=parts.tensor, pipeline=2, data=parts.replicas)
    engines = EngineLayout(parts.rollout_tensor, 8)
    whole = plan_for_rank(shape, layout, engines, rank=0, wire_elements=1 << 26, ranks_per_node=4)
    moved = push_bytes(shape, parts, per_node=4)
    assert moved.ranks == 8
    assert moved.within + moved.between == 2 * whole.elements_sent
    twice = push_bytes(replace(shape, num_layers=4), parts, per_node=4)
    assert 1 < (twice.within + twice.between) / (moved.within + moved.between) < 2
    assert math.isfinite(moved.between)


def test_pushes_are_planned_of_the_fastest(found, monkeypatch):
    monkeypatch.setattr("megatron_rl.planning.search.PUSHED", 3)
    few = search(SMALL, H100, 8, WORKLOAD).options
    assert [option.seconds["push"] > 0 for option in few[:5]] == [True, True, True, False, False]
    without = [option.step_seconds - option.seconds["push"] for option in few]
    assert max(without[:3]) <= min(without[3:])
    assert {option.parts for option in few} == {option.parts for option in found.options}
