"""Layers of the policy, and the description of a pack that their attention receives.

Without Transformer Engine the layers follow Megatron's local spec with our norm and core attention.
Megatron's torch norm does not support sequence parallelism, and its dot-product attention supports
neither context parallelism nor packed sequences; ours support all three.

Multi-head latent attention (arXiv 2405.04434, section 2.1), on Megatron's linears:

    [c_q; c; k_r] = W_down x,    q = W_q norm(c_q),    [k; v] = W_kv norm(c),    by head
    out = W_o attend([q_n; rotate(q_r)], [k; rotate(k_r)], v)

All heads share k_r; without a query latent, q = W_q x. Megatron's own module has neither packs nor
context parallelism with our shards. Here every rank has all of W_down and, under sequence
parallelism, projects its own tokens; what is gathered then are latents, smaller than hidden states.
Values are padded with zeros to the size of keys, so that attention is that of other models.
Shapes: t tokens of this rank, t' = t / tp with sequence parallelism, H local heads.

Experts of gpt-oss have biases and a clamped activation of gate and up rows in turn:

    gate, up = x[0::2], x[1::2]
    out      = (clamp(up, -7, 7) + 1) * gate' * sigmoid(1.702 gate'),   gate' = min(gate, 7)

Only whole experts are on a rank: Megatron supports biases of experts without tensor parallelism.

Norm and activation make few passes over memory and save few tensors for the backward pass:
without CUDA, torch and Megatron-core have no fused kernels for them, and on a small model these
passes dominate the step time.

An adapter (LoRA) of a linear, whosever the linear is: one factor is cut like the weight, the other
is whole on every tensor-parallel rank; only activations with r columns travel:

    column parallel  A [r, in], B [out / tp, r]: A x is gathered over shards of the sequence, or its
                     gradient is summed over ranks
    row parallel     A [r, in / tp], B [out, r]: A x is summed over ranks

A whole factor that sees only a shard of the sequence is marked, and Megatron sums its gradient. The
token dispatcher of experts gathers their inputs and sums their outputs, so adapters of experts send
no activations, and the gradient of their whole factor is summed over the expert's ranks.

Tokens go to the rows of their experts and back by gathers, with the same bits in every pass:
without Transformer Engine's kernels Megatron-core adds the k rows of a token with `scatter_add_`,
and torch's backward of `index_select` does the same. On CUDA these are atomic additions: their
order, and in bfloat16 each rounding, differ from one pass to the next, so that routers of later
layers choose other experts and the first ratio of a step is not 1 (seen on an H100: 0.08). Here
every token gathers its rows and adds them in the order of its experts, in at least float32.

[T, h] are tokens, [N, h] rows sorted by expert, N = k T (no token is dropped).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP, apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_rl.actor.rotary import PackRotation
from megatron_rl.distributed.collectives import Group
from megatron_rl.distributed.context_attention import (
    AttentionPlan,
    build_attention_plan,
    context_attention,
)
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.models.architectures.gpt_oss import ALPHA, LIMIT
from megatron_rl.models.shape import ModelShape


class _RmsNorm(torch.autograd.Function):
    """RMS norm that saves x and 1 / sqrt(mean(x^2) + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return dx = s g' - x s^3 mean(p w) and dw = sum_tokens s p; g' = g w, p = g x."""
        x, weight, scale = ctx.saved_tensors
        wide, grad, wide_weight = x.float(), grad.float(), weight.float()
        product = grad * wide
        grad_weight = None
        if ctx.needs_input_grad[1]:
            by_channel = product.flatten(0, -2).t() @ scale.flatten()
            grad_weight = by_channel.to(weight.dtype)
        share = (product @ wide_weight).unsqueeze(-1).mul_(scale**3).div_(-x.shape[-1])
        grad_x = (grad * wide_weight).mul_(scale).addcmul_(wide, share)
        return grad_x.to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight; [..., h], [h] -> [..., h].

    torch's fused norm needs a weight of x's dtype.
    """
    if x.is_cuda and weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RmsNorm.apply(x, weight, eps)


# Input elements per block of rows, so that intermediate results stay in the cache.
SWIGLU_ELEMENTS = 1 << 18


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_backward(grad: Tensor, x: Tensor, *, grad_input: Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=grad_input)


class _Gated(torch.autograd.Function):
    """Gated activation that saves only its input and recomputes act(gate) in the backward pass.

    The gradient overwrites the input, so that no tensor of that size is allocated at peak memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activate: Callable[..., Tensor], differentiate: Callable[..., Any]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activate, ctx.differentiate = activate, differentiate
        gate, up = x.chunk(2, dim=-1)
        return activate(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        x = x.detach()
        count = max(1, SWIGLU_ELEMENTS * len(x) // max(1, x.numel()))
        for rows, grad_rows in zip(x.split(count), grad.split(count), strict=True):
            gate, up = rows.chunk(2, dim=-1)
            grad_activated = grad_rows * up
            torch.mul(ctx.activate(gate), grad_rows, out=up)
            ctx.differentiate(grad_activated, gate, grad_input=gate)
        return x, None, None


def swiglu(x: Tensor) -> Tensor:
    """Compute silu(gate) * up for x = [gate; up]; [t, ..., 2 f] -> [t, ..., f].

    The backward pass overwrites x, so x must not be read afterwards: it must be a projection's
    output, not a leaf. A second backward pass through the same graph raises torch's RuntimeError.
    """
    return _Gated.apply(x, F.silu, torch.ops.aten.silu_backward.grad_input)


def geglu(x: Tensor) -> Tensor:
    """Compute gelu(gate) * up for x = [gate; up], with gelu's tanh form; otherwise as `swiglu`."""
    return _Gated.apply(x, _gelu, _gelu_backward)


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


@dataclass
class Boundaries(PackedSeqParams):
    """Sequence boundaries of a pack for Transformer Engine's attention.

    Without an explicit `pad_between_seqs`, releases before 2.18 may compare the boundaries by value
    and so wait for the device in every layer.
    """

    pad_between_seqs: bool = False


@dataclass
class PackContext(PackedSeqParams):
    """Description of a pack for attention, passed to every layer as Megatron's pack argument.

    "thd" makes Megatron pass queries, keys and values as [t, heads, size]. Computed on first use:
    plans for our attention, by window, and `boundaries` for Transformer Engine's.

    layout: on the device; host: the same layout on the host, read without a device sync.
    local_rotation: of layers with a sliding window, if it differs.
    """

    qkv_format: str = "thd"
    layout: SequenceLayout | None = None
    host: SequenceLayout | None = None
    rotation: PackRotation | None = None
    local_rotation: PackRotation | None = None
    routing: Any = None  # `actor.routing.PackRouting` of the present pass; None: routers choose

    plans: dict[int | None, AttentionPlan] = field(default_factory=dict)  # by window

    def plan(self, window: int | None) -> AttentionPlan:
        """Return the attention plan of this rank for layers with this window; None: unlimited."""
        assert self.layout is not None and self.host is not None, "a pack without its layout"
        if window not in self.plans:
            device = self.layout.device
            self.plans[window] = build_attention_plan(self.host, window=window, device=device)
        return self.plans[window]

    def rotation_of(self, window: int | None) -> PackRotation:
        """Return the rotary embedding of layers with this attention window."""
        local = None if window is None else self.local_rotation
        rotation = local or self.rotation
        assert rotation is not None, "a pack without its rotation"
        return rotation

    @contextmanager
    def selected_rotations(self) -> Iterator[None]:
        """Keep the rows of this pack's rotations for all layers in the block."""
        with ExitStack() as stack:
            for rotation in filter(None, (self.rotation, self.local_rotation)):
                stack.enter_context(rotation.selected())
            yield

    @cached_property
    def boundaries(self) -> Boundaries:
        """Boundaries of all sequences of the pack, padding included.

        Padding follows a sequence's tokens, where causal attention hides it from them, so it can be
        treated as tokens. All four arguments are the same tensor: without padding between
        sequences, all of Transformer Engine's kernels are available.
        """
        assert self.layout is not None, "a pack without its layout"
        lengths = self.layout.lengths
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)  # [S + 1]
        ends = ends.to(self.layout.device)
        return Boundaries(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=ends,
            cu_seqlens_kv_padded=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )


