"""The layout search covers all layouts; those that fit become configs, others have a reason."""

import json
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.apps.planning import fit
from megatron_rl.apps.planning import search as search_module
from megatron_rl.apps.planning.dry_run import dry_run_rank, stage_ranks
from megatron_rl.apps.planning.fit import ENGINE_ASLEEP, RESERVE, check_fit, response_bytes
from megatron_rl.apps.planning.generation import Answers, workload_of
from megatron_rl.apps.planning.models import MODELS, write_config_json
from megatron_rl.apps.planning.rates import DEVICES, link_bytes, push_bytes
from megatron_rl.apps.planning.report import (
    config_of,
    config_text,
    describe,
    evaluation_seconds,
    require_fit,
    run_cost,
)
from megatron_rl.apps.planning.search import (
    DryRuns,
    Layout,
    Planner,
    _misfit,
    layer_pattern,
    layouts,
    overlapped_seconds,
    probes_of,
    search,
    shares,
    with_layers,
)
from megatron_rl.commands import plan as plan_command
from megatron_rl.config import ConfigError, load_config, parse_config
from megatron_rl.errors import UserError
from megatron_rl.models.shape import read_model_shape
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.push_schedule import plan_for_rank
from tests.unit.apps.planning.models import save_shape

SMALL, H100 = "DeepSeek-R1-Distill-Qwen-1.5B", DEVICES["h100"]
FIXED = {"context": 1, "rollout_tensor": 1, "recompute": "full"}
# At most 1,024 tokens of a prompt and these of its response: a dry run takes a step for each 2,048.
RESPONSE, LONGEST = 3072, 4096


def planner_for(folder, name, sections=None, *, source=None, share=0.9):
    """Return the planner of a built-in model, or of one with this config.json."""
    model = write_config_json(MODELS[name], folder / name)
    if source is not None:
        (model / "config.json").write_text(json.dumps(source))
    config = parse_config({
        "model": {"path": str(model)}, "data": {"train": "data/train.parquet"},
        "rollout": {"max_response_tokens": RESPONSE}, **(sections or {}),
    })  # fmt: skip
    shape = read_model_shape(model)
    return Planner(config, shape, H100, workload_of(config), engine_share=share)


@pytest.fixture(scope="module")
def planner(tmp_path_factory):
    return planner_for(tmp_path_factory.mktemp("models"), SMALL)


@pytest.fixture(scope="module")
def dry_runs(planner):
    return DryRuns(planner.config)


@pytest.fixture(scope="module")
def result(planner, dry_runs):
    return search(planner, dry_runs, 8, FIXED, top=1000)


def test_every_layout_is_option_or_has_reason(result):
    every = [each.layout for each in (*result.options, *result.rejected)]
    keys = {(each.tensor, each.pipeline, each.data) for each in every}
    assert len(keys) == len(every) == 10  # powers of two whose product is 8
    assert all(each.reason for each in result.rejected)
    assert result.options and result.rejected and not result.slower + result.unmeasured
    assert any("does not divide the model's 12 attention heads" in each.reason
               for each in result.rejected)  # fmt: skip


def test_options_fit_are_sorted_and_above_their_lower_bounds(planner, result):
    times = [option.step_seconds for option in result.options]
    assert times == sorted(times)
    for option in result.options:
        assert max(option.memory.values()) <= 1.0
        assert all(seconds > 0 for seconds in option.seconds.values())
        layout = replace(option.layout, tokens=LONGEST)
        engine = planner.engine_beside(layout, planner.least_asleep(layout))
        assert planner.least_seconds(layout, engine) <= option.step_seconds
        assert planner.least_memory(layout) <= option.memory["train"] * H100.memory


class Shared(DryRuns):
    """Dry runs with the counts of others, which run what they do not have."""

    def __init__(self, others):
        super().__init__(others.config)
        self.others = others

    def run(self, probes):
        missing = [probe for probe in dict.fromkeys(probes) if probe not in self.done]
        self.others.run(missing)
        self.done |= {probe: self.others.done[probe] for probe in missing}
        return len(missing)


