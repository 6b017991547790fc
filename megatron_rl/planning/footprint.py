"""Bytes that one rank holds in each phase, by formula; docs/planning.md derives them.

Of the actor's local layers in bfloat16 on CUDA. What a layer keeps for its backward pass follows
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198), for gated MLPs, without dropout, and with attention that keeps no matrix of scores;
states are those of Megatron's distributed optimizer (Rajbhandari et al., ZeRO stage 1, arXiv
1910.02054). What is worked with at the peak was read off rehearsals of the actor.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.distributed.context_attention import KEPT_BYTES
from megatron_rl.distributed.vocab_parallel import MAX_TILE_TOKENS, TILE_ELEMENTS
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.devices import GIB
from megatron_rl.planning.parts import Parts, count_parameters, engine_parameters

# What an engine asleep still holds: CUDA graphs, its buffers and communicators. vLLM's log of one
# on a 96 GiB device: "5.82 GiB memory is still in use", the CUDA context among it
# (imokuri.com/blog/2025/07/vllm-sleep-mode).
ENGINE_ASLEEP = 4 * GIB
# What torch's allocator does not count or cannot use: the CUDA context, NCCL (0.5 to 0.7 GiB a
# communicator: github.com/NVIDIA/nccl issue 964), workspaces of cuBLAS, fragmentation.
RESERVE = 6 * GIB
BUCKETS = 128 << 20  # two of `resharding.bucket_mib`
WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12  # bytes of a parameter; the last one cut over replicas
ROUTER_BYTES = 6  # that a layer keeps of a token and an expert: a probability and two masks


@dataclass(frozen=True)
class Footprint:
    """Bytes of the rank that holds most, in each phase; reserves apart."""

    states: int  # awake
    asleep: int
    train: int
    behavior: int
    push: int
    engine_weights: int


def footprint(
    shape: ModelShape, parts: Parts, *, micro_batches: int, packs: int = 1, prompt_part: float = 0.0
) -> Footprint:
    """The largest of the first and the last stage in every phase.

    micro_batches: that one rank walks in an update. packs: that it keeps prepared, of a whole
    rollout batch. prompt_part: of a pack's tokens, which have no log-probs.
    """
    found = []
    for stage in sorted({0, parts.pipeline - 1}):
        states, asleep = state_bytes(shape, parts, stage=stage)
        update = activation_bytes(
            shape, parts, stage=stage, micro_batches=micro_batches, prompt_part=prompt_part
        )
        prepared = packs * prepared_pack_bytes(shape, parts)
        behavior = asleep + forward_bytes(shape, parts, stage=stage) + prepared
        found.append((states, asleep, states + update + prepared, behavior))
    states, asleep, train, behavior = map(max, zip(*found, strict=True))
    engine = WEIGHT * engine_parameters(shape, parts.rollout_tensor)
    return Footprint(states, asleep, train, behavior, asleep + engine + BUCKETS, engine)


def state_bytes(shape: ModelShape, parts: Parts, *, stage: int) -> tuple[int, int]:
    """Weights, gradients and optimizer of one rank, awake and asleep.

    Asleep are the weights alone, and Megatron's buffer for gathered activations.
    """
    held = count_parameters(shape, parts, stage=stage)
    optimizer = (held.dense + held.expert * parts.expert) / parts.replicas
    awake = (WEIGHT + GRADIENT) * held.total + OPTIMIZER * optimizer
    return int(awake), WEIGHT * held.total + int(gathered_bytes(shape, parts))


def in_flight(parts: Parts, *, stage: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage holds at once under 1F1B."""
    return min(parts.pipeline - stage, micro_batches)


def activation_bytes(
    shape: ModelShape, parts: Parts, *, stage: int, micro_batches: int, prompt_part: float = 0.0
) -> int:
    """What forward passes keep at the peak of an update, and what is worked with beside it."""
    tokens, depth = parts.local_tokens, shape.num_layers // parts.pipeline
    layer, mlp = kept_per_token(shape, parts) * tokens, _mlp_per_token(shape, parts) * tokens
    entry = _entry_bytes(shape, parts)
    under_way = in_flight(parts, stage=stage, micro_batches=micro_batches)
    kept, again = depth * layer, 0.0
    if parts.recompute == "full":
        kept, again = depth * entry, layer
    elif parts.recompute == "selective":
        kept, again = depth * (layer - mlp), mlp + entry
    last = stage == parts.pipeline - 1
    working = again + _layer_working(shape, parts)
    if last:  # before the last layer's backward pass begins
        working = max(working, entry + _head_bytes(shape, parts, prompt_part))
    total = kept * under_way + working + gathered_bytes(shape, parts)
    if parts.pipeline > 1:  # what goes to the next stage is kept, and what comes from it
        total += entry * (2 if last else under_way + 1)
    return int(total)


def kept_per_token(shape: ModelShape, parts: Parts) -> float:
    """Bytes that one layer keeps of a local token for its backward pass.

    Norms keep input and output (8 h) and a scale (4 each); attention queries, keys, values and what
    goes into its output projection; norms of queries and keys what they read.
    """
    sizes = shape.sizes
    kept = norms_kept(shape.hidden_size) + 8 + attention_kept(sizes["query"], 0)
    if shape.qk_norm:
        kept += 4 * sizes["query"] + 4 * sizes["key"]
        kept += 4 * (shape.num_attention_heads + shape.num_query_groups)
    return kept / parts.tensor + _keys_per_token(shape, parts) + _mlp_per_token(shape, parts)


