"""The layout search covers all layouts; those that fit become configs, others have a reason."""

import math
from dataclasses import replace

import pytest
from megatron_rl.apps.planning.built_in import MODELS
from megatron_rl.apps.planning.devices import DEVICES
from megatron_rl.apps.planning.layout_report import config_of, config_text, describe, plan
from megatron_rl.apps.planning.parts import Parts
from megatron_rl.apps.planning.push_time import push_bytes
from megatron_rl.apps.planning.response_bytes import response_bytes
from megatron_rl.apps.planning.run_cost import evaluation_seconds, run_cost
from megatron_rl.apps.planning.workload import workload_of

from megatron_rl import cli
from megatron_rl.apps.planning.search import MAX_PUSH_PLANS, layouts, search
from megatron_rl.commands import plan as plan_command
from megatron_rl.config import load_config, parse_config
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.push_schedule import plan_for_rank

BASE = parse_config({"model": {"path": "models/m"}, "data": {"train": "data/train.parquet"}})
WORKLOAD = workload_of(BASE)
SMALL, H100 = MODELS["DeepSeek-R1-Distill-Qwen-1.5B"], DEVICES["h100"]


@pytest.fixture(scope="module")
def result():
    return search(SMALL, H100, 8, WORKLOAD)


def test_every_layout_is_option_or_has_reason(result):
    all_parts = [layout.parts for layout in (*result.options, *result.rejected)]
    keys = {
        (p.tensor, p.pipeline, p.context, p.expert, p.data, p.rollout_tensor) for p in all_parts
    }
    assert len(keys) == len(all_parts)
    # (tp, pp, cp) of powers of two whose product divides 8: 20; vLLM 1, 2, 4 or 8.
    assert len(keys) == 20 * 4
    assert all(each.reason for each in result.rejected)
    assert result.options and result.rejected


def test_options_fit_and_are_sorted_by_step_time(result):
    times = [option.step_seconds for option in result.options]
    assert times == sorted(times)
    for option in result.options:
        assert max(option.memory.values()) <= 1.0
        assert option.parts.world_size == 8
        assert all(seconds > 0 for phase, seconds in option.seconds.items() if phase != "push")
    assert all(option.seconds["push"] > 0 for option in result.options[:MAX_PUSH_PLANS])


def test_rejections_name_rule(result):
    reasons = {each.reason for each in result.rejected}
    assert any(
        "parallel.tensor=8 does not divide the model's 12 attention heads" in r for r in reasons
    )


def test_planned_config_loads(result, tmp_path):
    option = result.options[0]
    file = tmp_path / "planned.yaml"
    file.write_text(config_text(option, BASE, result))
    config = load_config(file)
    assert config.parallel.tensor == option.parts.tensor
    assert config.parallel.model_size * config.parallel.data == 8
    assert config.rollout.gpu_memory_utilization == option.gpu_memory_utilization
    assert config.trainer.tokens_per_micro_batch >= config.max_model_tokens
    assert file.read_text().startswith("# Planned for 8 x h100")


def test_epochs_scale_training_time_and_not_rollout_time(result):
    once = search(SMALL, H100, 8, replace(WORKLOAD, epochs=1))
    parts = result.options[0].parts
    other = next(option for option in once.options if option.parts == parts)
    four = result.options[0].seconds
    assert four["train"] == pytest.approx(4 * other.seconds["train"])
    assert four["rollout"] == other.seconds["rollout"]


def test_fixed_fields_are_kept():
    result = search(SMALL, H100, 8, WORKLOAD, {"tensor": 2, "recompute": "full"})
    assert {option.parts.tensor for option in result.options} == {2}
    assert {option.parts.recompute for option in result.options} == {"full"}


