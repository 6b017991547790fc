"""The layout's scans and the collectives on four gloo ranks, at every context-parallel size."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.distributed import collectives
from megatron_rl.distributed.chunk_scan import Scan, scan_together
from megatron_rl.distributed.sequence_layout import SequenceLayout
from tests.unit.distributed.four_ranks import all_results

CP_SIZES = (1, 2, 4)
LENGTHS = (16, 64, 16, 240, 32)  # multiples of 2 * 8, long-tailed


def example():
    """Return a mask with gaps, values, and one cotangent per statistic."""
    generator = torch.Generator().manual_seed(7)
    tokens = sum(LENGTHS)
    mask = torch.rand(tokens, generator=generator) < 0.6
    mask[:16] = False  # a sequence without decisions
    x = torch.randn(tokens, generator=generator, dtype=torch.float64)
    cotangents = torch.randn(4, tokens, generator=generator, dtype=torch.float64)
    return mask, x, cotangents


def statistics_and_gradient(layout, x, cotangents):
    """Return all statistics of the whole pack and the gradient of their sum over ranks."""
    local = layout.shard(x).requires_grad_()
    sums, before = scan_together(layout, Scan(local), Scan(local, "min"))
    outputs = (
        sums.running,
        layout.spread(sums.total),
        torch.where(before.running < torch.inf, before.running, 0),
        layout.spread(before.total.clamp(max=1)),  # infinite for the sequence without decisions
    )
    own = layout.shard(cotangents.T).T
    sum(
        (torch.where(layout.mask, y, 0) * c).sum() for y, c in zip(outputs, own, strict=True)
    ).backward()
    gathered = [layout.gather(y.detach()) for y in outputs]
    counts = [layout.gather(layout.position), layout.gather(layout.length)]
    # Arrays: tensors in a queue are file handles that close with the process that created them.
    return (
        [y.numpy() for y in gathered],
        [count.numpy() for count in counts],
        layout.gather(local.grad).numpy(),
    )


def on_rank(rank, world_size):
    mask, x, cotangents = example()
    results = {}
    for cp_size in CP_SIZES:
        groups = [
            dist.new_group(list(range(start, start + cp_size)))
            for start in range(0, world_size, cp_size)
        ]
        group = groups[rank // cp_size]
        layout = SequenceLayout(
            LENGTHS, mask, cp_rank=rank % cp_size, cp_size=cp_size, cp_group=group
        )
        results[cp_size] = statistics_and_gradient(layout, x, cotangents)
        results[cp_size, "round trip"] = layout.gather(layout.shard(x)).equal(x)
    results["duals"] = duals(rank)
    return results


def duals(rank):
    """Return the gradients of L = sum over ranks r of (r + 1) * (output of rank r)."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (collectives.all_gather(x, group=dist.group.WORLD) * (rank + 1)).sum().backward()
    gathered_grad = x.grad.tolist()
    x.grad = None
    (collectives.all_reduce(x, group=dist.group.WORLD) * (rank + 1)).sum().backward()
    return gathered_grad, x.grad.tolist()


def layout_results():
    return [result["layout"] for result in all_results()]


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_scans_and_gradients_are_independent_of_context_parallelism(cp_size):
    mask, x, cotangents = example()
    wanted, counts, gradient = statistics_and_gradient(SequenceLayout(LENGTHS, mask), x, cotangents)
    for result in layout_results():
        got, got_counts, got_gradient = result[cp_size]
        assert result[cp_size, "round trip"]
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-13, rtol=0)
        for a, b in zip(got_counts, counts, strict=True):
            assert np.array_equal(a, b)
        np.testing.assert_allclose(got_gradient, gradient, atol=1e-12, rtol=0)


def test_collective_gradients_are_their_duals():
    # Rank r's x reaches every rank q with factor q + 1: the gradient is 1 + 2 + 3 + 4 = 10.
    for result in layout_results():
        assert result["duals"] == ([10.0, 10.0], [10.0, 10.0])
