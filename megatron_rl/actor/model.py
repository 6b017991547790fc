"""The policy: Megatron-core's GPTModel with log-probs of the response tokens as output.

GPTModel's own forward pass computes logits; ours stops at the hidden states, and the vocabulary-
parallel head converts those of response tokens to log-probs. Rotary positions are explicit, so
Megatron's position embedding is disabled. Layers are Transformer Engine's or Megatron's local ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import megatron_rl.actor.layers  # noqa: F401 - replaces Megatron's functions
from megatron_rl.actor.gated_delta_net import GatedDeltaNet
from megatron_rl.actor.layers import LatentAttention, PackContext, RmsNorm, build_local_layer_spec
from megatron_rl.actor.settings import GEMM_TOKENS, ActorSettings
from megatron_rl.distributed.topology import Topology
from megatron_rl.distributed.vocab_divergence import token_divergences
from megatron_rl.distributed.vocab_parallel import VocabShard, token_logprobs
from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import layout_of
from megatron_rl.resharding.pieces import padded_vocabulary
from megatron_rl.types import Divergence, ReferenceHead, ReferenceParts, ReferenceTop

# Compute capabilities whose cuDNN attends THD packs in linear memory with correct gradients. Below
# 9.0 Transformer Engine does not use cuDNN for THD; on 12.x gradients were wrong
# (github.com/NVIDIA/TransformerEngine issue 3333).
FIRST_CAPABILITY, FIRST_WRONG_CAPABILITY = (9, 0), (12, 0)


def uses_transformer_engine(
    settings: ActorSettings,
    *,
    device: torch.device,
    window: int | None = None,
    cp_size: int = 1,
    local_only: str | None = None,
) -> bool:
    """Return True if the model uses Transformer Engine's layers.

    By default they are used if installed, in bfloat16, on a CUDA device of compute capability 9.0
    to below 12.0, unless the model has a sliding window (`window` tokens) under context
    parallelism, or adapters. Raises ValueError if they are required but not installed, with such a
    window, or for a model that has `local_only`, which they lack.
    """
    required = settings.transformer_engine or settings.fp8 is not None
    window_in_ring = window is not None and cp_size > 1
    if required and local_only:
        raise UserError(
            f"transformer_engine={settings.transformer_engine}, fp8={settings.fp8}, but the model "
            f"has {local_only}, which Transformer Engine's layers lack; unset both"
        )
    if required and window_in_ring:
        raise UserError(
            f"transformer_engine={settings.transformer_engine}, fp8={settings.fp8}, but the model "
            f"has a sliding window of {window} tokens and parallel.context={cp_size}: Transformer "
            "Engine's ring of keys and values does not support windows; set parallel.context to 1, "
            "or unset transformer_engine and fp8"
        )
    if required and not te.HAVE_TE:
        raise UserError(
            f"transformer_engine={settings.transformer_engine}, fp8={settings.fp8}, but Megatron "
            "finds no Transformer Engine: `megatron-rl doctor` prints how to install it, or unset "
            "them"
        )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if settings.transformer_engine is None and not required:
        return (
            te.HAVE_TE
            and not window_in_ring
            and local_only is None
            and settings.lora is None  # no GPU has run adapters on its layers
            and settings.dtype == torch.bfloat16
            and capability is not None
            and FIRST_CAPABILITY <= capability < FIRST_WRONG_CAPABILITY
        )
    if required and capability is not None and capability >= FIRST_WRONG_CAPABILITY:
        warnings.warn(
            f"Transformer Engine on compute capability {capability[0]}.{capability[1]}: its "
            "attention has computed wrong gradients there; run tools/gpu_check.sh, or set "
            "transformer_engine to false",
            stacklevel=2,
        )
    return bool(required)


def build_block_spec(
    shape: ModelShape, *, config: TransformerConfig, layers: range
) -> TransformerBlockSubmodules:
    """Build the spec of these layers of the model and a final norm."""
    if config.transformer_impl == "transformer_engine":
        # This import fails without Transformer Engine.
        from megatron_rl.actor.transformer_engine import (
            TENorm,
            build_transformer_engine_spec,
        )

        build, norm = build_transformer_engine_spec, TENorm
    else:
        build, norm = build_local_layer_spec, RmsNorm
    nets = shape.layers_with("delta") if shape.delta else ()
    kinds = [(number in shape.layers_with("experts"), number in nets) for number in layers]
    specs = {kind: build(shape, experts=kind[0]) for kind in set(kinds)}
    for (_, is_net), spec in specs.items():
        if is_net or shape.latent:
            module = GatedDeltaNet if is_net else LatentAttention
            spec.submodules.self_attention = ModuleSpec(module=module, params={"shape": shape})
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=norm)


def mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark weights that are sharded over tensor parallelism, as Megatron's initialisation would.

    The gradient norm counts unmarked parameters on the first tensor-parallel rank only. Megatron
    does not pass the sharding to Transformer Engine's grouped linears, so from version 2.13 on they
    do not mark their weights.
    """
    shard_dimension = {ColumnParallelLinear: 0, RowParallelLinear: 1, VocabParallelEmbedding: 0}
    if te.HAVE_TE:
        shard_dimension[te.TEColumnParallelGroupedLinear] = 0
        shard_dimension[te.TERowParallelGroupedLinear] = 1
    for module in model.modules():
        if type(module) not in shard_dimension:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if name.startswith("weight") and not hasattr(parameter, "tensor_model_parallel"):
                dimension = shard_dimension[type(module)]
                set_tensor_model_parallel_attributes(parameter, True, dimension, 1)


