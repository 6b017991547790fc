"""Depth-wise causal convolution of a pack whose sequences' chunks lie on different ranks.

    y_t = sum_j w_{K-1-j} x_{t-j},   j = 0 .. K - 1,   x = 0 before a sequence

A rank needs the K - 1 tokens before each of its chunks, the chunk's halo. Every rank gathers the
last K - 1 tokens of all chunks (one collective), and the gradients of halos are summed back to
their owners (one collective). A chunk may be shorter than a halo, which then comes from several.
Shapes: t tokens of this rank, D channels, K taps, n chunks (2 for each sequence).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import gather_stacked, sum_to_owners
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.to_device import to_device

TAPS = 4  # of every published model; tables are cached by layout


class _Taps(NamedTuple):
    """Places of what a rank's tokens need, for K taps."""

    tails: Tensor  # [n (K - 1)] own token that is sent, t where a chunk is shorter
    halos: Tensor  # [n (K - 1)] its place in the gathered tails, the last one for zero
    rows: Tensor  # [K, t] place of x_{t-j} among halos, then tokens


def causal_convolution(x: Tensor, weight: Tensor, layout: SequenceLayout) -> Tensor:
    """Convolve every channel along its sequence, summed in float32; [t, D], [D, K] -> [t, D].

    Differentiable; weight's gradient is that of this rank's tokens.
    """
    layout.check_local(x)
    assert weight.shape[1] == TAPS, f"{weight.shape[1]} taps"
    return _Convolution.apply(x, weight, layout)


class _Convolution(torch.autograd.Function):
    """Saves the tokens and halos once, not once for each tap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layout: SequenceLayout) -> Tensor:
        taps, group = layout.once(_build_taps), layout.require_group()
        tails = _with_zero(x)[taps.tails]
        gathered = gather_stacked(tails, group=group).flatten(0, 1)
        pool = torch.cat((_with_zero(gathered)[taps.halos], x))
        wide = torch.promote_types(x.dtype, torch.float32)
        out = torch.zeros(x.shape, dtype=wide, device=x.device)
        for back, rows in enumerate(taps.rows):
            out.addcmul_(pool[rows].to(wide), weight[:, TAPS - 1 - back].to(wide))
        ctx.layout = layout
        ctx.save_for_backward(pool, weight)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        pool, weight = ctx.saved_tensors
        taps, group = ctx.layout.once(_build_taps), ctx.layout.require_group()
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad = grad.to(wide)
        grad_pool = torch.zeros(pool.shape, dtype=wide, device=grad.device)
        grad_weight = torch.empty(weight.shape, dtype=wide, device=grad.device)
        for back, rows in enumerate(taps.rows):
            tap = TAPS - 1 - back
            grad_weight[:, tap] = (grad * pool[rows]).sum(0)
            grad_pool.index_add_(0, rows, grad * weight[:, tap].to(wide))
        count = len(taps.halos)
        sent = _add_rows(grad_pool[:count], taps.halos, ctx.layout.cp_size * count)
        received = sum_to_owners(sent.unflatten(0, (-1, count)), group=group)
        grad_x = grad_pool[count:] + _add_rows(received, taps.tails, len(pool) - count)
        return grad_x.to(pool.dtype), grad_weight.to(weight.dtype), None


def _with_zero(x: Tensor) -> Tensor:
    return torch.cat((x, x.new_zeros(1, *x.shape[1:])))


def _add_rows(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Add rows of x at their places in zeros [count, ...]; row `count` is dropped.

    A place gets at most two rows, so that the order of additions does not matter.
    """
    return x.new_zeros(count + 1, *x.shape[1:]).index_add_(0, rows, x)[:-1]


def _build_taps(layout: SequenceLayout) -> _Taps:
    halo, cp, t = TAPS - 1, layout.cp_size, layout.local_tokens
    lengths = layout.chunk_lengths.reshape(-1).long()  # [n]
    starts = lengths.cumsum(0) - lengths
    back = torch.arange(halo, 0, -1)  # distance of a halo's tokens from the chunk
    ends = (starts + lengths)[:, None]
    tails = torch.where(back <= lengths[:, None], ends - back, t)
    # The token at this distance lies `far` chunks back, `within` from that chunk's end.
    size = lengths.view(-1, 2)[:, :1, None]  # [S, 1, 1]
    far = (back + size - 1) // size
    within = back - (far - 1) * size
    own = torch.tensor([layout.cp_rank, 2 * cp - 1 - layout.cp_rank])
    source = own[:, None] - far  # [S, 2, K - 1] chunk of the sequence
    is_late = source >= cp
    rank = torch.where(is_late, 2 * cp - 1 - source, source)
    sequence = torch.arange(len(layout.lengths))[:, None, None]
    places = ((rank * len(layout.lengths) + sequence) * 2 + is_late) * halo + halo - within
    nowhere = cp * tails.numel()
    halos = torch.where((source >= 0) & (cp > 1), places, nowhere).reshape(-1)
    ids = torch.repeat_interleave(lengths)
    columns = torch.arange(t) - starts[ids]
    rows = [
        torch.where(
            columns >= j, tails.numel() + torch.arange(t) - j, ids * halo + halo - j + columns
        )
        for j in range(TAPS)
    ]
    tables = (tails.reshape(-1), halos, torch.stack(rows))
    return _Taps(*(to_device(each, layout.device) for each in tables))