def window_of_layer(config: TransformerConfig, layer_number: int) -> int | None:
    """Return how many keys a query of this layer sees, its own included; None: all before it."""
    window, flags = config.window_size, config.window_attn_skip_freq
    return window[0] + 1 if is_layer_window_attention(window, flags, layer_number) else None


class PackedCoreAttention(torch.nn.Module):
    """Core attention that rotates queries and keys, then attends within each sequence."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: Any = None,
        softmax_scale: float | None = None,
        **_: Any,
    ):
        """layer_number: of the whole model, from 1. softmax_scale: None for 1 / sqrt(head size)."""
        super().__init__()
        self.group: Group = pg_collection.cp
        self.scale = softmax_scale
        self.sinks: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            empty = torch.empty(heads, dtype=config.params_dtype, device=device)
            self.sinks = torch.nn.Parameter(empty)
            set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)
        self.window = window_of_layer(config, layer_number)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """[t, H, d], [t, K, d], [t, K, d] -> [t, H * d]."""
        pack = kwargs["packed_seq_params"]
        rotation, plan = pack.rotation_of(self.window), pack.plan(self.window)
        query, key = rotation.apply(query), rotation.apply(key)
        out = context_attention(
            query, key, value, plan=plan, group=self.group, scale=self.scale, sinks=self.sinks
        )
        return out.flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the sinks for Megatron's checkpoints, cut by heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"sinks": 0}, sharded_offsets)


def build_local_layer_spec(shape: ModelShape, *, experts: bool) -> ModuleSpec:
    """Build Megatron's local layer spec with our norm and attention.

    experts: of a layer with a mixture of experts.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=shape.experts.num_experts if shape.experts and experts else None,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = RmsNorm
    layer.pre_mlp_layernorm = RmsNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if shape.qk_norm:
        attention.q_layernorm = RmsNorm
        attention.k_layernorm = RmsNorm
    # Megatron's builders of MLPs are partial functions that hold the linears.
    if not experts:
        mlp = PostNormMlp if shape.traits.post_norms else GatedMlp
        layer.mlp = partial(mlp.as_mlp_submodule, **layer.mlp.keywords)
    elif shape.traits.activation == "clamped_silu":
        parts = layer.mlp.keywords["submodules"]
        clamped = partial(ClampedExperts, **parts.experts.keywords)
        layer.mlp = partial(layer.mlp.func, submodules=replace(parts, experts=clamped))
    if shape.traits.post_norms:
        layer.self_attention.module = PostNormAttention
    return spec