def test_plan_error_names_missing_memory_and_devices_needed():
    with pytest.raises(ValueError) as error:
        plan(MODELS["Qwen2.5-32B"], H100, 1, WORKLOAD, {})
    text = str(error.value)
    assert "no layout fits on 1 x h100: the smallest needs " in text
    ratio = float(text.split("needs ")[1].split("x the memory")[0])
    # Weights and gradients of 32.76B at 6 bytes, 12 more of optimizer: 549 GiB of 79 alone.
    assert ratio > 549 / 79.1
    smallest = int(text.split("smallest that fits: ")[1].split(" devices")[0])
    assert search(MODELS["Qwen2.5-32B"], H100, smallest, WORKLOAD).options
    assert not search(MODELS["Qwen2.5-32B"], H100, smallest // 2, WORKLOAD).options


def test_search_raises_for_partial_nodes():
    with pytest.raises(ValueError, match="which do not divide 12; use 8 or 16"):
        search(SMALL, H100, 12, WORKLOAD)


def test_search_covers_expert_layouts():
    shape = MODELS["Qwen3-30B-A3B"]
    sizes = {parts.expert for parts in layouts(shape, 16, {})}
    assert sizes == {1, 2, 4, 8, 16}
    best = search(shape, H100, 32, WORKLOAD, {"tensor": 1, "pipeline": 1}).options[0]
    assert best.parts.expert > 1


def test_command_plans_with_largest_expert_share():
    """The busiest rank's share of a mixture of experts is that of the memory check."""
    found = []
    for overrides in (["run.largest_expert_share=1"], ["run.largest_expert_share=1.5"], []):
        fixed = ["parallel.expert=8"]
        options = cli._parse(["plan", "Qwen3-30B-A3B", "--devices", "8", *fixed, *overrides])
        found.append(plan_command._plan(options))
    assert found[0] != found[1] and found[1] == found[2]


def test_report_has_row_per_layout_and_reasons(result):
    text = describe(result, BASE, top=3, show_rejected=False, choice=1)
    assert len([line for line in text.splitlines() if line[:3].strip().isdigit()]) >= 3
    assert "by formula, not measured" in text and "key-value heads" in text
    experts = replace(result, shape=MODELS["Qwen3-30B-A3B"])
    for of, is_unmeasured in ((result, False), (experts, True)):
        page = describe(of, BASE, top=1, show_rejected=False, choice=1)
        assert ("no training of a mixture of experts has been measured" in page) is is_unmeasured
        assert "which is not counted" not in page
    newer = replace(experts, device=DEVICES["b200"])
    # 128 experts of 3 x 768 x 2,048 in bfloat16: 1.1 GiB
    loaders = "a push then keeps\n  1.1 GiB more for each pipeline stage, which is not counted"
    assert loaders in describe(newer, BASE, top=1, show_rejected=False, choice=1)
    assert len(describe(result, BASE, top=3, show_rejected=True, choice=1).splitlines()) > len(
        result.rejected
    )


def rows_of(text):
    return [line for line in text.splitlines() if line[:3].strip().isdigit() and "|" in line]


def test_planned_config_comment_matches_its_row(result):
    row = rows_of(describe(result, BASE, top=1, show_rejected=False, choice=1))[0]
    _, _, seconds, hours, moments, engine = (part.split() for part in row.split("|"))
    comment = "".join(
        line for line in config_text(result.options[0], BASE, result).splitlines()[:4]
    )
    assert f": {seconds[-1]} s per step, {hours[0]} hours for 150 steps;" in comment
    for phase, gib in zip(("rollout", "behavior", "train", "push"), moments, strict=True):
        assert f"{phase} {gib}" in comment
        assert float(gib) <= 79.1
    assert float(engine[0]) * 79.1 == pytest.approx(float(engine[1]), abs=0.06)


def test_rows_within_planners_error_are_grouped(result):
    text = describe(result, BASE, top=len(result.options), show_rejected=False, choice=1)
    table = text.split("tokens: per pack")[0].splitlines()[5:]
    groups, group = [], []
    for line in table:
        if line[:3].strip().isdigit():
            group.append(result.options[int(line[:3]) - 1].step_seconds)
        elif group:
            groups, group = [*groups, group], []
    groups = [*groups, group]
    assert sum(map(len, groups)) == len(result.options) and len(groups) > 2
    for group, following in zip(groups, [*groups[1:], [math.inf]], strict=True):
        assert group[-1] <= 1.1 * group[0] < following[0]


def test_run_cost(tmp_path):
    file = tmp_path / "aime.jsonl"
    file.write_text("{}\n" * 7)
    changes = {
        "trainer": {"steps": 25, "keep_checkpoints": 2},
        "eval": {"every": 10, "sets": {"a": str(file), "b": "nowhere.parquet"}},
    }
    config = parse_config(BASE.model_dump() | changes)
    result = search(SMALL, H100, 8, WORKLOAD)
    option = next(each for each in result.options if each.parts.context == each.parts.pipeline == 1)
    cost = run_cost(option, config, result)
    assert cost.evaluations == 4  # before the first step, after 10, 20 and 25
    one = [evaluation_seconds(option, config, result, count) for count in (7, 30)]
    assert cost.evaluation_seconds == pytest.approx(sum(one))
    assert cost.assumed == ("b",)
    assert cost.hours * 3600 == pytest.approx(25 * option.step_seconds + 4 * sum(one))
    # 1,777,088,000 parameters: float32 weight, two moments, master weight; 2 kept, 1 in writing;
    # each with a step's rollouts, 2,048 responses of a quarter of 15,360 tokens of 12 bytes.
    rollouts = 2048 * 15360 // 4 * 12
    assert cost.disk["2 + 1 checkpoints"] == 3 * (16 * 1_777_088_000 + rollouts)
    assert cost.disk["the model"] == 4 * 1_777_088_000
    # 12 bytes of optimizer states per parameter, stored once over the node's 8 devices.
    replicas = option.parts.replicas * option.parts.tensor
    assert replicas == 8
    assert cost.host_bytes == pytest.approx(12 * 1_777_088_000, rel=0.01)
    # What a dry run of the config prints, and what the memory of a layout contains.
    planned = config_of(option, config)
    assert cost.responses == response_bytes(planned, processes=8)
    assert str(cost.responses) in "\n".join(cost.describe())
    load, parts = result.workload, option.parts
    packs = load.packs(ranks=parts.data, budget=parts.tokens, alignment=parts.alignment)
    assert cost.prepared_bytes == load.minibatches * packs.count * 80 * parts.local_tokens > 0
    text = "\n".join(cost.describe())
    assert f"{cost.hours:.1f} hours for 25 steps, {8 * cost.hours:.0f} device-hours" in text
    assert "30 problems assumed in b" in text


@pytest.mark.parametrize("parts", [Parts(2, 2, 1, 2, rollout_tensor=4), Parts(1, 2, 2, 2)])
def test_push_bytes_match_push_schedule(parts):
    # As many layers as stages, so that nothing is scaled: the schedule's elements, at 2 bytes.
    shape = replace(SMALL, num_layers=2)
    layout = ActorLayout(tensor=parts.tensor, pipeline=2, data=parts.replicas)
    engines = EngineLayout(parts.rollout_tensor, 8)
    whole = plan_for_rank(shape, layout, engines, rank=0, wire_elements=1 << 26, ranks_per_node=4)
    volume = push_bytes(shape, parts, per_node=4)
    assert volume.ranks == 8
    assert volume.within + volume.between == 2 * whole.elements_sent
    twice = push_bytes(replace(shape, num_layers=4), parts, per_node=4)
    assert 1 < (twice.within + twice.between) / (volume.within + volume.between) < 2
    assert math.isfinite(volume.between)


def test_push_times_are_estimated_for_fastest_options(result):
    few = search(SMALL, H100, 8, WORKLOAD, pushes=3).options
    assert [option.seconds["push"] > 0 for option in few[:5]] == [True, True, True, False, False]
    without = [option.step_seconds - option.seconds["push"] for option in few]
    assert max(without[:3]) <= min(without[3:])
    assert {option.parts for option in few} == {option.parts for option in result.options}
