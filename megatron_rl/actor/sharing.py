"""Cost of common beginnings in an actor's model."""

from __future__ import annotations

from megatron_rl.actor.settings import ActorSettings
from megatron_rl.data.sharing import Sharing
from megatron_rl.models.shape import ModelShape

# FLOPs, forward and backward: of a linear's element for a row, and of a query-key pair's element.
ROW_FLOPS, PAIR_FLOPS = 6, 14
# Rate of attention kernels relative to matrix products: seen 54 of 82 GFLOP/s on one CPU core.
ATTENTION_RATE = 0.65
# Seconds of a pair behind a parent, relative to the kernel's causal mode: seen 1.11 at 150 and
# 4,000 tokens, and less than 1 where sequences are too short for that mode.
SLOWDOWN = 1.15


def build_sharing(
    settings: ActorSettings, shape: ModelShape, *, on_transformer_engine: bool
) -> Sharing | None:
    """Return the rule by which packs of this actor share beginnings; None if they never do.

    With Transformer Engine's layers `auto` never shares: our kernels attend packs that share
    instead of Transformer Engine's, and no GPU has shown what that costs.
    """
    is_always = settings.share_prompts is True
    if not settings.share_prompts or (on_transformer_engine and not is_always):
        return None
    pairs = operations_of_a_row(shape) * ATTENTION_RATE
    return Sharing(pairs, slowdown=SLOWDOWN, always=is_always)


def operations_of_a_row(shape: ModelShape) -> float:
    """Return the number of query-key pairs that cost as much as the linear layers of a row."""
    attention = len(shape.layers_with("attention")) * shape.num_attention_heads * shape.head_dim
    return ROW_FLOPS * _linear_elements(shape) / (PAIR_FLOPS * attention)


def _linear_elements(shape: ModelShape) -> float:
    """Return how many elements of all layers' linears a token is multiplied with.

    Of a mixture of experts its chosen ones.
    """
    sizes, hidden = shape.sizes, shape.hidden_size
    mixer = 2 * sizes["query"] + 2 * sizes["key"]
    total = len(shape.layers_with("attention")) * mixer
    if shape.delta is not None:
        mixer = sizes["delta_qkvz"] + sizes["delta_ba"] + sizes["delta_values"]
        total += len(shape.layers_with("delta")) * mixer
    total += len(shape.layers_with("dense")) * 3 * shape.ffn_hidden_size
    if (experts := shape.experts) is not None:
        own = experts.experts_per_token * experts.ffn_hidden_size
        own += experts.shared_ffn_hidden_size or 0
        total += len(shape.layers_with("experts")) * 3 * own
    return float(hidden * total)
