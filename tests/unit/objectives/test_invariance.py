"""Loss, gradients and metrics do not depend on how a minibatch is cut, packed or sharded.

Every objective, on data parallelism times context parallelism of 8 x 1, 4 x 2, 2 x 4 and 1 x 8,
with micro-batches of one, four and five responses in shuffled order, against one process that
sees one pack.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import OBJECTIVE_NAMES, Statistics, build_objective
from megatron_rl.types import Denominators
from tests.unit.distributed.eight_ranks import all_results

CP_SIZES = (1, 2, 4, 8)
PADDED = (16, 160, 16, 48, 32, 16, 64, 16, 32, 16)
OPTIONS = {
    "kl": {"coefficient": 0.1},
    "entropy_coefficient": 0.01,
    "rollout_correction": {"level": "sequence_mean", "low": 0.5, "high": 2.0},
}


def minibatch():
    """Ten responses: per-token inputs [responses, longest] and masks with holes."""
    generator = torch.Generator().manual_seed(11)
    shape = (len(PADDED), max(PADDED))

    def normal(scale):
        return scale * torch.randn(shape, dtype=torch.float64, generator=generator)

    mask = torch.rand(shape, generator=generator) < 0.7
    mask[:, 3] = True  # no response without a decision
    for row, length in enumerate(PADDED):
        mask[row, length:] = False
    behavior = -1 - normal(0.3).abs()
    drift = normal(1e-3) + normal(2e-3)[:, :1]
    tensors = {
        "policy_logprobs": behavior + drift,
        "behavior_logprobs": behavior,
        "rollout_logprobs": behavior + normal(0.05),
        "reference_logprobs": behavior + normal(0.05),
        "entropy": normal(1.0).abs(),
    }
    advantages = torch.randn(shape[0], dtype=torch.float64, generator=generator)
    tensors["advantages"] = advantages[:, None].expand(shape)
    return mask, tensors


def build(name):
    return build_objective(name) if name == "oapl" else build_objective(name, **OPTIONS)


def run_micro_batch(name, rows, *, cp_rank=0, cp_size=1, cp_group=None):
    """Loss of this rank, gradient of the whole micro-batch per response, statistics."""
    mask, tensors = minibatch()
    lengths = [PADDED[row] for row in rows]

    def pack(x):
        return torch.cat([x[row, : PADDED[row]] for row in rows])

    layout = SequenceLayout(
        lengths, pack(mask), cp_rank=cp_rank, cp_size=cp_size, cp_group=cp_group
    )
    local = {key: layout.shard(pack(x)) for key, x in tensors.items()}
    policy = local.pop("policy_logprobs").requires_grad_()
    denominators = Denominators(responses=float(len(PADDED)), tokens=float(mask.sum()))
    result = build(name)(policy, layout=layout, denominators=denominators, **local)
    result.loss.sum().backward()
    gradient = torch.zeros(len(PADDED), max(PADDED), dtype=torch.float64)
    for row, part in zip(rows, layout.gather(policy.grad).split(lengths), strict=True):
        gradient[row, : PADDED[row]] = part
    return result.loss.detach().sum(), gradient, result.statistics


def micro_batches(dp_rank, dp_size):
    """This rank's responses in an order of its own, four, one, five at a time."""
    order = torch.randperm(len(PADDED), generator=torch.Generator().manual_seed(dp_size)).tolist()
    mine, sizes = order[dp_rank::dp_size], (4, 1, 5)
    batches, start = [], 0
    while start < len(mine):
        size = sizes[len(batches) % 3]
        batches.append(mine[start : start + size])
        start += size
    return batches


def count_collectives(name, rank, group):
    """Collectives of one micro-batch at cp 2: (forward, backward)."""
    counts, originals = [0, 0], (dist.all_gather, dist.all_reduce)

    def counting(original, phase):
        def call(*arguments, **options):
            counts[phase[0]] += 1
            return original(*arguments, **options)

        return call

    phase = [0]
    mask, tensors = minibatch()
    rows = range(len(PADDED))
    pack = {k: torch.cat([x[row, : PADDED[row]] for row in rows]) for k, x in tensors.items()}
    full_mask = torch.cat([mask[row, : PADDED[row]] for row in rows])
    layout = SequenceLayout(PADDED, full_mask, cp_rank=rank % 2, cp_size=2, cp_group=group)
    local = {key: layout.shard(x) for key, x in pack.items()}
    policy = local.pop("policy_logprobs").requires_grad_()
    dist.all_gather, dist.all_reduce = (counting(original, phase) for original in originals)
    try:
        result = build_objective(name)(
            policy, layout=layout, denominators=Denominators(10.0, 100.0), **local
        )
        phase[0] = 1
        result.loss.sum().backward()
    finally:
        dist.all_gather, dist.all_reduce = originals
    return tuple(counts)


def on_rank(rank, world_size):
    """Every objective on every split; rank 0's totals stand for all, the others' must agree."""
    results = {}
    for cp_size in CP_SIZES:
        groups = [
            dist.new_group(list(range(start, start + cp_size)))
            for start in range(0, world_size, cp_size)
        ]
        for name in OBJECTIVE_NAMES:
            # Loss and gradients in one tensor: one all-reduce instead of two.
            totals = torch.zeros(1 + len(PADDED) * max(PADDED), dtype=torch.float64)
            statistics = Statistics.empty()
            for rows in micro_batches(rank // cp_size, world_size // cp_size):
                part = run_micro_batch(
                    name,
                    rows,
                    cp_rank=rank % cp_size,
                    cp_size=cp_size,
                    cp_group=groups[rank // cp_size],
                )
                # Each response's gradient is counted once per rank of its group.
                totals += torch.cat((part[0].view(1), part[1].reshape(-1) / cp_size))
                statistics = statistics.merge(part[2])
            dist.all_reduce(totals)
            gradient = totals[1:].view(len(PADDED), -1).numpy()
            metrics = statistics.all_reduce(dist.group.WORLD).to_metrics()
            results[cp_size, name] = (totals[0].item(), gradient, metrics)
        if cp_size == 2:
            group = groups[rank // 2]
            counts = {name: count_collectives(name, rank, group) for name in OBJECTIVE_NAMES}
    if rank:
        results = {key: value[2] for key, value in results.items()}
    return results | {"collectives": counts}


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_splits_do_not_matter(name):
    wanted_loss, wanted_gradient, wanted_statistics = run_micro_batch(name, range(len(PADDED)))
    wanted_metrics = wanted_statistics.to_metrics()
    assert wanted_gradient.abs().sum() > 0
    results = [rank["objectives"] for rank in all_results()]
    for cp_size in CP_SIZES:
        loss, gradient, metrics = results[0][cp_size, name]
        assert loss == pytest.approx(wanted_loss.item(), rel=1e-11)
        np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-10, atol=1e-15)
        assert set(metrics) == set(wanted_metrics)
        for key, value in wanted_metrics.items():
            assert metrics[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
        for other in results[1:]:
            assert other[cp_size, name] == metrics


# Objectives that need more than the one all-gather of the prefix sums, and those whose gradient
# flows through a sum over the response.
SECOND_SCAN = {"minpro", "tv_filter"}
BACKWARD_SCAN = {"gspo", "exact_prefix_score", "oapl"}


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_one_all_gather_per_micro_batch(name):
    wanted = (2 if name in SECOND_SCAN else 1, 1 if name in BACKWARD_SCAN else 0)
    for result in all_results():
        assert result["objectives"]["collectives"][name] == wanted
