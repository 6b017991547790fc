"""Memory of one rank in each phase, by formula; research/docs/planner.md derives the formulas.

They describe the actor's local layers in bfloat16 on CUDA. The activations that a layer stores for
its backward pass follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (arXiv 2205.05198), for gated MLPs without dropout and attention that stores no score
matrix. Optimizer states are those of Megatron's distributed optimizer (Rajbhandari et al., ZeRO
stage 1, arXiv 1910.02054). Temporary memory at the peak was measured in dry runs of the actor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.apps.planning.devices import GIB
from megatron_rl.apps.planning.layer_bytes import (
    copies_per_token,
    expert_copies,
    kept_per_token,
    key_size,
    layer_kinds,
    mlp_per_token,
)
from megatron_rl.apps.planning.parts import (
    Parts,
    count_parameters,
    count_trained,
    engine_parameters,
)
from megatron_rl.distributed.vocab_parallel import MAX_TILE_TOKENS, TILE_ELEMENTS
from megatron_rl.models.adapters import slot_elements
from megatron_rl.models.shape import ModelShape

# Memory of a sleeping engine: CUDA graphs, buffers and communicators. vLLM logged "5.82 GiB memory
# is still in use" on a 96 GiB device, CUDA context included
# (imokuri.com/blog/2025/07/vllm-sleep-mode).
ENGINE_ASLEEP = 4 * GIB
# Memory that torch's allocator does not count or cannot use: the CUDA context, NCCL (0.5 to 0.7 GiB
# per communicator: github.com/NVIDIA/nccl issue 964), cuBLAS workspaces, fragmentation.
RESERVE = 6 * GIB
COMMUNICATOR = GIB // 2  # of a process group beyond those that the reserve covers
RESERVED_COMMUNICATORS = 4
BUCKETS = GIB  # two of `resharding.bucket_mib`
WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12  # bytes per parameter; replicas share optimizer states
PREPARED = 80  # bytes per token of a prepared pack, if all of its tokens are responses


@dataclass(frozen=True)
class Footprint:
    """Bytes in each phase on the rank that needs the most, without reserves."""

    states: int  # awake
    asleep: int
    train: int
    behavior: int
    push: int
    engine_weights: int


def footprint(
    shape: ModelShape, parts: Parts, *, micro_batches: int, packs: int = 1, prompt_part: float = 0.0
) -> Footprint:
    """Compute the footprint: in every phase, that of the pipeline stage that needs the most.

    micro_batches: per rank and update. packs: prepared packs that a rank keeps for the rollout
    batch. prompt_part: fraction of a pack's tokens that are prompt tokens, without log-probs.
    """
    stages = []
    for stage in parts.stages(shape):
        states, asleep = state_bytes(shape, parts, stage=stage)
        update = activation_bytes(
            shape, parts, stage=stage, micro_batches=micro_batches, prompt_part=prompt_part
        )
        prepared = packs * prepared_pack_bytes(shape, parts)
        behavior = asleep + forward_bytes(shape, parts, stage=stage) + prepared
        stages.append((states, asleep, states + update + prepared, behavior))
    states, asleep, train, behavior = map(max, zip(*stages, strict=True))
    engine = engine_bytes(shape, parts)
    return Footprint(states, asleep, train, behavior, asleep + engine + BUCKETS, engine)


def engine_bytes(shape: ModelShape, parts: Parts) -> int:
    """Return the bytes of one engine rank's weights and slots of adapters."""
    count = engine_parameters(shape, parts.rollout_tensor)
    if parts.lora_versions:
        count += parts.lora_versions * slot_elements(
            shape, rank=parts.lora_rank, targets=parts.lora_targets, tensor=parts.rollout_tensor
        )
    return WEIGHT * count


def state_bytes(shape: ModelShape, parts: Parts, *, stage: int) -> tuple[int, int]:
    """Return the bytes of weights, gradients and optimizer states of one rank, awake and asleep.

    A sleeping actor keeps only its weights and Megatron's buffer for gathered activations.
    """
    counts = count_parameters(shape, parts, stage=stage).total
    trained = count_trained(shape, parts, stage=stage)
    if parts.lora_rank:
        counts += trained.total
    optimizer = trained.dense / parts.replicas + trained.expert / parts.expert_replicas
    awake = WEIGHT * counts + GRADIENT * trained.total + OPTIMIZER * optimizer
    return int(awake), WEIGHT * counts + int(gathered_bytes(shape, parts))


def micro_batches_in_flight(parts: Parts, *, stage: int, micro_batches: int) -> int:
    """Return how many micro-batches' activations a stage stores at the same time under 1F1B."""
    return min(parts.pipeline - stage, micro_batches)


