"""Rotary frequency scaling (context extension) as described by a config.json.

Keys are interpreted as in transformers (`modeling_rope_utils.py`): `rope_parameters`, or the older
`rope_scaling` with a separate `rope_theta`. vLLM uses transformers' implementation.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from megatron_rl.models.weights import Architecture

DEFAULT_BASE = 10000.0
# Required and optional keys of each supported type.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_ORIGINAL = "original_max_position_embeddings"
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL)
# Keys of YaRN's own code: transformers and vLLM use neither, 1 is what they compute.
_ONE = ("attn_factor", "extrapolation_factor")
# vLLM's code for latent attention does not read these keys of yarn.
_NOT_WITH_LATENTS = ("attention_factor", "truncate")
# Frequencies that depend on the longest sequence of a batch would differ between the actor's packs
# and the engine's batches, and so would the log-prob of the same token.
_BY_LENGTH = ("dynamic", "longrope", "su")


@dataclass(frozen=True)
class RotaryScaling:
    """A supported scaling type; parameters are sorted pairs of transformers' names and values."""

    kind: str
    parameters: tuple[tuple[str, float | bool], ...]

    def positions(self, max_position_embeddings: int) -> int:
        """Return the number of positions the model supports, given config.json's value.

        For yarn some configs give the number before scaling and others after it; like vLLM, use the
        original number times the factor.
        """
        if self.kind != "yarn":
            return max_position_embeddings
        values = dict(self.parameters)
        return int(values["original_max_position_embeddings"] * values["factor"])


def _rope_config(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _kind(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def unsupported_rotary_features(config: dict[str, Any], architecture: Architecture) -> list[str]:
    """List the rotary features in this config.json that the actor does not support."""
    rope = _rope_config(config)
    kind = _kind(rope)
    if any(isinstance(value, dict) for value in rope.values()):
        return ["rope parameters per layer type"]
    if kind in _BY_LENGTH:
        return [f"rope type {kind!r} (its frequencies depend on the sequence length)"]
    if kind not in _KEYS:
        return [f"rope type {kind!r}"]
    unsupported = _contradictions(config, rope)
    unsupported += [
        f"rope type {kind!r} without {key}" for key in _KEYS[kind][0] if rope.get(key) is None
    ]
    unsupported += [
        f"{key}=null of rope type {kind!r}"
        for key in ("rope_type", "type", "rope_theta", _ORIGINAL)
        if key in rope and rope[key] is None
    ]
    latent = architecture.latent_attention
    for key, value in rope.items():
        is_read = key in (*_COMMON, *_KEYS[kind][0], *_KEYS[kind][1])
        is_read = is_read and not (latent and key in _NOT_WITH_LATENTS)
        if value is not None and not is_read and not (key in _ONE and value == 1):
            hint = _hint(rope) if key == "attn_factor" and kind == "yarn" else ""
            unsupported.append(f"{key}={json.dumps(value)} of rope type {kind!r}{hint}")
    part = read_rotary_part(config)
    if part != 1 and "partial_rotary_factor" not in architecture.defaults:
        unsupported.append("partial rotary embeddings")
    return unsupported


def _hint(rope: dict[str, Any]) -> str:
    """Return the cure for `attn_factor`, as in R1-0528-Qwen3-8B, with the value its authors meant.

    YaRN's own code multiplies its factor of attention, 0.1 ln(factor) + 1, by it.
    """
    given, factor = rope["attn_factor"], rope.get("factor")
    if rope.get("attention_factor") is not None or not isinstance(given, int | float):
        return ""
    if not isinstance(factor, int | float) or factor <= 0:
        return ""
    meant = given * (0.1 * math.log(factor) + 1)
    return (
        " (neither transformers nor vLLM reads it: for what YaRN's own code computes, replace it "
        f'by "attention_factor": {meant:.6g}; to compute as transformers does, remove it)'
    )


def _contradictions(config: dict[str, Any], rope: dict[str, Any]) -> list[str]:
    """List keys with two values, of which transformers and vLLM would each choose one."""
    found = []
    if config.get("rope_scaling") and config.get("rope_parameters"):
        plain = {"rope_theta": config.get("rope_theta", DEFAULT_BASE)}
        first, second = (
            {**plain, **{("rope_type" if key == "type" else key): v for key, v in each.items()}}
            for each in (config["rope_scaling"], config["rope_parameters"])
        )
        if first != second:
            found.append("rope_scaling other than rope_parameters")
    for key in ("rope_theta", _ORIGINAL):
        values = [each[key] for each in (config, rope) if each.get(key) is not None]
        if len(values) == 2 and values[0] != values[1]:
            found.append(f"{key} {values[0]} and {values[1]}")
    if None not in (kinds := (rope.get("rope_type"), rope.get("type"))) and len({*kinds}) == 2:
        found.append(f"rope_type {kinds[0]!r} and type {kinds[1]!r}")
    return found


def read_rotary_part(config: dict[str, Any]) -> float:
    """Return the part of each head that is rotated."""
    part = _rope_config(config).get("partial_rotary_factor")
    part = config.get("partial_rotary_factor") if part is None else part
    return 1.0 if part is None else float(part)


def read_rotary_base(config: dict[str, Any]) -> float:
    """Return the base of the rotary frequencies."""
    base = _rope_config(config).get("rope_theta")
    return float(config.get("rope_theta", DEFAULT_BASE) if base is None else base)


def read_rotary_scaling(config: dict[str, Any]) -> RotaryScaling | None:
    """Read the scaling from a config.json without unsupported features; None for the default."""
    rope = _rope_config(config)
    kind = _kind(rope)
    if kind == "default":
        return None
    required, optional = _KEYS[kind]
    values = {key: rope[key] for key in (*required, *optional) if rope.get(key) is not None}
    if kind != "linear":
        values[_ORIGINAL] = (
            config.get(_ORIGINAL) or rope.get(_ORIGINAL) or config["max_position_embeddings"]
        )
    return RotaryScaling(kind, tuple(sorted(values.items())))