def test_layouts_behind_a_lower_bound_are_not_run(planner, dry_runs, result, monkeypatch):
    least = Planner.least_seconds
    slow = 1e6
    monkeypatch.setattr(
        Planner, "least_seconds",
        lambda self, layout, engine: least(self, layout, engine) + slow * (layout.tensor > 1),
    )  # fmt: skip
    runs = Shared(dry_runs)
    found = search(planner, runs, 8, FIXED | {"tokens": LONGEST}, top=1)
    assert found.slower > 0 and max(probe.layout.tensor for probe in runs.done) < 4
    monkeypatch.setattr(search_module, "MAX_DRY_RUNS", 0)
    limited = search(planner, runs, 8, FIXED)
    assert not limited.options and limited.unmeasured > found.slower


def test_epochs_scale_training_time_and_not_rollout_time(planner, dry_runs, result):
    once = replace(planner, workload=replace(planner.workload, epochs=1))
    four = result.options[0]
    one = once.evaluate(four.layout, dry_runs)
    ratio = planner.workload.epochs
    assert ratio > 1
    assert four.seconds["train"] == pytest.approx(ratio * one.seconds["train"])
    assert four.seconds["rollout"] == one.seconds["rollout"]


def test_reference_policy_is_another_scoring_pass(tmp_path, planner, dry_runs, result):
    kl = {"name": "grpo", "kl": {"estimator": "k3", "coefficient": 0.1}}
    with_kl = planner_for(tmp_path, SMALL, {"objective": kl})
    layout = result.options[0].layout
    runs = DryRuns(with_kl.config)
    runs.run(probes_of(with_kl.shape, layout))
    scored, alone = with_kl.evaluate(layout, runs), result.options[0]
    assert scored.seconds["behavior"] == pytest.approx(2 * alone.seconds["behavior"], rel=0.02)
    copied = 2 * 1_777_088_000 / layout.tensor / layout.pipeline  # bytes on the host, or more
    assert copied <= (scored.host_bytes - alone.host_bytes) * 1.02 < 1.4 * copied
    # A teacher with half the layers: less than a pass and its copy, more than half of them. It is
    # on the device with the policy while it scores.
    source = json.loads((Path(with_kl.config.model.path) / "config.json").read_text())
    save_shape(tmp_path / "teacher", with_layers(source, with_kl.shape.num_layers // 2))
    model = with_kl.config.model.model_copy(update={"reference": str(tmp_path / "teacher")})
    config = with_kl.config.model_copy(update={"model": model})
    distilled = replace(with_kl, config=config).evaluate(layout, runs)
    for got, own, plain in (
        (distilled.seconds["behavior"], scored.seconds["behavior"], alone.seconds["behavior"]),
        (distilled.host_bytes, scored.host_bytes, alone.host_bytes),
    ):
        assert 0.5 < (got - plain) / (own - plain) < 0.8
    assert distilled.memory["behavior"] > scored.memory["behavior"] + 0.2 * copied / H100.memory
    engine = planner_for(tmp_path, SMALL, {"behavior": "engine"})
    assert engine.evaluate(layout, dry_runs).seconds["behavior"] == 0


MIXTURES = ("Qwen3-30B-A3B", "Moonlight-16B-A3B-Instruct", "gpt-oss-20b-bf16")
# Model, its layers, and layout.
CASES = {
    "tensor and context": ("Qwen3-8B", 6, Layout(2, 1, 2, 2)),
    "four stages": ("Qwen3-8B", 8, Layout(1, 4, 1, 2, recompute="selective")),
    "experts": (MIXTURES[0], 6, Layout(2, 2, 2, 1, expert=2, expert_tensor=1, recompute="full")),
    "latent": (MIXTURES[1], 8, Layout(1, 2, 1, 2, expert=2)),
    "sinks and windows": (MIXTURES[2], 6, Layout(2, 1, 1, 2, expert=2, expert_tensor=1)),
    "a critic that is larger": (SMALL, 4, Layout(2, 1, 1, 4)),
    "a critic of its own in stages": (SMALL, 4, Layout(1, 2, 1, 2)),
}
FIRST = ("tensor and context", "latent")


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[pytest.mark.slow] * (one not in FIRST)) for one in CASES]
)
def test_memory_is_that_of_the_dry_run_of_the_whole_model(tmp_path, case):
    """With six or eight layers and, of mixtures, 8 experts."""
    name, layers, layout = CASES[case]
    source = json.loads(
        (write_config_json(MODELS[name], tmp_path / "whole") / "config.json").read_text()
    )
    source = with_layers(source, layers)
    few = dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8)
    source |= {key: value for key, value in few.items() if key in source}
    sections: dict[str, object] = {}
    if "critic" in case:
        depth = layers * (3 if "larger" in case else 1)
        save_shape(tmp_path / "critic", with_layers(source, depth))
        sections = {"critic": {"path": str(tmp_path / "critic")}, "objective": "ppo"}
    planner = planner_for(tmp_path, name, sections, source=source)
    planner = replace(planner, device=DEVICES["b200"])
    runs = DryRuns(planner.config)
    runs.run(probes_of(planner.shape, layout))
    stages, replicas = planner.stages(layout, runs)
    memory = planner.memory(layout, stages, replicas)
    option = planner.evaluate(layout, runs)
    config = fit.apply_changes(config_of(option, planner.config), fit.WHOLE)
    whole = [
        dry_run_rank(config, processes=layout.world_size, rank=rank)
        for rank in stage_ranks(config, layout.world_size)
    ]
    packs = planner._prepared_bytes(layout)
    planned = memory["train"] - packs - ENGINE_ASLEEP - RESERVE
    further = max(0, max(run.communicators for run in whole) - 4) * 2**29
    phases = {"update", "step", "critic"} & set(whole[0].phases)
    measured = max(run.phases[phase].peak for run in whole for phase in phases)
    assert planned == pytest.approx(measured + further, rel=0.02)
    awake = max(sum(run.asleep.values()) for run in whole)
    messages = 2 * 48 * 2**20 if "stages" in case else 0  # may be freed a little later
    assert memory["rollout"] - RESERVE == pytest.approx(awake, rel=0.01, abs=messages + 2**22)
    # FLOPs of the slowest stage
    flops = max(stage["update products"] + stage["update attention"] for stage in stages)
    runs_flops = max(run.phases["update"].flops / run.micro_batches for run in whole)
    assert flops == pytest.approx(runs_flops, rel=0.02)


