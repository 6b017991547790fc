"""Packed, context-parallel attention against softmax(q k^T / sqrt(d)) v, sequence by sequence."""

import itertools
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.distributed import context_attention as module
from megatron_rl.distributed.context_attention import (
    BATCH_PAIRS,
    RUN_QUERIES,
    build_attention_plan,
    context_attention,
)
from megatron_rl.distributed.sequence_layout import SequenceLayout
from tests.ranks import run_ranks

LENGTHS = (8, 264, 12, 260, 8, 148, 4)  # on the CPU: long sequences in runs, short ones in batches
SHORT_LENGTHS = (8, 64, 12, 60, 8, 48, 64)  # on the CPU: batches of equal length
LONG_LENGTHS = (1030, 40)  # one run in the kernel's causal mode
HEADS, GROUPS, DIM = 4, 2, 8
SINKS, SCALE = (0.5, -1.0, 2.0, 0.0), 0.3


def _inputs(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)

    def draw(heads):
        return torch.randn(tokens, heads, DIM, generator=generator)

    return draw(HEADS), draw(GROUPS), draw(GROUPS), draw(HEADS)


def _naive(query, key, value, lengths, window=None, sinks=None, parents=(), used=()):
    outputs, start, ancestors = [], 0, []
    for sequence, length in enumerate(lengths):
        rows = slice(start, start + length)
        parent = parents[sequence] if parents else -1
        before = ancestors[parent] if parent >= 0 else []
        ancestors.append([*before, *range(start, start + (used[sequence] if parents else 0))])
        q, k, v = (x[rows].double() for x in (query, key, value))
        k, v = (torch.cat((x[before].double(), own)) for x, own in ((key, k), (value, v)))
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (DIM**-0.5 if sinks is None else SCALE)
        distance = len(before) + torch.arange(length)[:, None] - torch.arange(len(k))
        hidden = (distance < 0) | (distance >= (window or len(k)))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, length, 1)), dim=-1)
        weights = scores.softmax(-1)[..., : len(k)]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        start += length
    return torch.cat(outputs)


def _attend_on_rank(
    rank, world_size, lengths, fused, group=None, window=None, sinks=False, parents=(), used=()
):
    if world_size > 1:
        group = torch.distributed.group.WORLD
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    layout = SequenceLayout(
        lengths, mask, cp_rank=rank, cp_size=world_size, cp_group=group, parents=parents, used=used
    )
    *inputs, grad = (layout.shard(x) for x in _inputs(lengths))
    leaves = [x.clone().requires_grad_() for x in inputs]
    further = {}
    if sinks:
        further = {"scale": SCALE, "sinks": torch.tensor(SINKS).requires_grad_()}
    plan = build_attention_plan(layout, window=window, fused=fused)
    is_cut = window is not None and window < max(layout.depths) + max(lengths)
    assert bool(plan.joined) == (fused and not is_cut and bool(layout.parents))
    if (
        fused and world_size > 1 and window is None and not parents
    ):  # two chunks of all sequences of one length at once
        assert len(plan.blocks) == 2 * len(set(lengths))
    out = context_attention(*leaves, plan=plan, group=group, **further)
    out.backward(grad)
    results = layout.local_index, out.detach(), *(leaf.grad for leaf in leaves)
    if sinks:
        results = *results, further["sinks"].grad
    return tuple(result.numpy() for result in results)


# CUDA uses the fused path; here torch's attention on the CPU replaces the CUDA kernels.
@pytest.mark.parametrize("fused", [False, True], ids=["cpu", "fused"])
@pytest.mark.parametrize("lengths", [LENGTHS, SHORT_LENGTHS, LONG_LENGTHS, (16, 16, 16)])
def test_attention_of_one_process_equals_definition(fused, lengths):
    _check([_attend_on_rank(0, 1, lengths, fused)], lengths)


