"""Attention of one pack on the CPU, one head after another.

Queries, keys and values are stored by head, [heads, slots, d]: batched matrix products then read
the short sequences of a block without a copy, and one head's scores fit into the cache. Long
sequences go to torch's CPU kernel in runs of queries, in memory linear in the tokens. Rotary
embeddings use the same memory layout, so no transposition is needed in between.

Shapes: T tokens in the pack, t = T / cp on this rank, H query heads, K key-value heads, d their
size; in a block s sequences, q query slots and k key slots each.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed.attention_plan import RUN_QUERIES, AttentionPlan, Block, is_visible
from megatron_rl.distributed.collectives import Group, gather_stacked, group_size, sum_to_owners


@lru_cache(maxsize=16)
def _last_rows(width: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the last RUN_QUERIES rows of an additive causal mask over `width` keys.

    The mask of any shorter run is its lower right corner.
    """
    positions = torch.arange(width, dtype=torch.int32)
    seen = is_visible(positions[width - RUN_QUERIES :, None] - positions, window)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))


def _causal(query: Tensor, key: Tensor, window: int | None) -> dict[str, Any]:
    """Return the kernel's mask arguments; the last query has the last key's position."""
    queries, keys = query.shape[2], key.shape[2]
    window = None if window is None or window >= keys else window
    if queries == keys and window is None:
        return {"is_causal": True}
    width = max(RUN_QUERIES, 1 << (keys - 1).bit_length())  # few widths, so that caching works
    mask = _last_rows(width, window, query.dtype)
    return {"attn_mask": mask[None, None, -queries:, -keys:]}


def _attend_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend one run by torch's CPU kernel; output [s, H, q, d] and log-sum-exps [s, H, q].

    The kernel has no sinks. With one, all weights are smaller by the same factor.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sum = kernel(query, key, value, **_causal(query, key, window), scale=scale)
    if sinks is None:
        return out, log_sum
    whole = torch.logaddexp(log_sum, sinks.float()[:, None])
    return out * (log_sum - whole).exp()[..., None].to(out.dtype), whole


def _attend_runs_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from the saved output and log-sum-exps.

    The kernel computes weights from the log-sum-exps and their gradient from the output, so both
    may contain a sink.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    causal = {"is_causal": False, **_causal(query, key, window)}
    return kernel(grad, query, key, value, out, log_sum, dropout_p=0.0, **causal, scale=scale)


def _product(left: Tensor, right: Tensor, *, into: Tensor) -> None:
    """Write the batched product left @ right into `into`, rounded to its precision."""
    if into.dtype == left.dtype:
        torch.bmm(left, right, out=into)
    else:
        into.copy_(torch.bmm(left, right))


def _attend_batch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    out: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """Attend a batch of short sequences into `out`; return each head's weights [s, q, k].

    query, out [H, s, q, d]; key, value [K, s, k, d].
    """
    repeats, weights = len(query) // len(key), []
    for head, (q, into) in enumerate(zip(query, out, strict=True)):
        k, v = key[head // repeats].float(), value[head // repeats].float()
        scores = torch.baddbmm(mask, q.float(), k.transpose(1, 2), alpha=scale)
        if sinks is None:
            weights.append(scores.softmax(-1))
        else:
            sink = sinks[head].float().expand(*scores.shape[:2], 1)
            weights.append(torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1])
        _product(weights[-1], v, into=into)
    return weights


def _attend_batch_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: list[Tensor],
    *,
    into: tuple[Tensor, Tensor, Tensor],
    scale: float,
) -> None:
    """Compute the gradients of query, key and value from the saved weights p.

    With dp = g v^T: ds = p (dp - sum of p dp), dq = ds k, dk = ds^T q, dv = p^T g. This also holds
    for weights that sum to less than 1, because a sink has no value.
    """
    repeats, (grad_query, grad_key, grad_value) = len(query) // len(key), into
    for head, p in enumerate(weights):
        # The first head of a group overwrites the buffer, the others add to it.
        group, beta = head // repeats, int(head % repeats > 0)
        g, q, k, v = (x.float() for x in (grad[head], query[head], key[group], value[group]))
        grad_weights = torch.bmm(g, v.transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_weights, p, -1, p.dtype)
        grad_scores *= scale
        _product(grad_scores, k, into=grad_query[head])
        grad_key[group].baddbmm_(grad_scores.transpose(1, 2), q, beta=beta)
        grad_value[group].baddbmm_(p.transpose(1, 2), g, beta=beta)


def _sink_gradient(grad: Tensor, out: Tensor, sink_weights: Tensor) -> Tensor:
    """Return the gradient of sinks, - sum of p g o; [..., H, n, d], [..., H, n] -> [H].

    Of a sink's weight p, dp is 0, so ds = p (0 - sum of p dp), and the sum is g o.
    """
    product = (grad.float() * out.float()).sum(-1)  # [..., H, n]
    return -(sink_weights * product).movedim(-2, 0).flatten(1).sum(1)


