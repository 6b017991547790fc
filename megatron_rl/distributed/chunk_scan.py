"""Scans along sequences whose chunks lie on different ranks: one idea, for numbers and for states.

A scan composes one map per token, s -> f(s). Composing is associative, so the tokens of a chunk,
however many, are one map of fixed size. Every scan in this package has four parts:

    1. each rank composes the maps of its own chunks;
    2. one exchange moves the maps of chunks, never tokens;
    3. a running composition over the 2 * cp_size chunks of a sequence gives what enters each chunk;
    4. each rank applies what enters its chunks to its own tokens.

    prefix sum of log-ratios    s -> s + b          b a number       this file
    prefix minimum              s -> min(s, b)      b a number       this file
    state of a gated delta net  S -> M S + B        M, B matrices    gated_delta.py

Numbers are small: every rank gathers those of all ranks. Maps of states are large, so here each
(sequence, head), a unit, is scanned by one rank: an all-to-all moves a unit's maps there, another
moves its states back. With d_k x d_k matrices M and d_k x d_v matrices B, a rank sends

    forward   2 S H (d_k d_k + 2 d_k d_v) / cp * (cp - 1)   elements, S H rounded up to cp units
    backward  2 S H (2 d_k d_v) / cp * (cp - 1)

whatever the length of the sequences. Backward, with D_c the gradient of the state before chunk c,

    L_c = D_{c+1} + M_{c+1}^T L_{c+1},    dB_c = L_c,    dM_c = L_c S_c^T

is the mirrored scan of the same maps, which stay where they were scanned: no gradient of M travels.
A sequence that continues another one begins with the state after its parent's last chunk, and gives
back the gradient of that state; one rank then scans a head of all sequences, so that H is what is
rounded up.
Shapes: S sequences, C = 2 cp_size chunks of each, n = 2 S chunks of this rank (S if cp_size is 1),
H heads.

*Prefix sums and minima.* Each rank scans its own chunks; all ranks exchange one
[S, 2, k] table with the chunk totals of k statistics in a single all-gather; then a running sum (or
minimum) over the 2 * cp_size chunks gives the carry into each local chunk. Sequences are scanned
independently: no prefix is computed by subtracting a larger one. The carry into a sequence of a
response with several (`layout.joined`) includes the sequences before it, whose totals are in the
same table. All accumulation is in float64. The chunks are rows of padded tables (`PaddedChunks`),
so that the number of operations does not grow with the number of sequences.

The backward of a prefix sum is the mirrored suffix sum, d/dx_k sum_t g_t S_t = sum_{t >= k} g_t,
which also needs one all-gather of chunk totals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import add_rows, all_to_all, gather_stacked, to_device
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
    """Compute the state before each of this rank's chunks, from zero before the first sequence.

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
        states = _scan_states(maps_m, maps_b, layout)
        own = _from_units(states, layout, heads=b.shape[1])
        ctx.layout = layout
        ctx.save_for_backward(maps_m, own)
        return own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        maps_m, own = ctx.saved_tensors
        before = _to_units(grad, ctx.layout)  # D of every chunk
        after = _scan_gradients(maps_m, before, ctx.layout)
        gathered = _from_units(after, ctx.layout, heads=grad.shape[1])
        return gathered @ own.transpose(-1, -2), gathered, None


def _scan_states(m: Tensor, b: Tensor, layout: SequenceLayout) -> Tensor:
    """Return the states before all chunks of own units; [C, units, ...]."""
    states = torch.zeros_like(b)
    if not layout.parents:
        for chunk in range(len(b) - 1):
            states[chunk + 1] = m[chunk] @ states[chunk] + b[chunk]
        return states
    m, b, states = (_by_sequence(x, layout) for x in (m, b, states))
    ends = torch.zeros_like(b[0])  # [S, ...] after the last chunk
    for rows, parents in layout.once(_level_tables):
        state = ends[parents] if len(parents) else torch.zeros_like(b[0, rows])
        for chunk in range(len(b)):
            states[chunk, rows] = state
            state = m[chunk, rows] @ state + b[chunk, rows]
        ends[rows] = state
    return states.flatten(1, 2)


