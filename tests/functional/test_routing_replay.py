"""Routing of experts: the same records, counts and replays under layouts and recomputation."""

import functools
import json
import math
from pathlib import Path

import pytest
import torch

from tests.functional.test_actor_architectures import EXPERTS, GROUPED, LATENT, MODELS, SIZES
from tests.functional.test_actor_layouts import make_rollouts, randomise
from tests.ranks import run_ranks

UPDATES = 3
# Replay and recomputation; the first of a model is the definition.
CASES = {
    "qwen2 replay": (True, "none"),
    "deepseek replay": (True, "none"),  # below latent attention
    "glm4 replay": (True, "none"),  # chosen by sigmoids and biases, among groups
    "glm4 replay, selective": (True, "selective"),
    "next replay": (True, "none"),  # with gated delta nets and shared experts
    "next replay, selective": (True, "selective"),
    "gpt replay": (True, "none"),  # by a router with biases
    "gpt replay, selective": (True, "selective"),
    "replay": (True, "none"),
    "replay, selective": (True, "selective"),
    "replay, full": (True, "full"),
    "compare": (False, "none"),
    "compare, full": (False, "full"),
}
ELSEWHERE = ("glm4 replay, selective", "next replay, selective")  # under layouts only
LAYOUTS = {
    "one": ({}, 1, [case for case in CASES if case not in ELSEWHERE]),
    "pp2-virtual2": (
        {"pipeline": 2, "virtual_stages": 2},
        2,
        ["replay, full", "compare, full"],
    ),
    "tp2-cp2-ep2": (
        {"tensor": 2, "context": 2, "expert": 2},
        4,
        ["replay, selective", "compare", "glm4 replay, selective"],
    ),
    "tp2-cp2-ep2, delta nets": (
        {"tensor": 2, "context": 2, "expert": 2}, 4, ["next replay, selective"],
    ),
    "tp2-pp2-ep2-etp1": (
        {"tensor": 2, "pipeline": 2, "expert": 2, "expert_tensor": 1},
        4,
        ["gpt replay, selective", "next replay, selective"],
    ),
}  # fmt: skip
SLOW = ("tp2-cp2-ep2, delta nets", "tp2-pp2-ep2-etp1")


