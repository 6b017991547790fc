"""Causal attention inside the sequences of a pack that is sharded over context parallelism.

Every rank gathers the keys and values of the whole pack (one collective) and attends with its own
queries; the gradients of keys and values are summed back to their owners (one collective). No
T x T matrix is made: a block is a run of queries with the keys up to the last of them, which fused
kernels attend in memory linear in the tokens. On CUDA, where few large kernels are fastest,
sequences of similar length form a segment and are attended as one padded batch. On the CPU each
sequence of a pack is attended where it lies, unless most of them are very short.

Shapes: T tokens in the pack, t = T / cp on this rank, H query heads, K key-value heads, d their
size; in a segment s sequences, q query slots and k key slots each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_rl.distributed.collectives import Group, gather_stacked, group_size
from megatron_rl.distributed.sequence_layout import SequenceLayout

# A segment's shortest sequence is at least this fraction of its longest: padding is bounded.
SIMILAR = 0.75
# On the CPU sequences that are on average this long or longer are attended one by one: starting a
# kernel costs less than padding.
SHORT = 48
# Queries of one kernel call on the CPU. Its causal form skips hidden keys in steps of 512 only, so
# it is left to whole sequences that are long; else a mask hides what is left of shorter runs.
RUN, LONG = 192, 1024


@dataclass
class Block:
    """A run of queries of every sequence of one segment, and the keys that they may see."""

    queries: slice  # of the pack's query slots, s * q of them
    keys: slice  # of the pack's key slots, s * k of them
    sequences: int
    rows: slice  # consecutive positions among the segment's q query slots per sequence
    visible: int  # leading key slots that the last of these rows sees; each one before it one less


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
    fused: bool  # by torch's attention, as on CUDA; else by the kernel for the CPU


def build_attention_plan(layout: SequenceLayout, *, fused: bool | None = None) -> AttentionPlan:
    """The plan of a pack; a pure function of its padded lengths and the context-parallel layout.

    fused: attend by torch's choice of fused kernels; by default wherever the pack is on CUDA.
    """
    fused = layout.device.type == "cuda" if fused is None else fused
    lengths = torch.tensor(layout.lengths)
    builder = _PlanBuilder(layout, lengths=lengths, fused=fused)
    if not fused and layout.full_tokens >= SHORT * len(lengths):
        segments = list(torch.arange(len(lengths)).split(1))
    else:
        segments = _similar(lengths, least=SIMILAR if layout.cp_size == 1 else 1.0)
    for sequences in segments:
        builder.add_segment(sequences)
    return builder.finish()


def _similar(lengths: Tensor, *, least: float) -> list[Tensor]:
    """Sequences by descending length, cut where one is below `least` of its segment's longest.

    Under context parallelism least must be 1: chunks of a shorter sequence would lie elsewhere.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    segments = []
    while len(order):
        count = int((lengths[order] >= least * lengths[order[0]]).sum())
        segments.append(order[:count])
        order = order[count:]
    return segments


class _PlanBuilder:
    """Collects the segments of one plan, on the host."""

    def __init__(self, layout: SequenceLayout, *, lengths: Tensor, fused: bool) -> None:
        self.layout, self.lengths, self.fused = layout, lengths, fused
        self.starts = lengths.cumsum(0) - lengths
        self.offsets = layout.offsets.cpu()  # [t] position in its sequence
        self.gathered = layout.gathered_index.cpu()  # [T] row of the gathered keys
        self.query_rows: list[Tensor] = []
        self.key_rows: list[Tensor] = []
        self.query_real: list[Tensor] = []
        self.key_real: list[Tensor] = []
        self.blocks: list[Block] = []
        self.query_count = self.key_count = 0

    def add_segment(self, sequences: Tensor) -> None:
        """Lay these sequences side by side, padded to the longest, and cut their queries."""
        lengths, starts = self.lengths[sequences, None], self.starts[sequences, None]
        cp_size = self.layout.cp_size
        keys, queries = int(lengths.max()), int(lengths.max()) // cp_size
        key_slot, query_slot = torch.arange(keys)[None], torch.arange(queries)[None]
        key_real, query_real = key_slot < lengths, query_slot < lengths // cp_size
        self.key_rows.append(self.gathered[starts + key_slot * key_real].view(-1))
        rows = starts // cp_size + query_slot * query_real
        self.query_rows.append(rows.view(-1))
        self.key_real.append(key_real.view(-1))
        self.query_real.append(query_real.view(-1))
        longest = self.offsets[rows[int(lengths.argmax())]]  # [q] positions
        for run in self._runs(queries):
            self.blocks.append(
                Block(
                    queries=slice(self.query_count, self.query_count + rows.numel()),
                    keys=slice(self.key_count, self.key_count + key_real.numel()),
                    sequences=len(sequences),
                    rows=run,
                    visible=int(longest[run.stop - 1]) + 1,
                )
            )
        self.query_count += rows.numel()
        self.key_count += key_real.numel()

    def _runs(self, queries: int) -> list[slice]:
        """A rank's queries of one sequence, cut where their positions jump and to kernels' liking.

        They are two chunks, or without context parallelism the whole sequence.
        """
        chunk = queries if self.layout.cp_size == 1 else queries // 2
        whole = self.fused or (chunk == queries and queries >= LONG)
        step = chunk if whole else min(chunk, RUN)
        return [
            slice(start, min(start + step, first + chunk))
            for first in range(0, queries, chunk)
            for start in range(first, first + chunk, step)
        ]

    def finish(self) -> AttentionPlan:
        """The plan on the device of the pack."""
        query_rows, query_slots = self._maps(self.query_rows, self.query_real)
        key_rows, key_slots = self._maps(self.key_rows, self.key_real)
        return AttentionPlan(query_rows, query_slots, key_rows, key_slots, self.blocks, self.fused)

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