def _scan_gradients(m: Tensor, before: Tensor, layout: SequenceLayout) -> Tensor:
    """Return L of all chunks of own units from D, from the last chunk; [C, units, ...]."""
    after = torch.zeros_like(before)
    if not layout.parents:
        for chunk in range(len(before) - 1, 0, -1):
            after[chunk - 1] = m[chunk].transpose(-1, -2) @ after[chunk] + before[chunk]
        return after
    m, before, after = (_by_sequence(x, layout) for x in (m, before, after))
    ends = torch.zeros_like(before[0])
    for rows, parents in reversed(layout.once(_level_tables)):
        state = ends[rows]
        for chunk in range(len(before) - 1, -1, -1):
            after[chunk, rows] = state
            state = m[chunk, rows].transpose(-1, -2) @ state + before[chunk, rows]
        if len(parents):
            ends += add_rows(state, parents, len(ends))
    return after.flatten(1, 2)


def _by_sequence(x: Tensor, layout: SequenceLayout) -> Tensor:
    """View [C, units, ...] as [C, S, heads, ...]."""
    return x.unflatten(1, (len(layout.lengths), -1))


def _level_tables(layout: SequenceLayout) -> list[tuple[Tensor, Tensor]]:
    """Return the sequences of each level, and their parents."""
    return [
        (
            to_device(torch.tensor(level), layout.device),
            to_device(torch.tensor([layout.parents[one] for one in level if number]).long(),
                      layout.device),
        )
        for number, level in enumerate(layout.levels)
    ]  # fmt: skip


def _to_units(x: Tensor, layout: SequenceLayout) -> Tensor:
    """Move own chunks of all units to all chunks of own units; [n, H, ...] -> [C, units, ...].

    Units are padded with zeros to a multiple of cp_size, so that heads need not be divisible by it.
    With parents a rank's units are some heads of all sequences.
    """
    if layout.parents:
        heads = x.unflatten(0, (-1, 2)).movedim(2, 0)  # [H, S, 2, ...]
        if missing := -len(heads) % layout.cp_size:
            heads = torch.cat((heads, heads.new_zeros(missing, *heads.shape[1:])))
        sent = heads.unflatten(0, (layout.cp_size, -1)).transpose(1, 2).flatten(1, 2)
        received = all_to_all(sent.contiguous(), group=layout.require_group())
        return order_chunks(received.transpose(1, 2))
    units = x.unflatten(0, (-1, 2)).transpose(1, 2).flatten(0, 1)  # [S H, 2, ...]
    missing = -len(units) % layout.cp_size
    if missing:
        units = torch.cat((units, units.new_zeros(missing, *units.shape[1:])))
    sent = units.unflatten(0, (layout.cp_size, -1))  # [cp, units, 2, ...]
    return order_chunks(all_to_all(sent, group=layout.require_group()).transpose(1, 2))


def _from_units(x: Tensor, layout: SequenceLayout, *, heads: int) -> Tensor:
    """Move all chunks of own units back to own chunks of all units; the inverse of `_to_units`."""
    received = all_to_all(split_chunks(x).transpose(1, 2), group=layout.require_group())
    if layout.parents:
        by_head = received.unflatten(1, (len(layout.lengths), -1)).transpose(1, 2).flatten(0, 1)
        return by_head[:heads].movedim(0, 2).flatten(0, 1)  # of [S, 2, H, ...]
    count = len(layout.lengths) * heads
    units = received.flatten(0, 1)[:count].unflatten(0, (-1, heads))  # [S, H, 2, ...]
    return units.transpose(1, 2).flatten(0, 1)


Combine = Literal["sum", "min"]
IDENTITY: dict[Combine, float] = {"sum": 0.0, "min": math.inf}


