"""Exchange of gradients and parameters between processes without a GPU."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer as megatron

from tests.ranks import run_ranks


def reduce_and_gather(rank, world_size):
    """Gradients, their sums in this rank's shard, and all shards, exchanged as Megatron does."""
    from megatron_rl.actor import cpu_adaptation, groups

    groups.initialise()
    generator = torch.Generator().manual_seed(rank)
    gradients = torch.randint(-9, 9, (12,), generator=generator, dtype=torch.float32)
    whole = gradients.clone()
    shard = whole.view(world_size, -1)[rank]
    fail = mock.Mock(side_effect=AssertionError("gloo's own"))
    with (
        mock.patch.object(cpu_adaptation, "_SUM_TO_SHARDS", fail),
        mock.patch.object(cpu_adaptation, "_GATHER_SHARDS", fail),
        cpu_adaptation.megatron_runtime(),
    ):
        options = {"group": dist.group.WORLD, "async_op": False}
        megatron.dist_reduce_scatter_func(shard, whole, op=dist.ReduceOp.SUM, **options)
        summed = shard.tolist()
        megatron.dist_all_gather_func(whole, shard, **options)
    return gradients.tolist(), summed, whole.tolist()


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_and_parameters_are_exchanged_in_place(ranks):
    gradients, sums, whole = zip(*run_ranks(reduce_and_gather, ranks), strict=True)
    expected = torch.tensor(gradients).sum(0).tolist()
    assert [value for shard in sums for value in shard] == expected
    assert all(each == expected for each in whole)
