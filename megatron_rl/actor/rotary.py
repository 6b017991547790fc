"""Rotary position embeddings from explicit positions, so that packs and zigzag shards need no care.

    x_i'         = x_i cos(p f_i) - x_{i + d/2} sin(p f_i)
    x_{i + d/2}' = x_{i + d/2} cos(p f_i) + x_i sin(p f_i),      f_i = base^(-2 i / d)

Su et al., arXiv 2104.09864, in the half-split form of the models of Hugging Face transformers.
Shapes: t local tokens, H heads, d their size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.resharding.architectures import ModelShape


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of every local token; computed once per pack, shared by all layers."""

    cosine: Tensor  # [t, 1, d / 2] in the model's dtype
    sine: Tensor  # [t, 1, d / 2]

    def apply(self, x: Tensor) -> Tensor:
        """Rotate queries or keys; [t, H, d] -> [t, H, d]."""
        return _Rotate.apply(x, self.cosine, self.sine)


def build_rotation(position_ids: Tensor, shape: ModelShape, *, dtype: torch.dtype) -> Rotation:
    """The rotation of tokens at these positions [t]; angles are float32, rounded at the end."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies = (1.0 / shape.rotary_base**exponents).to(position_ids.device)
    angles = position_ids[:, None].float() * frequencies
    return Rotation(angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype))


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    head, tail = out.chunk(2, dim=-1)
    torch.mul(first, cosine, out=head)
    torch.mul(second, cosine, out=tail)
    head.addcmul_(second, sine, value=-sign)
    tail.addcmul_(first, sine, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    """A rotation; its gradient is the opposite rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate(grad, cosine, sine, -1.0), None, None