class Scan(NamedTuple):
    """Request to scan one statistic along the sequences."""

    x: Tensor  # [t]
    combine: Combine = "sum"


class Scanned(NamedTuple):
    """Result of a scan: running values and totals of responses; only sums are differentiable."""

    running: Tensor  # [t] x_1 + ... + x_t; for "min" min(x_1, ..., x_{t-1}), inf at the first token
    total: Tensor  # [S] float64: of the response, at each of its sequences


def scan_together(layout: SequenceLayout, *scans: Scan) -> list[Scanned]:
    """Run all scans over the valid decisions with a single all-gather; sums are differentiable."""
    for scan in scans:
        layout.check_local(scan.x)
    masked = [torch.where(layout.mask, s.x, IDENTITY[s.combine]) for s in scans]
    outputs = _Scans.apply(layout, [s.combine for s in scans], *masked)
    pairs = zip(outputs[: len(scans)], outputs[len(scans) :], strict=True)
    return [Scanned(running, total) for running, total in pairs]


def prefix_sum(layout: SequenceLayout, x: Tensor) -> Tensor:
    """Compute S_t = x_1 + ... + x_t over the valid decisions of each response; [t] -> [t]."""
    return scan_together(layout, Scan(x))[0].running


def sequence_sum(layout: SequenceLayout, x: Tensor) -> Tensor:
    """Compute S_L, the sum over all valid decisions of the token's response; [t] -> [t]."""
    return layout.spread(scan_together(layout, Scan(x))[0].total).to(x.dtype)


class _Scans(torch.autograd.Function):
    """Autograd function that returns the running values of k scans, then their totals."""

    @staticmethod
    def forward(
        ctx: Any, layout: SequenceLayout, combine: list[Combine], *xs: Tensor
    ) -> tuple[Tensor, ...]:
        chunks = [_scan_chunks(layout, x, how) for x, how in zip(xs, combine, strict=True)]
        carried = _carry_in(layout, [chunk.totals for chunk in chunks], combine)
        running, totals = [], []
        for x, how, chunk, (carry, total) in zip(xs, combine, chunks, carried, strict=True):
            before = carry.reshape(-1)[layout.chunk_ids]
            if how == "sum":
                running.append((before + chunk.running).to(x.dtype))
            else:  # the minimum before each token in its chunk
                shifted = torch.cat((chunk.running[:1], chunk.running[:-1]))
                shifted = torch.where(layout.chunk_columns == 0, torch.inf, shifted)
                running.append(torch.minimum(before, shifted).to(x.dtype))
            totals.append(total)
        ctx.layout, ctx.dtypes = layout, [x.dtype for x in xs]
        ctx.set_materialize_grads(False)
        minima = [i for i, how in enumerate(combine) if how == "min"]
        ctx.mark_non_differentiable(*(out[i] for i in minima for out in (running, totals)))
        return *running, *totals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        result: list[Tensor | None] = []
        for i, dtype in enumerate(ctx.dtypes):
            running, total = grads[i], grads[len(ctx.dtypes) + i]
            # Every rank uses the same outputs, so every rank executes the same collectives in the
            # same order.
            used = ctx.needs_input_grad[2 + i] and (running is not None or total is not None)
            result.append(_sum_backward(ctx.layout, running, total).to(dtype) if used else None)
        return None, None, *result


def _sum_backward(layout: SequenceLayout, running: Tensor | None, total: Tensor | None) -> Tensor:
    """Compute g_k = sum_{t >= k} dS_t + dS_L from dS_t [t] and this rank's part of dS_L [S]."""
    tables = []
    if running is not None:
        chunks = _scan_chunks(layout, running, "sum", reverse=True)
        tables.append(chunks.totals)
    if total is not None:
        tables.append(torch.stack((total, torch.zeros_like(total)), dim=1))
    carried = _carry_in(layout, tables, ["sum"] * len(tables), reverse=True)
    grads = [] if total is None else [layout.spread(carried[-1].total)]
    if running is not None:
        grads.append(carried[0].carry.reshape(-1)[layout.chunk_ids] + chunks.running)
    return grads[0] if len(grads) == 1 else grads[0] + grads[1]


