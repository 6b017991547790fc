"""Packs: every response token once, aligned, balanced, in order, with global sizes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.data.packing import (
    FILLER,
    assign_packs,
    gather_by_rollout,
    padded_length,
    plan_minibatches,
    sequence_length,
    split_groups,
)
from megatron_rl.distributed.topology import Topology
from megatron_rl.types import GradeResult, Prompt, Response, Rollout


def _rollout(index, sample, prompt, response):
    logprobs = tuple(-0.5 - token for token in response)
    return Rollout(
        Prompt(index, (), tuple(prompt), "", ""),
        Response(index, sample, tuple(response), logprobs, "", "stop", 0),
        GradeResult(0.0, "", None),
    )


def _rollouts(groups=4, samples=2):
    return [
        _rollout(index, sample, range(1, 3 + index), range(10, 12 + 5 * index + sample))
        for index in range(groups)
        for sample in range(samples)
    ]


def _plan(
    rollouts,
    *,
    dp_size=1,
    dp_rank=0,
    cp_size=1,
    minibatches=2,
    budget=64,
    gemm_tokens=1,
    computed=None,
):
    topology = Topology(
        world_size=dp_size * cp_size, dp_size=dp_size, dp_rank=dp_rank, cp_size=cp_size
    )
    advantages = torch.arange(float(len(rollouts)))
    return plan_minibatches(
        rollouts,
        advantages,
        minibatches=minibatches,
        tokens_per_micro_batch=budget,
        topology=topology,
        gemm_tokens=gemm_tokens,
        computed=computed,
    )


def test_wrong_log_probs_of_engine_differ_from_missing_ones():
    """nan of an engine reaches the objective, which names it; nan of another run is not known."""
    wrong = _rollout(0, 0, (1, 2), (7, math.nan))
    wrong = replace(wrong, response=replace(wrong.response, token_ids=(7, 8)))
    elsewhere = replace(wrong, response=replace(wrong.response, weight_version=-1))
    kept, unknown = (
        _plan([one] * 2, minibatches=1)[0].micro_batches[0].rollout_logprobs
        for one in (wrong, elsewhere)
    )
    assert kept.isnan().any() and unknown is None


def test_sampling_masks_are_spread_over_labels():
    """A response without any has empty ones; they can be selected, and padded to the largest."""
    masked, plain = _rollout(0, 0, [5, 6], [7, 8]), _rollout(0, 1, [5], [7])
    masks = {"mask_ids": np.int32([7, 9, 1, 8]), "mask_counts": np.int32([3, 1])}
    masked = replace(masked, response=replace(masked.response, **masks))
    (minibatch,) = _plan([masked, plain], minibatches=1)
    (pack,) = minibatch.micro_batches
    rows = dict(zip(zip(pack.tokens.tolist(), pack.labels.tolist(), strict=True),
                    pack.sampling_mask.padded().tolist(), strict=True))  # fmt: skip
    chosen = pack.sampling_mask.select(pack.response_mask.nonzero().squeeze(1).flip(0))
    assert chosen.counts.tolist() == pack.sampling_mask.counts[pack.response_mask].flip(0).tolist()
    kept = [row for row in reversed(pack.sampling_mask.padded().tolist()) if row[0] >= 0]
    assert [row for row in chosen.padded().tolist() if row[0] >= 0] == kept
    assert chosen.select(torch.zeros(0, dtype=torch.int64)).padded().shape == (0, 0)
    none = [-1, -1, -1]
    assert rows[6, 7] == [7, 9, 1] and rows[7, 8] == [8, -1, -1]
    assert rows[5, 6] == rows[5, 7] == none  # of the prompt, and without a mask
    assert _plan([plain] * 2, minibatches=1)[0].micro_batches[0].sampling_mask is None


def test_pack_of_one_sequence_by_hand():
    # Prompt 1 2 3, response 7 8; position 2 predicts 7, position 3 predicts 8; the last token is
    # not fed in. cp 2 pads 4 positions to a multiple of 4.
    plan = _plan([_rollout(0, 0, (1, 2, 3), (7, 8))] * 2, cp_size=2, minibatches=1, budget=4)
    pack = plan[0].micro_batches[1]
    assert pack.tokens.tolist() == [1, 2, 3, 7]
    assert pack.labels.tolist() == [2, 3, 7, 8]
    assert pack.response_mask.tolist() == [False, False, True, True]
    assert pack.rollout_logprobs.tolist() == [0.0, 0.0, -7.5, -8.5]
    assert pack.position_ids.tolist() == [0, 1, 2, 3]
    assert (pack.lengths, pack.rollout_indices) == ((4,), (1,))
    assert pack.advantages.tolist() == [1.0]
    assert (plan[0].denominators.responses, plan[0].denominators.tokens) == (2.0, 4.0)


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_every_response_token_is_trained_on_once(dp_size, cp_size):
    rollouts = _rollouts()
    seen = []
    counts = set()
    for dp_rank in range(dp_size):
        plan = _plan(rollouts, dp_size=dp_size, dp_rank=dp_rank, cp_size=cp_size)
        counts.add(tuple(len(minibatch.micro_batches) for minibatch in plan))
        for place, minibatch in enumerate(plan):
            for pack in minibatch.micro_batches:
                assert sum(pack.lengths) == len(pack.tokens) <= 64
                assert all(length % (2 * cp_size) == 0 for length in pack.lengths)
                start = 0
                for index, length in zip(pack.rollout_indices, pack.lengths, strict=True):
                    rows = slice(start, start + length)
                    start += length
                    if index == FILLER:
                        assert not pack.response_mask[rows].any()
                        continue
                    assert index // 4 == place  # two groups of two to a minibatch, in order
                    labels = pack.labels[rows][pack.response_mask[rows]]
                    assert labels.tolist() == list(rollouts[index].response.token_ids)
                    seen.append(index)
    assert sorted(seen) == list(range(8))
    assert len(counts) == 1  # every rank walks alike


def test_packs_respect_budget_and_longest_gets_its_own():
    packs = assign_packs([4, 4, 100, 8, 8], budget=16, ranks=1)
    assert max(sum([4, 4, 100, 8, 8][i] for i in pack) for pack in packs[0]) == 100
    lengths = [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    packs = assign_packs(lengths, budget=15, ranks=2)
    assert [len(rank) for rank in packs] == [2, 2]  # 55 tokens need 4 packs of 15
    assert max(sum(lengths[i] for i in pack) for rank in packs for pack in rank) <= 15


def test_long_tailed_lengths_are_hardly_padded():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(torch.randn(512, generator=generator) + 7.5).clamp(64, 16384).int()
    alignment = 2 * 4 * 2  # cp 4, tp 2
    padded = ((lengths + alignment - 1) // alignment * alignment).tolist()
    assert lengths.sum() / sum(padded) > 0.99
    packs = assign_packs(padded, budget=32768, ranks=4)
    loads = [sum(padded[i] for i in pack) for rank in packs for pack in rank]
    assert min(loads) / max(loads) > 0.95


def test_groups_must_divide():
    with pytest.raises(ValueError, match="3 prompt groups cannot be split into 2 equal"):
        split_groups(_rollouts(groups=3), minibatches=2)
    # The same prompt twice in a row is two groups: the sample index starts again.
    twice = [_rollout(0, sample, (1,), (2,)) for sample in (0, 1, 0, 1)]
    assert split_groups(twice, minibatches=2) == [range(2), range(2, 4)]


@pytest.mark.parametrize(("cp_size", "gemm_tokens", "multiple"), [(1, 16, 16), (2, 16, 32)])
def test_last_sequence_is_padded_for_matrix_products(cp_size, gemm_tokens, multiple):
    plain = _plan(_rollouts(), cp_size=cp_size)
    count = sum(int(pack.response_mask.sum()) for each in plain for pack in each.micro_batches)
    for budget in range(32, 120, 7):
        filled = _plan(_rollouts(), cp_size=cp_size, budget=budget, gemm_tokens=gemm_tokens)
        assert [each.denominators for each in filled] == [each.denominators for each in plain]
        packs = [pack for minibatch in filled for pack in minibatch.micro_batches]
        assert count == sum(int(pack.response_mask.sum()) for pack in packs)
        for pack in packs:
            assert sum(pack.lengths) == len(pack.tokens) == len(pack.position_ids)
            assert sum(pack.lengths) % multiple == 0  # each of cp shards is a multiple of 16
            assert all(length % (2 * cp_size) == 0 for length in pack.lengths)
            assert sum(pack.lengths) <= budget
            needed = sum(
                padded_length(sequence_length(_rollouts()[i]), alignment=2 * cp_size)
                for i in pack.rollout_indices
            )
            assert 0 <= sum(pack.lengths) - needed < multiple


def test_filler_is_padded_for_matrix_products():
    plans = [_plan(_rollouts(1, 1), dp_size=2, dp_rank=rank, minibatches=1, gemm_tokens=16)
             for rank in range(2)]  # fmt: skip
    assert [plan[0].micro_batches[0].rollout_indices for plan in plans] == [(0,), (FILLER,)]
    assert [plan[0].micro_batches[0].lengths for plan in plans] == [(16,), (16,)]


@pytest.mark.parametrize("dp_size", [1, 2])
def test_rollouts_without_signal_are_in_global_sizes_but_in_no_pack(dp_size):
    rollouts = _rollouts()
    computed = [False, False, True, False, *[False] * 4]  # nothing of the second minibatch
    plans = [
        _plan(rollouts, dp_size=dp_size, dp_rank=rank, computed=computed) for rank in range(dp_size)
    ]
    everything = _plan(rollouts)
    for plan in plans:
        assert [each.denominators for each in plan] == [each.denominators for each in everything]
        assert [len(each.micro_batches) for each in plan] == [1, 1]  # every rank walks alike
    seen = [
        [i for plan in plans for pack in plan[m].micro_batches for i in pack.rollout_indices]
        for m in range(2)
    ]
    assert seen == [[2, *[FILLER] * (dp_size - 1)], [FILLER] * dp_size]
    packs = [pack for minibatch in plans[0] for pack in minibatch.micro_batches]
    rows = gather_by_rollout(
        packs, [p.rollout_logprobs for p in packs], count=8, topology=Topology.single()
    )
    assert [index for index, row in enumerate(rows) if row is not None] == [2]
