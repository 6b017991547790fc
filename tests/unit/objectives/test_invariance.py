"""Loss, gradients and metrics do not depend on how a minibatch is cut, packed or sharded.

Every objective on data parallelism times context parallelism of 2 x 2, and one of each kind of
scan on 1 x 4, with micro-batches of one, four and five responses in shuffled order, against one
process that sees one pack.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import OBJECTIVE_NAMES, Statistics, TokenInputs, build_objective
from megatron_rl.objectives.inputs import MinibatchTokens
from megatron_rl.types import Denominators
from tests.unit.distributed.four_ranks import all_results

PADDED = (16, 160, 16, 48, 32, 16, 64, 16, 32, 16)
OPTIONS = {
    "k3, entropy, sequence mean": {
        "kl": {"coefficient": 0.1, "estimator": "k3"},
        "entropy_coefficient": 0.01,
        "rollout_correction": {"level": "sequence_mean", "low": 0.5, "high": 2.0},
    },
    "k1, token": {
        "kl": {"coefficient": 0.1, "estimator": "k1"},
        "rollout_correction": {"level": "token", "mode": "mask", "low": 0.9, "high": 1.1},
    },
    "k2, entropy, sequence": {
        "kl": {"coefficient": 0.1, "estimator": "k2"},
        "entropy_coefficient": 0.01,
        "rollout_correction": {"level": "sequence", "low": 0.3, "high": 3.0},
    },
    "plain": {},
}
OWN = "tests.unit.objectives.own_losses"
OWN_LOSSES = {
    name: {"function": f"{OWN}:{name}", "aggregation": aggregation}
    for name, aggregation in (
        ("clip", "token_mean"), ("sequence_ratio", "response_mean"), ("prefix_mean", "response_sum")
    )
}  # fmt: skip
# Every objective with one set of optional terms, in turn. The scans of the four with another one:
# a prefix, a sequence with a backward scan, a prefix and its minimum, a prefix and its length.
WITH_SCANS = {(name, "k2, entropy, sequence") for name in ("pnpo", "gspo", "minpro", "cppo")}
CASES = sorted(
    {(name, list(OPTIONS)[i % 3]) for i, name in enumerate(OBJECTIVE_NAMES) if name != "oapl"}
    | WITH_SCANS
    | {("pnpo", "plain"), ("oapl", "plain")}
    | {("function", name) for name in OWN_LOSSES}
)
CASES_OF = {2: CASES, 4: sorted(WITH_SCANS | {("oapl", "plain")})}  # by context parallelism


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


def build(case):
    name, options = case
    return build_objective(name, **(OWN_LOSSES if name == "function" else OPTIONS)[options])


def resolved(case):
    """The objective for the whole minibatch, the same on every rank that has a part of it."""
    mask, tensors = minibatch()
    log_ratios = tensors["policy_logprobs"] - tensors["behavior_logprobs"]
    advantages, behavior = tensors["advantages"], tensors["behavior_logprobs"]
    return build(case).resolve(
        MinibatchTokens.whole(log_ratios[mask], advantages[mask], behavior[mask])
    )


def run_micro_batch(case, rows, *, cp_rank=0, cp_size=1, cp_group=None):
    """Loss of this rank, gradients of the whole micro-batch per response, statistics.

    The gradients are those of the log-probs and of the entropy.
    """
    mask, tensors = minibatch()
    lengths = [PADDED[row] for row in rows]

    def pack(x):
        return torch.cat([x[row, : PADDED[row]] for row in rows])

    layout = SequenceLayout(
        lengths, pack(mask), cp_rank=cp_rank, cp_size=cp_size, cp_group=cp_group
    )
    local = {key: layout.shard(pack(x)) for key, x in tensors.items()}
    policy = local.pop("policy_logprobs").requires_grad_()
    local["entropy"].requires_grad_()
    denominators = Denominators(responses=float(len(PADDED)), tokens=float(mask.sum()))
    result = resolved(case)(
        TokenInputs(policy_logprobs=policy, **local), layout=layout, denominators=denominators
    )
    result.loss.sum().backward()
    gradient = torch.zeros(2, len(PADDED), max(PADDED), dtype=torch.float64)
    of_entropy = local["entropy"].grad
    grads = (policy.grad, torch.zeros_like(policy) if of_entropy is None else of_entropy)
    for table, grad in zip(gradient, grads, strict=True):
        for row, part in zip(rows, layout.gather(grad.detach()).split(lengths), strict=True):
            table[row, : PADDED[row]] = part
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


def count_collectives(case, rank, group):
    """Messages of one micro-batch at cp 2, shapes and bytes of an element: (forward, backward)."""
    seen, originals = ([], []), (dist.all_gather, dist.all_reduce)

    def counting(original, place):
        def call(*arguments, **options):
            tensor = arguments[place]
            seen[phase[0]].append((tuple(tensor.shape), tensor.element_size()))
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
    dist.all_gather, dist.all_reduce = counting(originals[0], 1), counting(originals[1], 0)
    try:
        result = resolved(case)(
            TokenInputs(policy_logprobs=policy, **local),
            layout=layout,
            denominators=Denominators(10.0, 100.0),
        )
        phase[0] = 1
        result.loss.sum().backward()
    finally:
        dist.all_gather, dist.all_reduce = originals
    return seen


def on_rank(rank, world_size):
    """Every objective on every split; rank 0's totals stand for all, the others' must agree."""
    results = {}
    for cp_size, cases in CASES_OF.items():
        groups = [
            dist.new_group(list(range(start, start + cp_size)))
            for start in range(0, world_size, cp_size)
        ]
        for case in cases:
            # Loss and gradients in one tensor: one all-reduce instead of two.
            totals = torch.zeros(1 + 2 * len(PADDED) * max(PADDED), dtype=torch.float64)
            statistics = Statistics.empty()
            for rows in micro_batches(rank // cp_size, world_size // cp_size):
                part = run_micro_batch(
                    case,
                    rows,
                    cp_rank=rank % cp_size,
                    cp_size=cp_size,
                    cp_group=groups[rank // cp_size],
                )
                # Each response's gradient is counted once per rank of its group.
                totals += torch.cat((part[0].view(1), part[1].reshape(-1) / cp_size))
                statistics = statistics.merge(part[2])
            dist.all_reduce(totals)
            gradient = totals[1:].view(2, len(PADDED), -1).numpy()
            metrics = statistics.all_reduce(dist.group.WORLD).to_metrics()
            results[cp_size, case] = (totals[0].item(), gradient, metrics)
        if cp_size == 2:
            group = groups[rank // 2]
            counts = {case: count_collectives(case, rank, group) for case in CASES}
    if rank:
        results = {key: value[2] for key, value in results.items()}
    return results | {"collectives": counts}


def test_every_objective_is_split():
    assert {name for name, _ in CASES} == {*OBJECTIVE_NAMES, "function"}


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_splits_do_not_matter(case):
    wanted_loss, wanted_gradient, wanted_statistics = run_micro_batch(case, range(len(PADDED)))
    wanted_metrics = wanted_statistics.to_metrics()
    assert wanted_gradient[0].abs().sum() > 0
    assert bool(wanted_gradient[1].any()) == ("entropy" in case[1])
    results = [rank["objectives"] for rank in all_results()]
    for cp_size in (size for size, cases in CASES_OF.items() if case in cases):
        loss, gradient, metrics = results[0][cp_size, case]
        assert loss == pytest.approx(wanted_loss.item(), rel=1e-11)
        np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-10, atol=1e-15)
        assert set(metrics) == set(wanted_metrics)
        for key, value in wanted_metrics.items():
            assert metrics[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
        for other in results[1:]:
            assert other[cp_size, case] == metrics


# What is scanned next to the log-ratio, and whose gradient flows through a sum over the response.
SECOND_SCAN = {"minpro", "vaco", "cppo"}
BACKWARD_SCAN = {"gspo", "exact_prefix_score", "oapl"}


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_one_all_gather_per_micro_batch_for_any_scans(case):
    # Two chunk totals in float64: 16 bytes per sequence, rank and statistic.
    corrected = case[0] != "function" and "sequence" in case[1]
    statistics = 1 + (case[0] in SECOND_SCAN) + corrected
    forward = [((len(PADDED), 2, statistics), 8)]
    through_sum = case[0] in BACKWARD_SCAN or case == ("function", "sequence_ratio")
    backward = [((len(PADDED), 2, 1), 8)] if through_sum else []
    for result in all_results():
        assert result["objectives"]["collectives"][case] == (forward, backward)
