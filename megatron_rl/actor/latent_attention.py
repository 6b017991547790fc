"""Multi-head latent attention of a pack (arXiv 2405.04434, section 2.1), on Megatron's linears.

    [c_q; c; k_r] = W_down x,    q = W_q norm(c_q),    [k; v] = W_kv norm(c),    by head
    out = W_o attend([q_n; rotate(q_r)], [k; rotate(k_r)], v)

All heads share k_r; without a query latent, q = W_q x. Megatron's own module has neither packs nor
context parallelism with our shards. Here every rank has all of W_down and, under sequence
parallelism, projects its own tokens; what is gathered then are latents, smaller than hidden states.
Values are padded with zeros to the size of keys, so that attention is that of other models.
Shapes: t tokens of this rank, t' = t / tp with sequence parallelism, H local heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.actor.layers import PackContext
from megatron_rl.actor.norms import RmsNorm
from megatron_rl.distributed.context_attention import context_attention
from megatron_rl.models.shape import ModelShape

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
