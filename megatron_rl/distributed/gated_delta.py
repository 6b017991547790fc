"""Gated delta rule (arXiv 2412.06464) and convolution of a pack with chunks on different ranks.

Of one head, with the state S [d_k, d_v] of a sequence and its token's key k and query q (both of
length 1), value v, decay exp(g) <= 1 and strength beta:

    S <- exp(g) S,    S <- S + k (beta (v - S^T k))^T,    o = S^T q / sqrt(d_k)

C tokens are affine in the state before them. With G the running sum of g in the block, A_ij =
exp(G_i - G_j) k_i . k_j below the diagonal and one unit-triangular solve of size C,

    [w, u] = (I + diag(beta) A)^-1 diag(beta) [exp(G) k, v]
    S' = exp(G_C) S + sum_j exp(G_C - G_j) k_j (u_j - w_j S)
    o_i = exp(G_i) q_i S + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) (u_j - w_j S)

so a chunk of any length is a map S -> M S + B (`chunk_scan.py`). Both come from the same rule: with
d_k more columns of values, all 0, and the state [0 | I] before the chunk, the state after it is
[B | M] and the outputs are [o | R]; the outputs of the true state S before the chunk are o + R S.

The depth-wise causal convolution before it is

    y_t = sum_j w_{K-1-j} x_{t-j},   j = 0 .. K - 1,   x = 0 before a sequence

A rank needs the K - 1 tokens before each of its chunks, the chunk's halo. Every rank gathers the
tokens that are in a halo (one collective), and the gradients of halos are summed back to their
owners (one collective). A chunk may be shorter than a halo, which then comes from several.

A sequence that continues another one begins with the state that its parent's tokens leave, and the
first halo is the end of its ancestors; gradients of both are added over all that continue it. In
the padding of such packs beta and g are 0, which leaves the state as it is. Without context
parallelism the rule runs once for each level of the tree; with it, the scan over chunks does.

Shapes: t tokens of this rank, K key heads (of a convolution: taps), H value heads, D channels,
n chunks (2 for each sequence, 1 if cp_size is 1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.distributed.chunk_scan import states_before_chunks
from megatron_rl.distributed.collectives import (
    add_rows,
    gather_stacked,
    sum_to_owners,
    take_rows,
    to_device,
)
from megatron_rl.distributed.sequence_layout import SequenceLayout

# Tokens of a block: the largest that pads no more than by this factor. Applying states to tokens
# copies the states once for each block, so its blocks may be larger.
SIZES = (64, 32, 16)
STATE_SIZES = (512, 256, *SIZES)
MAX_PADDING = 1.25

# q [t, K, d_k], k, v [t, H, d_v], g [t, H], beta [t, H], the state before each chunk [n, H, d_k,
# d_v] or None for zeros, layout -> outputs [t, H, d_v], states after the chunks [n, H, d_k, d_v].
Rule = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, SequenceLayout], tuple[Tensor, Tensor]
]


class Blocks(NamedTuple):
    """Blocks of a rank's chunks, step by step: block i of every chunk that has one."""

    rows: Tensor  # [blocks, size] token of each slot, t for padding
    chunks: Tensor  # [blocks] chunk of each block
    slots: Tensor  # [t] slot of each token
    counts: list[int]  # chunks with a block in each step
    order: Tensor  # [n] chunks by falling number of blocks, as in each step


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    layout: SequenceLayout,
    *,
    rule: Rule | None = None,
) -> Tensor:
    """Compute the outputs of all tokens; a sequence without a parent begins with zeros.

    q, k [t, K, d_k] of length 1, v [t, H, d_v], g, beta [t, H] -> [t, H, d_v] in v's dtype; value
    head h has key head h // (H / K). Differentiable. rule: computes the rank's own chunks.
    """
    layout.check_local(v)
    rule = rule or torch_rule
    if layout.parents:
        g, beta = (torch.where(layout.is_used[:, None], x, 0) for x in (g, beta))
    if layout.cp_size == 1:
        if layout.parents:
            return _run_levels(rule, q, k, v, g, beta, layout).to(v.dtype)
        return rule(q, k, v, g, beta, None, layout)[0].to(v.dtype)
    key, value = k.shape[-1], v.shape[-1]
    wide = torch.promote_types(v.dtype, torch.float32)
    eye = torch.eye(key, dtype=wide, device=v.device)
    chunks = 2 * len(layout.lengths)
    before = F.pad(eye, (value, 0)).expand(chunks, v.shape[1], key, value + key)
    out, after = rule(q, k, F.pad(v, (0, key)), g, beta, before, layout)
    own, response = out.split([value, key], dim=-1)
    b, m = after.to(wide).split([value, key], dim=-1)
    states = states_before_chunks(m, b, layout)
    return (own + _apply_states(response.to(wide), states, layout)).to(v.dtype)


