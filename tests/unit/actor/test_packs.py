"""A pack on the device: copied once per rollout batch, by no copy that waits, and never read back.

Tensors on the meta device stand for the device's: they have no values, so reading one raises as it
would wait on CUDA. Every copy to them is counted, and must go through `to_device`, which pins.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.actor import packs, rotary
from megatron_rl.actor.packs import PackCache
from megatron_rl.data.packing import build_pack
from megatron_rl.distributed import collectives, sequence_layout
from megatron_rl.distributed.topology import Topology
from megatron_rl.types import SamplingMask
from tests.functional.test_actor_layouts import (
    freeze_behavior,
    make_model,
    make_rollouts,
    make_split_rollouts,
)
from tests.ranks import run_ranks
from tests.unit.resharding.shapes import small_shape

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts copies from the host to the device; those not made by `to_device` are pageable."""

    def __init__(self):
        super().__init__()
        self.pinned = self.pageable = 0
        self.inside = False

    def to_device(self, values, device):
        """`to_device`, distinguished from other copies."""
        self.inside = True
        moved = collectives.to_device(values, device)
        self.inside = False
        return moved

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        result = function(*arguments, **options)
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        # Numbers that are wrapped as tensors travel in the kernel's arguments.
        hosted = any(x.device.type == "cpu" and x.dim() for x in tensors)
        if hosted and isinstance(result, torch.Tensor) and result.is_meta:
            self.pinned += self.inside
            self.pageable += not self.inside
        return result


@pytest.fixture
def copies(monkeypatch):
    counter = Copies()
    for module in (packs, rotary, sequence_layout):
        monkeypatch.setattr(module, "to_device", counter.to_device)
    return counter


def freeze(batch):
    """Log-probs as the behavior pass leaves them, on the device; the engine's stay on the host."""
    batch.behavior_logprobs = torch.empty(len(batch.tokens), device=META)
    batch.reference_logprobs = torch.empty(len(batch.tokens), device=META)


def walk(cache, batch):
    """Everything that an update reads from a pack before the model runs and for the loss."""
    pack = cache.prepare(batch)
    values = (batch.behavior_logprobs, batch.rollout_logprobs, batch.reference_logprobs)
    local = [*map(pack.shard, values), pack.spread(batch.advantages)]
    layout = pack.layout
    return [*local, layout.mask, layout.position, layout.length, layout.gathered_index]


@pytest.mark.parametrize("make", [lambda: make_rollouts()[0], make_split_rollouts])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_updates_reuse_copies_of_first_pass(copies, cp_size, make):
    topology = Topology(world_size=cp_size, cp_size=cp_size, device=META)
    rollouts, advantages = make(), torch.ones(16)
    batch = build_pack(rollouts, advantages, indices=range(6), alignment=4)
    cache = PackCache(small_shape(), topology, dtype=torch.float32)
    with copies:
        cache.prepare(batch)  # the behavior pass
        freeze(batch)
        first = walk(cache, batch)
        once = copies.pinned
        assert once > 0
        for _ in range(3):
            assert all(map(lambda a, b: a is b, walk(cache, batch), first))
        assert (copies.pinned, copies.pageable) == (once, 0)
        # Changed values are noticed, whether another tensor or the same one is written.
        batch.rollout_logprobs.zero_()
        batch.advantages = batch.advantages.clone()
        walk(cache, batch)
        assert copies.pinned == once + 2
        # When the engine wakes up no pack is left.
        cache.clear()
        assert not cache._packs
        walk(cache, batch)
        assert copies.pinned == 2 * once + 1  # the tables of positions stay


def test_advantage_is_that_of_all_sequences_of_a_response():
    rollouts = make_split_rollouts()
    advantages = torch.arange(1.0, 1 + len(rollouts))
    batch = build_pack(rollouts, advantages, indices=range(len(rollouts)), alignment=4)
    assert len(batch.sequence_lengths) > len(batch.lengths) == len(rollouts)
    for rank in range(2):
        topology = Topology(world_size=2, rank=rank, cp_size=2, cp_rank=rank)
        local = PackCache(small_shape(), topology, dtype=torch.float32).prepare(batch)
        wanted = local.shard(batch.advantages_per_token())
        assert torch.equal(local.spread(batch.advantages), wanted)


def test_replaced_parts_of_a_pack_are_prepared_anew():
    """Scored with an old sampling mask, behavior and policy would still agree."""
    rollouts, advantages = make_rollouts()
    batch = build_pack(rollouts, advantages, indices=range(len(rollouts)), alignment=2)
    counts = batch.response_mask.int()
    ids = torch.arange(int(counts.sum()), dtype=torch.int32)
    batch = replace(batch, sampling_mask=SamplingMask(ids, counts))
    cache = PackCache(small_shape(), Topology.single(), dtype=torch.float32)
    first = cache.prepare(batch)
    assert cache.prepare(replace(batch, on_policy=True)) is first  # a value that is not prepared
    other = cache.prepare(replace(batch, sampling_mask=SamplingMask(ids + 1, counts)))
    assert torch.equal(other.sampling_mask.ids, first.sampling_mask.ids + 1)
    parts = {"tokens": batch.tokens + 1, "labels": batch.labels.clone(), "sampling_mask": None}
    for name, value in parts.items():
        assert cache.prepare(replace(batch, **{name: value})) is not cache.prepare(batch), name


