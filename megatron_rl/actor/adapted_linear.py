"""The part of an adapter (LoRA) that does not depend on whose linear it is on.

One factor is cut like the weight, the other is whole on every tensor-parallel rank; only
activations with r columns travel:

    column parallel  A [r, in], B [out / tp, r]: A x is gathered over shards of the sequence, or its
                     gradient is summed over ranks
    row parallel     A [r, in / tp], B [out, r]: A x is summed over ranks

A whole factor that sees only a shard of the sequence is marked, and Megatron sums its gradient. The
token dispatcher of experts gathers their inputs and sums their outputs, so adapters of experts send
no activations, and the gradient of their whole factor is summed over the expert's ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Module, Parameter


class AdaptedLinear(Module):
    """The part of an adapted linear that does not depend on its parallelism.

    lora_gated: the output is [gate shard; up shard]. lora_enabled: False while the reference policy
    is computed.
    """

    lora_a: Parameter  # [r, in] or [r, in / tp]
    lora_b: Parameter  # [out / tp, r] or [out, r]
    lora_scale: float
    lora_gated: bool
    lora_enabled: bool
    lora_cut: tuple[str, int]  # the factor that is cut like the weight, and its dimension
    tp_group: Any

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """[..., in] -> ([..., out], bias), cut and gathered like the linear's."""
        input_, out, bias = self.run_frozen(input_, *args, **kwargs)
        if not self.lora_enabled:
            return out, bias
        low, b = self._low_rank(input_)
        total = torch.addmm(out.flatten(0, -2), low.flatten(0, -2), b.t(), alpha=self.lora_scale)
        return total.view_as(out), bias

    def run_frozen(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Any]:
        """Return the adapter's input, the linear's output, and its bias."""
        out, bias = super().forward(input_, *args, **kwargs)
        return input_, out, bias

    def _low_rank(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return A x for the tokens of the output, [..., r], and B."""
        raise NotImplementedError

    def _summed(self, factor: Tensor) -> Tensor:
        """Return the factor; its gradient is summed over the linear's ranks."""
        return tensor_parallel.copy_to_tensor_model_parallel_region(factor, group=self.tp_group)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the linear's tensors and the factors with their places in the global tensors."""
        linear: Any = super()
        state = linear.sharded_state_dict(prefix, sharded_offsets, metadata)
        state |= make_sharded_tensors_for_checkpoint(
            {"lora_a": self.lora_a, "lora_b": self.lora_b},
            prefix,
            dict([self.lora_cut]),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.lora_gated:  # as Megatron does for the weight
            name = f"{prefix}lora_b"
            state[name] = apply_swiglu_sharded_factory(state[name], sharded_offsets)
        return state


class ColumnAdapter(AdaptedLinear):
    """Adapter of a column-parallel linear; B is cut."""

    lora_cut = ("lora_b", 0)

    def _low_rank(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_expert:
            return x @ self._summed(self.lora_a).t(), self.lora_b
        low = x @ self.lora_a.t()
        if self.sequence_parallel:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            return gather(low, group=self.tp_group), self.lora_b
        return self._summed(low), self.lora_b


class RowAdapter(AdaptedLinear):
    """Adapter of a row-parallel linear; A is cut."""

    lora_cut = ("lora_a", 1)

    def _low_rank(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low = x @ self.lora_a.t()  # of this rank's inputs
        if self.is_expert:
            return low, self._summed(self.lora_b)
        if self.sequence_parallel:
            total = tensor_parallel.reduce_scatter_to_sequence_parallel_region
        else:
            total = tensor_parallel.reduce_from_tensor_model_parallel_region
        return total(low, group=self.tp_group), self.lora_b
