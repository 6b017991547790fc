"""The differentiable scans of a SequenceLayout: local scans, one all-gather, carries brought in.

However many statistics are asked for together, the totals of their chunks travel in one table
[S, 2, k]. The backward of a prefix sum is the mirrored suffix sum: d/dx_k sum_t g_t S_t =
sum_{t >= k} g_t, again one all-gather of chunk totals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.distributed.segmented_scan import IDENTITY, Combine

if TYPE_CHECKING:
    from megatron_rl.distributed.sequence_layout import SequenceLayout


class Scan(NamedTuple):
    """One statistic along the sequences."""

    x: Tensor  # [t]
    combine: Combine = "sum"
    exclusive: bool = False  # over what comes before each token


class Scanned(NamedTuple):
    """Its value at every token, and that of each whole sequence (not differentiable for "min")."""

    running: Tensor  # [t]
    total: Tensor  # [S] float64 for "sum"


def scan_sequences(layout: SequenceLayout, scans: list[Scan]) -> list[Scanned]:
    """Scan each sequence over all ranks, with one all-gather of [S, 2, k] for the k scans."""
    started = [layout.scan.begin(s.x, combine=s.combine) for s in scans]
    table = torch.stack([s.totals.view(-1, 2).double() for s in started], dim=2)
    gathered = layout.carry_in(table, combine=[s.combine for s in scans])
    return [
        Scanned(layout.scan.finish(begun, carry=carry.reshape(-1), exclusive=scan.exclusive), total)
        for scan, begun, (carry, total) in zip(scans, started, gathered, strict=True)
    ]


class _Scans(torch.autograd.Function):
    """The running values of k scans, then their totals."""

    @staticmethod
    def forward(
        ctx: Any, layout: SequenceLayout, kinds: list[tuple[Combine, bool]], *xs: Tensor
    ) -> tuple[Tensor, ...]:
        scans = [Scan(x, *kind) for x, kind in zip(xs, kinds, strict=True)]
        results = scan_sequences(layout, scans)
        ctx.layout, ctx.kinds, ctx.dtypes = layout, kinds, [x.dtype for x in xs]
        ctx.set_materialize_grads(False)
        minima = [place for place, (combine, _) in enumerate(kinds) if combine == "min"]
        ctx.save_for_backward(*(xs[place] for place in minima))
        ctx.mark_non_differentiable(*(results[place].total for place in minima))
        running = [r.running.to(x.dtype) for r, x in zip(results, xs, strict=True)]
        return *running, *(r.total for r in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        result: list[Tensor | None] = []
        saved = iter(ctx.saved_tensors)
        for place, (combine, exclusive) in enumerate(ctx.kinds):
            x = next(saved) if combine == "min" else None
            running, total = grads[place], grads[len(ctx.kinds) + place]
            grad = None
            # Which outputs were used is the same on every rank, so the collectives match.
            if ctx.needs_input_grad[2 + place] and (running is not None or total is not None):
                if x is None:
                    grad = _sum_backward(ctx.layout, running, total, exclusive)
                elif running is not None:
                    grad = _min_backward(ctx.layout, x, running, exclusive)
            result.append(None if grad is None else grad.to(ctx.dtypes[place]))
        return None, None, *result


def _sum_backward(
    layout: SequenceLayout, running: Tensor | None, total: Tensor | None, exclusive: bool
) -> Tensor:
    """g_k = sum_{t >= k} dS_t + dS_L from dS_t [t] and this rank's part of dS_L [S]."""
    columns, grads = [], []
    if running is not None:
        started = layout.scan.begin(running, combine="sum", reverse=True)
        columns.append(started.totals.view(-1, 2))
    if total is not None:
        columns.append(torch.stack((total, torch.zeros_like(total)), dim=1))
    gathered = layout.carry_in(
        torch.stack(columns, dim=2), combine=["sum"] * len(columns), reverse=True
    )
    if running is not None:
        carry = gathered[0].carry.reshape(-1)
        grads.append(layout.scan.finish(started, carry=carry, exclusive=exclusive))
    if total is not None:
        grads.append(layout.spread(gathered[-1].total))
    return grads[0] if len(grads) == 1 else grads[0] + grads[1]


def _min_backward(layout: SequenceLayout, x: Tensor, grad: Tensor, exclusive: bool) -> Tensor:
    """A minimum's gradient goes to the earliest token that has it.

    Gathers the pack, which the forward does not: only an objective whose gradient flows through
    a prefix minimum pays for it.
    """
    whole = layout.whole()
    x, grad = layout.gather(x), layout.gather(grad)  # [T]
    # A record is smaller than all before it: the minimum at t is the last record up to t.
    (before,) = scan_sequences(whole, [Scan(x, "min", exclusive=True)])
    place = torch.arange(x.numel(), device=x.device)
    records = torch.where(x < before.running, place, -1)
    if exclusive:
        records = torch.cat((records.new_full((1,), -1), records[:-1]))
    source = records.cummax(0).values
    has_source = source >= place - whole.offsets  # a record of the same sequence
    grad = torch.where(has_source, grad, 0)
    return layout.shard(torch.zeros_like(grad).index_add_(0, source.clamp(min=0), grad))


def scan_together(layout: SequenceLayout, *scans: Scan) -> list[Scanned]:
    """The scans over the valid decisions, differentiable, with one all-gather for all of them."""
    masked = [torch.where(layout.mask, s.x, IDENTITY[s.combine]) for s in scans]
    kinds = [(s.combine, s.exclusive) for s in scans]
    outputs = _Scans.apply(layout, kinds, *masked)
    return [
        Scanned(*pair) for pair in zip(outputs[: len(scans)], outputs[len(scans) :], strict=True)
    ]