def norms_kept(hidden: float) -> float:
    """Bytes of a token: inputs and outputs of a layer's two norms."""
    return 8 * hidden


def attention_kept(query: float, key: float) -> float:
    """Bytes of a token: queries, what goes into the output projection, keys and values."""
    return 4 * query + 4 * key


def mlp_kept(ffn: float, *, gated: bool = True) -> float:
    """Bytes of a token: what the activation reads (gate and up, or one) and what it gives."""
    return (6 if gated else 4) * ffn


def _keys_per_token(shape: ModelShape, parts: Parts) -> float:
    """Keys and values: this rank's own where gathered ones would be large, else all of them."""
    own = attention_kept(0, shape.sizes["key"]) / parts.tensor
    return own if own * parts.tokens > KEPT_BYTES else own * parts.context


def _mlp_per_token(shape: ModelShape, parts: Parts) -> float:
    """What the MLP keeps beside its norm's output: gate, up and their product (6 f).

    Experts get `experts_per_token` copies of every token (2 h each) of all tensor-parallel ranks.
    """
    if shape.experts is None:
        return mlp_kept(shape.ffn_hidden_size) / parts.tensor
    experts = shape.experts
    product = mlp_kept(experts.experts_per_token * experts.ffn_hidden_size)
    product += mlp_kept(experts.shared_ffn_hidden_size or 0)
    router = ROUTER_BYTES * experts.num_experts
    return (product + router) / parts.tensor + 2 * shape.hidden_size * experts.experts_per_token


def _entry_bytes(shape: ModelShape, parts: Parts) -> float:
    """Of one micro-batch's hidden states, cut by sequence parallelism."""
    return 2 * shape.hidden_size * parts.local_tokens / parts.tensor


def _layer_working(shape: ModelShape, parts: Parts) -> float:
    """Beside what layers keep, where one is at its peak.

    Dense: in the MLP's backward pass, gradients of gate and up (4 f), of their product (2 f), which
    itself is gone by then (2 f), and of the layer's output. Experts: in the forward pass.
    """
    if shape.experts is not None:
        return _expert_copies(shape, parts)
    tokens, ffn = parts.local_tokens, shape.ffn_hidden_size / parts.tensor
    dense = 4 * tokens * ffn + 2 * tokens * shape.hidden_size / parts.tensor
    keys = 12 * shape.sizes["key"] / parts.tensor * parts.tokens  # gathered, float32 gradients
    queries = 8 * shape.sizes["query"] / parts.tensor * tokens
    return max(dense, keys + queries - _mlp_per_token(shape, parts) * tokens)


def _expert_copies(shape: ModelShape, parts: Parts) -> float:
    """The copies of tokens that are alive when experts' outputs return, beside what is kept.

    Of the size of all copies: the experts' outputs one by one and together; those that were sent
    and received. With tensor parallelism outputs in order, in float32 for their sum, and the sums.
    """
    assert shape.experts is not None, "only of a mixture of experts"
    whole = 2.0 * parts.local_tokens * shape.hidden_size * shape.experts.experts_per_token
    exchanged = whole / parts.tensor * (2 if parts.expert > 1 else 1)
    if parts.tensor == 1:
        return 2 * whole + exchanged
    return 4 * whole + 2 * whole / parts.tensor + exchanged


def _head_bytes(shape: ModelShape, parts: Parts, prompt_part: float) -> float:
    """Chosen hidden states (2 h), their gradient in float32 (4 h), a tile of logits in both."""
    tokens = parts.local_tokens * (1 - prompt_part)
    rows = min(shape.vocab_size / parts.tensor, TILE_ELEMENTS["cuda"] / MAX_TILE_TOKENS)
    return 6 * (tokens * shape.hidden_size + min(tokens, MAX_TILE_TOKENS) * rows)


def forward_bytes(shape: ModelShape, parts: Parts, *, stage: int) -> float:
    """What a forward pass without gradients works with: one MLP, or a tile of logits."""
    tokens, entry = parts.local_tokens, _entry_bytes(shape, parts)
    if shape.experts is None:
        mlp = 6 * tokens * shape.ffn_hidden_size / parts.tensor
    else:
        copies = 2 * tokens * shape.hidden_size * shape.experts.experts_per_token
        mlp = _expert_copies(shape, parts) + copies
    working = mlp + 4 * entry
    if stage == parts.pipeline - 1:
        tile = min(TILE_ELEMENTS["cuda"], MAX_TILE_TOKENS * shape.vocab_size // parts.tensor)
        working = max(working, 2 * entry + 2 * tokens * shape.hidden_size + 8 * tile)
    return working


def gathered_bytes(shape: ModelShape, parts: Parts) -> float:
    """Megatron's buffer for activations gathered over sequence parallelism, which stays."""
    return 2 * parts.local_tokens * shape.hidden_size if parts.tensor > 1 else 0


def prepared_pack_bytes(shape: ModelShape, parts: Parts) -> int:
    """A pack on the device: cosines and sines (2 d), and numbers of each token (60 bytes)."""
    return parts.local_tokens * (2 * shape.head_dim + 60)