def fuse_gradient_accumulation(model: torch.nn.Module) -> None:
    """Let Transformer Engine's linears add their weight gradients to the float32 `main_grad`.

    Otherwise each micro-batch's gradient is rounded to the weight's dtype and added afterwards.
    Megatron's own option is not used: it also requires apex for the output layer, whose gradient
    our head accumulates in float32 anyway.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            setattr(module, "fuse_wgrad_accumulation", True)  # noqa: B010 - mypy takes it for a tensor


def add_expert_biases(model: torch.nn.Module) -> None:
    """Give every router a zero bias for each expert (arXiv 2408.15664), constant in training.

    Megatron's own setting also counts tokens in every pass, sums them over ranks after every update
    and moves the biases towards equal loads. Here a router has only the buffer, which Megatron's
    routing and checkpoints use. It is float32 in models of any dtype.
    """
    for router in model.modules():
        if isinstance(router, TopKRouter):
            zeros = torch.zeros(
                router.num_experts, dtype=torch.float32, device=router.weight.device
            )
            del router.expert_bias
            router.register_buffer("expert_bias", zeros)


_EXTRA_STATE = "_extra_state"  # in the names of module state other than parameters


@dataclass
class ModelInput:
    """This rank's shard of one pack, as model input."""

    tokens: Tensor  # [1, t]
    labels: Tensor  # [n] of response positions
    response_positions: Tensor  # [n] local positions whose log-probs are computed
    context: PackContext


@dataclass(frozen=True)
class HeadOutputs:
    """Selects the outputs of the last stage in addition to log-probs."""

    entropy: bool = False
    divergence: Divergence | None = None  # from the reference
    inputs_only: bool = False  # instead of everything else, the head's own inputs


LOGPROBS_ALONE = HeadOutputs()


class PolicyModel(GPTModel):
    """One model chunk of the policy: GPTModel with explicit rotary positions and our head."""

    trained_beside_adapters: tuple[str, ...] = ()  # names of parameters that LoRA does not freeze

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

    def forward(
        self,
        inputs: ModelInput,
        *,
        outputs: HeadOutputs = LOGPROBS_ALONE,
        reference: ReferenceHead | ReferenceTop | ReferenceParts | None = None,
        sampling_mask: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states, or on the last stage log-probs [1, t], 0 off the mask.

        sampling_mask [n, k]: tokens that log-probs and entropies are over (`token_logprobs`).

        Further rows are entropies and divergences from `reference`, as `outputs` requests; with
        `inputs_only` the last stage returns the hidden states of the n response tokens, [n, h].
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
        if not self.post_process:
            return hidden
        return self._run_head(hidden, inputs, outputs, reference, sampling_mask)

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
            weight: Any = self.head_weight()
            weight.returns_zero_gradient = weight.requires_grad

    def head_weight(self) -> Tensor:
        """Return this rank's rows of the output weight, on the last stage; [v, h]."""
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

    def _run_head(
        self,
        hidden: Tensor,
        inputs: ModelInput,
        outputs: HeadOutputs,
        reference: ReferenceHead | ReferenceTop | ReferenceParts | None,
        sampling_mask: Tensor | None,
    ) -> Tensor:
        """Compute the rows of `forward` in float32; [t / tp, 1, h] -> [1 to 3, t] or [n, h]."""
        group = self.vocab_shard.group
        if self.config.sequence_parallel:
            # The head returns this rank's part of the gradient; the gather's dual sums the parts.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=group
            )
        hidden = hidden.squeeze(1).index_select(0, inputs.response_positions)
        if not self.config.sequence_parallel:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)
        if outputs.inputs_only:
            return hidden
        weight = self.head_weight()
        logprobs, entropies = token_logprobs(
            hidden,
            weight,
            inputs.labels,
            shard=self.vocab_shard,
            temperature=self.temperature,
            entropy=outputs.entropy,
            into_main_grad=hasattr(weight, "main_grad"),
            sampling_mask=sampling_mask,
        )
        rows = [logprobs] if entropies is None else [logprobs, entropies]
        if outputs.divergence is not None:
            if reference is None:  # of a filler
                assert not len(hidden), "compute the reference's states before the update"
                reference = ReferenceHead(hidden.detach(), weight.detach())
            rows.append(
                token_divergences(
                    hidden,
                    weight,
                    reference,
                    divergence=outputs.divergence,
                    shard=self.vocab_shard,
                    temperature=self.temperature,
                    into_main_grad=hasattr(weight, "main_grad"),
                )
            )
        values = torch.stack(rows)
        full = values.new_zeros(len(values), inputs.tokens.shape[1])
        return full.index_copy(1, inputs.response_positions, values)
