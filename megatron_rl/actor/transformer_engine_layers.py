"""Megatron's layers of Transformer Engine: fused norms, linears and THD attention, grouped experts.

Import it only where Transformer Engine is installed.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_rl.actor.layers import build_local_layer_spec
from megatron_rl.models.shape import ModelShape

__all__ = ["TransformerEngineAttention", "TENorm", "build_transformer_engine_spec"]


class TransformerEngineAttention(TEDotProductAttention):
    """Rotates queries and keys, then lets Transformer Engine attend inside each sequence.

    Under context parallelism it exchanges keys and values in a ring. It expects of every sequence
    what `SequenceLayout` gives this rank: chunks r and 2 cp - 1 - r, one after the other
    (`thd_partition_src_index` in its fused_attn/context_parallel.cu).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept_packed_seq_params.add("pad_between_seqs")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[t, H, d], [t, K, d], [t, K, d] -> [t, H * d]."""
        pack = kwargs.pop("packed_seq_params")
        # It compares strides, also of a single head; on CUDA these are views.
        query, key = (pack.rotation.apply(x).flatten(1).view(x.shape) for x in (query, key))
        return super().forward(
            query, key, value, *args, packed_seq_params=pack.boundaries, **kwargs
        )


def build_transformer_engine_spec(shape: ModelShape) -> ModuleSpec:
    """Megatron's layer of Transformer Engine modules, with explicit rotary positions."""
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.experts.num_experts if shape.experts else None,
        moe_grouped_gemm=shape.experts is not None,
        qk_layernorm=shape.qk_norm,
    )
    layer = spec.submodules
    layer.self_attention.submodules.core_attention = TransformerEngineAttention
    # Checkpoints call every tensor as those of local layers do, so that either loads the other's.
    local = build_local_layer_spec(shape).submodules
    layer.sharded_state_dict_keys_map = local.sharded_state_dict_keys_map
    return spec
