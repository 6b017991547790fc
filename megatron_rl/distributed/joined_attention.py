"""Attention of packs whose sequences continue others, on a GPU: no key is copied.

A query attends to the keys of each ancestor in a call of its own, which is not causal, and to the
keys of its own sequence in a causal one. The kernel gives each call's output o_i and log-sum-exp
l_i of the scores; with l = log sum_i exp(l_i), the output is sum_i exp(l_i - l) o_i. The backward
pass of a call needs l and the joined output only: it computes exp(score - l), the weights of all of
the query's keys. A sink is one more l_i, without an output.

A query has at most one ancestor with the same number of ancestors, so all calls to such ancestors
are one call of the kernel, which takes many runs of queries, each with its run of keys.

Shapes: T tokens in the pack, t = T / cp on this rank, H query heads, K key-value heads, d their
size; q queries and k keys of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.distributed.collectives import (
    Group,
    gather_stacked,
    group_size,
    sum_to_owners,
    to_device,
)
from megatron_rl.distributed.sequence_layout import SequenceLayout

HALF = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256  # of the kernel; sizes are multiples of 8


@dataclass
class Call:
    """One call of the kernel: runs of queries, each of which attends to one run of keys."""

    queries: Tensor  # [q] local token of each query, each token at most once
    keys: Tensor  # [k] row of each key in the gathered keys, each row at most once
    query_bounds: Tensor  # [runs + 1] int32, from 0 to q
    key_bounds: Tensor  # [runs + 1] int32, from 0 to k
    runs: list[tuple[int, int]]  # queries and keys of each run
    causal: bool  # the last query of a run has the position of its last key

    @property
    def pairs(self) -> int:
        """Query-key pairs."""
        hidden = sum(q * (q - 1) // 2 for q, _ in self.runs) if self.causal else 0
        return sum(q * k for q, k in self.runs) - hidden

    @property
    def longest(self) -> tuple[int, int]:
        """Most queries and most keys of a run."""
        return max(q for q, _ in self.runs), max(k for _, k in self.runs)


def can_join(query: Tensor) -> bool:
    """Return whether the kernel takes such queries [t, H, d]; the CPU's takes any."""
    size, fits = query.shape[-1], query.device.type == "cpu"
    return fits or (query.dtype in HALF and size % 8 == 0 and size <= LARGEST_HEAD)


def build_calls(layout: SequenceLayout, *, device: torch.device) -> list[Call]:
    """Return the calls of one pack on one rank: own keys first, then ancestors, eldest first.

    layout: should be on the host. device: that of the calls' tables.
    """
    cp_size, rank, gathered = layout.cp_size, layout.cp_rank, layout.gathered_index.cpu().long()
    ends = torch.tensor(layout.lengths).cumsum(0).tolist()
    starts = [end - length for end, length in zip(ends, layout.lengths, strict=True)]

    def local(sequence: int) -> Tensor:
        return torch.arange(starts[sequence] // cp_size, ends[sequence] // cp_size)

    def first_keys(sequence: int, count: int) -> Tensor:
        return gathered[starts[sequence] : starts[sequence] + count]

    def build(runs: list[tuple[Tensor, Tensor]], *, causal: bool) -> Call:
        sizes = [(len(queries), len(keys)) for queries, keys in runs]
        bounds = F.pad(torch.tensor(sizes).cumsum(0), (0, 0, 1, 0)).to(torch.int32).t()
        tables = (torch.cat(each) for each in zip(*runs, strict=True))
        queries, keys, *ends = (to_device(x, device) for x in (*tables, *bounds.contiguous()))
        return Call(queries, keys, ends[0], ends[1], sizes, causal)

    every, pieces = range(len(layout.lengths)), 1 if cp_size == 1 else 2 * cp_size
    chunks = sorted({rank, pieces - 1 - rank})  # of each sequence, on this rank
    calls = []
    for place, chunk in enumerate(chunks):
        own = [
            (
                local(one).chunk(len(chunks))[place],
                first_keys(one, (chunk + 1) * layout.lengths[one] // pieces),
            )
            for one in every
        ]
        calls.append(build(own, causal=True))
    for ancestors in layout.levels[:-1]:
        runs = []
        for one in ancestors:
            below = [local(each) for each in every if _descends(layout, each, one)]
            if below and layout.used[one]:
                runs.append((torch.cat(below), first_keys(one, layout.used[one])))
        if runs:
            calls.append(build(runs, causal=False))
    return calls


def _descends(layout: SequenceLayout, sequence: int, ancestor: int) -> bool:
    while (sequence := layout.parents[sequence]) > ancestor:
        pass
    return sequence == ancestor


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, call: Call, scale: float
) -> tuple[Tensor, Tensor, Any]:
    """Attend one call; [q, H, d], [k, K, d] -> output, log-sum-exps [H, q], what a gradient needs.

    On a CPU torch's kernel takes one run after another.
    """
    if query.device.type != "cpu":
        out, log_sum, *kept, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, call.query_bounds, call.key_bounds, *call.longest,
            0.0, call.causal, False, scale=scale,
        )  # fmt: skip
        return out, log_sum, kept
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sum = torch.empty_like(query), query.new_empty(query.shape[1::-1])
    for queries, keys, mask in _runs(call, query.dtype):
        run = (_by_head(x[rows]) for x, rows in ((query, queries), (key, keys), (value, keys)))
        attended, log_sum[:, queries] = (x[0] for x in kernel(*run, attn_mask=mask, scale=scale))
        out[queries] = attended.transpose(0, 1)
    return out, log_sum, None


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    *,
    call: Call,
    kept: Any,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one call's gradients of query, key and value.

    out [q, H, d] and log_sum [H, q] may be those of more keys than the call's.
    """
    if query.device.type != "cpu":
        return torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, log_sum, call.query_bounds, call.key_bounds,
            *call.longest, 0.0, call.causal, *kept, scale=scale,
        )  # fmt: skip
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for queries, keys, mask in _runs(call, query.dtype):
        g, q, o = (_by_head(x[queries]) for x in (grad, query, out))
        k, v = (_by_head(x[keys]) for x in (key, value))
        run = kernel(
            g, q, k, v, o, log_sum[None, :, queries], dropout_p=0.0, is_causal=False,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
        for into, part, rows in zip(grads, run, (queries, keys, keys), strict=True):
            into[rows] = part[0].transpose(0, 1)
    return grads


def _by_head(x: Tensor) -> Tensor:
    """[n, H, d] -> [1, H, n, d]."""
    return x.transpose(0, 1)[None]


def _runs(call: Call, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield each run's queries, keys and additive mask; on a CPU."""
    before_queries = before_keys = 0
    for queries, keys in call.runs:
        mask = None
        if call.causal:
            hidden = torch.ones(1, 1, queries, keys, dtype=torch.bool).triu(keys - queries + 1)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        yield (
            slice(before_queries, before_queries + queries),
            slice(before_keys, before_keys + keys),
            mask,
        )
        before_queries, before_keys = before_queries + queries, before_keys + keys


