"""Causal attention inside the sequences of a pack that is sharded over context parallelism.

Every rank gathers the keys and values of the whole pack (one collective) and attends with its own
queries; the gradients of keys and values are summed back to their owners (one collective). Where
the gathered ones are large, the backward pass gathers them again instead of keeping them (one more
collective). No T x T matrix is made: blocks of queries meet the keys up to their own
(`attention_plan.py`). Long ones go to fused kernels, which attend in memory linear in the tokens;
on the CPU batches of short sequences are attended by plain products.

Shapes: T tokens in the pack, t = T / cp on this rank, H query heads, K key-value heads, d their
size; in a segment s sequences, q query slots and k key slots each.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_rl.distributed.attention_plan import RUN, AttentionPlan, Block
from megatron_rl.distributed.collectives import Group, gather_stacked, group_size

# Gathered keys and values of one layer and pack are kept for the backward pass up to this size:
# below it a collective costs more than the memory is worth.
KEPT_BYTES = 1 << 24


def _take(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _spread(x: Tensor, slots: Tensor | None, *, like: Tensor) -> Tensor:
    """Rows into their slots; slots of padding get zero, or they would reach the keys they saw."""
    return x if slots is None else torch.zeros_like(like).index_copy_(0, slots.long(), x)


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


def _attend_runs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output [s, H, q, d] of a run by the kernel for the CPU, and its log-sum-exp [s, H, q]."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, **_causal(query, key))


def _attend_runs_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key, value from the saved output and log-sum-exp."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    causal = {"is_causal": False, **_causal(query, key)}
    return kernel(grad, query, key, value, out, log_sum, dropout_p=0.0, **causal)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Rows of every sequence and key-value head, float32; [s, H, q, d] -> [s K, (H / K) q, d]."""
    return x.float().reshape(len(x) * groups, -1, x.shape[-1])


def _attend_batch(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [s, H, q, d] of a batch of short sequences, and the attention weights."""
    groups = key.shape[1]
    hidden = hidden.repeat(query.shape[1] // groups, 1)  # [(H / K) q, k]
    q, k, v = (_by_group(x, groups) for x in (query, key, value))
    scores = torch.baddbmm(hidden, q, k.transpose(1, 2), alpha=query.shape[-1] ** -0.5)
    weights = scores.softmax(-1)
    return torch.bmm(weights, v).view(query.shape), weights


def _attend_batch_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key, value from the saved weights p: with dp = g v^T,
    ds = p (dp - sum of p dp), dq = ds k, dk = ds^T q, dv = p^T g."""
    groups = key.shape[1]
    g, q, k, v = (_by_group(x, groups) for x in (grad, query, key, value))
    grad_weights = torch.bmm(g, v.transpose(1, 2))
    grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    grad_scores *= query.shape[-1] ** -0.5
    return (
        torch.bmm(grad_scores, k).view(query.shape),
        torch.bmm(grad_scores.transpose(1, 2), q).view(key.shape),
        torch.bmm(weights.transpose(1, 2), g).view(key.shape),
    )


class _PackedAttention(torch.autograd.Function):
    """Attention of one pack.

    Saves the slots' queries, keys and values (or where they are many this rank's own) and, on the
    CPU, what its kernels' backward passes read.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, group: Group
    ) -> Tensor:
        """[t, H, d], [t, K, d], [t, K, d] -> [t, H, d]."""
        own = torch.stack((key, value), dim=1)  # [t, 2, K, d]
        keys = _key_slots(own, plan, group)
        queries = _take(query, plan.query_rows)  # [query slots, H, d]
        out = torch.empty_like(queries)
        kept: list[Tensor] = []  # by block
        for block in plan.blocks:
            q, k, v = _rows(queries, block), *_keys_and_values(keys, block)
            if plan.fused:
                attended = attend_fused(q, k, v)
            else:
                attended, extra = (
                    _attend_runs(q, k, v)
                    if block.hidden is None
                    else _attend_batch(q, k, v, block.hidden)
                )
                kept.append(extra)
            _rows(out, block).copy_(attended)
        ctx.plan, ctx.group, ctx.kept = plan, group, kept
        ctx.gathers = group_size(group) > 1 and keys.nbytes > KEPT_BYTES
        # The fused backward attends again and does not read the output.
        ctx.save_for_backward(
            queries, own if ctx.gathers else keys, *(() if plan.fused else (out,))
        )
        return _take(out, plan.query_slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value."""
        plan, group = ctx.plan, ctx.group
        queries, keys, *outs = ctx.saved_tensors
        if ctx.gathers:
            keys = _key_slots(keys, plan, group)
        grads = _spread(grad, plan.query_slots, like=queries)
        grad_queries = torch.empty_like(queries)
        # A key collects from both runs of queries after it: bfloat16 would round each time.
        grad_keys = torch.zeros_like(keys, dtype=torch.promote_types(keys.dtype, torch.float32))
        for index, block in enumerate(plan.blocks):
            q, g = _rows(queries, block), _rows(grads, block)
            k, v = _keys_and_values(keys, block)
            if plan.fused:
                dq, dk, dv = _attend_fused_backward(g, q, k, v)
            elif block.hidden is None:
                dq, dk, dv = _attend_runs_backward(
                    g, q, k, v, _rows(outs[0], block), ctx.kept[index]
                )
            else:
                dq, dk, dv = _attend_batch_backward(g, q, k, v, ctx.kept[index])
            _rows(grad_queries, block).copy_(dq)
            into_k, into_v = _keys_and_values(grad_keys, block)
            into_k += dk
            into_v += dv
        owned = _take(grad_keys, plan.key_slots).to(keys.dtype)
        owned = _sum_to_owners(owned.view(group_size(group), -1, *owned.shape[1:]), group=group)
        grad_query = _take(grad_queries, plan.query_slots)
        return grad_query, owned[:, 0], owned[:, 1], None, None


def _key_slots(own: Tensor, plan: AttentionPlan, group: Group) -> Tensor:
    """Keys and values of the whole pack in their slots; [t, 2, K, d] -> [key slots, 2, K, d]."""
    return _take(gather_stacked(own, group=group).flatten(0, 1), plan.key_rows)


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