def _sum_to_owners(x: Tensor, *, group: Group) -> Tensor:
    """Each rank's part of the sum over ranks; [cp, t, ...] -> [t, ...] (a reduce-scatter).

    By all-to-all: gloo has no reduce-scatter that is faster than an all-reduce.
    """
    if group_size(group) == 1:
        return x[0]
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received.sum(0)


def attend_fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of a run by torch's fused kernels; [s, H, q, d], [s, K, k, d] -> [s, H, q, d]."""
    repeats = query.shape[1] // key.shape[1]
    grouped = repeats > 1
    if grouped and query.dtype == torch.float32:
        # Only the kernels of half precision know groups; else all scores would be materialized.
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        grouped = False
    bias = causal_lower_right(query.shape[2], key.shape[2])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=grouped)


def _attend_fused_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key, value; the forward is repeated for them."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (query, key, value))
        dq, dk, dv = torch.autograd.grad(attend_fused(q, k, v), (q, k, v), grad)
        return dq, dk, dv


@lru_cache(maxsize=16)
def _triangle(width: int, dtype: torch.dtype) -> Tensor:
    """The last RUN rows of a causal mask over `width` keys, additive; its corners are any run's."""
    return torch.full((RUN, width), float("-inf"), dtype=dtype).triu_(1 + width - RUN)


def _causal(query: Tensor, key: Tensor) -> dict[str, Any]:
    """How the kernel is told that the last query sees all keys, each one before it one less."""
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys:
        return {"is_causal": True}
    width = max(RUN, 1 << (keys - 1).bit_length())  # few widths, so that each is made once
    triangle = _triangle(width, query.dtype)
    return {"attn_mask": triangle[None, None, -queries:, -keys:]}


def _attend_cpu(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output [s, H, q, d] of a run and its log-sum-exp [s, H, q]."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, **_causal(query, key))


def _attend_cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key, value from the saved output and log-sum-exp."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    causal = {"is_causal": False, **_causal(query, key)}
    return kernel(grad, query, key, value, out, log_sum, dropout_p=0.0, **causal)


class _PackedAttention(torch.autograd.Function):
    """Attention of one pack; saves padded queries, keys, values and, on the CPU, outputs."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, group: Group
    ) -> Tensor:
        """[t, H, d], [t, K, d], [t, K, d] -> [t, H, d]."""
        both = gather_stacked(torch.stack((key, value), dim=1), group=group)  # [cp, t, 2, K, d]
        keys = _take(both.flatten(0, 1), plan.key_rows)  # [key slots, 2, K, d]
        queries = _take(query, plan.query_rows)  # [query slots, H, d]
        out = torch.empty_like(queries)
        log_sums: list[Tensor] = []
        for block in plan.blocks:
            q, k, v = _rows(queries, block), *_keys_and_values(keys, block)
            if plan.fused:
                attended = attend_fused(q, k, v)
            else:
                attended, log_sum = _attend_cpu(q, k, v)
                log_sums.append(log_sum)
            _rows(out, block).copy_(attended)
        ctx.plan, ctx.group, ctx.log_sums = plan, group, log_sums
        # The fused backward attends again and does not read the output.
        ctx.save_for_backward(queries, keys, *(() if plan.fused else (out,)))
        return _take(out, plan.query_slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value."""
        plan, group = ctx.plan, ctx.group
        queries, keys, *outs = ctx.saved_tensors
        grads = _spread(grad, plan.query_slots, like=queries)
        grad_queries = torch.empty_like(queries)
        # A key collects from both runs of queries after it: bfloat16 would round each time.
        grad_keys = torch.zeros_like(keys, dtype=torch.promote_types(keys.dtype, torch.float32))
        for index, block in enumerate(plan.blocks):
            q, g = _rows(queries, block), _rows(grads, block)
            k, v = _keys_and_values(keys, block)
            if plan.fused:
                dq, dk, dv = _attend_fused_backward(g, q, k, v)
            else:
                saved = _rows(outs[0], block), ctx.log_sums[index]
                dq, dk, dv = _attend_cpu_backward(g, q, k, v, *saved)
            _rows(grad_queries, block).copy_(dq)
            into_k, into_v = _keys_and_values(grad_keys, block)
            into_k += dk
            into_v += dv
        owned = _take(grad_keys, plan.key_slots).to(keys.dtype)
        owned = _sum_to_owners(owned.view(group_size(group), -1, *owned.shape[1:]), group=group)
        grad_query = _take(grad_queries, plan.query_slots)
        return grad_query, owned[:, 0], owned[:, 1], None, None


def _rows(x: Tensor, block: Block) -> Tensor:
    """A block's run of query slots, as a view; [query slots, H, d] -> [s, H, q, d]."""
    segment = x[block.queries].view(block.sequences, -1, *x.shape[1:])
    return segment[:, block.rows].transpose(1, 2)


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