@pytest.mark.parametrize("pairs", [1 << 12, 1 << 13, 1 << 17], ids=["head", "group", "heads"])
def test_calls_of_one_head_of_a_group_and_of_all_heads_equal_definition(pairs, monkeypatch):
    monkeypatch.setattr(module, "BATCH_PAIRS", pairs)
    calls = module._head_runs(torch.empty(HEADS, 1, 64, DIM), torch.empty(GROUPS, 1, 64, DIM))
    assert len(calls) == {1 << 12: HEADS, 1 << 13: GROUPS, 1 << 17: 1}[pairs]
    results = _attend_on_rank(0, 1, SHORT_LENGTHS, False, sinks=True)
    _check([results], SHORT_LENGTHS, with_sinks=True)


def _check(results, lengths, window=None, with_sinks=False, parents=(), used=()):
    leaves = [x.double().requires_grad_() for x in _inputs(lengths)[:3]]
    sinks = torch.tensor(SINKS, dtype=torch.float64).requires_grad_() if with_sinks else None
    expected = _naive(*leaves, lengths, window, sinks, parents, used)
    expected.backward(_inputs(lengths)[3].double())
    results = [tuple(torch.from_numpy(x) for x in result) for result in results]
    if with_sinks:  # each rank has the gradient of its queries
        grad = sum(result[-1].double() for result in results)
        torch.testing.assert_close(grad, sinks.grad, rtol=1e-5, atol=1e-5)
    index = torch.cat([result[0] for result in results])
    assert sorted(index.tolist()) == list(range(sum(lengths)))
    all_expected = (expected.detach(), *(leaf.grad for leaf in leaves))
    for position, wanted in enumerate(all_expected, start=1):
        got = torch.empty_like(wanted)
        got[index] = torch.cat([result[position] for result in results]).double()
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def _on_two_ranks(rank, world_size):
    """Attend long and short sequences, fused or not, with keys kept or gathered again in the
    backward pass; also return the bytes saved for a pack of 512 tokens, and windows."""
    attended, saved, windows = {}, {}, _windows_on_rank(rank, world_size)
    attended["trees"] = _trees_on_rank(rank, world_size)
    for module.KEPT_BYTES in (1 << 24, 0):
        saved[module.KEPT_BYTES] = _saved_bytes(rank, world_size, (512,))
        for name, fused in itertools.product(TWO_RANK_LENGTHS, (False, True)):
            result = _attend_on_rank(rank, world_size, TWO_RANK_LENGTHS[name], fused)
            attended[name, fused, module.KEPT_BYTES] = result
    return attended, saved, windows


TWO_RANK_LENGTHS = {
    name: tuple(4 * (length // 4 + 1) for length in (*lengths, max(lengths)))
    for name, lengths in (("long", LENGTHS), ("short", SHORT_LENGTHS))
}


def _saved_bytes(rank, world_size, lengths):
    group = torch.distributed.group.WORLD
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    layout = SequenceLayout(lengths, mask, cp_rank=rank, cp_size=world_size, cp_group=group)
    leaves = [layout.shard(x).requires_grad_() for x in _inputs(lengths)[:3]]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes), lambda x: x):
        context_attention(*leaves, plan=build_attention_plan(layout), group=group)
    return saved


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(_on_two_ranks, 2)


@pytest.mark.parametrize("name", TWO_RANK_LENGTHS)
@pytest.mark.parametrize("fused", [False, True], ids=["cpu", "fused"])
def test_attention_of_two_ranks_equals_one_process(two_ranks, name, fused):
    kept, again = ([rank[0][name, fused, limit] for rank in two_ranks] for limit in (1 << 24, 0))
    _check(kept, TWO_RANK_LENGTHS[name])
    for ranks in zip(kept, again, strict=True):  # bit-identical, gathered once or twice
        assert all((a == b).all() for a, b in zip(*ranks, strict=True))


def test_large_gathered_keys_are_not_saved(two_ranks):
    """Keys and values take 2 * K * d * 4 = 128 bytes per token, for 512 tokens or this rank's 256;
    queries and outputs take H * d * 4 = 128 bytes per token each."""
    for _, saved, _ in two_ranks:
        assert saved[1 << 24] == [256 * 128, 512 * 128, 256 * 128]
        assert saved[0] == [256 * 128] * 3


WINDOW_RUN = 64  # queries per fused call with a window in these tests, so that some have several