# Of the norms of latents, in DeepSeek's own code and transformers, whatever config.json has for the
# others.
LATENT_NORM_EPSILON = 1e-6


class WholeLinear(torch.nn.Module):
    """A linear that every tensor-parallel rank has whole, and applies to its own tokens."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(outputs, inputs, dtype=config.params_dtype, device=device)
        )
        # Makes Megatron sum the gradient over the ranks, as that of norms.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return F.linear(x, self.weight)


class LatentAttention(MegatronModule):
    """Self-attention of a layer; takes the place of Megatron's."""

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
        assert shape.latent is not None, "latent attention without its sizes"
        self.latent, self.head_dim = shape.latent, shape.head_dim
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.sequence_parallel = config.sequence_parallel
        latent, sizes = shape.latent, shape.sizes
        query_rank = latent.query_rank or 0
        self.parts = [query_rank, latent.rank, latent.rotated]
        self.linear_down_proj = WholeLinear(shape.hidden_size, sum(self.parts), config)
        if query_rank:
            self.q_layernorm = RmsNorm(config, query_rank, eps=LATENT_NORM_EPSILON)
        self.kv_layernorm = RmsNorm(config, latent.rank, eps=LATENT_NORM_EPSILON)
        common: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": True,
            "tp_group": self.tp_group,
        }
        self.linear_q_up_proj = ColumnParallelLinear(
            query_rank or shape.hidden_size, sizes["query"], gather_output=False, **common
        )
        self.linear_kv_up_proj = ColumnParallelLinear(
            latent.rank, sizes["keys_values"], gather_output=False, **common
        )
        self.linear_proj = RowParallelLinear(
            sizes["values"], shape.hidden_size, input_is_parallel=True, **common
        )

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: PackContext, **__: Any
    ) -> tuple[Tensor, None]:
        """[t', 1, h] -> ([t', 1, h], no bias)."""
        pack, latent = packed_seq_params, self.latent
        rotation = pack.rotation_of(None)
        query_latent, own, shared = self.linear_down_proj(hidden_states).split(self.parts, dim=-1)
        if latent.query_rank:
            hidden_states = self.q_layernorm(query_latent)
        query = self._heads(self.linear_q_up_proj(hidden_states)[0])  # [t, H, head_dim]
        keys_values = self._heads(self.linear_kv_up_proj(self.kv_layernorm(own))[0])
        fixed = self.head_dim - latent.rotated
        key, value = keys_values.split([fixed, latent.value], dim=-1)
        rotated = rotation.apply(_by_halves(self._all_tokens(shared)))  # [t, 1, rotated]
        key = torch.cat((key, rotated.expand(-1, key.shape[1], -1)), dim=-1)
        still, turning = query.split([fixed, latent.rotated], dim=-1)
        query = torch.cat((still, rotation.apply(_by_halves(turning))), dim=-1)
        value = F.pad(value, (0, self.head_dim - latent.value))
        plan, scale = pack.plan(None), latent.score_factor * self.head_dim**-0.5
        out = context_attention(query, key, value, plan=plan, group=self.cp_group, scale=scale)
        out = out[..., : latent.value].flatten(1)  # [t, H * value]
        return self.linear_proj(out[:, None])[0], None

    def _heads(self, x: Tensor) -> Tensor:
        """View [t, 1, H * size] as [t, H, size]."""
        heads = self.config.num_attention_heads // self.tp_group.size()
        return x.squeeze(1).unflatten(-1, (heads, -1))

    def _all_tokens(self, x: Tensor) -> Tensor:
        """Return the keys that all heads share, [t', 1, size], for all tokens: [t, 1, size].

        Each rank's heads have a part of their gradient, so it is summed.
        """
        if self.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(
                x, tensor_parallel_output_grad=True, group=self.tp_group
            )
        return tensor_parallel.copy_to_tensor_model_parallel_region(x, group=self.tp_group)


