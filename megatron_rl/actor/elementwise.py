"""Norm and activation with few passes over memory and little kept for the backward pass.

Off CUDA, where torch and Megatron-core have no fused kernels for them, these passes are what a
small model's step consists of.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RmsNorm(torch.autograd.Function):
    """Keeps x and 1 / sqrt(mean(x^2) + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With g' = g w and p = g x: dx = s g' - x s^3 mean(p w), dw = sum of s p over tokens."""
        x, weight, scale = ctx.saved_tensors
        wide, grad, wide_weight = x.float(), grad.float(), weight.float()
        product = grad * wide
        grad_weight = product.flatten(0, -2).t() @ scale.flatten()
        share = (product @ wide_weight).unsqueeze(-1).mul_(scale**3).div_(-x.shape[-1])
        grad_x = (grad * wide_weight).mul_(scale).addcmul_(wide, share)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; [..., h], [h] -> [..., h]."""
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RmsNorm.apply(x, weight, eps)


# Of a SwiGLU's input, in rows that are worked on at once: what lies between passes stays in cache.
SWIGLU_ELEMENTS = 1 << 18


class _Swiglu(torch.autograd.Function):
    """Keeps only its input, makes silu(gate) again in the backward pass, and leaves the gradient
    in the input's place: nothing as wide as the input is allocated where memory is at its peak."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        x = x.detach()
        count = max(1, SWIGLU_ELEMENTS * len(x) // max(1, x.numel()))
        for rows, grad_rows in zip(x.split(count), grad.split(count), strict=True):
            gate, up = rows.chunk(2, dim=-1)
            grad_silu = grad_rows * up
            torch.mul(F.silu(gate), grad_rows, out=up)
            torch.ops.aten.silu_backward.grad_input(grad_silu, gate, grad_input=gate)
        return x


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of x = [gate; up] in the last dimension; [t, ..., 2 f] -> [t, ..., f].

    The backward pass overwrites x, so x must be what nobody else reads after it: a projection's
    output, not a leaf. A second backward pass through the same graph raises torch's RuntimeError.
    """
    return _Swiglu.apply(x)
