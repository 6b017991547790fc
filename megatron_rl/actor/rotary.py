"""Rotary position embeddings from explicit positions, independent of packing and sharding.

    x_i'         = x_i cos(p f_i) - x_{i + d/2} sin(p f_i)
    x_{i + d/2}' = x_{i + d/2} cos(p f_i) + x_i sin(p f_i),      f_i = base^(-2 i / d)

Su et al., arXiv 2104.09864, in the half-split form of the models of Hugging Face transformers.
If the model's config extends its context (linear, yarn, llama3), transformers' own functions
compute the frequencies and the factor that scales cosines and sines.
Shapes: t local tokens, H heads of size d.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import to_device
from megatron_rl.models.shape import ModelShape


@dataclass(frozen=True)
class RotationByHalves:
    """Direct implementation of the formula, with tables of half a head."""

    cosine: Tensor  # [t, 1, d / 2] in the model's dtype
    sine: Tensor  # [t, 1, d / 2]

    @property
    def size(self) -> int:
        """Number of rotated elements of a head, d."""
        return 2 * self.cosine.shape[-1]

    def apply(self, x: Tensor) -> Tensor:
        """Rotate queries or keys; [t, H, d] -> [t, H, d]."""
        return _Rotate.apply(x, self.cosine, self.sine, _rotate_halves)


@dataclass(frozen=True)
class RotationByHead:
    """Bit-identical implementation for the CPU, where rows of half a head are too short to be fast.

    Each head is rotated as a whole: x cos + (x with its halves swapped) sin. The result has shape
    [t, H, d] and memory order [H, t, d], as the CPU's attention expects.
    """

    cosine: Tensor  # [t, d] in the model's dtype, identical halves
    sine: Tensor  # [t, d], first half negated

    @property
    def size(self) -> int:
        """Number of rotated elements of a head, d."""
        return self.cosine.shape[-1]

    def apply(self, x: Tensor) -> Tensor:
        """Rotate queries or keys; [t, H, d] -> [t, H, d]."""
        return _Rotate.apply(x, self.cosine, self.sine, _rotate_heads)


RotationTables = RotationByHalves | RotationByHead


class PackRotation:
    """Rotation of a pack's tokens by rows of the tables of all positions.

    A prepared pack keeps only its positions. Rows exist during one pass of the model, where all
    layers share them, and as long as autograd needs them; a layer that is recomputed in the
    backward pass selects them again.

    tables: of positions 0, 1, 2, ...; shared by all packs. positions: [t] int32.
    """

    def __init__(self, tables: RotationTables, positions: Tensor) -> None:
        self.tables, self.positions = tables, positions
        self._rows: RotationTables | None = None

    def apply(self, x: Tensor) -> Tensor:
        """Rotate queries or keys; [t, H, d] -> [t, H, d], of which the tables may cover a part."""
        rows = self._rows or self._select()
        if rows.size == x.shape[-1]:
            return rows.apply(x)
        return torch.cat((rows.apply(x[..., : rows.size]), x[..., rows.size :]), dim=-1)

    @contextmanager
    def selected(self) -> Iterator[None]:
        """Keep this pack's rows for all layers in the block."""
        self._rows = self._select()
        try:
            yield
        finally:
            self._rows = None

    def _select(self) -> RotationTables:
        cosine, sine = self.tables.cosine, self.tables.sine
        return replace(
            self.tables,
            cosine=cosine.index_select(0, self.positions),
            sine=sine.index_select(0, self.positions),
        )


def build_rotation(
    position_ids: Tensor, shape: ModelShape, *, dtype: torch.dtype
) -> RotationTables:
    """Build the tables for positions [t]; angles are float32, tables are rounded to dtype."""
    frequencies, factor = rotary_frequencies(shape)
    angles = position_ids[:, None].float() * to_device(frequencies, position_ids.device)
    cosine, sine = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    if position_ids.device.type == "cuda":
        return RotationByHalves(cosine[:, None], sine[:, None])
    return RotationByHead(torch.cat((cosine, cosine), dim=1), torch.cat((-sine, sine), dim=1))


@lru_cache
def rotary_frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    """Return the frequencies [d / 2], on the host, and the factor of cosine and sine."""
    if shape.rotary_scaling is None:
        size = shape.rotary_size
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / shape.rotary_base**exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = shape.rotary_scaling
    parameters = dict(scaling.parameters)
    config = LlamaConfig(  # any config class works: the functions read only these values
        head_dim=shape.rotary_size,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={
            "rope_type": scaling.kind,
            "rope_theta": shape.rotary_base,
            **parameters,
        },
    )
    return ROPE_INIT_FUNCTIONS[scaling.kind](config)


def _rotate_halves(x: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (first, second), (head, tail) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cosine, out=head)
    torch.mul(second, cosine, out=tail)
    head.addcmul_(second, sine, value=-sign)
    tail.addcmul_(first, sine, value=sign)
    return out


def _rotate_heads(x: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    x = x.transpose(0, 1).contiguous()  # [H, t, d], so that the tables broadcast contiguously
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cosine).addcmul_(swapped, sine, value=sign).transpose(0, 1)


class _Rotate(torch.autograd.Function):
    """Rotation by one of the two functions above; its gradient is the inverse rotation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cosine: Tensor,
        sine: Tensor,
        rotate: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.rotate = rotate
        return rotate(x, cosine, sine, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.rotate(grad, *ctx.saved_tensors, -1.0), None, None, None
