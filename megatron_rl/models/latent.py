"""Multi-head latent attention (arXiv 2405.04434, section 2.1): sizes and weights.

Keys and values of all heads are projections of one small vector of a token, its latent; queries may
come from a latent of their own. The last elements of each head are rotated: those of keys are one
vector, which all heads share.
"""

import math
from dataclasses import dataclass
from typing import Any

from megatron_rl.models.config_keys import RotaryScaling
from megatron_rl.models.weights import OptionalWeights, Size, Weight


@dataclass(frozen=True)
class LatentShape:
    """Sizes of latent attention; `ModelShape.head_dim` is that of queries and keys.

    query_rank: size of the queries' latent; None: queries are projections of the hidden states.
    rank: size of the latent of keys and values. rotated: elements of each head of queries and keys.
    value: size of a head of values. score_factor: of the scores, besides 1 / sqrt(head_dim).
    """

    query_rank: int | None
    rank: int
    rotated: int
    value: int
    score_factor: float = 1.0


def unsupported_latent_features(config: dict[str, Any]) -> list[str]:
    """List features of this config.json's latent attention that the actor does not support."""
    keys = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    values = config["v_head_dim"]
    features = {
        f"v_head_dim {values} above the {keys} of keys": values > keys,
    }
    return [feature for feature, present in features.items() if present]


def read_latent(config: dict[str, Any], scaling: RotaryScaling | None) -> LatentShape:
    """Read the sizes from a config.json without unsupported features."""
    return LatentShape(
        query_rank=config["q_lora_rank"],
        rank=config["kv_lora_rank"],
        rotated=config["qk_rope_head_dim"],
        value=config["v_head_dim"],
        score_factor=_score_factor(scaling),
    )


def _score_factor(scaling: RotaryScaling | None) -> float:
    """Return the factor by which a longer context sharpens attention, as in DeepSeek's own code."""
    values = dict(scaling.parameters) if scaling else {}
    weight, factor = float(values.get("mscale_all_dim", 0)), float(values.get("factor", 1))
    if not weight or factor <= 1:
        return 1.0
    return (0.1 * weight * math.log(factor) + 1.0) ** 2


def latent_sizes(latent: LatentShape, *, heads: int, head_dim: int) -> dict[str, int]:
    """Return the values of the `Size` names of the weights below."""
    return {
        "query_rank": latent.query_rank or 0,
        "rank": latent.rank,
        "latent": latent.rank + latent.rotated,
        "keys_values": heads * (head_dim - latent.rotated + latent.value),
        "values": heads * latent.value,
    }


_L = "model.layers.{layer}."
_SELF = _L + "self_attn."
_M = "decoder.layers.{layer}."
_MEGATRON_SELF = _M + "self_attention."


def _norm(size: Size, name: str) -> Weight:
    """The norm of a latent."""
    stored = f"{_SELF}{name}_a_layernorm.weight"
    megatron = f"{_MEGATRON_SELF}{name}_layernorm.weight"
    return Weight("layer", "replicated", (size,), (stored,), megatron, stored)


# The first projections are one product, as in vLLM: of the query's latent, if there is one, of the
# latent of keys and values, and of the rotated part of the keys.
_WITH_QUERY_LATENT = (
    Weight(
        "layer", "replicated", ("query_rank", "hidden"),
        (_SELF + "q_a_proj.weight", _SELF + "kv_a_proj_with_mqa.weight"),
        _MEGATRON_SELF + "linear_down_proj.weight",
        _SELF + "fused_qkv_a_proj.weight",
        heights=("query_rank", "latent"),
    ),
    _norm("query_rank", "q"),
    Weight(
        "layer", "rows", ("query", "query_rank"),
        (_SELF + "q_b_proj.weight",),
        _MEGATRON_SELF + "linear_q_up_proj.weight",
        _SELF + "q_b_proj.weight",
    ),
)  # fmt: skip
_WITHOUT_QUERY_LATENT = (
    Weight(
        "layer", "replicated", ("latent", "hidden"),
        (_SELF + "kv_a_proj_with_mqa.weight",),
        _MEGATRON_SELF + "linear_down_proj.weight",
        _SELF + "kv_a_proj_with_mqa.weight",
    ),
    Weight(
        "layer", "rows", ("query", "hidden"),
        (_SELF + "q_proj.weight",),
        _MEGATRON_SELF + "linear_q_up_proj.weight",
        _SELF + "q_proj.weight",
    ),
)  # fmt: skip
QUERY_LATENT = OptionalWeights("q_lora_rank", _WITH_QUERY_LATENT, _WITHOUT_QUERY_LATENT)
LATENT_ATTENTION = (
    Weight(
        "layer", "replicated", ("hidden",),
        (_L + "input_layernorm.weight",),
        _M + "input_layernorm.weight",
        _L + "input_layernorm.weight",
    ),
    *_WITH_QUERY_LATENT,
    *_WITHOUT_QUERY_LATENT,
    _norm("rank", "kv"),
    Weight(
        "layer", "rows", ("keys_values", "rank"),
        (_SELF + "kv_b_proj.weight",),
        _MEGATRON_SELF + "linear_kv_up_proj.weight",
        _SELF + "kv_b_proj.weight",
    ),
    Weight(
        "layer", "columns", ("hidden", "values"),
        (_SELF + "o_proj.weight",),
        _MEGATRON_SELF + "linear_proj.weight",
        _SELF + "o_proj.weight",
    ),
)  # fmt: skip
