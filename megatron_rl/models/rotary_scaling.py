"""How a config.json stretches rotary frequencies beyond the context of pretraining.

The reading is that of transformers (`modeling_rope_utils.py`), for its key `rope_parameters` and
for the older `rope_scaling` with `rope_theta` beside it; vLLM reads through transformers.
"""

from dataclasses import dataclass
from typing import Any

DEFAULT_BASE = 10000.0
# What each supported type must state, and what it may.
_KEYS = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
# Frequencies that follow the longest sequence at hand differ between the actor's packs and the
# engine's batches: the same token would have several log-probs.
_BY_LENGTH = ("dynamic", "longrope", "su")


@dataclass(frozen=True)
class RotaryScaling:
    """One supported type with its parameters, as sorted pairs of transformers' names and values."""

    kind: str
    parameters: tuple[tuple[str, float | bool], ...]

    def positions(self, stated: int) -> int:
        """How many positions the model serves, where config.json states `stated`.

        Configs of yarn state the number before the stretching or after it; vLLM takes the product.
        """
        if self.kind != "yarn":
            return stated
        values = dict(self.parameters)
        return int(values["original_max_position_embeddings"] * values["factor"])


def _stated(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _kind(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def unsupported_rotary_features(config: dict[str, Any]) -> list[str]:
    """What this config.json asks of rotary positions that the actor lacks, by name."""
    rope = _stated(config)
    kind = _kind(rope)
    found = []
    if any(isinstance(value, dict) for value in rope.values()):
        found.append("rope parameters by kind of layer")
    elif kind in _BY_LENGTH:
        found.append(f"rope type {kind!r} (frequencies that depend on the length at hand)")
    elif kind not in ("default", *_KEYS):
        found.append(f"rope type {kind!r}")
    elif kind != "default":
        missing = [key for key in _KEYS[kind][0] if rope.get(key) is None]
        found += [f"rope type {kind!r} without {key}" for key in missing]
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    if partial != 1:
        found.append("partial rotary embeddings")
    return found


def read_rotary_base(config: dict[str, Any]) -> float:
    """The base of the rotary frequencies."""
    return float(_stated(config).get("rope_theta") or config.get("rope_theta") or DEFAULT_BASE)


def read_rotary_scaling(config: dict[str, Any]) -> RotaryScaling | None:
    """The scaling of a config.json without unsupported features; None where there is none."""
    rope = _stated(config)
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
