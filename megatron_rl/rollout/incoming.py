"""What weights go through on their way into the engine: a check, and rounding where asked.

Rounding makes a gap between trainer and engine on purpose, as an engine of lower precision has one:
in the engine's own dtype the values are the rounded ones, the products are not.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.models.shape import ModelShape, tensor_shapes

Mismatch = Literal["none", "bf16", "fp8_e4m3"]
# The matrices of a layer; embeddings, norms, the output layer and a router stay as they are, as in
# engines that quantize to fp8.
LAYER_MATRIX = re.compile(r"model\.layers\.\d+\.(?!mlp\.gate\.)[\w.]+\.weight")


def check_tensors(
    weights: Iterable[tuple[str, Tensor]], shape: ModelShape
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors; ValueError for one that is missing, twice there or of another shape."""
    missing = tensor_shapes(shape)
    for name, tensor in weights:
        size = missing.pop(name, None)
        if size is None:
            raise ValueError(f"{name} was pushed twice or is not a weight of the model")
        if tuple(tensor.shape) != size:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the model says {size}")
        yield name, tensor
    if missing:
        raise ValueError(f"weights were not pushed: {sorted(missing)}")


def round_tensors(
    weights: Iterable[tuple[str, Tensor]], mismatch: Mismatch
) -> Iterator[tuple[str, Tensor]]:
    """Whole Hugging Face tensors, rounded; those given are not changed."""
    for name, tensor in weights:
        yield name, round_tensor(name, tensor, mismatch)


def round_tensor(name: str, tensor: Tensor, mismatch: Mismatch) -> Tensor:
    """One tensor: to bfloat16; or a layer's matrix to fp8 with one scale, so that its largest
    number is fp8's largest.
    """
    if mismatch == "bf16":
        return tensor.to(torch.bfloat16).to(tensor.dtype)
    if mismatch == "fp8_e4m3" and tensor.dim() == 2 and LAYER_MATRIX.fullmatch(name):
        values = tensor.float()
        scale = values.abs().amax().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
        return ((values / scale).to(torch.float8_e4m3fn).float() * scale).to(tensor.dtype)
    return tensor
