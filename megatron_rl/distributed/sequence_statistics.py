"""The differentiable scans of a SequenceLayout: local scan, one all-gather, carry added.

The backward of a prefix sum is the mirrored suffix sum: d/dx_k sum_t g_t S_t = sum_{t >= k} g_t,
again one all-gather of chunk totals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_rl.distributed.segmented_scan import combine_pair

if TYPE_CHECKING:
    from megatron_rl.distributed.sequence_layout import SequenceLayout


def scan_sequences(
    layout: SequenceLayout,
    x: Tensor,
    *,
    combine: str,
    reverse: bool = False,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scan each sequence over all ranks, and its total: [t] -> ([t], [S])."""
    local, chunk_totals = layout.scan(x, combine=combine, reverse=reverse)
    carry, totals = layout.carry_in(chunk_totals.view(-1, 2), combine=combine, reverse=reverse)
    if exclusive:  # what a token's own chunk holds before it
        identity = 0.0 if combine == "sum" else float("inf")
        shifted = torch.cat((local.new_full((1,), identity), local[:-1]))
        local = torch.where(layout.scan.columns == 0, identity, shifted)
    return combine_pair(local, layout.scan.spread(carry.reshape(-1)), combine), totals


class _PrefixSum(torch.autograd.Function):
    """(S_t, S_L) of x; backward: g_k = sum_{t >= k} dS_t + sum_t dS_L."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        ctx.layout, ctx.dtype = layout, x.dtype
        ctx.set_materialize_grads(False)
        prefix, totals = scan_sequences(layout, x, combine="sum")
        return prefix.to(x.dtype), totals[layout.sequence_ids].to(x.dtype)

    @staticmethod
    def backward(
        ctx: Any, grad_prefix: Tensor | None, grad_total: Tensor | None
    ) -> tuple[Tensor | None, None]:
        layout = ctx.layout
        grad: Tensor | None = None
        # Which outputs were used is the same on every rank, so the collectives match.
        if grad_prefix is not None:
            grad, _ = scan_sequences(layout, grad_prefix, combine="sum", reverse=True)
        if grad_total is not None:
            _, totals = scan_sequences(layout, grad_total, combine="sum")
            spread = totals[layout.sequence_ids]
            grad = spread if grad is None else grad + spread
        return (None if grad is None else grad.to(ctx.dtype)), None


class _PrefixMin(torch.autograd.Function):
    """min over the prefix; backward: a minimum's gradient goes to the earliest token that has it.

    The backward gathers the pack (the forward does not): only an objective whose gradient flows
    through a prefix minimum pays for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: SequenceLayout, exclusive: bool) -> Tensor:
        ctx.layout, ctx.exclusive = layout, exclusive
        ctx.save_for_backward(x)
        return scan_sequences(layout, x, combine="min", exclusive=exclusive)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        layout, whole = ctx.layout, ctx.layout.whole()
        (local_x,) = ctx.saved_tensors
        x, grad = layout.gather(local_x), layout.gather(grad)  # [T]
        # A record is smaller than all before it: the minimum at t is the last record up to t.
        before, _ = scan_sequences(whole, x, combine="min", exclusive=True)
        place = torch.arange(x.numel(), device=x.device)
        records = torch.where(x < before, place, -1)
        if ctx.exclusive:
            records = torch.cat((records.new_full((1,), -1), records[:-1]))
        source = records.cummax(0).values
        has_source = source >= place - whole.offsets  # a record of the same sequence
        grad = torch.where(has_source, grad, 0)
        return (
            layout.shard(torch.zeros_like(grad).index_add_(0, source.clamp(min=0), grad)),
            None,
            None,
        )


def prefix_sum_and_total(layout: SequenceLayout, x: Tensor) -> tuple[Tensor, Tensor]:
    """S_t and S_L over the valid decisions; [t] -> ([t], [t])."""
    return _PrefixSum.apply(torch.where(layout.mask, x, 0), layout)


def prefix_min(layout: SequenceLayout, x: Tensor, exclusive: bool) -> Tensor:
    """The running minimum over the valid decisions; [t] -> [t]."""
    return _PrefixMin.apply(torch.where(layout.mask, x, float("inf")), layout, exclusive)
