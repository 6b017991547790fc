"""Gated delta rule (arXiv 2412.06464) of a pack whose sequences' chunks lie on different ranks.

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
Shapes: t tokens of this rank, K key heads, H value heads, n chunks (2 for each
sequence, 1 if cp_size is 1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.distributed.chunk_scan import states_before_chunks
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.to_device import to_device

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
    """Compute the outputs of all tokens; every sequence begins with a state of zeros.

    q, k [t, K, d_k] of length 1, v [t, H, d_v], g, beta [t, H] -> [t, H, d_v] in v's dtype; value
    head h has key head h // (H / K). Differentiable. rule: computes the rank's own chunks.
    """
    layout.check_local(v)
    rule = rule or torch_rule
    if layout.cp_size == 1:
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
    q, k, v, g, beta = (_take(x, blocks.rows) for x in inputs)  # [blocks, H, size, ...]
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
    return _give(out, blocks.slots), after


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
    return _give(_take(response, blocks.rows) @ states[blocks.chunks], blocks.slots)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Return the tokens of blocks, zeros for padding; [t, H, ...] -> [blocks, H, size, ...].

    Without a key, with beta = 0 and g = 0, padding leaves the state as it is.
    """
    padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    return padded[rows].transpose(1, 2)


def _give(x: Tensor, slots: Tensor) -> Tensor:
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