def test_critic_with_adapters_has_few_states_and_one_that_cannot_be_cut_is_named(tmp_path):
    ppo = {"objective": "ppo", "optimizer": {"learning_rate": 1e-4}}
    adapters = {"learning_rate": 1e-4, "lora": {"rank": 8}}
    assert 0 < planner_for(tmp_path, SMALL, ppo | {"critic": adapters})._critic_part < 0.1
    both = planner_for(tmp_path, SMALL, ppo | {"critic": adapters, "lora": {"rank": 8}})
    assert 0.5 < both._critic_part <= 1.1
    write_config_json(MODELS["Qwen2.5-0.5B"], tmp_path / "critic")  # 14 heads, 24 layers
    own = planner_for(tmp_path, SMALL, ppo | {"critic": {"path": str(tmp_path / "critic")}})
    assert _misfit(own, Layout(4, 1, 1, 2)).startswith("critic.path: ")
    assert "another depth" in _misfit(own, Layout(1, 2, 1, 2))
    assert not _misfit(own, Layout(2, 1, 1, 2))


@pytest.mark.parametrize(
    ("name", "expected"),
    [(SMALL, (0, 1)), ("GLM-4.5-Air", (1, 1)), ("DeepSeek-V3", (3, 1)),
     ("Gemma-3-4B-it-text", (0, 6)), ("gpt-oss-20b-bf16", (0, 2)), ("Qwen3.5-35B-A3B", (0, 4))],
)  # fmt: skip
def test_kinds_of_layers_repeat(name, expected):
    assert layer_pattern(MODELS[name]) == expected


@pytest.fixture
def probes(dry_runs, result):
    """Two depths of a first pipeline stage, which has no vocabulary to go through.

    The last ones: a process computes the frequencies of positions once for each shape.
    """
    return [probe for probe in dry_runs.done if len(probe.layers) == 2 and probe.stage == 0][-2:]


