"""Gated delta net (arXiv 2412.06464) of a pack, on Megatron's linears, in place of attention.

    [q; k; v; z] = W_qkvz x,  [b; a] = W_ba x          by key head
    [q; k; v] <- silu(conv([q; k; v])),  q <- q / |q|,  k <- k / |k|
    g = -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)
    out = W_o (norm(rule(q, k, v, g, beta)) * silu(z))  norm over each value head

Megatron-core's own module needs flash-linear-attention and CUDA, and exchanges tokens for heads
under context parallelism; here chunks exchange their maps (`distributed/chunk_scan.py`). Rotary
positions are not used. Shapes: t tokens of this rank, t' = t / tp with sequence parallelism, K
local key heads, H local value heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_rl.actor.delta_kernel import choose_rule
from megatron_rl.actor.layers import PackContext
from megatron_rl.distributed.gated_delta import causal_convolution, gated_delta
from megatron_rl.models.shape import ModelShape

# Added to the squared length of q and k, in transformers and flash-linear-attention.
LENGTH_EPSILON = 1e-6


class GatedDeltaNet(MegatronModule):
    """Gated delta net of a layer; takes the place of Megatron's self-attention."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any = None,
        *,
        shape: ModelShape,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        assert shape.delta is not None, "a gated delta net without its sizes"
        self.delta, self.tp_group = shape.delta, pg_collection.tp
        delta, sizes, tp_size = shape.delta, shape.sizes, self.tp_group.size()
        self.repeats = delta.value_heads // delta.key_heads
        common: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": True,
            "tp_group": self.tp_group,
        }
        for name in ("qkvz", "ba"):
            linear = ColumnParallelLinear(
                shape.hidden_size, sizes[f"delta_{name}"], gather_output=False,
                disable_grad_reduce=True, **common,
            )  # fmt: skip
            linear.sequence_parallel = False  # the inputs of both are gathered once
            setattr(self, f"linear_{name}", linear)
        self.linear_proj = RowParallelLinear(
            sizes["delta_values"], shape.hidden_size, input_is_parallel=True, **common
        )
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        like: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        self.conv1d = _Weight(delta.conv_channels // tp_size, 1, delta.kernel, **like)
        self.norm = _Weight(delta.value_dim, **like)
        heads = delta.value_heads // tp_size
        self.A_log = torch.nn.Parameter(torch.empty(heads, **like))
        self.dt_bias = torch.nn.Parameter(torch.empty(heads, **like))
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.rule = choose_rule(on_cuda=self.A_log.is_cuda)

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: PackContext, **__: Any
    ) -> tuple[Tensor, None]:
        """[t', 1, h] -> ([t', 1, h], no bias)."""
        layout, delta = packed_seq_params.layout, self.delta
        assert layout is not None, "a pack without its layout"
        hidden = self._all_tokens(hidden_states)
        values = self.repeats * delta.value_dim
        qkv, z = self._by_head(self.linear_qkvz(hidden)[0]).split(
            [2 * delta.key_dim + values, values], dim=-1
        )
        b, a = (
            x.flatten(1) for x in self._by_head(self.linear_ba(hidden)[0]).chunk(2, dim=-1)
        )  # [t, H]
        taps = self.conv1d.weight.squeeze(1)
        mixed = F.silu(causal_convolution(qkv.flatten(1), taps, layout)).view(qkv.shape)
        q, k, v = mixed.split([delta.key_dim, delta.key_dim, values], dim=-1)
        v, z = (x.reshape(len(x), -1, delta.value_dim) for x in (v, z))  # [t, H, d_v]
        wide = torch.promote_types(v.dtype, torch.float32)
        g = -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))
        beta = b.to(wide).sigmoid()
        out = gated_delta(_unit(q), _unit(k), v, g, beta, layout, rule=self.rule)
        return self.linear_proj(self._gated_norm(out, z).flatten(1)[:, None])[0], None

    def _all_tokens(self, x: Tensor) -> Tensor:
        """Return the hidden states of all tokens, [t, 1, h]; their gradients are summed."""
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(
                x, tensor_parallel_output_grad=True, group=self.tp_group
            )
        return tensor_parallel.copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def _by_head(self, x: Tensor) -> Tensor:
        """View [t, 1, K * size] as [t, K, size]."""
        return x.squeeze(1).unflatten(-1, (self.delta.key_heads // self.tp_group.size(), -1))

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise each value head, then multiply by the weight and silu(gate); [t, H, d_v].

        Each tensor-parallel rank has other heads, so the weight's gradient is summed.
        """
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(
            self.norm.weight, group=self.tp_group
        )
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = wide.pow(2).mean(-1, keepdim=True).add(self.config.layernorm_epsilon).rsqrt()
        gated = wide * scale * weight.to(wide.dtype) * F.silu(gate.to(wide.dtype))
        return gated.to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return all tensors with their places in the global ones, cut by key heads."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        own |= {"conv1d.weight": self.conv1d.weight, "norm.weight": self.norm.weight}
        rows = {"A_log": 0, "dt_bias": 0, "conv1d.weight": 0}
        return state | make_sharded_tensors_for_checkpoint(own, prefix, rows, sharded_offsets)


class _Weight(torch.nn.Module):
    """A weight by this name in a module of its own, as in files."""

    def __init__(self, *size: int, **like: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size, **like))


def _unit(x: Tensor) -> Tensor:
    """Divide each head by its length; [t, K, d_k]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * wide.pow(2).sum(-1, keepdim=True).add(LENGTH_EPSILON).rsqrt()).to(x.dtype)
