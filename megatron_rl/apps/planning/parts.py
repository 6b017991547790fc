"""Parallel layout of a model on devices, and the number of parameters per rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from megatron_rl.models.adapters import adapted_linears
from megatron_rl.models.shape import ModelShape, weight_shapes
from megatron_rl.models.weights import Layers, Weight
from megatron_rl.resharding.layouts import ActorLayout
from megatron_rl.resharding.pieces import padded_vocabulary

Recompute = Literal["none", "selective", "full"]
KINDS = get_args(Layers)


@dataclass(frozen=True)
class Parts(ActorLayout):
    """Layout of the actor, its activation recomputation and the engines' tensor parallel size.

    tokens: size of a pack, over all its context-parallel shards. expert_share: tokens of the
    busiest expert-parallel rank over an equal share. lora_rank: of the adapters that are trained
    instead of the weights, on the linears lora_targets; 0 without adapters. lora_versions: of
    adapters that the engine computes with itself; 0: it receives sums.
    """

    rollout_tensor: int = 1
    recompute: Recompute = "none"
    tokens: int = 16384
    expert_share: float = 1.0
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_versions: int = 0

    @property
    def replicas(self) -> int:
        """Number of ranks with the same non-expert parameters."""
        return self.context * self.data

    @property
    def expert_slices(self) -> int:
        """Number of ranks that share each expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def expert_replicas(self) -> int:
        """Number of ranks with the same expert parameters."""
        return self.tensor * self.replicas // (self.expert * self.expert_slices)

    def stages(self, shape: ModelShape) -> list[int]:
        """Return the stages that may need the most: first, last, and one with the most layers."""
        deepest = max(range(self.pipeline), key=lambda stage: self.depth(shape, stage=stage))
        return sorted({0, deepest, self.pipeline - 1})

    @property
    def alignment(self) -> int:
        """Multiple to which sequences are padded."""
        return 2 * self.context * self.tensor

    @property
    def local_tokens(self) -> int:
        """Tokens of a full pack on one rank."""
        return self.tokens // self.context

    def __str__(self) -> str:
        return (
            f"tp{self.tensor} pp{self.pipeline} cp{self.context} ep{self.expert} "
            f"etp{self.expert_slices} dp{self.data} "
            f"vllm{self.rollout_tensor} recompute={self.recompute} tokens={self.tokens}"
        )


@dataclass(frozen=True)
class RankParameters:
    """Number of parameters of one rank, dense and expert."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """Dense plus expert parameters."""
        return self.dense + self.expert


def count_parameters(shape: ModelShape, parts: Parts, *, stage: int) -> RankParameters:
    """Count the parameters of a rank of pipeline stage `stage`, including vocabulary padding."""
    return _count(
        shape,
        parts.tensor,
        parts.expert,
        parts.expert_slices,
        depths=_depths(shape, parts, stage),
        first=stage == 0,
        last=stage == parts.pipeline - 1,
    )


def _depths(shape: ModelShape, parts: Parts, stage: int) -> tuple[int, ...]:
    """Count the layers of each kind of a stage, in the order of `KINDS`."""
    chunks = parts.layers(shape, stage=stage)
    return tuple(sum(len(shape.layers_with(kind, chunk)) for chunk in chunks) for kind in KINDS)


@lru_cache(maxsize=4096)
def _count(
    shape: ModelShape,
    tensor: int,
    expert: int,
    slices: int,
    *,
    depths: tuple[int, ...],
    first: bool,
    last: bool,
) -> RankParameters:
    dense = experts = 0
    for weight in shape.weights:
        depth = depths[KINDS.index(weight.layers)]
        size = _elements(weight, shape, slices if weight.part == "expert" else tensor)
        if weight.part == "layer":
            dense += depth * size
        elif weight.part == "expert":
            assert shape.experts is not None, "experts without a shape"
            experts += depth * size * shape.experts.num_experts // expert
        elif (weight.part == "first" and first) or (weight.part == "last" and last):
            dense += size
        elif weight.part == "first" and last and shape.tied_embeddings:
            dense += size  # a copy of the embedding, which is the output layer
    return RankParameters(dense, experts)


def count_adapters(shape: ModelShape, parts: Parts, *, stage: int) -> RankParameters:
    """Count the adapters' parameters of a rank: one factor is cut like the weight."""
    dense = experts = 0
    depths = _depths(shape, parts, stage)
    for weight, cut, whole in adapted_linears(shape, parts.lora_targets):
        depth = depths[KINDS.index(weight.layers)]
        if weight.part == "expert":
            assert shape.experts is not None, "experts without a shape"
            local = depth * shape.experts.num_experts // parts.expert
            experts += local * parts.lora_rank * (cut // parts.expert_slices + whole)
        else:
            dense += depth * parts.lora_rank * (cut // parts.tensor + whole)
    return RankParameters(dense, experts)


def count_trained(shape: ModelShape, parts: Parts, *, stage: int) -> RankParameters:
    """Count the parameters of a rank that have gradients: those of adapters, or all."""
    count = count_adapters if parts.lora_rank else count_parameters
    return count(shape, parts, stage=stage)


def _elements(weight: Weight, shape: ModelShape, tensor: int) -> int:
    """Count the elements of one layer's (or one expert's) weight on one rank."""
    whole = sum(math.prod(size) for size in weight_shapes(weight, shape=shape))
    if weight.cut == "replicated":
        return whole
    if weight.cut == "vocabulary":
        padded = padded_vocabulary(shape.vocab_size, tp_size=tensor)
        return padded // tensor * shape.hidden_size
    return whole // tensor


def model_parameters(shape: ModelShape) -> int:
    """Count the parameters of the whole model."""
    return count_parameters(shape, Parts(), stage=0).total


def active_parameters(shape: ModelShape) -> int:
    """Count the parameters used per token, without the input embedding."""
    counted = count_parameters(shape, Parts(), stage=0)
    embedding = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
    if shape.experts is None:
        return counted.total - embedding
    used = shape.experts.experts_per_token / shape.experts.num_experts
    return round(counted.dense + used * counted.expert) - embedding


def engine_parameters(shape: ModelShape, tensor: int) -> int:
    """Count the parameters of one vLLM rank; key-value heads are replicated over excess ranks."""
    total = count_parameters(shape, Parts(tensor=tensor), stage=0).total
    if (replication := tensor // shape.num_query_groups) > 1:
        keys = 2 * shape.num_query_groups * shape.head_dim * shape.hidden_size // tensor
        total += (replication - 1) * keys * shape.num_layers
    return total


def state_bytes(shape: ModelShape, tensor: int) -> float:
    """Return the bytes of one sequence's states in gated delta nets on one vLLM rank.

    Float32 states of all layers, and the last inputs of their convolutions in bfloat16.
    """
    if shape.delta is None:
        return 0.0
    taps = (shape.delta.kernel - 1) * shape.delta.conv_channels
    return len(shape.delta.layers) * (4 * shape.delta.state_elements + 2 * taps) / tensor


def cached_elements(shape: ModelShape, tensor: int) -> float:
    """Count what one vLLM rank caches of a token: keys and values of its heads, or latents.

    With fewer key-value heads than ranks, heads are replicated; latents always are.
    """
    if shape.latent is not None:
        return shape.num_layers * shape.sizes["latent"]
    layers = shape.layers_with("attention") if shape.delta else range(shape.num_layers)
    return 2 * len(layers) * max(1.0, shape.num_query_groups / tensor) * shape.head_dim