def test_counts_are_kept_in_files(tmp_path, planner, probes):
    first = DryRuns(planner.config, folder=tmp_path)
    assert first.run(probes) == len(probes) == 2
    second = DryRuns(planner.config, folder=tmp_path)
    assert second.run(probes) == 0 and second.done == first.done
    other = planner.config.model_copy(
        update={"run": planner.config.run.model_copy(update={"largest_expert_share": 2.0})}
    )
    assert not DryRuns(other, folder=tmp_path)._file(probes[0]).exists()


def test_worker_processes_return_the_same_counts(planner, dry_runs, probes):
    several = DryRuns(planner.config, workers=2)
    try:
        several.run(probes)
    finally:
        several.close()
    assert {probe: dry_runs.done[probe] for probe in probes} == several.done


def test_plan_error_names_missing_memory_and_devices_needed(tmp_path):
    planner = planner_for(tmp_path, "Qwen2.5-32B")
    result = search(planner, DryRuns(planner.config), 1)
    assert not result.dry_runs  # a lower bound suffices
    with pytest.raises(UserError) as error:
        require_fit(result, planner)
    text = str(error.value)
    assert "no layout fits on 1 x h100: the smallest needs " in text
    ratio = float(text.split("needs ")[1].split("x the memory")[0])
    # Weights and gradients of 32.76B at 6 bytes, 12 more of optimizer: 549 GiB of 79 alone.
    assert ratio > 549 / 79.1
    assert "fill 7 devices: try 8" in text


def test_search_raises_for_partial_nodes(planner, dry_runs):
    with pytest.raises(ValueError, match="which do not divide 12; use 8 or 16"):
        search(planner, dry_runs, 12)


def test_search_covers_expert_layouts():
    shape = MODELS["Qwen3-30B-A3B"]
    sizes = {layout.expert for layout in layouts(shape, 16, {})}
    assert sizes == {1, 2, 4, 8, 16}


def test_planned_config_loads_and_comment_matches_its_row(tmp_path, planner, result):
    option = result.options[0]
    file = tmp_path / "planned.yaml"
    file.write_text(config_text(option, planner, planner.config, 8))
    config = load_config(file)
    assert config.parallel.tensor == option.layout.tensor
    assert config.parallel.model_size * config.parallel.data == 8
    assert config.rollout.gpu_memory_utilization == option.gpu_memory_utilization
    assert config.trainer.tokens_per_micro_batch >= config.max_model_tokens
    text = describe(result, planner, top=1, show_rejected=False, choice=1)
    row = next(line for line in text.splitlines() if line[:3].strip().isdigit() and "|" in line)
    _, _, seconds, hours, moments, engine = (part.split() for part in row.split("|"))
    comment = "".join(file.read_text().splitlines()[:4])
    assert comment.startswith("# Planned for 8 x h100")
    assert f": {seconds[-1]} s per step, {hours[0]} hours for 150 steps;" in comment
    for phase, gib in zip(("rollout", "behavior", "train", "push"), moments, strict=True):
        assert f"{phase} {gib}" in comment and float(gib) <= 79.1
    assert float(engine[0]) * 79.1 == pytest.approx(float(engine[1]), abs=0.06)
    (run,) = check_fit(config, processes=8, device_bytes=H100.memory)
    needed = run.peak + ENGINE_ASLEEP + RESERVE
    assert needed / H100.memory == pytest.approx(option.memory["train"], rel=0.05)


def test_report_has_rows_and_reasons(planner, result):
    text = describe(result, planner, top=3, show_rejected=False, choice=1)
    assert len([line for line in text.splitlines() if line[:3].strip().isdigit()]) >= 3
    assert f"of {result.dry_runs} dry runs" in text and "attention heads" in text
    assert "which is not counted" not in text
    shape = MODELS["Qwen3-30B-A3B"]
    newer = replace(result, shape=shape, device=DEVICES["b200"])
    # 128 experts of 3 x 768 x 2,048 in bfloat16: 1.1 GiB
    loaders = "a push then keeps\n  1.1 GiB more for each pipeline stage, which is not counted"
    assert loaders in describe(newer, planner, top=1, show_rejected=False, choice=1)
    trainer = planner.config.trainer.model_copy(update={"share_prompts": True})
    sharing = replace(planner, config=planner.config.model_copy(update={"trainer": trainer}))
    assert "share_prompts" not in text
    assert "trainer.share_prompts=true is not counted" in describe(
        result, sharing, top=1, show_rejected=False, choice=1
    )
    every = describe(result, planner, top=3, show_rejected=True, choice=1)
    assert len(every.splitlines()) > len(result.rejected)
    limited = replace(result, slower=3, unmeasured=4)
    text = describe(limited, planner, top=1, show_rejected=False, choice=1)
    assert "3 are slower by a lower bound, 4 were not measured" in text