class _Level(NamedTuple):
    """The sequences that have the same number of ancestors, as a pack of their own."""

    rows: Tensor  # tokens
    parents: Tensor  # of each sequence, its place in the level above
    layout: SequenceLayout


def _run_levels(
    rule: Rule, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: SequenceLayout
) -> Tensor:
    """Compute level after level; the states after one begin the next. Without shards."""
    levels = layout.once(_build_levels)
    wide, parts, after = torch.promote_types(v.dtype, torch.float32), [], None
    for level in levels:
        rows = level.rows
        if after is None:
            states = (len(level.layout.lengths), v.shape[1], k.shape[-1], v.shape[-1])
            before = v.new_zeros(states, dtype=wide)
        else:
            before = take_rows(after, level.parents)
        out, after = rule(q[rows], k[rows], v[rows], g[rows], beta[rows], before, level.layout)
        parts.append(out)
    order = torch.argsort(torch.cat([level.rows for level in levels]))
    return torch.cat(parts).index_select(0, order)


def _build_levels(layout: SequenceLayout) -> list[_Level]:
    ends = torch.tensor(layout.lengths).cumsum(0).tolist()
    places = {one: place for level in layout.levels for place, one in enumerate(level)}
    levels = []
    for number, level in enumerate(layout.levels):
        rows = torch.cat([torch.arange(ends[i] - layout.lengths[i], ends[i]) for i in level])
        rows = to_device(rows, layout.device)
        parents = [places[layout.parents[one]] if number else 0 for one in level]
        own = SequenceLayout([layout.lengths[one] for one in level], layout.full_mask[rows])
        levels.append(_Level(rows, to_device(torch.tensor(parents), layout.device), own))
    return levels


