"""Memory models of CUDA's fused kernels: they allocate the same tensors but compute nothing.

On torch's `meta` device the composite forms of these operations would run instead and allocate
tensors that never exist on a GPU. Each function takes the arguments of the function it replaces,
allocates the kernel's outputs and temporaries, and saves the same tensors for the backward pass.
Sources: torch's aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (attention) and
native/cuda/layer_norm_kernel.cu (norm), flash-linear-attention's fla/ops/gated_delta_rule/chunk.py
(gated delta rule). Functions that Megatron-core compiles count as one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.actor.layers import rms_norm as computed_rms_norm
from megatron_rl.distributed.context_attention import with_sink
from megatron_rl.distributed.joined_attention import Call


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """[..., h], [h] -> [..., h]."""
    if weight.dtype != x.dtype:  # not fused on CUDA either
        return computed_rms_norm(x, weight, eps=eps)
    return _Norm.apply(x, weight)


def swiglu(y: Tensor) -> Tensor:
    """[..., 2 f] -> [..., f]."""
    return y.new_empty((*y.shape[:-1], y.shape[-1] // 2))


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """[..., f], [..., 2 f] -> [..., 2 f]."""
    return torch.empty_like(y)


def weighted_swiglu(y: Tensor, weights: Tensor) -> Tensor:
    """[..., 2 f], [..., 1] -> [..., f]."""
    return swiglu(y)


def weighted_swiglu_back(g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[..., f], [..., 2 f], [..., 1] -> [..., 2 f], [..., 1]."""
    return torch.empty_like(y), torch.empty_like(weights)


class _Attention(torch.autograd.Function):
    """Attention that saves queries, keys, values, the output and its log-sum-exps."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        count: Callable[[int], None],
        window: int | None,
    ) -> Tensor:
        out = torch.empty_like(query)
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.count, ctx.window = count, window
        count(2 * _visible_products(query, key, window))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        ctx.count(5 * _visible_products(query, key, ctx.window))
        temporary = [torch.empty_like(query, dtype=torch.float32)]  # sum over blocks of keys
        if key.shape[1] != query.shape[1]:  # one per query head, summed over the group afterwards
            size = (*query.shape[:2], key.shape[2], key.shape[3])
            temporary += [key.new_empty(size) for _ in range(2)]
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del temporary
        return (*grads, None, None)


def _visible_products(query: Tensor, key: Tensor, window: int | None) -> int:
    """Return the FLOPs of one causal product in which the last query has the last key's position.

    The window hides hidden keys from the last query, and one fewer from each before it.
    """
    sequences, heads, queries, size = query.shape
    keys = key.shape[2]
    hidden = 0 if window is None else max(0, keys - window)
    rows = min(queries, hidden)
    pairs = queries * (2 * keys - queries + 1) // 2 - rows * (2 * hidden - rows + 1) // 2
    return 2 * sequences * heads * pairs * size


def attention(count: Callable[[int], None]) -> Callable[..., Tensor]:
    """Return causal attention that reports FLOPs; [s, H, q, d], [s, K, k, d] -> [s, H, q, d]."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if sinks is not None:
            size = query.shape[-1]
            query, key, value = with_sink(query, key, value, sinks=sinks, scale=scale or 1.0)
            window = None if window is None else window + 1
            return attend(query, key, value, window=window)[..., :size]
        repeats = query.shape[1] // key.shape[1]
        cut = window is not None and window < key.shape[2]
        if repeats > 1 and (cut or query.dtype == torch.float32):  # as in `attend_fused`
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        return _Attention.apply(query, key, value, count, window)

    return attend


def joined(
    kernel: Callable[..., Any], count: Callable[[int], None], *, products: int
) -> Callable[..., Any]:
    """Return `joined_attention.attend`, or its backward, that reports the FLOPs of its products.

    torch's own functions for the `meta` device allocate what the kernels do.
    """

    def attend(*tensors: Tensor, call: Call, **named: Any) -> Any:
        _, heads, size = tensors[0].shape
        count(2 * products * call.pairs * heads * size)
        return kernel(*tensors, call=call, **named)

    return attend


BLOCK = 64  # tokens of a block of flash-linear-attention's kernel


class _DeltaRule(torch.autograd.Function):
    """Gated delta rule that saves its inputs and one [BLOCK]-row of products for each token."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        before: Tensor | None,
        count: Callable[[int], None],
        sequences: int,
    ) -> tuple[Tensor, Tensor]:
        sums = torch.empty_like(g, dtype=torch.float32)
        products = v.new_empty((*v.shape[:-1], BLOCK))
        temporary = _delta_temporaries(q, v, sequences)
        out = torch.empty_like(v)
        after = v.new_empty((sequences, *v.shape[2:3], q.shape[-1], v.shape[-1])).float()
        del temporary
        ctx.save_for_backward(q, k, v, sums, beta, products, before)
        ctx.count, ctx.sequences = count, sequences
        count(_delta_flops(q, v))
        return out, after

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sums, beta, _, before = ctx.saved_tensors
        ctx.count(3 * _delta_flops(q, v))  # the forward pass again, and two products for each
        temporary = [_delta_temporaries(q, v, ctx.sequences) for _ in range(2)]
        by_value_head = [v.new_empty((*v.shape[:-1], q.shape[-1])) for _ in range(2)]
        given = [torch.empty_like(x) for x in (q, k, v, sums, beta)]
        del temporary, by_value_head
        return (*given, None if before is None else torch.empty_like(before), None, None)


def _delta_temporaries(q: Tensor, v: Tensor, sequences: int) -> list[Tensor]:
    """Return w, u, corrected values, and the states before all blocks."""
    tokens, heads, key, value = v.shape[1], v.shape[2], q.shape[-1], v.shape[-1]
    blocks = -(-tokens // BLOCK) + sequences // 2  # ends of chunks are half full on average
    return [
        v.new_empty((1, tokens, heads, key)),
        torch.empty_like(v),
        torch.empty_like(v),
        v.new_empty((1, blocks, heads, key, value)),
    ]


def _delta_flops(q: Tensor, v: Tensor) -> int:
    """Return the FLOPs of all products of the rule's chunked form."""
    tokens, heads, key, value = v.shape[1], v.shape[2], q.shape[-1], v.shape[-1]
    in_block = BLOCK * (2 * key + key + value + value)  # k k^T, q k^T; w, u; outputs
    with_state = 3 * key * value  # w S, q S, update
    return 2 * tokens * heads * (in_block + with_state)


def gated_delta(count: Callable[[int], None]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return flash-linear-attention's call: q, k [1, t, K, d_k], v [1, t, H, d_v]; see the rule."""

    def rule(
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float,
        initial_state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor,
    ) -> tuple[Tensor, Tensor]:
        sequences = len(cu_seqlens) - 1
        return _DeltaRule.apply(q, k, v, g, beta, initial_state, count, sequences)

    return rule