def test_rows_within_planners_error_are_grouped(planner, result):
    text = describe(result, planner, top=len(result.options), show_rejected=False, choice=1)
    table = text.split("tokens: per pack")[0].splitlines()[5:]
    groups, group = [], []
    for line in table:
        if line[:3].strip().isdigit():
            group.append(result.options[int(line[:3]) - 1].step_seconds)
        elif group:
            groups, group = [*groups, group], []
    groups = [*groups, group]
    assert sum(map(len, groups)) == len(result.options)
    for group, following in zip(groups, [*groups[1:], [math.inf]], strict=True):
        assert group[-1] <= 1.1 * group[0] < following[0]


def test_run_cost(tmp_path, planner, result):
    file = tmp_path / "aime.jsonl"
    file.write_text("{}\n" * 7)
    changes = {
        "trainer": {"steps": 25, "keep_checkpoints": 2},
        "eval": {"every": 10, "sets": {"a": str(file), "b": "nowhere.parquet"}},
    }
    config = parse_config(planner.config.model_dump() | changes)
    of_run = replace(planner, config=config)
    option = next(each for each in result.options if each.layout.pipeline == 1)
    cost = run_cost(option, of_run, 8)
    assert cost.evaluations == 4  # before the first step, after 10, 20 and 25
    one = [evaluation_seconds(option, of_run, count) for count in (7, 30)]
    assert cost.evaluation_seconds == pytest.approx(sum(one))
    assert cost.assumed == ("b",)
    assert cost.hours * 3600 == pytest.approx(25 * option.step_seconds + 4 * sum(one))
    # 1,777,088,000 parameters: float32 weight, two moments, master weight; 2 kept, 1 in writing;
    # each with a step's rollouts, 2,048 responses of a quarter of 3,072 tokens of 12 bytes.
    rollouts = 2048 * RESPONSE // 4 * 12
    assert cost.disk["2 + 1 checkpoints"] == 3 * (16 * 1_777_088_000 + rollouts)
    assert cost.disk["the model"] == 2 * 1_777_088_000
    # 12 bytes of optimizer states per parameter, stored once over the node's 8 devices.
    assert option.layout.replicas * option.layout.tensor == 8
    assert cost.host_bytes == pytest.approx(12 * 1_777_088_000, rel=0.01)
    # What a dry run of the config prints, and what the memory of a layout contains.
    assert cost.responses == response_bytes(config_of(option, config), trainers=8)
    assert str(cost.responses) in "\n".join(cost.describe())
    packs = planner.packs(option.layout)
    local = option.layout.tokens // option.layout.context
    assert cost.prepared_bytes == planner.workload.minibatches * packs.count * 80 * local > 0
    text = "\n".join(cost.describe())
    assert f"{cost.hours:.1f} hours for 25 steps, {8 * cost.hours:.0f} device-hours" in text
    assert "30 problems assumed in b" in text


