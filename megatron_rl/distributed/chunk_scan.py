"""Scans along sequences whose chunks lie on different ranks: one idea, for numbers and for states.

A scan composes one map per token, s -> f(s). Composing is associative, so the tokens of a chunk,
however many, are one map of fixed size. Every scan in this package has four parts:

    1. each rank composes the maps of its own chunks;
    2. one exchange moves the maps of chunks, never tokens;
    3. a running composition over the 2 * cp_size chunks of a sequence gives what enters each chunk;
    4. each rank applies what enters its chunks to its own tokens.

    prefix sum of log-ratios    s -> s + b          b a number       sequence_statistics.py
    prefix minimum              s -> min(s, b)      b a number       sequence_statistics.py
    state of a gated delta net  S -> M S + B        M, B matrices    gated_delta.py

Numbers are small: every rank gathers those of all ranks. Maps of states are large, so here each
(sequence, head), a unit, is scanned by one rank: an all-to-all moves a unit's maps there, another
moves its states back. With d_k x d_k matrices M and d_k x d_v matrices B, a rank sends

    forward   2 S H (d_k d_k + 2 d_k d_v) / cp * (cp - 1)   elements, S H rounded up to cp units
    backward  2 S H (2 d_k d_v) / cp * (cp - 1)

whatever the length of the sequences. Backward, with D_c the gradient of the state before chunk c,

    L_c = D_{c+1} + M_{c+1}^T L_{c+1},    dB_c = L_c,    dM_c = L_c S_c^T

is the mirrored scan of the same maps, which stay where they were scanned: no gradient of M travels.
Shapes: S sequences, C = 2 cp_size chunks of each, n = 2 S chunks of this rank (S if cp_size is 1),
H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import all_to_all
from megatron_rl.distributed.sequence_layout import SequenceLayout


def order_chunks(by_rank: Tensor) -> Tensor:
    """Order the chunks of all ranks by place in their sequence; [cp, 2, ...] -> [C, ...].

    Rank r has chunk r and chunk C - 1 - r.
    """
    return torch.cat((by_rank[:, 0], by_rank[:, 1].flip(0)))


def split_chunks(chunks: Tensor) -> Tensor:
    """Return the early and late chunk of every rank; [C, ...] -> [cp, 2, ...]."""
    early, late = chunks.chunk(2)
    return torch.stack((early, late.flip(0)), dim=1)


def states_before_chunks(m: Tensor, b: Tensor, layout: SequenceLayout) -> Tensor:
    """Compute the state before each of this rank's chunks, from zero before a sequence.

    m [n, H, d_k, d_k], b [n, H, d_k, d_v]: the state after a chunk is m S + b of the S before it.
    Returns [n, H, d_k, d_v]; differentiable, two all-to-alls forward and two backward.
    """
    if layout.cp_size == 1:
        return torch.zeros_like(b)
    return _StatesBeforeChunks.apply(m, b, layout)


class _StatesBeforeChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, m: Tensor, b: Tensor, layout: SequenceLayout) -> Tensor:
        sizes = [m.shape[-1], b.shape[-1]]
        maps_m, maps_b = _to_units(torch.cat((m, b), dim=-1), layout).split(sizes, dim=-1)
        states = [torch.zeros_like(maps_b[0])]
        for chunk in range(len(maps_b) - 1):
            states.append(maps_m[chunk] @ states[-1] + maps_b[chunk])
        own = _from_units(torch.stack(states), layout, heads=b.shape[1])
        ctx.layout = layout
        ctx.save_for_backward(maps_m, own)
        return own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        maps_m, own = ctx.saved_tensors
        before = _to_units(grad, ctx.layout)  # D of every chunk
        after = [torch.zeros_like(before[0])]  # L, from the last chunk
        for chunk in range(len(before) - 1, 0, -1):
            after.append(maps_m[chunk].transpose(-1, -2) @ after[-1] + before[chunk])
        gathered = _from_units(torch.stack(after[::-1]), ctx.layout, heads=grad.shape[1])
        return gathered @ own.transpose(-1, -2), gathered, None


def _to_units(x: Tensor, layout: SequenceLayout) -> Tensor:
    """Move own chunks of all units to all chunks of own units; [n, H, ...] -> [C, units, ...].

    Units are padded with zeros to a multiple of cp_size, so that heads need not be divisible by it.
    """
    units = x.unflatten(0, (-1, 2)).transpose(1, 2).flatten(0, 1)  # [S H, 2, ...]
    missing = -len(units) % layout.cp_size
    if missing:
        units = torch.cat((units, units.new_zeros(missing, *units.shape[1:])))
    sent = units.unflatten(0, (layout.cp_size, -1))  # [cp, units, 2, ...]
    return order_chunks(all_to_all(sent, group=layout.require_group()).transpose(1, 2))


def _from_units(x: Tensor, layout: SequenceLayout, *, heads: int) -> Tensor:
    """Move all chunks of own units back to own chunks of all units; the inverse of `_to_units`."""
    received = all_to_all(split_chunks(x).transpose(1, 2), group=layout.require_group())
    count = len(layout.lengths) * heads
    units = received.flatten(0, 1)[:count].unflatten(0, (-1, heads))  # [S, H, 2, ...]
    return units.transpose(1, 2).flatten(0, 1)