class JoinedAttention(torch.autograd.Function):
    """Attention of one pack: all calls, joined by their log-sum-exps in float32.

    Saves queries, keys, values, the output and its log-sum-exps; if the gathered keys and values
    have more than `kept_bytes`, only this rank's own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        calls: list[Call],
        group: Group,
        scale: float | None,
        kept_bytes: int,
    ) -> Tensor:
        """[t, H, d], [t, K, d], [t, K, d], [H] -> [t, H, d]."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        own = torch.stack((key, value), dim=1)  # [t, 2, K, d]
        keys = _gather(own, group)
        out = torch.zeros_like(query, dtype=torch.float32)
        log_sum = out.new_full(query.shape[:2], float("-inf"))  # [t, H]
        ctx.kept = []
        for call in calls:
            rows = call.queries
            k, v = keys[call.keys].unbind(1)
            attended, own_sum, kept = attend(query[rows], k, v, call=call, scale=scale)
            before, own_sum = log_sum[rows], own_sum.t()
            joined = torch.logaddexp(before, own_sum)
            out[rows] = out[rows] * _weights(before, joined) + attended * _weights(own_sum, joined)
            log_sum[rows] = joined
            ctx.kept.append(kept)
        if sinks is not None:
            whole = torch.logaddexp(log_sum, sinks.float())
            out, log_sum = out * _weights(log_sum, whole), whole
        out = out.to(query.dtype)
        ctx.calls, ctx.group, ctx.scale = calls, group, scale
        ctx.gathers = group_size(group) > 1 and keys.nbytes > kept_bytes
        ctx.save_for_backward(query, own if ctx.gathers else keys, out, log_sum, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks."""
        query, keys, out, log_sum, sinks = ctx.saved_tensors
        if ctx.gathers:
            keys = _gather(keys, ctx.group)
        # Several calls add to one gradient; bfloat16 would round each addition.
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        grad_keys = torch.zeros_like(keys, dtype=torch.float32)
        for call, kept in zip(ctx.calls, ctx.kept, strict=True):
            rows = call.queries
            k, v = keys[call.keys].unbind(1)
            dq, *dkv = attend_backward(
                grad[rows], query[rows], k, v, out[rows], log_sum[rows].t().contiguous(),
                call=call, kept=kept, scale=ctx.scale,
            )  # fmt: skip
            grad_query[rows] += dq
            grad_keys[call.keys] += torch.stack(dkv, dim=1)
        grad_sinks = None
        if sinks is not None:  # of a weight p without a value, the score's gradient is - p g o
            product = (grad.float() * out.float()).sum(-1)  # [t, H]
            grad_sinks = -((sinks.float() - log_sum).exp() * product).sum(0).to(sinks.dtype)
        parts = grad_keys.to(keys.dtype).unflatten(0, (group_size(ctx.group), -1))
        owned = sum_to_owners(parts, group=ctx.group)
        grads = grad_query.to(query.dtype), owned[:, 0], owned[:, 1], grad_sinks
        return *grads, None, None, None, None


def _gather(own: Tensor, group: Group) -> Tensor:
    """Gather the whole pack's keys and values; [t, 2, K, d] -> [T, 2, K, d]."""
    return gather_stacked(own, group=group).flatten(0, 1)


def _weights(part: Tensor, whole: Tensor) -> Tensor:
    """Return exp(part - whole) for [q, H] log-sum-exps, to multiply outputs with; [q, H, 1]."""
    return (part - whole).exp()[..., None]
