"""Transformer Engine layers: fused norms, linears (also with adapters), THD attention, experts.

Importing this module requires Transformer Engine.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.actor.layers import (
    ColumnAdapter,
    RowAdapter,
    build_local_layer_spec,
    window_of_layer,
)
from megatron_rl.distributed.context_attention import context_attention
from megatron_rl.models.shape import ModelShape


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


__all__ = ["TransformerEngineAttention", "TENorm", "build_transformer_engine_spec"]


class TransformerEngineAttention(TEDotProductAttention):
    """Attention that rotates queries and keys, then calls Transformer Engine's THD attention.

    Our attention handles packs in which a sequence continues another sequence, which Transformer
    Engine's cannot express. Under context parallelism Transformer Engine exchanges keys and values
    in a ring. It expects the same sharding as `SequenceLayout`: of every sequence, chunk r followed
    by chunk 2 cp - 1 - r (`thd_partition_src_index` in its fused_attn/context_parallel.cu).
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **kwargs: Any) -> None:
        super().__init__(config, layer_number, **kwargs)
        self.kept_packed_seq_params.add("pad_between_seqs")
        self.group, self.scale = kwargs["pg_collection"].cp, kwargs.get("softmax_scale")
        self.window = window_of_layer(config, layer_number)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[t, H, d], [t, K, d], [t, K, d] -> [t, H * d]."""
        pack = kwargs.pop("packed_seq_params")
        # Transformer Engine compares strides, even for a single head; on CUDA these are views.
        rotation = pack.rotation_of(None)
        query, key = (rotation.apply(x).flatten(1).view(x.shape) for x in (query, key))
        if pack.layout.parents:
            plan = pack.plan(self.window)
            out = context_attention(
                query, key, value, plan=plan, group=self.group, scale=self.scale
            )
            return out.flatten(1)
        return super().forward(
            query, key, value, *args, packed_seq_params=pack.boundaries, **kwargs
        )


def build_transformer_engine_spec(shape: ModelShape, *, experts: bool) -> ModuleSpec:
    """Build Megatron's Transformer Engine layer spec with explicit rotary positions."""
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.experts.num_experts if shape.experts and experts else None,
        moe_grouped_gemm=experts,
        qk_layernorm=shape.qk_norm,
    )
    layer = spec.submodules
    layer.self_attention.submodules.core_attention = TransformerEngineAttention
    # Checkpoints use the tensor names of local layers, so that either kind can load them.
    local = build_local_layer_spec(shape, experts=experts).submodules
    layer.sharded_state_dict_keys_map = local.sharded_state_dict_keys_map
    return spec