def torch_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    before: Tensor | None,
    layout: SequenceLayout,
) -> tuple[Tensor, Tensor]:
    """Compute a rank's own chunks by torch, in float32 or wider: a `Rule`."""
    blocks = layout.once(_rule_blocks)
    wide = torch.promote_types(v.dtype, torch.float32)
    heads, key = v.shape[1], k.shape[-1]
    q, k = (x.to(wide).repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    inputs = (q * key**-0.5, k, v.to(wide), g.to(wide), beta.to(wide))
    q, k, v, g, beta = (_gather_rows(x, blocks.rows) for x in inputs)  # [blocks, H, size, ...]
    sums = g.cumsum(-1)
    lower = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril()
    # Masked before the exponential: above the diagonal it may overflow.
    pairs = (sums[..., :, None] - sums[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    scaled = k * beta[..., None]
    system = (scaled @ k.transpose(-1, -2)) * pairs
    right = torch.cat((scaled * sums.exp()[..., None], v * beta[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    w, u = solved.split([key, v.shape[-1]], dim=-1)
    kept = (k * (sums[..., -1:] - sums).exp()[..., None]).transpose(-1, -2)
    decay = sums[..., -1].exp()[..., None, None]
    states, after = _scan_blocks(w, u, kept, decay, before, blocks)
    out = (q * sums.exp()[..., None]) @ states
    out = out + ((q @ k.transpose(-1, -2)) * pairs) @ (u - w @ states)
    return _scatter_rows(out, blocks.slots), after


def _scan_blocks(
    w: Tensor, u: Tensor, kept: Tensor, decay: Tensor, before: Tensor | None, blocks: Blocks
) -> tuple[Tensor, Tensor]:
    """Return the states before all blocks, and those after the chunks; the one sequential part."""
    order = blocks.order
    if before is None:
        state = u.new_zeros(len(order), u.shape[1], w.shape[-1], u.shape[-1])
    else:
        state = before[order]
    states, ends, start = [], [], 0
    for count in blocks.counts:
        part = slice(start, start + count)
        if count < len(state):  # the last chunks of this order have no more blocks
            ends.append(state[count:])
            state = state[:count]
        states.append(state)
        state = decay[part] * state + kept[part] @ (u[part] - w[part] @ state)
        start += count
    ends.append(state)
    after = torch.cat(ends[::-1])
    return torch.cat(states), after[torch.argsort(order)]


def _apply_states(response: Tensor, states: Tensor, layout: SequenceLayout) -> Tensor:
    """Multiply R of each token with the state before its chunk.

    [t, H, d_k], [n, H, d_k, d_v] -> [t, H, d_v].
    """
    blocks = layout.once(_state_blocks)
    return _scatter_rows(_gather_rows(response, blocks.rows) @ states[blocks.chunks], blocks.slots)


def _gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the tokens of blocks, zeros for padding; [t, H, ...] -> [blocks, H, size, ...].

    Without a key, with beta = 0 and g = 0, padding leaves the state as it is.
    """
    padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    return padded[rows].transpose(1, 2)


def _scatter_rows(x: Tensor, slots: Tensor) -> Tensor:
    """Return the tokens in their own order; [blocks, H, size, ...] -> [t, H, ...]."""
    return x.transpose(1, 2).flatten(0, 1)[slots]


def _build_blocks(layout: SequenceLayout, sizes: tuple[int, ...]) -> Blocks:
    lengths = layout.chunk_lengths.reshape(-1).long()
    lengths = lengths[lengths > 0]  # with cp_size 1 late chunks are empty
    limit = MAX_PADDING * layout.local_tokens
    fitting = (size for size in sizes if int(((lengths + size - 1) // size * size).sum()) <= limit)
    size = next(fitting, sizes[-1])
    starts = lengths.cumsum(0) - lengths
    number = (lengths + size - 1) // size
    order = torch.argsort(number, descending=True, stable=True)
    rows, chunks, counts = [], [], []
    for step in range(int(number.max())):
        active = order[number[order] > step]
        offsets = step * size + torch.arange(size)
        is_token = offsets < lengths[active][:, None]
        rows.append(torch.where(is_token, starts[active][:, None] + offsets, layout.local_tokens))
        chunks.append(active)
        counts.append(len(active))
    table = torch.cat(rows)
    slots = torch.empty(layout.local_tokens + 1, dtype=torch.long)
    slots[table.flatten()] = torch.arange(table.numel())
    tables = (table, torch.cat(chunks), slots[:-1], order)
    table, of_blocks, slots, order = (to_device(each, layout.device) for each in tables)
    return Blocks(table, of_blocks, slots, counts, order)


_rule_blocks = functools.partial(_build_blocks, sizes=SIZES)
_state_blocks = functools.partial(_build_blocks, sizes=STATE_SIZES)


TAPS = 4  # of every published model; tables are cached by layout


class _Taps(NamedTuple):
    """Places of what a rank's tokens need, for K taps."""

    tails: Tensor  # [m] own tokens that are sent, t where another rank sends more
    halos: Tensor  # [n (K - 1)] their places in the gathered tails [cp m], cp m for zero
    rows: Tensor  # [K, t] place of x_{t-j} among halos, then tokens


def causal_convolution(x: Tensor, weight: Tensor, layout: SequenceLayout) -> Tensor:
    """Convolve every channel along its sequence, summed in float32; [t, D], [D, K] -> [t, D].

    Differentiable; weight's gradient is that of this rank's tokens.
    """
    layout.check_local(x)
    assert weight.shape[1] == TAPS, f"{weight.shape[1]} taps"
    return _Convolution.apply(x, weight, layout)


class _Convolution(torch.autograd.Function):
    """Saves the tokens and halos once, not once for each tap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layout: SequenceLayout) -> Tensor:
        taps, group = layout.once(_build_taps), layout.require_group()
        tails = _with_zero(x)[taps.tails]
        gathered = gather_stacked(tails, group=group).flatten(0, 1)
        pool = torch.cat((_with_zero(gathered)[taps.halos], x))
        wide = torch.promote_types(x.dtype, torch.float32)
        out = torch.zeros(x.shape, dtype=wide, device=x.device)
        for back, rows in enumerate(taps.rows):
            out.addcmul_(pool[rows].to(wide), weight[:, TAPS - 1 - back].to(wide))
        ctx.layout = layout
        ctx.save_for_backward(pool, weight)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        pool, weight = ctx.saved_tensors
        taps, group = ctx.layout.once(_build_taps), ctx.layout.require_group()
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad = grad.to(wide)
        grad_pool = torch.zeros(pool.shape, dtype=wide, device=grad.device)
        grad_weight = torch.empty(weight.shape, dtype=wide, device=grad.device)
        for back, rows in enumerate(taps.rows):
            tap = TAPS - 1 - back
            grad_weight[:, tap] = (grad * pool[rows]).sum(0)
            grad_pool.index_add_(0, rows, grad * weight[:, tap].to(wide))
        count, cp_size = len(taps.halos), ctx.layout.cp_size
        sent = add_rows(grad_pool[:count], taps.halos, cp_size * len(taps.tails))
        sent = sent.view(cp_size, len(taps.tails), *sent.shape[1:])
        received = sum_to_owners(sent, group=group)
        grad_x = grad_pool[count:] + add_rows(received, taps.tails, len(pool) - count)
        return grad_x.to(pool.dtype), grad_weight.to(weight.dtype), None


def _with_zero(x: Tensor) -> Tensor:
    return torch.cat((x, x.new_zeros(1, *x.shape[1:])))


def _build_taps(layout: SequenceLayout) -> _Taps:
    halo, cp, t = TAPS - 1, layout.cp_size, layout.local_tokens
    needed = _halo_rows(layout)  # [S, chunks of a sequence, K - 1]
    gathered = layout.gathered_index.cpu().long()
    sent = gathered[needed[needed >= 0].unique()]  # places in the gathered shards
    by_rank = [sent[sent // t == rank].sort().values for rank in range(cp)]
    count = max(map(len, by_rank))
    tails = torch.full((count,), t)
    tails[: len(by_rank[layout.cp_rank])] = by_rank[layout.cp_rank] % t
    place_of = torch.full((cp * t + 1,), cp * count)
    for rank, own in enumerate(by_rank):
        place_of[own] = rank * count + torch.arange(len(own))
    chunks = [layout.cp_rank, 2 * cp - 1 - layout.cp_rank]
    own = needed[:, chunks].reshape(-1)  # [n (K - 1)]
    halos = place_of[torch.where(own >= 0, gathered[own], cp * t)]
    lengths = layout.chunk_lengths.reshape(-1).long()  # [n]
    starts = lengths.cumsum(0) - lengths
    ids = torch.repeat_interleave(lengths)
    columns = torch.arange(t) - starts[ids]
    rows = [
        torch.where(columns >= j, len(halos) + torch.arange(t) - j, ids * halo + halo - j + columns)
        for j in range(TAPS)
    ]
    tables = (tails, halos, torch.stack(rows))
    return _Taps(*(to_device(each, layout.device) for each in tables))


def _halo_rows(layout: SequenceLayout) -> Tensor:
    """Return the tokens of the pack before each chunk, -1 for none; [S, 2 cp, K - 1].

    With cp_size 1 the second chunk of a sequence is empty.
    """
    lengths = torch.tensor(layout.lengths)
    starts = lengths.cumsum(0) - lengths
    size = lengths if layout.cp_size == 1 else lengths // (2 * layout.cp_size)
    offsets = size[:, None] * torch.arange(2 * layout.cp_size)  # [S, C] of each chunk
    wanted = offsets[..., None] - torch.arange(TAPS - 1, 0, -1)  # [S, C, K - 1]
    rows = torch.where(wanted >= 0, starts[:, None, None] + wanted, -1)
    if layout.cp_size == 1:
        rows[:, 1] = -1
    for sequence, parent in enumerate(layout.parents):
        if parent >= 0:
            before = layout.rows_before(sequence)
            place = len(before) + wanted[sequence]
            known = (wanted[sequence] < 0) & (place >= 0)
            rows[sequence][known] = before[place[known]]
    return rows
