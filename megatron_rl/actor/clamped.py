"""Experts of gpt-oss: biases and a clamped activation of gate and up rows in turn.

    gate, up = x[0::2], x[1::2]
    out      = (clamp(up, -7, 7) + 1) * gate' * sigmoid(1.702 gate'),   gate' = min(gate, 7)

Only whole experts are on a rank: Megatron supports biases of experts without tensor parallelism.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from megatron_rl.models.architectures.gpt_oss import ALPHA, LIMIT


def clamped_swiglu(x: Tensor) -> Tensor:
    """Compute the clamped activation; [..., 2 f] -> [..., f]."""
    gate, up = x[..., ::2].clamp(max=LIMIT), x[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


class ClampedExpert(MLP):
    """One expert."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """[t, h], probabilities [t] -> ([t, h], no bias)."""
        assert per_token_scale is not None, "an expert without probabilities"
        both, bias = self.linear_fc1(hidden_states)
        scale = per_token_scale[:, None]
        out, bias_out = self.linear_fc2((clamped_swiglu(both + bias) * scale).to(both.dtype))
        return out + (bias_out * scale).to(out.dtype), None


class ClampedExperts(SequentialMLP):
    """Megatron's experts one after another, with this activation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for expert in self.local_experts:
            expert.__class__ = ClampedExpert
            # Tensor-parallel ranks have different experts: Megatron must not sum the gradients of
            # this bias over them, and must count it on each in the gradient's norm.
            bias = expert.linear_fc2.bias
            bias.sequence_parallel = False
            set_tensor_model_parallel_attributes(bias, True, 0, 1)
