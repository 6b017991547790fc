"""Tokens to the rows of their experts and back, by gathers: the same bits in every pass.

Without Transformer Engine's kernels Megatron-core adds the k rows of a token with `scatter_add_`,
and torch's backward of `index_select` does the same. On CUDA these are atomic additions: their
order, and in bfloat16 each rounding, differ from one pass to the next, so that routers of later
layers choose other experts and the first ratio of a step is not 1 (seen on an H100: 0.08). Here
every token gathers its rows and adds them in the order of its experts, in at least float32.

Shapes: [T, h] tokens, [N, h] rows sorted by expert, N = k T (no token is dropped).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor


def sum_rows(rows: Tensor, rows_of_token: Tensor) -> Tensor:
    """Add each token's rows in order: [N, h] at [T, k] -> [T, h] in the dtype of rows."""
    total = torch.promote_types(rows.dtype, torch.float32)
    first, *others = rows_of_token.unbind(1)
    out = rows.index_select(0, first).to(total)
    for row in others:
        out += rows.index_select(0, row)
    return out.to(rows.dtype)


def find_rows(token_of_row: Tensor, tokens: int) -> Tensor:
    """Return the rows of each token in the order of its experts: [N] -> [T, k]."""
    if not tokens:
        return token_of_row.new_empty(0, 1)
    return token_of_row.argsort(stable=True).view(tokens, -1)


class _Permute(torch.autograd.Function):
    """Copy each token to its rows; gradients of its rows are added."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_of_row: Tensor) -> Tensor:
        ctx.save_for_backward(find_rows(token_of_row, len(tokens)))
        return tokens.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_rows(gradient, *ctx.saved_tensors), None


class _Unpermute(torch.autograd.Function):
    """Add the rows of each token; its gradient is copied to them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return sum_rows(rows, find_rows(token_of_row, tokens))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, **options: Any
) -> tuple[Any, ...]:
    """Do what Megatron's `permute` does; see there."""
    if options.get("fused"):
        return _MEGATRON_PERMUTE(tokens, routing_map, probs=probs, **options)
    # The rows of a tensor without columns: Megatron's order of rows, and nothing to copy.
    _, *others = _MEGATRON_PERMUTE(tokens.detach()[:, :0], routing_map, probs=probs, **options)
    return _Permute.apply(tokens, others[1]), *others


def unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, restore_shape: torch.Size, **options: Any
) -> Tensor:
    """Do what Megatron's `unpermute` does where `permute` made the rows; see there."""
    if options.get("fused"):
        return _MEGATRON_UNPERMUTE(permuted_tokens, sorted_indices, restore_shape, **options)
    out: Tensor = _Unpermute.apply(permuted_tokens, sorted_indices, restore_shape[0])
    return out


_MEGATRON_PERMUTE, _MEGATRON_UNPERMUTE = moe_utils.permute, moe_utils.unpermute
token_dispatcher.permute, token_dispatcher.unpermute = permute, unpermute
