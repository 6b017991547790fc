"""Boxes of a range of a parameter's elements contain every element once, in order."""

import itertools
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_rl.actor.checkpoint import cut_into_boxes
from tests.functional.test_actor_layouts import make_model
from tests.ranks import run_ranks


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 2, 2), (6, 1)])
@pytest.mark.parametrize("largest", [1, 3, 100])
def test_boxes_contain_every_element_once_in_row_order(shape, largest):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(tensor.numel() + 1), 2):
        boxes = list(cut_into_boxes(shape, start, stop, largest=largest))
        found = [
            tensor[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].flatten()
            for offset, size in boxes
        ]
        assert all(0 < len(box) <= largest for box in found)
        assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(
            range(start, stop)
        )


def test_matrix_takes_three_boxes_at_most():
    # Rows of 4: elements 6 to 17 are the end of row 1, rows 2 and 3, the beginning of row 4.
    assert list(cut_into_boxes((5, 4), 6, 17)) == [
        ((1, 2), (1, 2)),
        ((2, 0), (2, 4)),
        ((4, 0), (1, 1)),
    ]


RANKS, SAVES = 4, 3


class CountedObjects:
    """Counts the shard descriptions that this rank receives in object collectives."""

    def __init__(self, collective):
        self.collective, self.shards = collective, 0

    def __call__(self, object_list, *args, **options):
        self.collective(object_list, *args, **options)
        self.shards += sum(len(one) for one in object_list if isinstance(one, list))


def _fill(actor, seed):
    """Weights and moments that no other rank or save has."""
    from megatron_rl.actor.digest import training_state

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in training_state([], actor.optimizer):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
        for parameter in actor.named_parameters_local().values():
            parameter.fill_(seed)


def save_often(rank, world_size, root):
    """Shards that each save and load exchanges, and whether folders load to what was saved."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.checkpoint import save_checkpoint
    from megatron_rl.actor.cpu_adaptation import megatron_runtime
    from megatron_rl.actor.settings import ActorSettings

    folder, topology = Path(root), groups.initialise(pipeline=2)
    actor = MegatronActor(folder / "model", topology=topology, settings=ActorSettings())
    digests, exchanged = [], []
    for number in range(SAVES):
        _fill(actor, 10 * number + rank // 2)  # replicas are equal
        digests.append(actor.digest())
        with mock.patch.object(
            dist, "all_gather_object", CountedObjects(dist.all_gather_object)
        ) as gathered:
            actor.save(folder / str(number))
        exchanged.append(gathered.shards)
    with megatron_runtime():  # weights alone are another structure
        save_checkpoint(folder / "weights", chunks=actor.chunks, writer=actor.writer)
    actor.save(folder / "again")
    weights = [p.detach().clone() for p in actor.named_parameters_local().values()]
    right = []
    for name, digest in [*enumerate(digests), ("again", digests[-1])]:
        _fill(actor, 99)
        with mock.patch.object(
            dist, "all_gather_object", CountedObjects(dist.all_gather_object)
        ) as gathered:
            actor.load(folder / str(name))
        exchanged.append(gathered.shards)
        right.append(actor.digest() == digest)
    _fill(actor, 99)
    actor.load(folder / "weights")
    loaded = actor.named_parameters_local().values()
    right.append(all(torch.equal(a, b) for a, b in zip(loaded, weights, strict=True)))
    return exchanged, right


def test_later_saves_exchange_no_shards_and_load_bit_identically(tmp_path):
    make_model(tmp_path / "model", tied=False)
    for exchanged, right in run_ranks(save_often, RANKS, str(tmp_path)):
        saves, loads = exchanged[:SAVES], exchanged[SAVES:]
        assert saves[0] > 0 and saves[1:] == [0] * (SAVES - 1)
        # Of what its replicas read, and not again to check that the ranks read everything.
        assert len(loads) == SAVES + 1 and max(loads) <= saves[0] / 2
        assert all(right) and len(right) == SAVES + 2
