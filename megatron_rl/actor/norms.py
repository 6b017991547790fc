"""RMS norm under sequence parallelism, gated MLP, and norms of what attention and MLP return."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_rl.actor.elementwise import geglu, rms_norm, swiglu


class RmsNorm(torch.nn.Module):
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467).

    Zero-centred norms multiply by 1 + weight, in float32. Under sequence parallelism each
    tensor-parallel rank normalises different tokens; the attribute on the weight makes Megatron sum
    its gradient over the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        weight = self.weight.float() + 1 if self.zero_centered else self.weight
        return rms_norm(x, weight, eps=self.eps)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the weight for Megatron's checkpoints, of which every rank has all."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)


class GatedMlp(MLP):
    """Megatron's dense MLP with our gated activations; on CUDA with Megatron's fused kernels.

    Megatron's name for gelu in its tanh form is `F.gelu`.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """[t, 1, h] -> ([t, 1, h], no bias)."""
        if self.config.bias_activation_fusion:
            return super().forward(hidden_states, *args, **kwargs)
        both, _ = self.linear_fc1(hidden_states)
        activate = swiglu if self.config.activation_func is F.silu else geglu
        return self.linear_fc2(activate(both))


class PostNormAttention(SelfAttention):
    """Megatron's self-attention with a norm of its output, before the residual sum."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_layernorm = RmsNorm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """[t, 1, h] -> ([t, 1, h], no bias)."""
        out, bias = super().forward(*args, **kwargs)
        return self.post_layernorm(out), bias


class PostNormMlp(GatedMlp):
    """Dense MLP with a norm of its output, before the residual sum."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        # Megatron-core warns if it is None.
        kwargs["ffn_hidden_size"] = kwargs.get("ffn_hidden_size") or config.ffn_hidden_size
        super().__init__(config, *args, **kwargs)
        self.post_layernorm = RmsNorm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """[t, 1, h] -> ([t, 1, h], no bias)."""
        out, bias = super().forward(*args, **kwargs)
        return self.post_layernorm(out), bias