class PackedAttention(torch.autograd.Function):
    """Attention of one pack on the CPU.

    Saves the queries, keys and values in their slots (if those are large, only this rank's own keys
    and values), the attention weights of short sequences and the outputs of long ones.
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
        kept_bytes: int,
    ) -> Tensor:
        """[t, H, d], [t, K, d], [t, K, d], [H] -> [t, H, d]."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        own = torch.stack((key.transpose(0, 1), value.transpose(0, 1)))  # [2, K, t, d]
        keys = _key_slots(own, plan, group)
        queries = _select_rows(
            query.transpose(0, 1).contiguous(), plan.query_rows
        )  # [H, query slots, d]
        out = torch.empty_like(queries)
        kept: list[Any] = []  # by block
        for block in plan.blocks:
            q, o, (k, v) = _queries(queries, block), _queries(out, block), _keys(keys, block)
            if block.mask is not None:
                kept.append(_attend_batch(q, k, v, block.mask, out=o, scale=scale, sinks=sinks))
            else:
                q, k, v = (x.transpose(0, 1) for x in (q, k, v))
                attended, log_sum = _attend_runs(
                    q, k, v, window=plan.window, scale=scale, sinks=sinks
                )
                o.copy_(attended.transpose(0, 1))
                kept.append(log_sum)
        out = out.transpose(0, 1).contiguous()  # [query slots, H, d]
        ctx.plan, ctx.group, ctx.kept, ctx.scale = plan, group, kept, scale
        ctx.gathers = group_size(group) > 1 and keys.nbytes > kept_bytes
        ctx.save_for_backward(queries, own if ctx.gathers else keys, out, sinks)
        return out if plan.query_slots is None else out.index_select(0, plan.query_slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks."""
        plan, group = ctx.plan, ctx.group
        queries, keys, out, sinks = ctx.saved_tensors
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        if ctx.gathers:
            keys = _key_slots(keys, plan, group)
        # No slot is padding here, so every slot has a gradient.
        grads = _select_rows(grad.transpose(0, 1).contiguous(), plan.query_rows)
        grad_queries = torch.empty_like(queries)
        # Several runs of queries add to one key's gradient; bfloat16 would round each addition.
        grad_keys = torch.empty_like(keys, dtype=torch.promote_types(keys.dtype, torch.float32))
        for index, block in enumerate(plan.blocks):
            q, g, dq = (_queries(x, block) for x in (queries, grads, grad_queries))
            (k, v), (dk, dv) = _keys(keys, block), _keys(grad_keys, block)
            o, kept = _queries(out.transpose(0, 1), block), ctx.kept[index]
            if block.mask is not None:
                _attend_batch_backward(g, q, k, v, kept, into=(dq, dk, dv), scale=ctx.scale)
                if grad_sinks is not None:
                    of_sinks = torch.stack([1 - weights.sum(-1) for weights in kept], dim=1)
                    grad_sinks += _sink_gradient(g.transpose(0, 1), o.transpose(0, 1), of_sinks)
                continue
            if block.rows.start == 0:  # the first run of these sequences
                grad_keys[:, :, block.keys] = 0
            g, q, k, v, o = (x.transpose(0, 1) for x in (g, q, k, v, o))
            if grad_sinks is not None:
                of_sinks = (sinks.float()[:, None] - kept).exp()
                grad_sinks += _sink_gradient(g, o, of_sinks)
            run_grads = _attend_runs_backward(
                g, q, k, v, o, kept, window=plan.window, scale=ctx.scale
            )
            dq.copy_(run_grads[0].transpose(0, 1))
            dk += run_grads[1].transpose(0, 1)
            dv += run_grads[2].transpose(0, 1)
        owned = _select_rows(grad_keys, plan.key_slots).to(keys.dtype)  # [2, K, cp t, d]
        parts = owned.unflatten(2, (group_size(group), -1)).movedim(2, 0)  # [cp, 2, K, t, d]
        owned = sum_to_owners(parts, group=group)
        grad_query = _select_rows(grad_queries, plan.query_slots)
        if grad_sinks is not None:
            grad_sinks = grad_sinks.to(sinks.dtype)
        by_token = (x.transpose(0, 1) for x in (grad_query, *owned))
        return *by_token, grad_sinks, None, None, None, None


def _select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Select rows of each head; [..., rows, d]."""
    return x if rows is None else x.index_select(-2, rows)


def _key_slots(own: Tensor, plan: AttentionPlan, group: Group) -> Tensor:
    """Gather the whole pack's keys and values into slots; [2, K, t, d] -> [2, K, key slots, d]."""
    gathered = gather_stacked(own, group=group)  # [cp, 2, K, t, d]
    return _select_rows(gathered.movedim(0, 2).flatten(2, 3), plan.key_rows)


def _queries(x: Tensor, block: Block) -> Tensor:
    """Return a block's run of query slots as a view; [H, query slots, d] -> [H, s, q, d]."""
    return x[:, block.queries].unflatten(1, (block.sequences, -1))[:, :, block.rows]


def _keys(x: Tensor, block: Block) -> Tensor:
    """Return a block's visible keys, values as views; [2, K, key slots, d] -> [2, K, s, k, d]."""
    return x[:, :, block.keys].unflatten(2, (block.sequences, -1))[:, :, :, block.visible]
