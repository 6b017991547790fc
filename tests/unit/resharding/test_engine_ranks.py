"""Pushes to engines on ranks of their own: everything arrives once, from a rank that trains."""

from datetime import timedelta

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.sections import ReshardingSection
from megatron_rl.distributed.link import Link
from megatron_rl.distributed.topology import Topology
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.push import EnginesElsewhere, LocalWeights, Resharder
from megatron_rl.resharding.push_schedule import WITHIN, plan_for_rank, plan_slices
from tests.cut_shards import cut_shards, topology_of
from tests.ranks import run_ranks
from tests.unit.resharding.shapes import numbered_tensors, small_shape
from tests.unit.resharding.test_push import Live, Slices, _values
from tests.unit.resharding.test_push_schedule import _contents, _fill


@settings(deadline=None, max_examples=12)
@given(
    architecture=st.sampled_from(["Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM"]),
    sizes=st.tuples(*[st.sampled_from([1, 2])] * 6),
    engines=st.sampled_from([1, 2, 3]),
    engine_tensor=st.sampled_from([1, 2]),
    node=st.sampled_from([None, 2, 4]),
    limits=st.sampled_from([(300, None), (5000, None), (1 << 14, 1 << 15)]),
)
def test_every_element_reaches_every_engine_rank_once(
    architecture, sizes, engines, engine_tensor, node, limits
):
    tensor, pipeline, context, data, virtual, expert = sizes
    shape = small_shape(architecture)
    if shape.experts is None or (tensor * context * data) % (tensor * expert):
        expert = 1
    source = ActorLayout(tensor, pipeline, context, data, virtual, expert)
    destination = EngineLayout(engine_tensor, engines * engine_tensor, first=source.world_size)
    tensors = numbered_tensors(shape)
    owned = {r: _fill(source.pieces(shape, rank=r), tensors) for r in source.ranks}
    expected = {r: _fill(destination.pieces(shape, rank=r), tensors) for r in destination.ranks}
    got = {r: {n: torch.zeros_like(v) for n, v in e.items()} for r, e in expected.items()}
    plans = [
        plan_for_rank(shape, source, destination, rank=r, wire_elements=limits[0],
                      tensor_elements=limits[1], ranks_per_node=node)
        for r in range(destination.ranks.stop)
    ]  # fmt: skip
    assert len({len(plan.rounds) for plan in plans}) == 1
    for parts in zip(*(plan.rounds for plan in plans), strict=True):
        for rank, part in enumerate(parts):
            for message in part.receives:
                assert rank in destination.ranks
                for each in message.slices:
                    target = each.needed.of_parameter(got[rank][each.needed.parameter])
                    assert not target.any(), f"{each} writes what another slice wrote"
                    target.copy_(
                        each.owned.of_parameter(owned[message.source][each.owned.parameter])
                    )
                # What a rank receives is what its sender sends it, in the same order.
            for sender in range(len(parts)):
                out = [_contents(m) for m in (*parts[sender].sends, *parts[sender].receives)
                       if rank in m.to]  # fmt: skip
                into = [_contents(m) for m in part.receives if m.sender == sender]
                assert out == into
    for rank in destination.ranks:
        for name, value in expected[rank].items():
            assert torch.equal(got[rank][name], value), (rank, name)
    assert not any(plan.local for plan in plans)
    slices = plan_slices(shape, source, destination, ranks_per_node=node)
    assert all(each.source != WITHIN for some in slices.values() for each in some)


PUSHES = [  # actor (tensor, pipeline, context, data, virtual, expert), vLLM tensor, direct
    ((1, 2, 1, 1), 2, True),
    ((1, 1, 1, 2, 1, 2), 1, False),
]


def _join(rank, *, trainers, engines, name="test"):
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return Link(rank, trainers, engines, store, timedelta(seconds=60), patience=60.0)


