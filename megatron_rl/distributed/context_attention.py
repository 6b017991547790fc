"""Causal attention inside the sequences of a pack that is sharded over context parallelism.

Every rank gathers the keys and values of the whole pack (one collective) and attends with its own
queries; the gradients of keys and values are summed back to their owners (one collective). No
T x T matrix is made: sequences of similar length form a segment and are attended as one padded
batch. On CUDA a block is a run of queries with the keys up to the last of them, which torch's fused
kernels (flash, cuDNN, memory-efficient) attend without a mask, in memory linear in the tokens. On
the CPU long segments are cut into blocks of queries under additive masks of bounded size.

Shapes: T tokens in the pack, t = T / cp on this rank, H query heads, K key-value heads, d their
size; in a segment s sequences, q query slots and k key slots each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_rl.distributed.collectives import Group, gather_stacked, group_size
from megatron_rl.distributed.sequence_layout import SequenceLayout

# Mask elements of one kernel call: the bound of every temporary that is not linear in T.
BLOCK_ELEMENTS = 1 << 22
# Masks of a whole pack are kept between layers up to this many elements, and rebuilt beyond it.
KEPT_MASK_ELEMENTS = 1 << 24
# A segment's shortest sequence is at least this fraction of its longest: padding is bounded.
SIMILAR = 0.75


@dataclass
class Block:
    """Some queries of every sequence of one segment, and the keys that they may see."""

    queries: slice  # of the pack's query slots, s * q of them
    keys: slice  # of the pack's key slots, s * k of them
    sequences: int
    rows: slice  # of the segment's q query slots per sequence
    visible: int  # leading key slots that any of these rows sees
    positions: Tensor  # [s, rows] of each query in its sequence
    is_run: bool = False  # the rows are consecutive positions, the last one at visible - 1
    kept_mask: Tensor | None = None

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Additive causal mask; a query sees the keys at and before its position; [s, 1, q, k].

        None for a run: its last query sees all visible keys, and each one before it one key less.
        """
        if self.is_run:
            return None
        if self.kept_mask is not None and self.kept_mask.dtype == dtype:
            return self.kept_mask
        keys = torch.arange(self.visible, device=self.positions.device)
        hidden = keys > self.positions[:, None, :, None]
        zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return zeros.masked_fill_(hidden, float("-inf"))


@dataclass
class AttentionPlan:
    """How one pack is attended on one rank: which rows go to which slots, and back.

    Slots are rows of the padded segments, laid end to end. Slots of padding repeat a real row and
    are never read back.
    """

    query_rows: Tensor | None  # [query slots] local token of each slot; None: slots are the tokens
    query_slots: Tensor | None  # [t] slot of each local token
    key_rows: Tensor | None  # [key slots] row of the gathered keys [cp * t]
    key_slots: Tensor | None  # [cp * t] slot of each gathered row
    blocks: list[Block]


def build_attention_plan(
    layout: SequenceLayout, *, dtype: torch.dtype = torch.float32, runs: bool | None = None
) -> AttentionPlan:
    """The plan of a pack; a pure function of its padded lengths and the context-parallel layout.

    dtype: that of the queries, in which masks are kept; those of another are rebuilt at each use.
    runs: blocks without masks, for fused kernels; by default wherever the pack is on CUDA.
    """
    runs = layout.device.type == "cuda" if runs is None else runs
    lengths = torch.tensor(layout.lengths)
    order = torch.argsort(lengths, descending=True, stable=True)
    starts = lengths.cumsum(0) - lengths
    builder = _PlanBuilder(layout, lengths=lengths, starts=starts)
    first = 0
    while first < len(order):
        longest = int(lengths[order[first]])
        # Chunks of a shorter sequence lie elsewhere: in a segment of runs they must not differ.
        least = longest if runs and layout.cp_size > 1 else SIMILAR * longest
        count = int((lengths[order[first:]] >= least).sum())
        if not runs:
            fitting = BLOCK_ELEMENTS // max(1, longest * longest // layout.cp_size)
            count = min(count, max(1, fitting))
        last = first + count
        builder.add_segment(order[first:last], runs=runs)
        first = last
    return builder.finish(dtype)