def _train(root, topology, case, checkpoint):
    """Record, write and read the routes, and update; what every layout must agree on."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.reference import ReferencePolicy
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.data.packing import gather_by_rollout, plan_minibatches
    from megatron_rl.objectives import build_objective
    from megatron_rl.trainer.learning_check import measure_routing
    from megatron_rl.trainer.route_files import read_routes, write_routes

    replay, recompute = CASES[case]
    settings = ActorSettings(
        optimizer=OptimizerSection(learning_rate=3e-3, weight_decay=0.0, epsilon=1e-4),
        warmup_updates=0,
        recompute=recompute,
        replay_routes=replay,
        overlap_reduction=topology.world_size > 1,
    )
    first, _, rest = case.partition(" ")
    model = root / (first if rest.startswith("replay") else "model")
    actor = MegatronActor(model, topology=topology, settings=settings)

    def plan():
        rollouts, advantages = make_rollouts()
        return plan_minibatches(
            rollouts,
            advantages,
            minibatches=2,
            tokens_per_micro_batch=130 if topology.pp_size > 1 else 260,
            topology=topology,
        )

    def gather(packs, values):
        rows = gather_by_rollout(packs, values, count=16, topology=topology)
        return [row.tolist() for row in rows]

    minibatches = plan()
    packs = [pack for minibatch in minibatches for pack in minibatch.micro_batches]
    plain = actor.compute_logprobs(packs)
    recorded = actor.compute_logprobs(packs, routing="record")
    assert all(map(torch.equal, plain, recorded)), "recording changed a log-prob"
    for pack, logprobs in zip(packs, recorded, strict=True):
        pack.behavior_logprobs = logprobs
    reference = ReferencePolicy(actor, model)
    report = {"behavior": gather(packs, recorded), "grad_norms": [], "changed": []}

    objective = build_objective("grpo")
    for update in range(UPDATES):
        if update == 2 and checkpoint:  # a run that ends here continues with the files
            folder = root / checkpoint
            folder.mkdir(exist_ok=True)
            before = [pack.routes for pack in packs]
            write_routes(folder, packs, actor)
            torch.distributed.barrier()
            for pack in packs:
                pack.routes = None
            read_routes(folder, packs, actor)
            assert all(map(torch.equal, before, (pack.routes for pack in packs)))
        result = actor.update(minibatches[update % 2], objective)
        if update == 0:
            report["deviation"] = result.statistics.to_metrics()["ratio/max_deviation"]
            assert result.routes[:, 0].sum() == 0, "nothing has changed yet"
        report["grad_norms"].append(result.grad_norm)
        routed = result.routes[result.routes[:, 1] > 0]  # layers with experts
        report["changed"].append((routed[:, 0] / routed[:, 1]).tolist())
    report["after"] = gather(packs, actor.compute_logprobs(packs))
    report["recorded"] = gather(packs, actor.compute_logprobs(packs, routing="recorded"))
    if topology.world_size == 1:
        report["own"] = gather(packs, actor.compute_logprobs(packs, routing="own"))
    report["fraction"] = list(measure_routing(actor, minibatches[0]).values())
    # The reference is the model at the start, whose own choices are the recorded ones.
    again = gather(packs, reference.compute_logprobs(packs))
    assert again == report["behavior"], "the reference did not choose its own experts"
    for pack in minibatches[1].micro_batches:  # as if no response had an advantage
        pack.response_mask = torch.zeros_like(pack.response_mask)
    assert all(map(math.isnan, measure_routing(actor, minibatches[1]).values()))
    return report


def _run(rank, world_size, root, layout, cases):
    from megatron_rl.actor import groups

    topology = groups.initialise(**layout)
    name = "-".join(f"{key}{size}" for key, size in layout.items()) or "one"
    return json.dumps(
        {
            case: _train(Path(root), topology, case, f"{name}-{case}" if "replay" in case else None)
            for case in cases
        }
    )


def _read_elsewhere(rank, world_size, root):
    """Read the files of several layouts in another one, which all give the same routes."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.data.packing import plan_minibatches
    from megatron_rl.trainer.route_files import read_routes

    topology = groups.initialise(context=world_size)
    actor = MegatronActor(Path(root) / "model", topology=topology, settings=ActorSettings())
    rollouts, advantages = make_rollouts()
    tables = []
    for folder in (
        "one-replay",
        "tensor2-context2-expert2-replay, selective",
        "pipeline2-virtual_stages2-replay, full",
    ):
        minibatches = plan_minibatches(
            rollouts,
            advantages,
            minibatches=2,
            tokens_per_micro_batch=130,
            topology=topology,
        )
        packs = [pack for minibatch in minibatches for pack in minibatch.micro_batches]
        read_routes(Path(root) / folder, packs, actor)
        routes = []
        for pack in packs:
            needed = actor.packs.prepare(pack).host.is_used
            routes.append(pack.routes[:, needed].sort(dim=2)[0].tolist())
        tables.append(routes)
    assert tables[0] == tables[1] == tables[2], "files of other layouts give other routes"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    import transformers

    root = tmp_path_factory.mktemp("routing")
    torch.manual_seed(7)
    experts = SIZES | EXPERTS | {"num_experts": 8}
    qwen2 = {"shared_expert_intermediate_size": 28, "head_dim": 8}
    for name, config in (
        ("model", transformers.Qwen3MoeConfig(**experts, norm_topk_prob=True)),
        ("qwen2", transformers.Qwen2MoeConfig(**experts | qwen2)),
        ("deepseek", transformers.DeepseekV3Config(**SIZES | GROUPED | LATENT)),
        ("glm4", transformers.Glm4MoeConfig(**SIZES, **GROUPED)),
        ("next", transformers.Qwen3NextConfig(**SIZES | MODELS["qwen3_next"][1])),
        ("gpt", transformers.GptOssConfig(**SIZES | MODELS["gpt_oss"][1])),
    ):
        model = transformers.AutoModelForCausalLM.from_config(config)
        randomise(model)
        model.save_pretrained(root / name)

    @functools.cache
    def report(name):
        layout, world_size, cases = LAYOUTS[name]
        return json.loads(run_ranks(_run, world_size, str(root), layout, cases)[0])

    return root, report


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS],
)
def test_updates_equal_those_of_one_process_without_recomputation(reports, layout):
    _, report = reports
    for case, got in report(layout).items():
        want = report("one")[case.split(",")[0]]
        assert got["deviation"] == 0.0, case
        # Own choices may round to the other side of a near tie, and the runs then go apart.
        count = UPDATES if "replay" in case else 2
        assert got["grad_norms"][:count] == pytest.approx(want["grad_norms"][:count], rel=1e-4), (
            case
        )
        for mine, theirs in zip(got["changed"], want["changed"], strict=True):
            assert mine == pytest.approx(theirs, abs=0.03), case
        for key in ("behavior", "after", "recorded") if count == UPDATES else ("behavior",):
            for mine, theirs in zip(got[key], want[key], strict=True):
                assert mine == pytest.approx(theirs, abs=2e-3), (case, key)


def test_replayed_choices_differ_from_own_ones_after_updates(reports):
    _, report = reports
    for case in ("replay", "compare"):
        got = report("one")[case]
        assert max(map(max, got["changed"])) > 0.1
        gap = max(abs(x - y) for a, b in zip(got["own"], got["recorded"], strict=True)
                  for x, y in zip(a, b, strict=True))  # fmt: skip
        assert gap > 0.05
        assert got["after"] == got["recorded" if case == "replay" else "own"]
        (fraction,) = got["fraction"]
        assert 0 < fraction < 10


def test_recomputation_changes_no_bit(reports):
    _, report = reports
    one = report("one")
    for case, got in one.items():
        assert got == one[case.split(",")[0]], case


def test_files_of_any_layout_give_same_routes(reports):
    root, report = reports
    for name in ("one", "tp2-cp2-ep2", "pp2-virtual2"):
        report(name)  # writes files
    run_ranks(_read_elsewhere, 2, str(root))