def _by_halves(x: Tensor) -> Tensor:
    """Move the pairs that are rotated together from neighbours to halves; [..., d] -> [..., d].

    Queries and keys are moved alike, so their products do not change.
    """
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


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
    """Adapter of a column-parallel linear; its factor B is sharded."""

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
    """Adapter of a row-parallel linear; its factor A is sharded."""

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


def sum_rows(rows: Tensor, rows_of_token: Tensor) -> Tensor:
    """Add each token's rows in order: [N, h] at [T, k] -> [T, h] in the dtype of rows."""
    total = torch.promote_types(rows.dtype, torch.float32)
    first, *others = rows_of_token.unbind(1)
    out = rows.index_select(0, first).to(total)
    for row in others:
        out += rows.index_select(0, row)
    return out.to(rows.dtype)


def find_rows(token_of_row: Tensor, tokens: int) -> Tensor:
    """Return the rows of each token in the order of its experts: [N] -> [T, k]."""
    if not tokens:
        return token_of_row.new_empty(0, 1)
    return token_of_row.argsort(stable=True).view(tokens, -1)


class _Permute(torch.autograd.Function):
    """Copy each token to its rows; gradients of its rows are added."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_of_row: Tensor) -> Tensor:
        ctx.save_for_backward(find_rows(token_of_row, len(tokens)))
        return tokens.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_rows(gradient, *ctx.saved_tensors), None


class _Unpermute(torch.autograd.Function):
    """Add the rows of each token; its gradient is copied to them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return sum_rows(rows, find_rows(token_of_row, tokens))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, **options: Any
) -> tuple[Any, ...]:
    """Do what Megatron's `permute` does; see there."""
    if options.get("fused"):
        return _MEGATRON_PERMUTE(tokens, routing_map, probs=probs, **options)
    # The rows of a tensor without columns: Megatron's order of rows, and nothing to copy.
    _, *others = _MEGATRON_PERMUTE(tokens.detach()[:, :0], routing_map, probs=probs, **options)
    return _Permute.apply(tokens, others[1]), *others


def unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, restore_shape: torch.Size, **options: Any
) -> Tensor:
    """Do what Megatron's `unpermute` does where `permute` made the rows; see there."""
    if options.get("fused"):
        return _MEGATRON_UNPERMUTE(permuted_tokens, sorted_indices, restore_shape, **options)
    out: Tensor = _Unpermute.apply(permuted_tokens, sorted_indices, restore_shape[0])
    return out


_MEGATRON_PERMUTE, _MEGATRON_UNPERMUTE = moe_utils.permute, moe_utils.unpermute
token_dispatcher.permute, token_dispatcher.unpermute = permute, unpermute