def test_packs_share_position_tables_that_grow_with_longest_sequence():
    rollouts, advantages = make_rollouts()
    lengths = [len(one.prompt.token_ids) + len(one.response.token_ids) - 1 for one in rollouts]
    order = sorted(range(len(rollouts)), key=lambda index: lengths[index])
    cache = PackCache(small_shape(), Topology.single(), dtype=torch.float32)

    def tables(index):
        batch = build_pack(
            [rollouts[index]], advantages[index : index + 1], indices=[0], alignment=2
        )
        return batch, cache.prepare(batch).inputs.context.rotation.tables

    kept = [tables(index) for index in reversed(order)]
    assert all(one is kept[0][1] for _, one in kept)
    assert lengths[order[-1]] <= len(kept[0][1].cosine) <= 2 * lengths[order[-1]]
    cache = PackCache(small_shape(), Topology.single(), dtype=torch.float32)
    _, small = tables(order[0])
    _, large = tables(order[-1])
    assert len(small.cosine) < len(large.cosine)
    assert torch.equal(large.cosine[: len(small.cosine)], small.cosine)


LAYOUTS = [  # ranks and layout
    (4, {"tensor": 2, "pipeline": 2, "virtual_stages": 2}),  # sequence parallelism
    (2, {"pipeline": 2}),
    pytest.param(4, {"pipeline": 4}, marks=pytest.mark.slow),
]


class Messages(TorchDispatchMode):
    """Counts tensors sent between stages by whether they are floating point; shapes are not."""

    def __init__(self):
        super().__init__()
        self.sent = {True: 0, False: 0}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is torch.ops.c10d.send.default:
            (tensor,) = arguments[0]
            self.sent[tensor.is_floating_point()] += 1
        return function(*arguments, **(options or {}))


def _train(root, topology):
    """Log-probs, two updates and the weights after them; and the messages of all that."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.data.packing import plan_minibatches
    from megatron_rl.objectives import build_objective

    settings = ActorSettings(
        optimizer=OptimizerSection(learning_rate=1e-3), warmup_updates=0, overlap_reduction=True
    )
    actor = MegatronActor(root, topology=topology, settings=settings)
    assert not actor.chunks[0].config.batch_p2p_sync  # a wait for the device after each hop
    (minibatch,) = plan_minibatches(
        *make_rollouts(),
        minibatches=1,
        tokens_per_micro_batch=160,
        topology=topology,
    )
    sizes = {len(pack.tokens) for pack in minibatch.micro_batches}
    assert len(minibatch.micro_batches) > 2 and len(sizes) > 1
    with Messages() as messages:
        packs = freeze_behavior(actor, [minibatch])
        norms = [actor.update(minibatch, build_objective("grpo")).grad_norm for _ in range(2)]
    values = [pack.behavior_logprobs for pack in packs] + [*actor.named_parameters_local().values()]
    values = [value.detach().clone() for value in values]
    return norms, values, messages.sent, actor.chunks[0].config


def compare_hops(rank, world_size, root, layout):
    """A layout with known shapes and with Megatron's own communicator; asserts here."""
    from megatron_rl.actor import groups, scoring

    topology = groups.initialise(**layout)
    norms, values, sent, config = _train(root, topology)
    with mock.patch.object(scoring, "pipeline_arguments", lambda *_, **__: {}):
        their_norms, theirs, all_sent, _ = _train(root, topology)
    assert norms == their_norms and norms[0] > 1e-3
    assert all(torch.equal(mine, one) for mine, one in zip(values, theirs, strict=True))
    hops = sent[True]
    assert hops > 0 and sent == {True: hops, False: 0}, sent
    assert all_sent == {True: hops, False: hops}, all_sent
    if rank == 0 and topology.tp_size == 1:
        refuse_another_shape(config)
    return "done"


def refuse_another_shape(config):
    """A stage does not send a tensor that is not the one that the others expect."""
    from megatron_rl.actor.packs import KnownShapes

    hops = KnownShapes(config=config, tokens=[8, 4])
    hops._communicate_shapes(torch.empty(8, 1, 32), None, False, False)
    assert hops._communicate_shapes(None, None, False, True) == ([0, 0, 0], [8, 1, 32])
    with pytest.raises(AssertionError, match=r"sends \[8, 1, 32\] where .* expect \[4, 1, 32"):
        hops._communicate_shapes(torch.empty(8, 1, 32), None, False, False)


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_fixed_shapes_are_not_exchanged_and_results_are_bit_identical(tmp_path, ranks, layout):
    make_model(tmp_path, tied=True)
    assert run_ranks(compare_hops, ranks, tmp_path, layout) == ["done"] * ranks