def test_push_bytes_match_push_schedule_and_adapters_are_sent_alone(tmp_path, planner, result):
    shape = replace(MODELS[SMALL], num_layers=2)
    for sizes in ({"tensor": 2, "data": 2}, {"context": 2, "data": 2}):
        # As many layers as stages, so that nothing is scaled: the schedule's elements, at 2 bytes.
        layout = Layout(pipeline=2, rollout_tensor=4, **sizes)
        actor = ActorLayout(tensor=layout.tensor, pipeline=2, data=layout.replicas)
        engines = EngineLayout(4, 8)
        whole = plan_for_rank(
            shape, actor, engines, rank=0, wire_elements=1 << 26, ranks_per_node=4
        )
        volume = push_bytes(shape, layout, 4, per_node=4)
        assert volume.ranks == 8
        assert volume.within + volume.between == 2 * whole.elements_sent
        twice = push_bytes(replace(shape, num_layers=4), layout, 4, per_node=4)
        assert 1 < (twice.within + twice.between) / (volume.within + volume.between) < 2
    merged, alone = (
        planner_for(tmp_path, SMALL, {"lora": {"rank": 8, "push": push}, "behavior": "engine",
                                      "optimizer": {"learning_rate": 1e-4}})
        for push in ("merged", "adapters")
    )  # fmt: skip
    option = result.options[0]
    pushed = [each.with_push(option).seconds["push"] for each in (merged, alone)]
    assert pushed[1] < pushed[0]


def simulated_seconds(rollout, behavior, train, push, *, lag, batches, steps=60):
    """Seconds of a step in `trainer.loop.run_step`'s order, of a run long enough for its start.

    Each side has a clock. A step that is to be trained must have been generated and scored.
    """
    trainers = engines = 0.0
    generated = scored = lag + batches  # in the first step, before training
    times = []
    for step in range(1, steps + 1):
        is_ordered = (step - 1) % batches == 0 and step > 1
        if is_ordered:  # during this step, right after the push that the step before ended with
            engines += batches * rollout
            generated += batches
        if step > 1 and (pending := generated - scored - batches * is_ordered):
            trainers += behavior * pending
            scored += pending
        assert scored >= step
        trainers += train
        if is_ordered:
            trainers = max(trainers, engines)  # the result is taken after the updates
        if step % batches == 0:
            engines = trainers = trainers + push
        times.append(trainers)
    later = steps // 2 // batches * batches
    return (times[-1] - times[-1 - later]) / later


