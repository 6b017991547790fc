"""Gated delta net (arXiv 2412.06464) of a pack, on Megatron's linears, in place of attention.

    [q; k; v; z] = W_qkvz x,  [b; a] = W_ba x          by key head
    [q; k; v] <- silu(conv([q; k; v])),  q <- q / |q|,  k <- k / |k|
    g = -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)
    out = W_o (norm(rule(q, k, v, g, beta)) * silu(z))  norm over each value head

Megatron-core's own module needs flash-linear-attention and CUDA, and exchanges tokens for heads
under context parallelism; here chunks exchange their maps (`distributed/chunk_scan.py`). Rotary
positions are not used. Shapes: t tokens of this rank, t' = t / tp with sequence parallelism, K
local key heads, H local value heads.

On CUDA the rule is flash-linear-attention's Triton kernels (fla/ops/gated_delta_rule/chunk.py of
github.com/fla-org/flash-linear-attention). Their public call computes everything that
`distributed/gated_delta.py` needs of a rule: sequences of any length, an initial state, the final
state, and gradients of both. Key heads are not repeated.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
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
from packaging.version import Version
from torch import Tensor

from megatron_rl.actor.layers import PackContext
from megatron_rl.distributed.gated_delta import Rule, causal_convolution, gated_delta, torch_rule
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.models.shape import ModelShape

PACKAGE = "flash-linear-attention"


def find_kernel() -> Callable[..., Any]:
    """Return the package's function.

    Raises ImportError, with the cure, where it or what it needs is not installed. On Hopper it
    refuses gradients with Triton 3.4.0 to 3.7.0, which miscompile them, unless tilelang computes
    them; source: `chunk_bwd_dqkwg` of the package's fla/ops/common/chunk_o.py.
    """
    try:
        kernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ImportError as error:
        raise ImportError(f"{PACKAGE} is not installed: `pip install {PACKAGE}`") from error
    if torch.cuda.get_device_capability() == (9, 0) and not importlib.util.find_spec("tilelang"):
        release = importlib.metadata.version("triton")
        if Version("3.4.0") <= Version(release) < Version("3.7.1"):
            raise ImportError(
                f"{PACKAGE} refuses gradients on Hopper with Triton {release}: "
                "`pip install tilelang`, or Triton 3.7.1 or later"
            )
    return kernel


def choose_rule(*, on_cuda: bool) -> Rule:
    """Return the kernel's rule on CUDA, and torch's on a CPU or, with a warning, without it."""
    if not on_cuda:
        return torch_rule
    try:
        return kernel_rule(find_kernel())
    except ImportError as error:
        warnings.warn(
            f"gated delta nets are scanned in torch, which computes the same several times slower: "
            f"{error}",
            stacklevel=2,
        )
        return torch_rule


def kernel_rule(kernel: Callable[..., Any]) -> Rule:
    """Return the rule that calls this function."""

    def rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        before: Tensor | None,
        layout: SequenceLayout,
    ) -> tuple[Tensor, Tensor]:
        out, after = kernel(
            q=q[None],
            k=k[None],
            v=v[None],
            g=g[None],
            beta=beta[None],
            scale=q.shape[-1] ** -0.5,
            initial_state=before,
            output_final_state=before is not None,
            cu_seqlens=layout.once(_chunk_ends),
        )
        return out[0], after

    return rule


def _chunk_ends(layout: SequenceLayout) -> Tensor:
    """Return the ends of this rank's chunks, from 0; int64 [n + 1].

    With cp_size 1 a sequence is one chunk, and its empty late chunk is left out.
    """
    ends = layout.chunk_bounds[1]
    ends = ends[::2] if layout.cp_size == 1 else ends
    return torch.cat((ends.new_zeros(1), ends)).long()


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
        """Return all tensors with their places in the global tensors, cut by key heads."""
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
