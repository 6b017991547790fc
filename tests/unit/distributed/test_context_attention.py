"""Packed, context-parallel attention against softmax(q k^T / sqrt(d)) v, sequence by sequence."""

import pytest
import torch

from megatron_rl.distributed import context_attention as module
from megatron_rl.distributed.context_attention import build_attention_plan, context_attention
from megatron_rl.distributed.sequence_layout import SequenceLayout
from tests.ranks import run_ranks

LENGTHS = (8, 64, 12, 60, 8, 48, 4)
HEADS, GROUPS, DIM = 4, 2, 8


def _inputs(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)

    def draw(heads):
        return torch.randn(tokens, heads, DIM, generator=generator)

    return draw(HEADS), draw(GROUPS), draw(GROUPS), draw(HEADS)


def _naive(query, key, value, lengths):
    outputs, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        q, k, v = (x[rows].double() for x in (query, key, value))
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        hidden = torch.ones(length, length).triu(1).bool()
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        start += length
    return torch.cat(outputs)


def _attend_on_rank(rank, world_size, lengths, block_elements, runs=False, group=None):
    module.BLOCK_ELEMENTS = block_elements
    module.KEPT_MASK_ELEMENTS = block_elements
    if world_size > 1:
        group = torch.distributed.group.WORLD
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    layout = SequenceLayout(lengths, mask, cp_rank=rank, cp_size=world_size, cp_group=group)
    *inputs, grad = (layout.shard(x) for x in _inputs(lengths))
    leaves = [x.clone().requires_grad_() for x in inputs]
    plan = build_attention_plan(layout, runs=runs)
    assert all((block.mask(torch.float32) is None) == runs for block in plan.blocks)
    if runs and world_size > 1:  # two chunks of all sequences of one length at once
        assert len(plan.blocks) == 2 * len(set(lengths))
    out = context_attention(*leaves, plan=plan, group=group)
    out.backward(grad)
    results = layout.local_index, out.detach(), *(leaf.grad for leaf in leaves)
    return tuple(result.numpy() for result in results)


# Runs are what CUDA gets; torch's attention on the CPU stands in for its fused kernels.
WAYS = [(1 << 22, False), (500, False), (500, True)]
WAY_NAMES = ["masks", "small masks", "runs"]


@pytest.mark.parametrize(("block_elements", "runs"), WAYS, ids=WAY_NAMES)
@pytest.mark.parametrize("lengths", [LENGTHS, (16, 16, 16)])
def test_one_process_equals_the_definition(block_elements, runs, lengths, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", block_elements)
    monkeypatch.setattr(module, "KEPT_MASK_ELEMENTS", block_elements)
    _check([_attend_on_rank(0, 1, lengths, block_elements, runs)], lengths)


def _check(results, lengths):
    leaves = [x.double().requires_grad_() for x in _inputs(lengths)[:3]]
    expected = _naive(*leaves, lengths)
    expected.backward(_inputs(lengths)[3].double())
    results = [tuple(torch.from_numpy(x) for x in result) for result in results]
    index = torch.cat([result[0] for result in results])
    assert sorted(index.tolist()) == list(range(sum(lengths)))
    wanted = (expected.detach(), *(leaf.grad for leaf in leaves))
    for place, want in enumerate(wanted, start=1):
        got = torch.empty_like(want)
        got[index] = torch.cat([result[place] for result in results]).double()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def _attend_every_way(rank, world_size, lengths):
    return [_attend_on_rank(rank, world_size, lengths, *way) for way in WAYS]


def test_two_ranks_hold_the_shards_of_one():
    lengths = tuple(4 * length for length in (2, 16, 3, 15, 2, 12, 1))
    for results in zip(*run_ranks(_attend_every_way, 2, lengths), strict=True):
        _check(results, lengths)


def test_runs_are_few_and_whole():
    """Without context parallelism one kernel call attends all sequences of similar lengths."""
    lengths = (64, 60, 16, 64, 16, 12)
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    plan = build_attention_plan(SequenceLayout(lengths, mask), runs=True)
    assert [(b.sequences, b.rows, b.visible) for b in plan.blocks] == [
        (3, slice(0, 64), 64),  # 64, 64 and 60
        (3, slice(0, 16), 16),  # 16, 16 and 12
    ]


def test_a_neighbour_in_the_pack_changes_nothing():
    query, key, value, _ = _inputs()
    layout = SequenceLayout(LENGTHS, torch.ones(sum(LENGTHS), dtype=torch.bool))
    plan = build_attention_plan(layout)
    before = context_attention(query, key, value, plan=plan, group=None)
    rows = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])  # the second sequence
    for x in (query, key, value):
        x[rows] += 100.0
    after = context_attention(query, key, value, plan=plan, group=None)
    outside = torch.ones(sum(LENGTHS), dtype=torch.bool)
    outside[rows] = False
    assert torch.equal(before[outside], after[outside])
    assert not torch.equal(before[rows], after[rows])


def test_what_outlives_the_layer_is_linear_in_the_tokens(monkeypatch):
    # One sequence of 512: a full score matrix has 512 * 512 elements; blocks may have 1/16 of it.
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 512 * 32)
    monkeypatch.setattr(module, "KEPT_MASK_ELEMENTS", 0)
    layout = SequenceLayout((512,), torch.ones(512, dtype=torch.bool))
    plan = build_attention_plan(layout)
    assert len(plan.blocks) == 16
    assert all(block.kept_mask is None for block in plan.blocks)
    assert max(block.mask(torch.float32).numel() for block in plan.blocks) <= 512 * 32
    # A block sees only the keys before it: 32, 64, ... 512.
    assert [block.visible for block in plan.blocks] == list(range(32, 513, 32))