@pytest.mark.parametrize(("lag", "batches"), [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_step_of_two_sides_is_that_of_a_simulated_schedule(lag, batches):
    for phases in ((10, 1, 3, 2), (10, 4, 9, 2), (5, 0, 5, 1), (1, 2, 30, 0), (9, 2, 7, 0.5)):
        rollout, behavior, train, push = phases
        once = push / batches  # `Option.seconds` are those of a step
        found = overlapped_seconds(rollout, behavior, train, once, batches=batches)
        simulated = simulated_seconds(*phases, lag=lag, batches=batches)
        assert found == pytest.approx(simulated), phases
    assert overlapped_seconds(10, 1, 3, 2) == 12 and overlapped_seconds(4, 1, 5, 2) == 8


SPLIT = {"lag": {"batches": 1}}


def test_layouts_of_engines_on_ranks_of_their_own(tmp_path, dry_runs, planner, result):
    """Counts of dry runs are those of the same layout of all ranks; nothing is shared."""
    apart = planner_for(tmp_path, SMALL, SPLIT)
    fixed = FIXED | {"tensor": 1, "engine_ranks": (0, *shares(H100, 8))}
    found = search(apart, dry_runs, 8, fixed, top=1000)
    every = [option.layout for option in found.options]
    assert {layout.engine_ranks for layout in every} >= {0, 1, 2, 4, 6, 7}
    assert all(layout.world_size + layout.engine_ranks == 8 for layout in every)
    # A lag alone changes nothing for shared ranks.
    assert [option for option in found.options if not option.layout.engine_ranks] == [
        option for option in result.options if option.layout.tensor == 1
    ]
    for option in found.options:
        layout, seconds = option.layout, option.seconds
        if not layout.engine_ranks:
            continue
        sides = seconds["rollout"], seconds["behavior"] + seconds["train"]
        assert option.step_seconds == seconds["push"] + max(sides)
        assert seconds["offload"] == 0 and option.gpu_memory_utilization == 0.9
        assert max(option.memory.values()) <= 1
        assert apart.least_seconds(layout, apart.engine_beside(layout, 0)) <= option.step_seconds
        assert apart.least_memory(layout) <= option.memory["train"] * H100.memory
    # The same ranks train without a sleeping engine, and with their optimizer's states.
    layout = replace(every[0], tensor=1, pipeline=1, data=4, engine_ranks=4, rollout_tensor=1)
    own, shared = (
        apart.evaluate(replace(layout, engine_ranks=engine_ranks), dry_runs)
        for engine_ranks in (4, 0)
    )
    freed = (shared.memory["train"] - own.memory["train"]) * H100.memory
    assert freed == pytest.approx(ENGINE_ASLEEP)
    assert own.memory["behavior"] > shared.memory["behavior"]
    assert own.seconds["train"] == shared.seconds["train"]
    kept = 2 * 1_777_088_000  # bytes of the weights for behavior log-probs
    assert own.host_bytes == pytest.approx(kept, rel=0.01)
    fewer = replace(layout, data=2, engine_ranks=6)
    more_engines = apart.evaluate(fewer, dry_runs)
    assert more_engines.seconds["rollout"] < own.seconds["rollout"]
    assert more_engines.seconds["train"] > own.seconds["train"]
    config = config_of(own, apart.config)
    assert config.parallel.engine_ranks == 4 and config.sides(8) == (4, 4)
    assert not config.process_problems(8)
    (run,) = check_fit(config, processes=8, device_bytes=H100.memory)
    assert (run.peak + RESERVE) / H100.memory == pytest.approx(own.memory["train"], rel=0.05)


def test_slow_answers_favour_engines_on_ranks_of_their_own(planner, dry_runs, result):
    """Trainers wait for minutes that cost engines no device; separate ones hide the training."""
    layout = next(each.layout for each in result.options if each.layout.data == 8)
    half = replace(layout, data=4, engine_ranks=4)
    dry_runs.run(probe for each in (layout, half) for probe in probes_of(planner.shape, each))
    ratios = []
    for seconds in (0, 600, 1800):
        answers = Answers(seconds, seconds) if seconds else None
        slow = replace(planner, workload=replace(planner.workload, turns=4, answers=answers))
        shared, own = (slow.evaluate(each, dry_runs).step_seconds for each in (layout, half))
        ratios.append(own / shared)
    assert ratios[0] > 1 > ratios[1]


def test_paused_requests_keep_the_engines_memory(planner, dry_runs, result):
    option = next(each for each in result.options if each.layout.pipeline == 1)
    windows = replace(planner, workload=replace(planner.workload, every_tokens=RESPONSE // 4))
    paused = windows.evaluate(option.layout, dry_runs)
    room, share = H100.memory, paused.gpu_memory_utilization
    taken = paused.memory["train"] - option.memory["train"] + ENGINE_ASLEEP / room
    assert taken == pytest.approx(share) and share < option.gpu_memory_utilization
    assert max(paused.memory.values()) <= 1
    assert paused.seconds["rollout"] < option.seconds["rollout"]


def test_shares_of_ranks_that_generate():
    assert shares(H100, 8) == tuple(range(1, 8)) and shares(H100, 2) == (1,)
    assert shares(H100, 16) == (8,) and shares(H100, 64) == tuple(range(8, 64, 8))
    assert shares(H100, 1024) == tuple(range(128, 1024, 128))


def test_push_to_other_ranks_has_every_weight_once_for_each_node():
    """Each of two nodes of engines receives every weight once, and forwards it within."""
    shape = replace(MODELS[SMALL], num_layers=2)
    layout = Layout(tensor=2, data=4, rollout_tensor=4, engine_ranks=16)
    volume = link_bytes(shape, layout, layout.engine_layout, per_node=8)
    engine = sum(
        math.prod(size) for size in EngineLayout(4, 4).parameter_shapes(shape, rank=0).values()
    )
    whole = plan_for_rank(
        shape, ActorLayout(tensor=2, data=4), layout.engine_layout,
        rank=0, wire_elements=1 << 26, ranks_per_node=8,
    )  # fmt: skip
    assert volume.ranks == 8
    sent = volume.between + 2 * volume.within  # 16 ranks forward, 8 are counted
    assert sent == pytest.approx(2 * whole.elements_sent, rel=0.01)
    assert sent == pytest.approx(16 * 2 * engine, rel=0.01)
    one_node = link_bytes(shape, Layout(data=4, engine_ranks=4), EngineLayout(1, 4, first=4), 8)
    assert one_node.between == 0 and one_node.ranks == 4


SHORT = (f"rollout.max_response_tokens={RESPONSE}", f"trainer.tokens_per_micro_batch={LONGEST}")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of the test's own; and one core, on which the command starts no workers."""
    monkeypatch.setattr(plan_command, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})


def test_command_chooses_the_split_where_a_lag_is_set(tmp_path, own_cache):
    sizes = [
        "parallel.tensor=1", "parallel.pipeline=1", "parallel.context=1", "rollout.tensor=1",
        "trainer.recompute=full", *SHORT,
    ]  # fmt: skip

    def own(*arguments):
        options = cli._parse(["plan", SMALL, "--devices", "8", *sizes, *arguments])
        text = plan_command._plan(options)
        rows = [line.split("|")[0].split() for line in text.splitlines()]
        return text, {int(row[-1]) for row in rows if len(row) == 8 and row[0].isdigit()}

    lag, answers = "lag.batches=1", ("--turns", "4", "--answer-seconds", "60,120")
    assert own()[1] == own(lag, "parallel.engine_ranks=null")[1] == {0}
    text, found = own(lag, *answers)
    assert {0, 4, 7} <= found
    assert "in 4 turns; answers take 60 s, 95% of them at most 120 s" in text
    file = tmp_path / "planned.yaml"
    assert own(lag, "parallel.engine_ranks=4", "--write", str(file))[1] == {4}
    assert load_config(file).parallel.engine_ranks == 4


def test_command_plans_with_largest_expert_share_and_writes_a_row(tmp_path, own_cache, capsys):
    """The busiest rank's share of a mixture of experts is that of the memory check."""
    found = []
    fixed = [
        "parallel.expert=8", "parallel.tensor=1", "parallel.pipeline=1", "parallel.context=1",
        "rollout.tensor=2", "trainer.recompute=full", *SHORT,
    ]  # fmt: skip
    for overrides in (["run.largest_expert_share=1"], []):
        target = ["--write", str(tmp_path / f"{len(found)}.yaml")]
        arguments = ["plan", "Qwen3-30B-A3B", "--devices", "32", *target, *fixed, *overrides]
        found.append(plan_command._plan(cli._parse(arguments)).partition("\nwrote row")[0])
    assert found[0] != found[1]
    assert "megatron-rl: 2 dry runs, 1 of 1 layouts; fastest so far" in capsys.readouterr().err
    assert load_config(tmp_path / "1.yaml").model.path == "models/Qwen3-30B-A3B"


def test_sizes_are_kept_in_either_form():
    for given in (
        ["parallel={tensor: 2, context: 1}"],
        ["parallel.tensor=2", "parallel.context=1"],
    ):
        config, fixed = plan_command._read(cli._parse(["plan", SMALL, "--devices", "8", *given]))
        assert fixed == {"tensor": 2, "context": 1} and config.parallel.tensor == 2


def test_ctrl_c_prints_the_layouts_that_were_measured(own_cache, dry_runs, monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    calls, measure = [], DryRuns.run

    def run(self, probes):
        calls.append(len(probes))
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # as the terminal does
        measure(dry_runs, probes)
        self.done |= {probe: dry_runs.done[probe] for probe in probes}
        return len(probes)

    monkeypatch.setattr(DryRuns, "run", run)
    fixed = ("parallel.context=1", "rollout.tensor=1", "trainer.recompute=full", *SHORT)
    text = plan_command._plan(cli._parse(["plan", SMALL, "--devices", "8", *fixed]))
    assert "interrupted: what was measured so far follows" in capsys.readouterr().err
    assert len(calls) == 3 and re.search(r"(?m)^ *1 .*\|", text)
    assert signal.getsignal(signal.SIGINT) is before
    calls.clear()
    monkeypatch.setattr(DryRuns, "run", lambda self, probes: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(ConfigError, match="interrupted before a layout that fits was measured"):
        plan_command._plan(cli._parse(["plan", SMALL, "--devices", "8", *fixed]))


def test_layouts_that_nearly_fill_a_device_come_last(result):
    slowest = result.options[-1]
    full = replace(result.options[0], memory={"train": 78.9 / 79.1})
    assert sorted([full, slowest], key=type(full).order) == [slowest, full]
