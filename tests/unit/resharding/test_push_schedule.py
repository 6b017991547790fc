"""The plan transfers every missing element exactly once, from a rank that has it."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.models.architectures import ARCHITECTURES
from megatron_rl.models.shape import tensor_shapes
from megatron_rl.resharding import push_schedule
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout, PushTarget
from megatron_rl.resharding.pieces import Piece, parameter_shapes
from megatron_rl.resharding.push_schedule import SLICE_EXTRA, WITHIN, plan_for_rank, plan_slices
from tests.unit.resharding.shapes import numbered_tensors, small_shape


def _copies(shape, source, destination, **options):
    """Yield every slice per destination: (sender, receiver, slice)."""
    for slices in plan_slices(shape, source, destination, **options).values():
        for each in slices:
            for to in each.destinations:
                yield (to if each.source == WITHIN else each.source), to, each


def _fill(pieces, tensors):
    """Fill one rank's parameters, as matrices, with element numbers; 0 is padding."""
    filled = {
        name: torch.zeros(size, dtype=torch.int64)
        for name, size in parameter_shapes(pieces).items()
    }
    for piece in pieces:
        piece.of_parameter(filled[piece.parameter]).copy_(piece.of_tensor(tensors[piece.tensor]))
    return filled


@settings(deadline=None, max_examples=25)
@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    tied=st.booleans(),
    sizes=st.tuples(*[st.sampled_from([1, 2])] * 6, st.sampled_from([1, 2, 4, 8])),
    engine_tensor=st.sampled_from([1, 2, 4, 8]),
    expert_parallel=st.booleans(),
)
def test_plan_slices_sends_each_missing_element_once(
    architecture, tied, sizes, engine_tensor, expert_parallel
):
    tensor, pipeline, context, data, virtual, expert, node = sizes
    shape = small_shape(architecture, tied_embeddings=tied, ffn_hidden_size=16)
    stage = tensor * context * data
    expert_tensor = 1 if shape.traits.biases else tensor
    if shape.experts is None or stage % (expert_tensor * expert):
        expert = 1
    source = ActorLayout(tensor, pipeline, context, data, virtual, expert, expert_tensor)
    world_size = source.world_size
    if world_size % engine_tensor or (shape.experts and engine_tensor == 8):
        engine_tensor = 1
    whole_experts = expert_parallel and shape.experts is not None
    check_plan(shape, source, EngineLayout(engine_tensor, world_size, whole_experts), node)


