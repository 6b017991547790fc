"""Layers of the policy, and the description of a pack that their attention receives.

Without Transformer Engine the layers follow Megatron's local spec with our norm and core attention.
Megatron's torch norm does not support sequence parallelism, and its dot-product attention supports
neither context parallelism nor packed sequences; ours support all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.actor.elementwise import rms_norm, swiglu
from megatron_rl.actor.rotary import PackRotation
from megatron_rl.distributed.attention_plan import AttentionPlan, build_attention_plan
from megatron_rl.distributed.collectives import Group
from megatron_rl.distributed.context_attention import context_attention
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.models.shape import ModelShape


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
    `plan` for our attention, `boundaries` for Transformer Engine's.

    layout: on the device; host: the same layout on the host, read without a device sync. window:
    tokens that every layer's queries attend to; None: all up to themselves.
    """

    qkv_format: str = "thd"
    layout: SequenceLayout | None = None
    host: SequenceLayout | None = None
    rotation: PackRotation | None = None
    window: int | None = None
    routing: Any = None  # `actor.routing.PackRouting` of the present pass; None: routers choose

    @cached_property
    def plan(self) -> AttentionPlan:
        """Attention plan of this rank."""
        assert self.layout is not None and self.host is not None, "a pack without its layout"
        return build_attention_plan(self.host, window=self.window, device=self.layout.device)

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


class RmsNorm(torch.nn.Module):
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467).

    Under sequence parallelism each tensor-parallel rank normalises different tokens; the attribute
    on the weight makes Megatron sum its gradient over the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return rms_norm(x, self.weight, eps=self.eps)


class GatedMlp(MLP):
    """Megatron's dense MLP with our SwiGLU; on CUDA with Megatron's fused kernel."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """[t, 1, h] -> ([t, 1, h], no bias)."""
        if self.config.bias_activation_fusion:
            return super().forward(hidden_states, *args, **kwargs)
        both, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(both))


class PackedCoreAttention(torch.nn.Module):
    """Core attention that rotates queries and keys, then attends within each sequence."""

    def __init__(self, config: TransformerConfig, pg_collection: Any = None, **_: Any):
        super().__init__()
        if config.softmax_scale is not None:
            raise ValueError("a softmax scale other than 1 / sqrt(head size) is not supported")
        self.group: Group = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """[t, H, d], [t, K, d], [t, K, d] -> [t, H * d]."""
        pack = kwargs["packed_seq_params"]
        query, key = pack.rotation.apply(query), pack.rotation.apply(key)
        out = context_attention(query, key, value, plan=pack.plan, group=self.group)
        return out.flatten(1)


def build_local_layer_spec(shape: ModelShape) -> ModuleSpec:
    """Build Megatron's local layer spec with our norm and attention."""
    spec = get_gpt_layer_local_spec(
        num_experts=shape.experts.num_experts if shape.experts else None,
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
    if shape.experts is None:
        layer.mlp.module = GatedMlp
    return spec