def _random_packs():
    """(lengths, window) of packs whose sequences are shorter and longer than the window."""
    choose = random.Random(3)
    for limit in (5, 40, 300):
        lengths = tuple(8 * choose.randint(1, 44) for _ in range(5))
        yield (*lengths, lengths[0], 8 * choose.randint(1, 12)), choose.randint(1, limit)
    yield (40, 40), 5
    yield (1096, 40), 700


def _window_cases():
    for number, (lengths, window) in enumerate(_random_packs()):
        yield from ((lengths, window, fused, fused == number % 2) for fused in (False, True))
    yield from ((lengths, None, fused, True) for fused in (False, True) for lengths in
                ((40, 16, 32, 40), (304, 104)))  # fmt: skip


def _windows_on_rank(rank, world_size):
    module.WINDOW_QUERIES = WINDOW_RUN
    return [
        _attend_on_rank(rank, world_size, lengths, fused, window=window, sinks=sinks)
        for lengths, window, fused, sinks in _window_cases()
    ]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_sliding_windows_and_sinks_equal_definition(cp_size, two_ranks, monkeypatch):
    monkeypatch.setattr(module, "WINDOW_QUERIES", WINDOW_RUN)
    by_rank = [_windows_on_rank(0, 1)] if cp_size == 1 else [windows for *_, windows in two_ranks]
    for (lengths, window, _, sinks), *results in zip(_window_cases(), *by_rank, strict=True):
        _check(results, lengths, window, sinks)


# A prompt with three that continue it, of which one has two of its own, and another prompt.
TREES = {
    "long": ((264, 8, 260, 8, 212, 4, 100, 40), (-1, 0, 0, 0, 2, 2, -1, 6)),
    "short": ((20, 16, 16, 8, 12, 12, 8, 24), (-1, 0, 0, 1, 1, 1, -1, 6)),
    "shorter than a window": ((8, 4, 4, 4, 4, 4, 60, 4), (-1, 0, 1, 2, 3, 4, 4, 4)),
}


TREE_OPTIONS = ((None, False, False), (None, False, True), (None, True, True),
                (9, False, False), (9, True, True), (70, True, False),
                (300, False, True))  # fmt: skip


def _tree_cases():
    for name, (lengths, parents) in TREES.items():
        used = tuple(max(0, length - place % 4) for place, length in enumerate(lengths))
        for window, sinks, fused in TREE_OPTIONS:
            yield name, lengths, parents, used, window, sinks, fused


def _trees_on_rank(rank, world_size):
    return [
        _attend_on_rank(rank, world_size, lengths, fused, window=window, sinks=sinks,
                        parents=parents, used=used)
        for _, lengths, parents, used, window, sinks, fused in _tree_cases()
    ]  # fmt: skip


@pytest.mark.parametrize("cp_size", [1, 2])
def test_queries_see_the_keys_of_ancestors_and_of_nothing_else(cp_size, two_ranks):
    """Neither padding of a parent, nor siblings; gradients of a parent's keys are added."""
    by_rank = [_trees_on_rank(0, 1)] if cp_size == 1 else [rank[0]["trees"] for rank in two_ranks]
    for (_, lengths, parents, used, window, sinks, _), *results in zip(
        _tree_cases(), *by_rank, strict=True
    ):
        _check(results, lengths, window, sinks, parents, used)


def test_copies_of_keys_are_selected_again_in_the_backward_pass(monkeypatch):
    """A key and its value take 2 * K * d * 4 = 128 bytes: 220 of tokens, in 100 + 6 * 120 slots."""
    lengths, parents = (100, *[20] * 6), (-1, *[0] * 6)
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    layout = SequenceLayout(lengths, mask, parents=parents, used=lengths)
    plan, results, saved = build_attention_plan(layout), [], []
    for limit in (0, 1 << 24):
        monkeypatch.setattr(module, "KEPT_BYTES", limit)
        *leaves, grad = (x.requires_grad_() for x in _inputs(lengths))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: saved.append(x.nbytes) or x, lambda x: x
        ):
            out = context_attention(*leaves, plan=plan, group=None)
        out.backward(grad)
        results.append([out, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert saved[1] == 220 * 128 and saved[4] == 820 * 128


def test_a_gpu_copies_no_keys():
    """As saved for the backward pass: 220 tokens' queries, keys with values, outputs, sums."""
    lengths, parents, saved = (100, *[20] * 6), (-1, *[0] * 6), []
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    layout = SequenceLayout(lengths, mask, parents=parents, used=lengths)
    *leaves, grad = (x.requires_grad_() for x in _inputs(lengths))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.nbytes) or x, lambda x: x
    ):
        plan = build_attention_plan(layout, fused=True)
        context_attention(*leaves, plan=plan, group=None).backward(grad)
    assert saved == [220 * 128, 220 * 128, 220 * 128, 220 * 4 * HEADS]


