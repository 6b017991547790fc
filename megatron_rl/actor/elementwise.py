"""Norm and activation with few passes over memory and few tensors saved for the backward pass.

Without CUDA, torch and Megatron-core have no fused kernels for them, and on a small model these
passes dominate the step time.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RmsNorm(torch.autograd.Function):
    """RMS norm that saves x and 1 / sqrt(mean(x^2) + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return dx = s g' - x s^3 mean(p w) and dw = sum_tokens s p; g' = g w, p = g x."""
        x, weight, scale = ctx.saved_tensors
        wide, grad, wide_weight = x.float(), grad.float(), weight.float()
        product = grad * wide
        grad_weight = None
        if ctx.needs_input_grad[1]:
            by_channel = product.flatten(0, -2).t() @ scale.flatten()
            grad_weight = by_channel.to(weight.dtype)
        share = (product @ wide_weight).unsqueeze(-1).mul_(scale**3).div_(-x.shape[-1])
        grad_x = (grad * wide_weight).mul_(scale).addcmul_(wide, share)
        return grad_x.to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight; [..., h], [h] -> [..., h].

    torch's fused norm needs a weight of x's dtype.
    """
    if x.is_cuda and weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RmsNorm.apply(x, weight, eps)


# Input elements per block of rows, so that intermediate results stay in the cache.
SWIGLU_ELEMENTS = 1 << 18


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_backward(grad: Tensor, x: Tensor, *, grad_input: Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=grad_input)


class _Gated(torch.autograd.Function):
    """Gated activation that saves only its input and recomputes act(gate) in the backward pass.

    The gradient overwrites the input, so that no tensor of that size is allocated at peak memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activate: Callable[..., Tensor], differentiate: Callable[..., Any]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activate, ctx.differentiate = activate, differentiate
        gate, up = x.chunk(2, dim=-1)
        return activate(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        x = x.detach()
        count = max(1, SWIGLU_ELEMENTS * len(x) // max(1, x.numel()))
        for rows, grad_rows in zip(x.split(count), grad.split(count), strict=True):
            gate, up = rows.chunk(2, dim=-1)
            grad_activated = grad_rows * up
            torch.mul(ctx.activate(gate), grad_rows, out=up)
            ctx.differentiate(grad_activated, gate, grad_input=gate)
        return x, None, None


def swiglu(x: Tensor) -> Tensor:
    """Compute silu(gate) * up for x = [gate; up]; [t, ..., 2 f] -> [t, ..., f].

    The backward pass overwrites x, so x must not be read afterwards: it must be a projection's
    output, not a leaf. A second backward pass through the same graph raises torch's RuntimeError.
    """
    return _Gated.apply(x, F.silu, torch.ops.aten.silu_backward.grad_input)


def geglu(x: Tensor) -> Tensor:
    """Compute gelu(gate) * up for x = [gate; up], with gelu's tanh form; otherwise as `swiglu`."""
    return _Gated.apply(x, _gelu, _gelu_backward)
