"""Rotary frequency scaling (context extension) as described by a config.json.

Keys are interpreted as in transformers (`modeling_rope_utils.py`): `rope_parameters`, or the older
`rope_scaling` with a separate `rope_theta`. vLLM uses transformers' implementation.
"""

from dataclasses import dataclass
from typing import Any

DEFAULT_BASE = 10000.0
# Required and optional keys of each supported type.
_KEYS = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
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


def unsupported_rotary_features(config: dict[str, Any], *, partial: bool = False) -> list[str]:
    """List the rotary features in this config.json that the actor does not support.

    partial: whether models of this architecture may rotate a part of each head.
    """
    rope = _rope_config(config)
    kind = _kind(rope)
    unsupported = []
    if any(isinstance(value, dict) for value in rope.values()):
        unsupported.append("rope parameters per layer type")
    elif kind in _BY_LENGTH:
        unsupported.append(f"rope type {kind!r} (its frequencies depend on the sequence length)")
    elif kind not in ("default", *_KEYS):
        unsupported.append(f"rope type {kind!r}")
    elif kind != "default":
        missing = [key for key in _KEYS[kind][0] if rope.get(key) is None]
        unsupported += [f"rope type {kind!r} without {key}" for key in missing]
    if rope.get("llama_4_scaling_beta"):
        unsupported.append("queries scaled by position (llama_4_scaling_beta)")
    if not partial and _rotary_part(config) not in (None, 1):
        unsupported.append("partial rotary embeddings")
    return unsupported


def _rotary_part(config: dict[str, Any]) -> float | None:
    part = _rope_config(config).get("partial_rotary_factor")
    return part or config.get("partial_rotary_factor")


def read_rotary_part(config: dict[str, Any], *, default: float | None) -> float:
    """Return the part of each head that is rotated; default None: the whole head."""
    return 1.0 if default is None else float(_rotary_part(config) or default)


def read_rotary_base(config: dict[str, Any]) -> float:
    """Return the base of the rotary frequencies."""
    base = _rope_config(config).get("rope_theta") or config.get("rope_theta") or DEFAULT_BASE
    return float(base)


def read_rotary_scaling(config: dict[str, Any]) -> RotaryScaling | None:
    """Read the scaling from a config.json without unsupported features; None for the default."""
    rope = _rope_config(config)
    kind = _kind(rope)
    if kind == "default":
        return None
    required, optional = _KEYS[kind]
    values = {key: rope[key] for key in (*required, *optional) if rope.get(key) is not None}
    if kind != "linear":
        values["original_max_position_embeddings"] = (
            config.get("original_max_position_embeddings")
            or rope.get("original_max_position_embeddings")
            or config["max_position_embeddings"]
        )
    return RotaryScaling(kind, tuple(sorted(values.items())))
