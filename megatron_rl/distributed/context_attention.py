"""Causal attention within the sequences of a pack that is sharded over context parallelism.

Every rank gathers the keys and values of the whole pack (one collective) and attends with its own
queries; the gradients of keys and values are summed back to their owners (one collective). If the
gathered tensors are large, the backward pass gathers them again instead of keeping them (one more
collective). No T x T matrix is materialized: each block of queries attends to the keys of its
sliding window, or all keys, up to its own positions (`attention_plan.py`). This file uses fused
kernels, whose memory is linear in the tokens; the CPU implementation is in `cpu_attention.py`.

Shapes: T tokens in the pack, t = T / cp on this rank, H query heads, K key-value heads, d their
size; in a segment s sequences, q query slots and k key slots each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_rl.distributed.attention_plan import AttentionPlan, Block, is_visible
from megatron_rl.distributed.collectives import Group, gather_stacked, group_size, sum_to_owners
from megatron_rl.distributed.cpu_attention import PackedAttention

# Gathered keys and values of one layer and pack are kept for the backward pass up to this size;
# below it, gathering again costs more than the memory saved.
KEPT_BYTES = 1 << 24
SINK_WIDTH = 8  # dimensions added to each head for the score of a sink


def _select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _scatter_rows(x: Tensor, slots: Tensor | None, *, like: Tensor) -> Tensor:
    """Copy rows into their slots; padding slots get zero gradient, since they repeat real rows."""
    return x if slots is None else torch.zeros_like(like).index_copy_(0, slots.long(), x)


def attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend one run by torch's fused kernels; [s, H, q, d], [s, K, k, d] -> [s, H, q, d].

    The last query has the last key's position. A window of fewer than k tokens needs a [q, k] mask.
    scale: of the scores; None: 1 / sqrt(d). sinks: see `context_attention`.
    """
    if sinks is not None:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        extended = with_sink(query, key, value, sinks=sinks, scale=scale)
        out = _attend_masked(*extended, window=window, scale=scale, first_seen=1)
        return out[..., : query.shape[-1]]
    return _attend_masked(query, key, value, window=window, scale=scale, first_seen=0)


