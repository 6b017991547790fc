"""The policy: Megatron-core's GPTModel with log-probs of the response tokens as output.

GPTModel's own forward pass computes logits; ours stops at the hidden states, and the vocabulary-
parallel head converts those of response tokens to log-probs. Rotary positions are explicit, so
Megatron's position embedding is disabled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.actor.expert_bias import add_expert_biases
from megatron_rl.actor.layer_choice import (
    build_block_spec,
    fuse_gradient_accumulation,
    mark_tensor_parallel,
)
from megatron_rl.actor.layers import PackContext
from megatron_rl.actor.settings import GEMM_TOKENS
from megatron_rl.distributed.topology import Topology
from megatron_rl.distributed.vocab_parallel import VocabShard, token_logprobs
from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import layout_of
from megatron_rl.resharding.pieces import padded_vocabulary

_EXTRA_STATE = "_extra_state"  # in the names of module state other than parameters


@dataclass
class ModelInput:
    """This rank's shard of one pack, as model input."""

    tokens: Tensor  # [1, t]
    labels: Tensor  # [n] of response positions
    response_positions: Tensor  # [n] local positions whose log-probs are computed
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
        layers = layout_of(topology).chunks(shape)[chunk]
        super().__init__(
            config=config,
            transformer_layer_spec=build_block_spec(shape, config=config, layers=layers),
            vocab_size=padded_vocabulary(shape.vocab_size, tp_size=topology.tp_size),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=chunk == 0,
            post_process=chunk == chunks - 1,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",
            vp_stage=virtual_stage,
        )
        self.temperature = temperature
        self.embedding_scale: float | None = None
        if shape.traits.scaled_embeddings:  # rounded, as in training
            scale = torch.tensor(shape.hidden_size**0.5, device="cpu").to(config.params_dtype)
            self.embedding_scale = scale.item()
        rows = padded_vocabulary(shape.vocab_size, tp_size=topology.tp_size) // topology.tp_size
        self.vocab_shard = VocabShard(rows * topology.tp_rank, shape.vocab_size, topology.tp_group)
        if shape.experts is not None and shape.experts.scoring == "sigmoid":
            add_expert_biases(self)
        mark_tensor_parallel(self)
        fuse_gradient_accumulation(self)

    def forward(self, inputs: ModelInput, *, entropy: bool = False) -> Tensor:
        """Return hidden states, or on the last stage log-probs [1, t], 0 off the mask.

        With `entropy` the last stage returns log-probs and entropies, [2, t].
        """
        self._check_tokens(inputs.tokens.shape[1])
        hidden = self.embedding(inputs.tokens, None) if self.pre_process else None
        if hidden is not None and self.embedding_scale is not None:
            hidden = hidden * self.embedding_scale
        if hidden is not None and torch.is_grad_enabled():
            hidden.requires_grad_()  # of a frozen embedding: recomputed layers need it
        with inputs.context.selected_rotations():
            hidden = self.decoder(
                hidden_states=hidden, attention_mask=None, packed_seq_params=inputs.context
            )
        return self._run_head(hidden, inputs, entropy) if self.post_process else hidden

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return parameters only, with the same keys for local and Transformer Engine layers.

        "_extra_state" is the history of delayed fp8 scaling, which the actor does not use.
        """
        state = super().sharded_state_dict(*args, **kwargs)
        return {key: value for key, value in state.items() if _EXTRA_STATE not in key}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load parameters as torch does; modules keep their current extra state."""
        extra = {key: value for key, value in self.state_dict().items() if _EXTRA_STATE in key}
        return super().load_state_dict({**extra, **state_dict}, *args, **kwargs)

    def announce_head_gradient(self) -> None:
        """Return a zero gradient for the head's weight, so that Megatron's hook runs.

        The head adds the weight's gradient to the buffer itself.
        """
        if self.post_process:
            weight: Any = self._head_weight()
            weight.returns_zero_gradient = weight.requires_grad

    def _head_weight(self) -> Tensor:
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def _check_tokens(self, tokens: int) -> None:
        """Raise ValueError if fp8 products do not support this number of tokens per rank."""
        config = self.config
        if not config.fp8:
            return
        unit = GEMM_TOKENS[config.fp8_recipe]
        multiple = unit * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        if tokens % multiple:
            raise UserError(
                f"a rank has {tokens} tokens of a pack; with fp8={config.fp8_recipe} they must be "
                f"a multiple of {multiple}: plan packs with gemm_tokens={unit}"
            )

    def _run_head(self, hidden: Tensor, inputs: ModelInput, entropy: bool) -> Tensor:
        """Compute float32 log-probs (and entropies) of labels; [t / tp, 1, h] -> [1|2, t]."""
        group = self.vocab_shard.group
        if self.config.sequence_parallel:
            # The head returns this rank's part of the gradient; the gather's dual sums the parts.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=group
            )
        hidden = hidden.squeeze(1).index_select(0, inputs.response_positions)
        if not self.config.sequence_parallel:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)
        weight = self._head_weight()
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
