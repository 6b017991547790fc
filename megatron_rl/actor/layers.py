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
"""

from __future__ import annotations

from collections.abc import Iterator
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
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megatron_rl.actor.elementwise import geglu, rms_norm, swiglu
from megatron_rl.actor.rotary import PackRotation
from megatron_rl.distributed.attention_plan import AttentionPlan, build_attention_plan
from megatron_rl.distributed.collectives import Group
from megatron_rl.distributed.context_attention import context_attention
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.models.architectures.gpt_oss import ALPHA, LIMIT
from megatron_rl.models.shape import ModelShape


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
        """Return the rotation in layers with this window."""
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
        window, flags = config.window_size, config.window_attn_skip_freq
        has_window = is_layer_window_attention(window, flags, layer_number)
        self.window = window[0] + 1 if has_window else None

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
