"""Adapters on Transformer Engine's linears, of which one kind also normalises its input.

Importing this module requires Transformer Engine.
"""

from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from torch import Tensor

from megatron_rl.actor.adapted_linear import ColumnAdapter, RowAdapter


class AdaptedEngineColumnLinear(ColumnAdapter, TEColumnParallelLinear):
    """Transformer Engine's column-parallel linear with an adapter."""


class AdaptedEngineRowLinear(RowAdapter, TERowParallelLinear):
    """Transformer Engine's row-parallel linear with an adapter."""


class AdaptedEngineNormLinear(ColumnAdapter, TELayerNormColumnParallelLinear):
    """A norm and a column-parallel linear; the adapter's input is the norm's output."""

    @property
    def return_layernorm_output(self) -> bool:
        """Let Transformer Engine return the norm's output too."""
        return True

    def run_frozen(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Any]:
        """Return the norm's output, the linear's, and its bias."""
        # Megatron's wrapper returns what Transformer Engine's layer does if that has a bias apart.
        result = TELayerNormColumnParallelLinear.forward(self, input_, *args, **kwargs)
        if self.te_return_bias:
            out, bias, normed = result
        else:
            (out, normed), bias = result
        return normed, out, bias


ADAPTED = {
    TEColumnParallelLinear: AdaptedEngineColumnLinear,
    TERowParallelLinear: AdaptedEngineRowLinear,
    TELayerNormColumnParallelLinear: AdaptedEngineNormLinear,
}
