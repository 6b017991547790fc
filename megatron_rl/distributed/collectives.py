"""Differentiable collectives over an explicit process group, and copies to the device."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any  # torch.distributed.ProcessGroup or None


def group_size(group: Group) -> int:
    """Return the number of ranks in the group; 1 for `None`."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """Return this process's rank in the group; 0 for `None`."""
    return 0 if group is None else dist.get_rank(group)


def gather_stacked(x: Tensor, *, group: Group) -> Tensor:
    """Stack every rank's `x` in rank order, without autograd: [...] -> [ranks, ...]."""
    size = group_size(group)
    if size == 1:
        return x.unsqueeze(0)
    stacked = x.new_empty((size, *x.shape))
    dist.all_gather(list(stacked.unbind(0)), x.contiguous(), group=group)
    return stacked


def gather_ragged(x: Tensor, *, group: Group) -> Tensor:
    """Concatenate every rank's `x` in rank order; lengths may differ: [n] -> [sum of n]."""
    sizes = gather_stacked(torch.tensor(len(x), device=x.device), group=group).tolist()
    padded = x.new_zeros(max(sizes))
    padded[: len(x)] = x
    rows = gather_stacked(padded, group=group)
    return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])


def reduce_sum(x: Tensor, *, group: Group) -> Tensor:
    """Sum `x` over the group, without autograd and without modifying `x`."""
    if group_size(group) == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def reduce_max(x: Tensor, *, group: Group) -> Tensor:
    """Return the element-wise maximum over the group, without autograd or modifying `x`."""
    if group_size(group) == 1:
        return x
    largest = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def all_to_all(x: Tensor, *, group: Group) -> Tensor:
    """Send x[r] to rank r, without autograd: [ranks, ...] -> [ranks, ...] by sender."""
    if group_size(group) == 1:
        return x
    received = x.new_empty(x.shape)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received


def exchange(sent: Sequence[Tensor], received: Sequence[Tensor], *, group: Group) -> None:
    """Send sent[r] to each other rank r, and receive its part in received[r], without copies."""
    others = [rank for rank in range(group_size(group)) if rank != group_rank(group)]
    works = [dist.irecv(received[rank], group=group, group_src=rank) for rank in others]
    works += [dist.isend(sent[rank], group=group, group_dst=rank) for rank in others]
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()


def sum_to_owners(x: Tensor, *, group: Group) -> Tensor:
    """Reduce-scatter: return this rank's part of the sum, without autograd; [ranks, ...] -> [...].

    Uses all-to-all: gloo has no reduce-scatter that is faster than an all-reduce.
    """
    return x[0] if group_size(group) == 1 else all_to_all(x, group=group).sum(0)


class _AllGather(torch.autograd.Function):
    """Forward all-gather, backward reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gather_stacked(x, group=group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # An all-reduce and a slice: not every backend has a reduce-scatter.
        return reduce_sum(grad, group=ctx.group)[group_rank(ctx.group)], None


class _AllReduce(torch.autograd.Function):
    """Forward all-reduce (sum), backward all-reduce (sum)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_sum(x, group=group).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_sum(grad, group=ctx.group), None


def all_gather(x: Tensor, *, group: Group) -> Tensor:
    """Stack every rank's `x` in rank order, differentiable: [...] -> [ranks, ...]."""
    return _AllGather.apply(x, group)


def all_reduce(x: Tensor, *, group: Group) -> Tensor:
    """Sum `x` over the group, differentiable."""
    return _AllReduce.apply(x, group)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values` to `device` without blocking the host."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()  # a copy from pageable memory would block
    return values.to(device, non_blocking=True)


def add_rows(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Add rows of x at their places in zeros [count, ...]; row `count` is dropped.

    The order of additions is fixed, also on CUDA, where `index_add_` adds in any order.
    """
    total = x.new_zeros(count + 1, *x.shape[1:])
    if x.is_cuda:
        return total.index_put_((rows,), x, accumulate=True)[:-1]
    return total.index_add_(0, rows, x)[:-1]


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return add_rows(grad, ctx.saved_tensors[0], ctx.count), None


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows of x, each maybe several times; their gradients are added in a fixed order."""
    out: Tensor = _TakeRows.apply(x, rows)
    return out
