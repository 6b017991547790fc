"""Gated delta nets (arXiv 2412.06464) in most layers of a model, gated attention in the others.

The convolution's taps are those of q, k and v of all heads, [q; k; v]. Value head h has the query
and key of key head h // (value heads / key heads). Megatron's parameters have the rows of a key
head together, q, k, then those of its value heads, so that each rank's rows are consecutive under
any tensor parallelism.
"""

from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.models.weights import ATTENTION, QK_NORM, Cut, Size, Weight

LINEAR, FULL = "linear_attention", "full_attention"
KEYS = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "full_attention_interval", "mamba_ssm_dtype",
    "mtp_use_dedicated_embeddings", "output_gate_type",
)  # fmt: skip
DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}
ONLY = {"linear_conv_kernel_dim": 4, "attn_output_gate": True}


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of gated delta nets, and the layers that have a gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel: int  # taps of the convolution
    layers: tuple[int, ...]

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q, k and v of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Elements of the states of one sequence in one layer."""
        return self.value_heads * self.key_dim * self.value_dim


def layer_types(config: dict[str, Any]) -> list[str]:
    """Return the type of every layer; by default every fourth has attention."""
    every = config.get("full_attention_interval") or 4
    layers = range(1, config["num_hidden_layers"] + 1)
    return config.get("layer_types") or [LINEAR if n % every else FULL for n in layers]


def unsupported_delta_features(config: dict[str, Any]) -> list[str]:
    """List features of this config.json's layers that are not supported."""
    kinds = layer_types(config)
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    gate = config.get("output_gate_type", "silu")
    features = {
        **{f"layer type {kind!r}": True for kind in sorted({*kinds} - {LINEAR, FULL})},
        f"{len(kinds)} layer_types for all layers": len(kinds) != config["num_hidden_layers"],
        f"output_gate_type {gate!r} (supported: silu)": gate not in ("silu", "swish"),
        "layer_types with one type only (both are needed)": {*kinds} in ({LINEAR}, {FULL}),
        f"linear_num_value_heads {value_heads}, no multiple of linear_num_key_heads {key_heads}":
            value_heads % key_heads != 0,
    }  # fmt: skip
    return [feature for feature, present in features.items() if present]


def read_delta(config: dict[str, Any]) -> DeltaShape:
    """Read the sizes from a config.json without unsupported features."""
    kinds = layer_types(config)
    return DeltaShape(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        kernel=config.get("linear_conv_kernel_dim", 4),
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR),
    )


def delta_sizes(delta: DeltaShape) -> dict[str, int]:
    """Return the values of the `Size` names of the weights below."""
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    return {
        "delta_keys": keys,
        "delta_values": values,
        "delta_qkv": 2 * keys + values,
        "delta_qkvz": 2 * keys + 2 * values,
        "delta_ba": 2 * delta.value_heads,
        "delta_heads": delta.value_heads,
        "delta_head": delta.value_dim,
        "kernel": delta.kernel,
    }


_HF, _MEGATRON = "model.layers.{layer}.linear_attn.", "decoder.layers.{layer}.self_attention."


def _delta(
    cut: Cut,
    size: tuple[Size, ...],
    *names: str,
    megatron: str,
    vllm: str | None = None,
    **more: Any,
) -> Weight:
    return Weight(
        "layer", cut, size, tuple(_HF + name for name in names), _MEGATRON + megatron,
        _HF + (vllm or names[0]), layers="delta", **more,
    )  # fmt: skip


_QKV: tuple[tuple[int, Size], ...] = ((0, "delta_keys"), (0, "delta_keys"), (0, "delta_values"))
_COMMON = (
    _delta(
        "by_head", ("delta_qkv", "one", "kernel"), "conv1d.weight",
        megatron="conv1d.weight", parts=_QKV,
    ),
    _delta("rows", ("delta_heads",), "A_log", megatron="A_log"),
    _delta("rows", ("delta_heads",), "dt_bias", megatron="dt_bias"),
    _delta("replicated", ("delta_head",), "norm.weight", megatron="norm.weight"),
    _delta("columns", ("hidden", "delta_values"), "out_proj.weight", megatron="linear_proj.weight"),
)  # fmt: skip
# Files have the rows of each key head together, as Megatron's parameters here.
ROWS_BY_HEAD = (
    _delta(
        "rows", ("delta_qkvz", "hidden"), "in_proj_qkvz.weight", megatron="linear_qkvz.weight"
    ),
    _delta("rows", ("delta_ba", "hidden"), "in_proj_ba.weight", megatron="linear_ba.weight"),
    *_COMMON,
)  # fmt: skip
# Files have q of all heads, k of all heads, and so on.
ROWS_BY_PART = (
    _delta(
        "by_head", ("delta_qkv", "hidden"), "in_proj_qkv.weight", "in_proj_z.weight",
        megatron="linear_qkvz.weight", vllm="in_proj_qkvz.weight",
        heights=("delta_qkv", "delta_values"), parts=(*_QKV, (1, "delta_values")),
    ),
    _delta(
        "by_head", ("delta_heads", "hidden"), "in_proj_b.weight", "in_proj_a.weight",
        megatron="linear_ba.weight", vllm="in_proj_ba.weight",
        parts=((0, "delta_heads"), (1, "delta_heads")),
    ),
    *_COMMON,
)  # fmt: skip
# A head's rows of q_proj are its query and the gate of its output.
GATED_ATTENTION = (
    replace(ATTENTION[0], fused=None),
    replace(ATTENTION[1], cut="gated_qkv", size=("gated_qkv", "hidden"), layers="attention"),
    replace(ATTENTION[2], layers="attention"),
    *(replace(norm, layers="attention") for norm in QK_NORM),
)