def _push(rank, world_size):
    link = _join(rank, trainers=2, engines=2)
    for sizes, engine_tensor, direct in PUSHES:
        layout = ActorLayout(*sizes)
        engines = EngineLayout(engine_tensor, 2, first=2)
        shape = small_shape("Glm4MoeForCausalLM" if layout.expert > 1 else "Qwen2ForCausalLM")
        kind = Live if direct else Slices
        receiver = (
            kind(shape, engines, rank, torch.float32)
            if link.is_engine
            else EnginesElsewhere(engines, torch.float32)
        )
        resharder = Resharder(receiver, ReshardingSection(bucket_mib=6000 / 2**20), link=link)
        for version in range(2):
            tensors = _values(shape, version)
            if link.is_engine:
                topology = topology_of(layout, rank=0)
                topology = Topology(**{**vars(topology), "rank": rank})
                source = LocalWeights(shape, topology, {})
            else:
                source = cut_shards(tensors, shape=shape, layout=layout, rank=rank)
            stats = resharder.push(source, version=version)
            assert stats.bytes_local == 0
            if link.is_engine:
                assert receiver.differs_from(tensors) == []
                assert receiver.version == version
    return True


def test_trainers_push_to_engines_over_the_link():
    assert all(run_ranks(_push, 4))


class _Refusing(Slices):
    def receive(self, weights, *, version):
        raise KeyError("no such parameter")


def _refuse(rank, world_size):
    link = _join(rank, trainers=1, engines=2)
    shape, layout, engines = small_shape(), ActorLayout(), EngineLayout(1, 2, first=1)
    receiver = EnginesElsewhere(engines, torch.float32)
    source = cut_shards(_values(shape, 0), shape=shape, layout=layout, rank=0)
    if link.is_engine:
        kind = _Refusing if rank == 2 else Slices
        receiver = kind(shape, engines, rank)
        source = LocalWeights(shape, Topology(rank=rank), {})
    resharder = Resharder(receiver, ReshardingSection(bucket_mib=6000 / 2**20), link=link)
    try:
        resharder.push(source, version=3)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_error_of_one_engine_rank_is_raised_on_both_sides():
    errors = run_ranks(_refuse, 3)
    assert errors[2].startswith("KeyError: ") and "no such parameter" in errors[2]
    for error in errors[:2]:
        assert "weight sync 3, actor tp1 to vLLM tp1 x 2 engines: rank 2: KeyError" in error


def _talk(rank, world_size):
    link = _join(rank, trainers=2, engines=1)
    if link.is_engine:
        orders = [link.orders.next(), link.orders.next()]
        given = link.values.take()
        for order in orders:
            link.values.send({"answers": order, "values": given})
        last = link.orders.next()
        link.values.flush()
        return [*orders, last]
    link.orders.send("first", 1)
    link.orders.send("second", 2)
    link.values.send(torch.arange(100_000))
    results = [link.values.take(), link.values.take()]
    link.values.flush()
    link.orders.send("end")
    if rank:
        return results
    assert all(torch.equal(one["values"], torch.arange(100_000)) for one in results)
    return [one["answers"] for one in results]


def test_orders_and_values_arrive_in_order():
    first, second, engine = run_ranks(_talk, 3)
    assert first == [("first", 1), ("second", 2)]
    assert second == [None, None]
    assert engine == [("first", 1), ("second", 2), ("end",)]


def _wait_and_fail(rank, world_size):
    """The messages of a wait of both sides, and of the trainer after an error of the engine."""
    link = _join(rank, trainers=1, engines=1)
    link.patience, messages = 0.5, []
    try:
        if link.is_engine:
            link.orders.next()
        else:
            link.values.take()
    except RuntimeError as error:
        messages.append(str(error))
    link = _join(rank, trainers=1, engines=1, name="second")
    if rank:
        link.fail(ValueError("out of memory"))
        link.fail(ValueError("a second error"))
        return messages
    try:
        link.values.take()
    except RuntimeError as error:
        return [*messages, f"{type(error).__name__}: {error}"]


def test_wait_ends_without_progress_or_with_an_error_of_the_other_side():
    """Both wait: a rank that waits makes no progress."""
    (trainer, error), (engine,) = run_ranks(_wait_and_fail, 2)
    assert error == "OtherRankError: rank 1: ValueError: out of memory"
    assert trainer == (
        "rank 0 waits for result 0: ranks 1 to 1, which generate, made no progress for 0.5 s"
    )
    assert engine == (
        "rank 1 waits for order 0: ranks 0 to 0, which train, made no progress for 0.5 s"
    )