class _Chunks(NamedTuple):
    """This rank's chunks, each scanned independently, in float64."""

    running: Tensor  # [t] inclusive
    totals: Tensor  # [S, 2] totals of the early and the late chunk


def _scan_chunks(
    layout: SequenceLayout, x: Tensor, combine: Combine, *, reverse: bool = False
) -> _Chunks:
    """Scan each chunk in a row of its own: its neighbours cannot affect it.

    reverse: scan from the last token to the first.
    """
    rows = layout.padded_chunks
    places = rows.mirrored if reverse else rows.places
    flat = torch.full((rows.size,), IDENTITY[combine], dtype=torch.float64, device=x.device)
    flat[places] = x.double()
    for table in rows.tables(flat):
        if combine == "sum":
            table.cumsum_(1)
        else:
            table.copy_(table.cummin(1).values)
    running = flat[places]  # [t]
    starts, ends = layout.chunk_bounds
    last = starts if reverse else ends - 1
    totals = torch.where(starts < ends, running[last.clamp(0, x.numel() - 1)], IDENTITY[combine])
    return _Chunks(running, totals.view(-1, 2))


class _Carried(NamedTuple):
    """Carry into this rank's chunks from the other chunks, for one statistic."""

    carry: Tensor  # [S, 2] combined totals of all chunks before the early and the late chunk
    total: Tensor  # [S] totals of the whole responses


def _carry_in(
    layout: SequenceLayout,
    totals: Sequence[Tensor],
    combine: Sequence[Combine],
    *,
    reverse: bool = False,
) -> list[_Carried]:
    """Combine the totals before each local chunk (after it, if reverse), for k statistics at once.

    This is the only collective of a scan: it gathers the `totals` [S, 2] of every rank's early and
    late chunks and orders them by the 2 * cp_size chunks of a sequence.
    """
    gathered = gather_stacked(torch.stack(list(totals), dim=2), group=layout.require_group())
    chunks = order_chunks(gathered.transpose(1, 2))  # [2 cp, S, k]
    early, late = layout.cp_rank, 2 * layout.cp_size - 1 - layout.cp_rank
    if reverse:
        chunks = chunks.flip(0)
        early, late = late, early
    carried = []
    for column, how in zip(chunks.unbind(2), combine, strict=True):
        shifted = torch.cat((torch.full_like(column[:1], IDENTITY[how]), column))
        running = shifted.cumsum(0) if how == "sum" else shifted.cummin(0).values
        carry = torch.stack((running[early], running[late]), dim=1)
        one = _Carried(carry, running[-1])
        carried.append(_join(layout, one, how, reverse=reverse) if layout.joined else one)
    return carried


def _join(layout: SequenceLayout, apart: _Carried, combine: Combine, *, reverse: bool) -> _Carried:
    """Combine each sequence with those of its response before it (after it, if reverse).

    The totals are those of whole responses, at each of their sequences.
    """
    joined = layout.joined_places
    rows, columns = joined.shape
    table = apart.total.new_full((rows * columns,), IDENTITY[combine])
    table[joined.places] = apart.total
    table = table.view(rows, columns)
    table = table.flip(1) if reverse else table
    shifted = torch.cat((torch.full_like(table[:, :1], IDENTITY[combine]), table), dim=1)
    running = shifted.cumsum(1) if combine == "sum" else shifted.cummin(1).values
    before = running[:, :-1].flip(1) if reverse else running[:, :-1]
    others = before.reshape(-1)[joined.places][:, None]  # [S, 1]
    carry = apart.carry + others if combine == "sum" else torch.minimum(apart.carry, others)
    return _Carried(carry, running[:, -1][joined.rows])
