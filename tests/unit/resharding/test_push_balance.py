"""All ranks send at once: the rounds' time over that of the busiest port, and what a plan costs."""

import functools
from dataclasses import replace

import pytest

from megatron_rl.apps.planning.rates import IMBALANCE
from megatron_rl.models.shape import ExpertShape
from megatron_rl.resharding import layouts, push_schedule
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.push_schedule import plan_for_rank
from tests.unit.resharding.shapes import small_shape
from tools.benchmarks import push_simulation
from tools.benchmarks.large_models import qwen3_235b

simulate = functools.cache(push_simulation.simulate)
# The ratios of Qwen3-235B-A22B and Qwen2.5-72B, 1/64 of their sizes; so 8,000 elements of a tensor
# are 64 MiB of theirs.
EXPERTS = small_shape(
    "Qwen3MoeForCausalLM", num_layers=4, hidden_size=64, num_attention_heads=16, num_query_groups=4,
    head_dim=8, vocab_size=2048, experts=ExpertShape(64, 8, 24, True),
)  # fmt: skip
DENSE = small_shape(
    num_layers=8, hidden_size=128, num_attention_heads=16, num_query_groups=8, head_dim=8,
    ffn_hidden_size=464, vocab_size=2048,
)  # fmt: skip
LAYOUTS = [  # shape, actor, engine, bound
    (EXPERTS, ActorLayout(1, 2, 4, 8, expert=8), EngineLayout(8, 64), 2.0),
    (EXPERTS, ActorLayout(4, 2, 1, 8, expert=8), EngineLayout(8, 64), 2.0),
    (EXPERTS, ActorLayout(4, 2, 1, 8, expert=8), EngineLayout(8, 64, True), 2.0),
    (EXPERTS, ActorLayout(1, 1, 4, 16, expert=32), EngineLayout(8, 64, True), 2.0),
    (EXPERTS, ActorLayout(1, 2, 4, 8, expert=8), EngineLayout(8, 64, True), 2.0),
    (DENSE, ActorLayout(8, 4, 1, 4), EngineLayout(8, 128), 1.5),
    (DENSE, ActorLayout(4, 4, 1, 8), EngineLayout(8, 128), 1.5),
]


@pytest.mark.parametrize(("shape", "actor", "engine", "bound"), LAYOUTS[::2])
def test_rounds_take_little_more_than_busiest_port(shape, actor, engine, bound):
    found = simulate(shape, actor, engine, wire_elements=8000, ranks_per_node=8)
    assert len(found.out) >= 8
    assert found.over_ideal <= bound, (found.over_ideal, found.senders)
    assert found.senders > 0.8 * actor.world_size


@pytest.mark.parametrize(("shape", "actor", "engine", "bound"), LAYOUTS[::2])
def test_rounds_for_loaders_take_little_more_than_the_busiest_port(shape, actor, engine, bound):
    """Whole tensors, with buckets of 512 MiB as on CUDA: `Resharder._plan`."""
    found = simulate(
        shape, actor, engine, wire_elements=16000, tensor_elements=32000, ranks_per_node=8
    )
    assert len(found.out) >= 5
    assert found.over_ideal <= bound, (found.over_ideal, found.senders)


def test_small_round_for_loaders_has_a_block_of_every_expert_rank():
    found = simulate(
        EXPERTS, ActorLayout(data=64, expert=64), EngineLayout(4, 64), wire_elements=4000,
        tensor_elements=8000, ranks_per_node=8,
    )  # fmt: skip
    assert found.over_ideal <= 2.0, (found.over_ideal, found.senders)


@pytest.mark.slow
def test_many_expert_ranks_send_few_messages_and_all_at_once(monkeypatch):
    """64 expert ranks of each of two stages: a round would have a message from each of them.

    In shares of the nodes a rank receives from about 128 / 4 at a time. A push then has a quarter
    of the messages, and some more because rounds do not end where shares do.
    """
    shape = replace(EXPERTS, num_layers=8)
    layouts = ActorLayout(4, 2, 1, 32, expert=64, expert_tensor=1), EngineLayout(8, 256)
    bucket = {"wire_elements": 64000, "ranks_per_node": 8}

    def messages():
        plan = plan_for_rank(shape, *layouts, rank=0, **bucket)
        sent = sum(len(each.to) for part in plan.rounds for each in part.sends)
        return sent + sum(len(part.receives) for part in plan.rounds)

    assert push_schedule.shares_of_nodes(shape, *layouts, 8) == 4
    found, in_shares = push_simulation.simulate(shape, *layouts, **bucket), messages()
    monkeypatch.setattr(push_schedule, "SOURCES_AT_ONCE", 10**9)
    assert in_shares < messages() / 2
    assert found.over_ideal <= 2.0 and found.senders > 0.8 * 256