@dataclass(frozen=True)
class Rows(PushTarget):
    """An engine of another kind: a rank has every `count`-th row of each tensor, by HF's names."""

    count: int
    world_size: int
    first: int = 0

    @property
    def ranks(self):
        return range(self.first, self.first + self.world_size)

    def shard_coordinates(self, rank):
        return ((rank - self.first) % self.count,)

    def pieces(self, shape, *, rank):
        (own,) = self.shard_coordinates(rank)
        sizes = {name: (*size, 1)[:2] for name, size in tensor_shapes(shape).items()}
        return tuple(
            Piece(name, (row, row + 1), (0, width), name, row // self.count)
            for name, (height, width) in sizes.items()
            for row in range(own, height, self.count)
        )


@pytest.mark.parametrize("node", [1, 2, 8])
def test_plan_serves_a_target_with_other_names_and_parts(node):
    source = ActorLayout(2, 2, 1, 2)
    check_plan(small_shape("Qwen2ForCausalLM"), source, Rows(4, 8), node)


def check_plan(shape, source, destination, node):
    """The target gets every element that it lacks exactly once, and no other one."""
    world_size, tensors = source.world_size, numbered_tensors(shape)
    owned = [_fill(source.pieces(shape, rank=r), tensors) for r in range(world_size)]
    expected = [_fill(destination.pieces(shape, rank=r), tensors) for r in range(world_size)]
    got = [{name: torch.zeros_like(v) for name, v in e.items()} for e in expected]

    sent = 0
    for sender, to, each in _copies(shape, source, destination, ranks_per_node=node):
        target = each.needed.of_parameter(got[to][each.needed.parameter])
        assert not target.any(), f"{each} writes what another slice wrote"
        target.copy_(each.owned.of_parameter(owned[sender][each.owned.parameter]))
        sent += each.size if sender != to else 0
    for rank in range(world_size):
        for name, value in expected[rank].items():
            assert torch.equal(got[rank][name], value), (rank, name)

    # The lower bound from the numbers: elements that a rank needs and lacks.
    bound = 0
    for rank in range(world_size):
        has = torch.cat([value.flatten() for value in owned[rank].values()]).unique()
        needs = torch.cat([value.flatten() for value in expected[rank].values()])
        bound += int((~torch.isin(needs[needs > 0], has)).sum())
    assert sent == bound


SHARED = [  # actor, engine, ranks per node, shares, limit of a round
    (
        ActorLayout(data=8, expert=4),
        EngineLayout(2, 8),
        2,
        2,
        300,
    ),  # two replicas: 4 nodes, 2 shares
    (ActorLayout(data=8, expert=4), EngineLayout(2, 8), 1, 4, 5000),
    (ActorLayout(2, 2, 1, 2, expert=4, expert_tensor=1), EngineLayout(4, 8, True), 1, 2, 300),
    # Two ranks share each key-value head, so queries and keys have different owners.
    (ActorLayout(8, expert=4, expert_tensor=1), EngineLayout(4, 8), 2, 2, 5000),
]


@pytest.mark.parametrize(("source", "engines", "node", "shares", "limit"), SHARED)
def test_plan_in_shares_sends_each_missing_element_once(
    source, engines, node, shares, limit, monkeypatch
):
    """Messages of all ranks, matched by their order as in the exchange, give each its shards."""
    monkeypatch.setattr(push_schedule, "SOURCES_AT_ONCE", 1)
    monkeypatch.setattr(push_schedule, "NODES_OF_SHARE", 1)
    shape = small_shape("Qwen3MoeForCausalLM", num_layers=5)
    assert push_schedule.shares_of_nodes(shape, source, engines, node) == shares
    tensors = numbered_tensors(shape)
    owned = [_fill(source.pieces(shape, rank=r), tensors) for r in range(8)]
    expected = [_fill(engines.pieces(shape, rank=r), tensors) for r in range(8)]
    got = [{name: torch.zeros_like(v) for name, v in e.items()} for e in expected]

    def deliver(slices, sender, to):
        for each in slices:
            target = each.needed.of_parameter(got[to][each.needed.parameter])
            assert not target.any(), f"{each} writes what another slice wrote"
            target.copy_(each.owned.of_parameter(owned[sender][each.owned.parameter]))

    plans = [
        plan_for_rank(shape, source, engines, rank=r, wire_elements=limit, ranks_per_node=node)
        for r in range(8)
    ]
    for plan in plans:
        deliver(itertools.chain(*plan.local.values()), plan.rank, plan.rank)
    assert len({len(plan.rounds) for plan in plans}) == 1
    for parts in zip(*(plan.rounds for plan in plans), strict=True):
        for rank, part in enumerate(parts):
            load = sum(m.size + SLICE_EXTRA * len(m.slices) for m in (*part.sends, *part.receives))
            assert load <= limit
            for message in part.receives:
                deliver(message.slices, message.source, rank)
        for rank, to in itertools.permutations(range(8), 2):
            out = [_contents(m) for m in parts[rank].sends if to in m.to]
            receives = [m for m in parts[to].receives if m.source == m.sender == rank]
            assert out == [_contents(m) for m in receives]
            out = [_contents(m) for m in parts[rank].receives if to in m.to]
            receives = [m for m in parts[to].receives if m.sender == rank != m.source]
            assert out == [_contents(m) for m in receives]
    for rank in range(8):
        for name, value in expected[rank].items():
            assert torch.equal(got[rank][name], value), (rank, name)


NODES = [  # actor, engine tensor, ranks per node, True if all ranks can have equal shares
    (ActorLayout(2, 2, 1, 2), 2, 4, True),  # each node has one of two stages
    (ActorLayout(1, 4, 1, 2), 1, 2, True),  # each node has one of four
    (ActorLayout(4, 2), 1, 4, True),
    (ActorLayout(4, 1, 1, 2), 2, 2, False),  # each shard goes to one rank of a node, or none
]


@pytest.mark.parametrize(("source", "engine", "node", "even"), NODES)
def test_plan_crosses_nodes_once_and_forwards_within(source, engine, node, even):
    shape, destination = small_shape(ffn_hidden_size=16), EngineLayout(engine, 8)
    tensors = numbered_tensors(shape)
    # The lower bound from the numbers: elements that a node's ranks need and all of them lack.
    bound = 0
    for first in range(0, 8, node):
        has, needs = (
            torch.cat([v.flatten() for r in range(first, first + node) for v in f(r).values()])
            for f in (
                lambda r: _fill(source.pieces(shape, rank=r), tensors),
                lambda r: _fill(destination.pieces(shape, rank=r), tensors),
            )
        )
        needs = needs[needs > 0].unique()
        bound += int((~torch.isin(needs, has)).sum())
    assert bound > 0
    options = {"wire_elements": 500, "ranks_per_node": node}
    plans = [plan_for_rank(shape, source, destination, rank=r, **options) for r in range(8)]
    between, sends, arrives = 0, [0] * 8, [0] * 8
    for plan in plans:
        for message in (m for part in plan.rounds for m in part.sends):
            far = sum(to // node != plan.rank // node for to in message.to)
            between += message.size * far
            sends[plan.rank] += message.size * far
        for message in (m for part in plan.rounds for m in part.receives):
            arrives[plan.rank] += message.size * (message.sender // node != plan.rank // node)
            # Only messages from another node are forwarded, within this one.
            assert not message.to or message.source // node != plan.rank // node
            assert all(to // node == plan.rank // node for to in message.to)
            assert message.sender == message.source or message.sender // node == plan.rank // node
    assert between == sum(arrives) == bound
    # The first and last stages have the vocabulary, so they send more than others.
    for shares in (sends, arrives) if even else ():
        assert max(shares) <= 1.2 * bound / 8


def _contents(message):
    return [(each.tensor, each.owned.rows, each.owned.columns) for each in message.slices]


@pytest.mark.parametrize("limit", [7, 100, 10**9])
def test_plan_rounds_contain_all_slices_in_bounded_buckets(limit):
    shape = small_shape(num_layers=2)
    source, destination = ActorLayout(2, 2, 1, 1), EngineLayout(1, 4)
    plans = [
        plan_for_rank(shape, source, destination, rank=rank, wire_elements=limit)
        for rank in range(4)
    ]
    assert len({len(plan.rounds) for plan in plans}) == 1
    total = 0
    for plan in plans:
        for number, exchange in enumerate(plan.rounds):
            messages = (*exchange.sends, *exchange.receives)
            owned = sum(m.size + SLICE_EXTRA * len(m.slices) for m in messages)
            # The smallest slice is one row of 20, 24 or 32 columns.
            assert owned <= max(limit, 32 + SLICE_EXTRA)
            total += sum(m.size * len(m.to) for m in exchange.sends)
            for other in range(4):
                # Messages are matched by order: equal slices in equal order.
                out = [m for m in exchange.sends if other in m.to]
                into = [m for m in plans[other].rounds[number].receives if m.source == plan.rank]
                assert [_contents(m) for m in out] == [_contents(m) for m in into]
                # One message per round for each sender and set of destinations.
                assert len({m.to for m in exchange.sends}) == len(exchange.sends)
        assert plan.last_round.keys() == numbered_tensors(shape).keys()
    assert total == plans[0].elements_sent


def test_plan_completes_modules_in_order_with_local_parts():
    """Each rank has two of four experts; vLLM keeps a layer's tensors until it is complete."""
    shape = small_shape("Qwen3MoeForCausalLM")
    source, engines = ActorLayout(data=2, expert=2), EngineLayout(1, 2)
    for rank in range(2):
        plan = plan_for_rank(shape, source, engines, rank=rank, wire_elements=2000)
        layers = [name.split(".")[2] for name in plan.last_round if ".experts." in name]
        assert layers == sorted(layers)
        rounds = list(plan.last_round.values())
        assert rounds == sorted(rounds) and rounds[0] == -1 and len(plan.rounds) > 3
        # No tensor of a layer is complete before the round that completes the previous layer.
        for layer in range(1, shape.num_layers):
            by_layer = [
                [at for name, at in plan.last_round.items() if f".{number}.mlp.experts" in name]
                for number in (layer - 1, layer)
            ]
            assert min(by_layer[1]) >= max(by_layer[0]) >= 0


def test_engine_layout_expert_parallel_needs_experts():
    with pytest.raises(ValueError, match="needs a model with experts"):
        EngineLayout(2, 2, expert_parallel=True).check(small_shape())


def test_plan_slices_rejects_different_world_sizes():
    with pytest.raises(ValueError, match="different numbers of ranks"):
        plan_slices(small_shape(), ActorLayout(2), EngineLayout(1, 4))


def test_plan_assembled_tensor_within_quarter_of_bucket_uses_one_round():
    shape, layouts = small_shape(), (ActorLayout(4), EngineLayout(1, 4))
    # A rank has one of 4 shards; the largest tensor has 37 x 20 elements.
    for limit in (4 * (740 + 4 * SLICE_EXTRA), 4000):
        plan = plan_for_rank(shape, *layouts, rank=2, wire_elements=limit, tensor_elements=10**9)
        assert len(plan.rounds) > 1
        for number, exchange in enumerate(plan.rounds):
            for message in exchange.receives:
                assert {plan.last_round[each.tensor] for each in message.slices} == {number}


def test_plan_rounds_bound_assembled_tensors():
    """A round adds to two tensors of a layer (640 elements each) or more, by its limit.

    Larger tensors, the vocabulary's of 740 elements, count as half of the limit.
    """
    shape = small_shape()
    sizes = {name: torch.Size(size).numel() for name, size in tensor_shapes(shape).items()}
    largest = max(size for name, size in sizes.items() if ".layers." in name)
    assert largest == 640
    for limit in (500, 3000):
        bound = max(limit, 2 * largest)
        plan = plan_for_rank(
            shape,
            ActorLayout(4),
            EngineLayout(2, 4),
            rank=1,
            wire_elements=10**9,
            tensor_elements=limit,
        )
        assert len(plan.rounds) > 2
        most = 0
        for part in plan.rounds:
            added = {each.tensor for message in part.receives for each in message.slices}
            most = max(most, sum(min(sizes[name], bound // 2) for name in added))
        assert bound / 2 < most <= bound


def test_plan_rank_with_padding_only_still_gets_every_tensor():
    """vLLM pads 24 rows to 64: the second of two ranks needs no row, but its loader runs."""
    shape = small_shape("Qwen2ForCausalLM", vocab_size=24)
    plan = plan_for_rank(
        shape,
        ActorLayout(pipeline=2),
        EngineLayout(tensor=2, world_size=2),
        rank=1,
        wire_elements=1000,
    )
    assert plan.last_round.keys() == tensor_shapes(shape).keys()
    assert plan.last_round["model.embed_tokens.weight"] == -1  # complete before any round
