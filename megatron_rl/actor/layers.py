"""Layers of the policy, and the description of a pack that their attention receives.

Without Transformer Engine the layers follow Megatron's local spec with our norm and core attention.
Megatron's torch norm does not support sequence parallelism, and its dot-product attention supports
neither context parallelism nor packed sequences; ours support all three.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megatron_rl.actor.clamped import ClampedExperts
from megatron_rl.actor.norms import GatedMlp, PostNormAttention, PostNormMlp, RmsNorm
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
