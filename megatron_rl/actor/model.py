"""The policy: Megatron-core's GPTModel that ends in log-probs of the response tokens.

GPTModel's own forward makes logits; ours stops at the hidden states and lets the vocabulary-
parallel head turn those of response tokens into log-probs. Rotary positions are explicit, so
Megatron's position embedding is switched off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.actor.layers import PackContext, RmsNorm, build_layer_spec
from megatron_rl.distributed.topology import Topology
from megatron_rl.distributed.vocab_parallel import VocabShard, token_logprobs
from megatron_rl.resharding.architectures import ModelShape
from megatron_rl.resharding.pieces import padded_vocabulary


@dataclass
class ModelInput:
    """This rank's shard of one pack, as the model reads it."""

    tokens: Tensor  # [1, t]
    labels: Tensor  # [n] of response positions
    response_positions: Tensor  # [n] local positions whose log-probs are wanted
    context: PackContext


class PolicyModel(GPTModel):
    """One model chunk of the policy: GPTModel with explicit rotary positions and our head."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        config: TransformerConfig,
        topology: Topology,
        temperature: float,
        virtual_stage: int | None = None,
    ) -> None:
        chunk = (virtual_stage or 0) * topology.pp_size + topology.pp_rank
        chunks = topology.pp_size * topology.virtual_stages
        spec = build_layer_spec(shape)
        depth = get_num_layers_to_build(config, virtual_stage, topology.pp_rank)
        super().__init__(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[spec] * depth, layer_norm=RmsNorm
            ),
            vocab_size=padded_vocabulary(shape.vocab_size, tp_size=topology.tp_size),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=chunk == 0,
            post_process=chunk == chunks - 1,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",
            vp_stage=virtual_stage,
        )
        self.temperature = temperature
        rows = padded_vocabulary(shape.vocab_size, tp_size=topology.tp_size) // topology.tp_size
        self.vocab_shard = VocabShard(rows * topology.tp_rank, shape.vocab_size, topology.tp_group)
        _mark_tensor_parallel(self)

    def forward(self, inputs: ModelInput, *, entropy: bool = False) -> Tensor:
        """Hidden states for the next stage; on the last stage log-probs [1, t], 0 off the mask.

        With `entropy` [2, t]: log-probs, and the policy's entropies at the same positions.
        """
        hidden = self.embedding(inputs.tokens, None) if self.pre_process else None
        hidden = self.decoder(
            hidden_states=hidden, attention_mask=None, packed_seq_params=inputs.context
        )
        return self._run_head(hidden, inputs, entropy) if self.post_process else hidden

    def _run_head(self, hidden: Tensor, inputs: ModelInput, entropy: bool) -> Tensor:
        """What the response positions say of their labels, float32; [t / tp, 1, h] -> [1|2, t]."""
        group = self.vocab_shard.group
        if self.config.sequence_parallel:
            # The head's gradient is one shard's part: the dual of this gather sums the parts.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=group
            )
        hidden = hidden.squeeze(1).index_select(0, inputs.response_positions)
        if not self.config.sequence_parallel:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)
        weight = self.shared_embedding_or_output_weight()
        if not self.share_embeddings_and_output_weights:
            weight = self.output_layer.weight
        logprobs, entropies = token_logprobs(
            hidden,
            weight,
            inputs.labels,
            shard=self.vocab_shard,
            temperature=self.temperature,
            entropy=entropy,
            into_main_grad=hasattr(weight, "main_grad"),
        )
        values = logprobs[None] if entropies is None else torch.stack((logprobs, entropies))
        full = values.new_zeros(len(values), inputs.tokens.shape[1])
        return full.index_copy(1, inputs.response_positions, values)


def _mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark weights that are cut over tensor parallelism, as Megatron's initialisation would.

    The gradient norm counts unmarked parameters on the first tensor-parallel rank only.
    """
    cut_dimension = {ColumnParallelLinear: 0, RowParallelLinear: 1, VocabParallelEmbedding: 0}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module) in cut_dimension and weight is not None:
            dimension = cut_dimension[type(module)]
            if not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, True, dimension, 1)