def with_sink(
    query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key before all others whose score is the sink and whose value is 0.

    The score comes from one more dimension of each head: sink / scale in queries, 1 in the new key,
    0 in the others. Kernels need sizes that are multiples of 8, so seven zeros follow.
    """
    column = (sinks / scale).to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
    query = F.pad(torch.cat((query, column), dim=-1), (0, SINK_WIDTH - 1))
    first = key.new_zeros(key.shape[-1] + SINK_WIDTH)
    first[key.shape[-1]] = 1
    first = first.expand(*key.shape[:2], 1, -1)
    key = torch.cat((first, F.pad(key, (0, SINK_WIDTH))), dim=2)
    return query, key, F.pad(value, (0, SINK_WIDTH, 1, 0))


def _attend_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None,
    scale: float | None,
    first_seen: int,
) -> Tensor:
    """Attend causally and within a window; every query attends to the keys before first_seen."""
    queries, keys = query.shape[2], key.shape[2]
    repeats = query.shape[1] // key.shape[1]
    grouped, cut = repeats > 1, window is not None and window < keys - first_seen
    if grouped and (cut or query.dtype == torch.float32):
        # Only half-precision kernels without an explicit mask support grouped queries; others would
        # materialize all scores.
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        grouped = False
    if cut:
        positions = torch.arange(keys, device=query.device)
        bias = is_visible(positions[keys - queries :, None] - positions, window)  # [q, k]
        bias[:, :first_seen] = True
    else:
        bias = causal_lower_right(queries, keys)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, enable_gqa=grouped, scale=scale
    )


def _attend_fused_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None,
    scale: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and sinks by recomputing the forward pass."""
    inputs = (query, key, value) if sinks is None else (query, key, value, sinks)
    with torch.enable_grad():
        q, k, v, *s = leaves = [x.detach().requires_grad_() for x in inputs]
        out = attend_fused(q, k, v, window=window, scale=scale, sinks=s[0] if s else None)
        return torch.autograd.grad(out, leaves, grad)


class _FusedAttention(torch.autograd.Function):
    """Attention of one pack by fused kernels.

    Saves the queries, keys and values in their slots; if those are large, only this rank's own
    keys and values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: AttentionPlan,
        group: Group,
        scale: float | None,
    ) -> Tensor:
        """[t, H, d], [t, K, d], [t, K, d], [H] -> [t, H, d]."""
        own = torch.stack((key, value), dim=1)  # [t, 2, K, d]
        keys = _key_slots(own, plan, group)
        queries = _select_rows(query, plan.query_rows)  # [query slots, H, d]
        out = torch.empty_like(queries)
        for block in plan.blocks:
            q, (k, v) = _rows(queries, block), _keys_and_values(keys, block)
            attended = attend_fused(q, k, v, window=plan.window, scale=scale, sinks=sinks)
            _rows(out, block).copy_(attended)
        ctx.plan, ctx.group, ctx.scale = plan, group, scale
        ctx.gathers = group_size(group) > 1 and keys.nbytes > KEPT_BYTES
        # The backward pass recomputes attention and does not read the output.
        ctx.save_for_backward(queries, own if ctx.gathers else keys, sinks)
        return _select_rows(out, plan.query_slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks."""
        plan, group = ctx.plan, ctx.group
        queries, keys, sinks = ctx.saved_tensors
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        if ctx.gathers:
            keys = _key_slots(keys, plan, group)
        grads = _scatter_rows(grad, plan.query_slots, like=queries)
        grad_queries = torch.empty_like(queries)
        # Several runs of queries add to one key's gradient; bfloat16 would round each addition.
        grad_keys = torch.zeros_like(keys, dtype=torch.promote_types(keys.dtype, torch.float32))
        for block in plan.blocks:
            q, g = _rows(queries, block), _rows(grads, block)
            k, v = _keys_and_values(keys, block)
            dq, dk, dv, *ds = _attend_fused_backward(
                g, q, k, v, window=plan.window, scale=ctx.scale, sinks=sinks
            )
            _rows(grad_queries, block).copy_(dq)
            if grad_sinks is not None:
                grad_sinks += ds[0]
            into_k, into_v = _keys_and_values(grad_keys, block)
            into_k += dk
            into_v += dv
        owned = _select_rows(grad_keys, plan.key_slots).to(keys.dtype)
        owned = sum_to_owners(owned.view(group_size(group), -1, *owned.shape[1:]), group=group)
        grad_query = _select_rows(grad_queries, plan.query_slots)
        if grad_sinks is not None:
            grad_sinks = grad_sinks.to(sinks.dtype)
        return grad_query, owned[:, 0], owned[:, 1], grad_sinks, None, None, None


def _key_slots(own: Tensor, plan: AttentionPlan, group: Group) -> Tensor:
    """Gather the whole pack's keys and values into slots; [t, 2, K, d] -> [key slots, 2, K, d]."""
    return _select_rows(gather_stacked(own, group=group).flatten(0, 1), plan.key_rows)


def _rows(x: Tensor, block: Block) -> Tensor:
    """Return a block's run of query slots as a view; [query slots, H, d] -> [s, H, q, d]."""
    segment = x[block.queries].view(block.sequences, -1, *x.shape[1:])
    return segment[:, block.rows].transpose(1, 2)


def _keys_and_values(keys: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Return the visible keys and values of a block as views; each [s, K, k, d]."""
    segment = keys[block.keys].view(block.sequences, -1, *keys.shape[1:])[:, block.visible]
    return segment[:, :, 0].transpose(1, 2), segment[:, :, 1].transpose(1, 2)


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: AttentionPlan,
    group: Group,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal softmax(scale q k^T) v within each sequence and the plan's window.

    query [t, H, d], key and value [t, K, d] -> [t, H, d]. H must be a multiple of K (grouped
    queries). Differentiable; gradients of keys and values are summed over the group. scale: None
    for 1 / sqrt(d). sinks: [H], a further score of every query, without a value (arXiv 2309.17453):
    the weights of the keys then sum to less than 1. Their gradient is that of this rank's queries.
    """
    if plan.fused:
        return _FusedAttention.apply(query, key, value, sinks, plan, group, scale)
    return PackedAttention.apply(query, key, value, sinks, plan, group, scale, KEPT_BYTES)