def test_plan_skips_keys_before_the_window(monkeypatch):
    """The first query of the second run is at 192 (64) and attends to the 100 keys from 93 (0)."""
    layout = SequenceLayout((300,), torch.ones(300, dtype=torch.bool))
    blocks = build_attention_plan(layout, window=100).blocks
    assert [b.visible for b in blocks] == [slice(0, 192), slice(93, 300)]
    monkeypatch.setattr(module, "WINDOW_QUERIES", WINDOW_RUN)
    blocks = build_attention_plan(layout, window=100, fused=True).blocks
    blocks = build_attention_plan(layout, window=100, fused=True).blocks
    visible = [(b.visible.start, b.visible.stop) for b in blocks]
    assert visible == [(0, 64), (0, 128), (29, 192), (93, 256), (157, 300)]
    (block,) = build_attention_plan(layout, window=300, fused=True).blocks  # nothing is hidden
    assert block.visible == slice(0, 300)


def test_output_is_independent_of_other_sequences_in_pack():
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


def test_cpu_plan_groups_equal_lengths_and_limits_runs():
    """500 = 192 + 192 + 116 queries, each run with the keys before it. If the longest sequences
    come first and equal lengths are adjacent, slots equal tokens and nothing is copied."""
    layout = SequenceLayout((500, 500, 40, 40, 38), torch.ones(1118, dtype=torch.bool))
    plan = build_attention_plan(layout)
    assert plan.query_rows is None and plan.key_rows is None
    assert [(b.queries, b.rows, b.visible, b.mask is None) for b in plan.blocks] == [
        (slice(0, 1000), slice(0, 192), slice(0, 192), True),
        (slice(0, 1000), slice(192, 384), slice(0, 384), True),
        (slice(0, 1000), slice(384, 500), slice(0, 500), True),
        (slice(1000, 1080), slice(0, 40), slice(0, 40), False),
        (slice(1080, 1118), slice(0, 38), slice(0, 38), False),
    ]


def test_cpu_batches_are_bounded():
    """64 * 64 query-key pairs per sequence: 32 sequences reach the limit of 2**17."""
    assert BATCH_PAIRS == 2**17
    lengths = (64,) * 80
    layout = SequenceLayout(lengths, torch.ones(sum(lengths), dtype=torch.bool))
    assert [b.sequences for b in build_attention_plan(layout).blocks] == [32, 32, 16]


class _Sizes(TorchDispatchMode):
    """Recorder of the largest tensor (in elements) that any operation creates."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            self.largest = max(self.largest, x.numel() if torch.is_tensor(x) else 0)
        return result


@pytest.mark.parametrize("tokens", [960, 3840])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_memory_is_linear_in_tokens(tokens, cp_size):
    """The largest tensor is a mask of RUN_QUERIES rows whose width is a power of two; the full
    score matrix would be 10 times larger."""
    module._last_rows.cache_clear()
    layout = SequenceLayout((tokens,), torch.ones(tokens, dtype=torch.bool), cp_size=cp_size)
    plan = build_attention_plan(layout)
    query, key, value, grad = (x.requires_grad_() for x in _inputs((tokens,)))
    with _Sizes() as sizes:
        for block in plan.blocks:  # one rank's part, without the collectives
            q, g = (module._rows(x[: layout.local_tokens], block) for x in (query, grad))
            k, v = (x[block.visible].transpose(0, 1)[None] for x in (key, value))
            out, log_sum = module._attend_runs(q, k, v)
            module._attend_runs_backward(g, q, k, v, out, log_sum)
    assert sizes.largest <= RUN_QUERIES * 2 * tokens