class _PlanBuilder:
    """Collects the segments of one plan, on the host."""

    def __init__(self, layout: SequenceLayout, *, lengths: Tensor, starts: Tensor) -> None:
        self.layout, self.lengths, self.starts = layout, lengths, starts
        self.offsets = layout.offsets.cpu()  # [t] position in its sequence
        self.gathered = layout._gather_index.cpu()  # [T] row of the gathered keys
        self.query_rows: list[Tensor] = []
        self.key_rows: list[Tensor] = []
        self.query_real: list[Tensor] = []
        self.key_real: list[Tensor] = []
        self.blocks: list[Block] = []
        self.query_count = self.key_count = 0

    def add_segment(self, sequences: Tensor, *, runs: bool) -> None:
        """Lay these sequences side by side, padded to the longest, and cut their queries."""
        lengths, starts = self.lengths[sequences, None], self.starts[sequences, None]
        cp_size = self.layout.cp_size
        keys, queries = int(lengths.max()), int(lengths.max()) // cp_size
        key_slot, query_slot = torch.arange(keys)[None], torch.arange(queries)[None]
        key_real, query_real = key_slot < lengths, query_slot < lengths // cp_size
        self.key_rows.append(self.gathered[starts + key_slot * key_real].view(-1))
        rows = starts // cp_size + query_slot * query_real
        positions = self.offsets[rows] * query_real
        self.query_rows.append(rows.view(-1))
        self.key_real.append(key_real.view(-1))
        self.query_real.append(query_real.view(-1))
        if runs:  # a rank's queries of a sequence are two chunks, or without cp the whole sequence
            step = queries if cp_size == 1 else queries // 2
        else:
            step = max(1, min(queries, BLOCK_ELEMENTS // (len(sequences) * keys)))
        self._cut(step, keys=keys, positions=positions, is_run=runs)
        self.query_count += rows.numel()
        self.key_count += key_real.numel()

    def _cut(self, step: int, *, keys: int, positions: Tensor, is_run: bool) -> None:
        sequences, queries = positions.shape
        for start in range(0, queries, step):
            rows = slice(start, min(start + step, queries))
            inside = positions[:, rows]
            self.blocks.append(
                Block(
                    queries=slice(self.query_count, self.query_count + sequences * queries),
                    keys=slice(self.key_count, self.key_count + sequences * keys),
                    sequences=sequences,
                    rows=rows,
                    visible=int(inside.max()) + 1,
                    positions=inside.contiguous().to(self.layout.device),
                    is_run=is_run,
                )
            )

    def finish(self, dtype: torch.dtype) -> AttentionPlan:
        """The plan on the device of the pack."""
        elements = sum(b.positions.numel() * b.visible for b in self.blocks if not b.is_run)
        if elements <= KEPT_MASK_ELEMENTS:
            for block in self.blocks:
                block.kept_mask = block.mask(dtype)
        query_rows, query_slots = self._maps(self.query_rows, self.query_real)
        key_rows, key_slots = self._maps(self.key_rows, self.key_real)
        return AttentionPlan(query_rows, query_slots, key_rows, key_slots, self.blocks)

    def _maps(self, rows: list[Tensor], real: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Slot -> row and its inverse on the real slots; (None, None) where both are identity."""
        row, is_real = torch.cat(rows), torch.cat(real)
        slots = torch.empty(int(is_real.sum()), dtype=torch.int64)
        slots[row[is_real]] = torch.arange(len(row))[is_real]
        if len(slots) == len(row) and bool((row == torch.arange(len(row))).all()):
            return None, None
        return row.to(self.layout.device), slots.to(self.layout.device)


def _take(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _spread(x: Tensor, slots: Tensor | None, *, like: Tensor) -> Tensor:
    """Rows into their slots; slots of padding get zero, or they would reach the keys they saw."""
    return x if slots is None else torch.zeros_like(like).index_copy_(0, slots, x)


def _segment(x: Tensor, slots: slice, sequences: int) -> Tensor:
    """Slots of one segment as a batch, a view; [slots, H, d] -> [s, H, slots per sequence, d]."""
    return x[slots].view(sequences, -1, *x.shape[1:]).transpose(1, 2)


def _sum_to_owners(x: Tensor, *, group: Group) -> Tensor:
    """Each rank's part of the sum over ranks; [cp, t, ...] -> [t, ...] (a reduce-scatter).

    By all-to-all: gloo has no reduce-scatter that is faster than an all-reduce.
    """
    if group_size(group) == 1:
        return x[0]
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received.sum(0)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Output [s, H, q, d] and, under a mask, its log-sum-exp; grouped queries; None: a run."""
    if mask is not None:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, 0.0, False, attn_mask=mask)
    repeats = query.shape[1] // key.shape[1]
    grouped = repeats > 1
    if grouped and query.dtype == torch.float32:
        # Only the kernels of half precision know groups; else all scores would be materialized.
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        grouped = False
    bias = causal_lower_right(query.shape[2], key.shape[2])
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=grouped)
    return out, None


def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Any, lse: Any, mask: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key, value; of a run the forward is repeated for them."""
    if mask is not None:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, query, key, value, out, lse, 0.0, False, attn_mask=mask)
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (query, key, value))
        repeated, _ = _attend(q, k, v, mask)
        dq, dk, dv = torch.autograd.grad(repeated, (q, k, v), grad)
        return dq, dk, dv


class _PackedAttention(torch.autograd.Function):
    """Attention of one pack; saves padded queries, keys, values and, under masks, outputs."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, group: Group
    ) -> Tensor:
        """[t, H, d], [t, K, d], [t, K, d] -> [t, H, d]."""
        both = gather_stacked(torch.stack((key, value), dim=1), group=group)  # [cp, t, 2, K, d]
        keys = _take(both.flatten(0, 1), plan.key_rows)  # [key slots, 2, K, d]
        queries = _take(query, plan.query_rows)  # [query slots, H, d]
        out = torch.empty_like(queries)
        saved: list[tuple[Tensor | None, Tensor | None]] = []
        for block in plan.blocks:
            q = _segment(queries, block.queries, block.sequences)[:, :, block.rows]
            k, v = _keys_and_values(keys, block)
            o, lse = _attend(q, k, v, block.mask(q.dtype))
            _segment(out, block.queries, block.sequences)[:, :, block.rows] = o
            # Only a masked block's backward reads them; a run's would double the outputs.
            saved.append((None, None) if lse is None else (o, lse))
        ctx.plan, ctx.group, ctx.saved = plan, group, saved
        ctx.save_for_backward(queries, keys)
        return _take(out, plan.query_slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value."""
        plan, group = ctx.plan, ctx.group
        queries, keys = ctx.saved_tensors
        grads = _spread(grad, plan.query_slots, like=queries)
        grad_queries = torch.empty_like(queries)
        # A key collects from every block of queries after it: bfloat16 would round each time.
        grad_keys = torch.zeros_like(keys, dtype=torch.promote_types(keys.dtype, torch.float32))
        for block, (o, lse) in zip(plan.blocks, ctx.saved, strict=True):
            q = _segment(queries, block.queries, block.sequences)[:, :, block.rows]
            g = _segment(grads, block.queries, block.sequences)[:, :, block.rows]
            k, v = _keys_and_values(keys, block)
            dq, dk, dv = _attend_backward(g, q, k, v, o, lse, block.mask(q.dtype))
            _segment(grad_queries, block.queries, block.sequences)[:, :, block.rows] = dq
            into_k, into_v = _keys_and_values(grad_keys, block)
            into_k += dk
            into_v += dv
        owned = _take(grad_keys, plan.key_slots).to(keys.dtype)
        owned = _sum_to_owners(owned.view(group_size(group), -1, *owned.shape[1:]), group=group)
        grad_query = _take(grad_queries, plan.query_slots)
        return grad_query, owned[:, 0], owned[:, 1], None, None


def _keys_and_values(keys: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """The visible keys and values of a block, as views; each [s, K, k, d]."""
    segment = keys[block.keys].view(block.sequences, -1, *keys.shape[1:])[:, : block.visible]
    return segment[:, :, 0].transpose(1, 2), segment[:, :, 1].transpose(1, 2)


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, *, plan: AttentionPlan, group: Group
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over each sequence's own past.

    query [t, H, d], key and value [t, K, d] -> [t, H, d]. H must be a multiple of K (grouped
    queries). Differentiable; gradients of keys and values are summed over the group.
    """
    return _PackedAttention.apply(query, key, value, plan, group)