@pytest.mark.slow
def test_planner_uses_the_largest_simulated_ratio():
    ratios = []
    for shape, actor, engine, _ in LAYOUTS:
        for wire, tensors in ((64000, None), (16000, 32000)):
            found = simulate(
                shape, actor, engine, wire_elements=wire, tensor_elements=tensors, ranks_per_node=8
            )
            ratios.append(found.time / found.into.sum(1).sum() * actor.world_size)
    assert 1.5 < max(ratios) < IMBALANCE == pytest.approx(_over_mean(_largest()), abs=0.05)


@functools.cache
def _largest():
    """A third of 235B on 512 ranks, to engines of 8 ranks with whole experts: the largest ratio."""
    shape = replace(qwen3_235b(), num_layers=32)
    layout = ActorLayout(8, 8, 1, 8, expert=64, expert_tensor=1)
    return push_simulation.simulate(
        shape, layout, EngineLayout(8, 512, True), wire_elements=1 << 28, ranks_per_node=8
    )


def _over_mean(found):
    return found.time / found.into.sum(1).sum() * found.into.shape[1]


@pytest.mark.slow
def test_expert_ranks_of_one_engine_rank_take_turns_with_others(monkeypatch):
    """Eight neighbouring expert ranks of eight stages have the experts of one engine rank."""
    found = _largest()
    assert found.over_ideal < 2.1 and found.senders > 250
    monkeypatch.setattr(push_schedule.Plan, "_alternate", lambda plan, of: list(enumerate(of)))
    assert _largest.__wrapped__().over_ideal > 7


def test_slices_of_a_message_are_written_in_few_runs():
    """Gate and up of all experts of a rank are one run of its message, and their down another."""
    plan = plan_for_rank(
        EXPERTS, ActorLayout(1, 2, 4, 8, expert=8), EngineLayout(8, 64), rank=0,
        wire_elements=64000, ranks_per_node=8,
    )  # fmt: skip
    messages = [message for part in plan.rounds for message in part.receives]
    slices = sum(len(message.slices) for message in messages)
    assert slices > 500 and sum(len(message.runs) for message in messages) <= slices / 4
    for message in messages:
        covered = [n for run in message.runs for n in range(run.first, run.stop)]
        assert covered == list(range(len(message.slices)))


def _count(monkeypatch, module, name):
    calls, inner = [], getattr(module, name)

    def counted(*arguments, **options):
        calls.append(name)
        return inner(*arguments, **options)

    monkeypatch.setattr(module, name, counted)
    return calls


def test_plan_costs_same_with_replicas(monkeypatch):
    """16 times the ranks: the same pieces, patterns and slices on a rank, which makes only its own.

    Each node of 4 ranks has one stage, so all replicas of a node send to another one.
    """
    shape = small_shape("Qwen3MoeForCausalLM")
    counted = [
        _count(monkeypatch, layouts, "megatron_pieces"),
        _count(monkeypatch, layouts, "vllm_pieces"),
        _count(monkeypatch, push_schedule, "Pattern"),
        _count(monkeypatch, push_schedule, "split_into_blocks"),
        _count(monkeypatch, push_schedule, "Slice"),
    ]
    counts = []
    for replicas in (2, 32):
        source = ActorLayout(2, 2, data=replicas, expert=2)
        plan = plan_for_rank(
            shape, source, EngineLayout(4, source.world_size), rank=1, wire_elements=2000,
            ranks_per_node=4,
        )  # fmt: skip
        own = sum(len(message.slices) for r in plan.rounds for message in (*r.sends, *r.receives))
        own += sum(map(len, plan.local.values()))
        assert own == len(counted[4]) and plan.elements_sent > 0
        counts.append([len(calls) for calls in counted])
        for calls in counted:
            calls.clear()
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("nodes", "owners"), [(3, 4), (4, 3), (4, 4), (6, 4), (8, 2), (2, 12)])
def test_far_nodes_are_served_in_equal_shares(nodes, owners):
    """Owners are one rank on each of the first nodes, the others lack the slice."""
    world = 2 * (nodes + owners)
    pattern = push_schedule.Pattern(
        range(0, 2 * owners, 2), range(2 * owners, world), world_size=world, node_size=2, paths={}
    )
    sent, first = [0] * world, [0] * world
    for number in range(pattern.turns):
        for path in pattern.turn(number).paths:
            for ranks in path.by_node:
                sent[path.source] += 1
                first[ranks[0]] += 1
    assert len({sent[rank] for rank in range(0, 2 * owners, 2)}) == 1
    assert len(set(first[2 * owners :])) == 1 and sum(first) == nodes * pattern.turns
