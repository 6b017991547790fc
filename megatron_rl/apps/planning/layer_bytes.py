"""Bytes that one layer stores for its backward pass, and of the copies of tokens for experts.

A `shape` without experts, or with experts in all layers, describes one layer; `layer_kinds` gives
one for each kind of layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.apps.planning.parts import Parts
from megatron_rl.distributed.context_attention import KEPT_BYTES
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.weights import Layers

ROUTER_BYTES = 6  # stored per token, expert and layer: a probability and two masks


def layer_kinds(shape: ModelShape, parts: Parts, *, stage: int) -> Iterator[tuple[ModelShape, int]]:
    """Yield the shape and the number of each kind of layer of a stage: dense ones, with experts."""
    chunks = parts.layers(shape, stage=stage)
    kinds: dict[Layers, ModelShape] = {"dense": replace(shape, experts=None), "experts": shape}
    for kind, of_kind in kinds.items():
        if depth := sum(len(shape.layers_with(kind, chunk)) for chunk in chunks):
            yield of_kind, depth


def kept_per_token(shape: ModelShape, parts: Parts) -> float:
    """Return the bytes that one layer stores per local token for its backward pass.

    Norms store input and output (8 h) and a scale (4 each), norms of what attention and MLP return
    only their inputs (4 h). Attention stores queries, keys, values and the input of its output
    projection. Norms of queries and keys store their inputs.
    """
    sizes = shape.sizes
    kept = norms_kept(shape.hidden_size) + 8 + attention_kept(sizes["query"], 0)
    if shape.latent is not None:
        # Outputs and inputs of the norms of latents; values are smaller than queries.
        kept += 2 * (sizes["latent"] + sizes["rank"] + 2 * sizes["query_rank"]) + 8
        kept -= 2 * (sizes["query"] - sizes["values"])
    if shape.traits.post_norms:
        kept += 4 * shape.hidden_size + 8
    if shape.qk_norm:
        kept += 4 * sizes["query"] + 4 * shape.num_attention_heads
    kept /= parts.tensor
    if shape.qk_norm:
        kept += 4 * key_size(shape, parts) * (1 + 1 / shape.head_dim)
    kept += _gathered_per_token(shape, parts)
    return kept + _keys_per_token(shape, parts) + mlp_per_token(shape, parts)


def _gathered_per_token(shape: ModelShape, parts: Parts) -> float:
    """Return the bytes of gathered queries, keys and values, with fewer key heads than ranks.

    Megatron gathers those of all heads. Norms of queries and keys store views of them as inputs,
    which keeps them all; the views are counted elsewhere.
    """
    if shape.num_query_groups >= parts.tensor or not shape.qk_norm:
        return 0.0
    sizes = shape.sizes
    views = 2 * sizes["query"] / parts.tensor + 2 * shape.head_dim
    return 2 * (sizes["query"] + 2 * sizes["key"]) - views


def key_size(shape: ModelShape, parts: Parts) -> float:
    """Return the size of the keys on one rank: at least one head."""
    return max(shape.sizes["key"] / parts.tensor, shape.head_dim)


def norms_kept(hidden: float) -> float:
    """Return the bytes per token of the inputs and outputs of a layer's two norms."""
    return 8 * hidden


def attention_kept(query: float, key: float) -> float:
    """Return the bytes per token of queries, the output projection's input, keys and values."""
    return 4 * query + 4 * key


def mlp_kept(ffn: float, *, gated: bool = True, clamped: bool = False) -> float:
    """Return the bytes per token of the activation's inputs (gate and up, or one) and output.

    The clamped activation of gpt-oss is no fused kernel: besides gate and up with their biases it
    stores gate, up + 1, their product, the sigmoid, the result, and that times the probability.
    """
    if clamped:
        return 16 * ffn
    return (6 if gated else 4) * ffn


def _keys_per_token(shape: ModelShape, parts: Parts) -> float:
    """Return the bytes of keys and values: only this rank's own if the gathered ones are large."""
    own = attention_kept(0, key_size(shape, parts))
    return own if own * parts.tokens > KEPT_BYTES else own * parts.context


def mlp_per_token(shape: ModelShape, parts: Parts) -> float:
    """Return the bytes that the MLP stores besides its input: gate, up and their product (6 f).

    Experts receive `experts_per_token` copies of every token (2 h each) of all ranks that share
    each expert, times the largest share.
    """
    if shape.experts is None:
        return mlp_kept(shape.ffn_hidden_size) / parts.tensor
    experts = shape.experts
    clamped = shape.traits.activation == "clamped_silu"
    product = mlp_kept(experts.experts_per_token * experts.ffn_hidden_size, clamped=clamped)
    product *= parts.expert_share
    product += mlp_kept(experts.shared_ffn_hidden_size or 0)
    router = ROUTER_BYTES * experts.num_experts
    return (product + router) / parts.tensor + copies_per_token(shape, parts)


def copies_per_token(shape: ModelShape, parts: Parts) -> float:
    """Return the bytes of the token copies that a rank's experts receive, per local token."""
    assert shape.experts is not None, "requires a mixture of experts"
    copies = 2.0 * shape.hidden_size * shape.experts.experts_per_token
    return copies * parts.expert_slices / parts.tensor * parts.expert_share


def expert_copies(shape: ModelShape, parts: Parts) -> float:
    """Return the bytes of temporary token copies when the experts' outputs are combined.

    Each term has the size of all copies: the experts' outputs, separate and concatenated, and the
    sent and received copies. Tensor parallelism of the experts adds the reordered outputs, their
    float32 copy for the sum, and the sums.
    """
    whole, slices = parts.local_tokens * copies_per_token(shape, parts), parts.expert_slices
    exchanged = whole / slices * (1 / parts.expert_share + 1 if parts.expert > 1 else 1)
    if slices == 1:
        return 2 * whole + exchanged
    return 4 * whole + 2 * whole / slices + exchanged