def activation_bytes(
    shape: ModelShape, parts: Parts, *, stage: int, micro_batches: int, prompt_part: float = 0.0
) -> int:
    """Return the bytes of stored activations and temporaries at the peak of an update."""
    tokens, entry = parts.local_tokens, _entry_bytes(shape, parts)
    in_flight = micro_batches_in_flight(parts, stage=stage, micro_batches=micro_batches)
    kept, working = 0.0, 0.0
    for kind, depth in layer_kinds(shape, parts, stage=stage):
        layer, mlp = kept_per_token(kind, parts) * tokens, mlp_per_token(kind, parts) * tokens
        stored, recomputed = layer, 0.0
        if parts.recompute == "full":
            stored, recomputed = entry, layer
        elif parts.recompute == "selective":
            stored, recomputed = layer - mlp, mlp + entry
        kept += depth * stored
        working = max(working, recomputed + _layer_working(kind, parts))
    last = stage == parts.pipeline - 1
    if last:  # the peak is before the last layer's backward pass
        working = max(working, entry + _head_bytes(shape, parts, prompt_part))
    kept += rotation_bytes(shape, parts)
    total = kept * in_flight + working + gathered_bytes(shape, parts)
    if parts.pipeline > 1:  # sent and received stage inputs are kept
        total += entry * (2 if last else in_flight + 1)
    return int(total)


def _entry_bytes(shape: ModelShape, parts: Parts) -> float:
    """Return the bytes of one micro-batch's hidden states, sharded by sequence parallelism."""
    return 2 * shape.hidden_size * parts.local_tokens / parts.tensor


def _layer_working(shape: ModelShape, parts: Parts) -> float:
    """Return the temporary bytes of one layer at its peak, besides stored activations.

    Dense: in the MLP's backward pass, gradients of gate and up (4 f), of their product (2 f) and of
    the layer's output, less the product itself (2 f), which is freed. Experts: in the forward pass.
    """
    if shape.experts is not None:
        return expert_copies(shape, parts)
    tokens, ffn = parts.local_tokens, shape.ffn_hidden_size / parts.tensor
    dense = 4 * tokens * ffn + 2 * tokens * shape.hidden_size / parts.tensor
    keys = 12 * key_size(shape, parts) * parts.tokens  # gathered, float32 gradients
    queries = 8 * shape.sizes["query"] / parts.tensor * tokens
    return max(dense, keys + queries - mlp_per_token(shape, parts) * tokens)


def _head_bytes(shape: ModelShape, parts: Parts, prompt_part: float) -> float:
    """Return the bytes of response hidden states (2 h), float32 gradients (4 h) and logit tiles."""
    tokens = parts.local_tokens * (1 - prompt_part)
    rows = min(shape.vocab_size / parts.tensor, TILE_ELEMENTS["cuda"] / MAX_TILE_TOKENS)
    return 6 * (tokens * shape.hidden_size + min(tokens, MAX_TILE_TOKENS) * rows)


def forward_bytes(shape: ModelShape, parts: Parts, *, stage: int) -> float:
    """Return the temporary bytes of a forward pass without gradients: one MLP or a logit tile."""
    tokens, entry = parts.local_tokens, _entry_bytes(shape, parts)
    mlp = 0.0
    for kind, _ in layer_kinds(shape, parts, stage=stage):
        if kind.experts is None:
            mlp = max(mlp, 6 * tokens * kind.ffn_hidden_size / parts.tensor)
        else:
            copies = tokens * copies_per_token(kind, parts)
            mlp = max(mlp, expert_copies(kind, parts) + copies)
    working = mlp + 4 * entry
    if stage == parts.pipeline - 1:
        tile = min(TILE_ELEMENTS["cuda"], MAX_TILE_TOKENS * shape.vocab_size // parts.tensor)
        working = max(working, 2 * entry + 2 * tokens * shape.hidden_size + 8 * tile)
    return working + rotation_bytes(shape, parts)


def gathered_bytes(shape: ModelShape, parts: Parts) -> float:
    """Return the bytes of Megatron's permanent buffer for gathered activations."""
    return 2 * parts.local_tokens * shape.hidden_size if parts.tensor > 1 else 0


def prepared_pack_bytes(shape: ModelShape, parts: Parts) -> int:
    """Return the bytes of a pack on the device: tokens, labels, positions, log-probs, routes."""
    routes = route_bytes(shape, tensor=parts.tensor, stages=parts.pipeline)
    return math.ceil((PREPARED + routes) * parts.local_tokens)


def route_bytes(shape: ModelShape, *, tensor: int, stages: int) -> float:
    """Return the bytes of the recorded experts per token of a context-parallel shard.

    Each layer of a rank records the chosen experts of its tokens, in one byte each, or two if the
    model has more than 256 experts.
    """
    if shape.experts is None:
        return 0.0
    layers = min(math.ceil(shape.num_layers / stages), len(shape.layers_with("experts")))
    width = 1 if shape.experts.num_experts <= 256 else 2
    return layers * shape.experts.experts_per_token * width / tensor


def rotation_bytes(shape: ModelShape, parts: Parts) -> int:
    """Return the bytes of the cosines and sines of one micro-batch, which its pass keeps."""
    tables = 1 if shape.local_rotary is None else 2
    return 2 * tables * shape.head_dim * parts.local_tokens
