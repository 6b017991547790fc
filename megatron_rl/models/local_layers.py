"""Layers with a sliding window among layers without one, as described by a config.json."""

from dataclasses import dataclass
from typing import Any

_LOCAL, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class LocalLayers:
    """The layers that attend to a sliding window, and their rotary frequencies.

    full: numbers of the layers that attend to all tokens. rotary_base: of the layers with a window,
    without scaling; None: all layers have the same rotary embeddings.
    """

    full: tuple[int, ...]
    rotary_base: float | None = None

    def flags(self, num_layers: int) -> list[int]:
        """Return for each layer 1 if it has the window and 0 otherwise, as Megatron wants it."""
        return [int(layer not in self.full) for layer in range(num_layers)]


@dataclass(frozen=True)
class LocalPattern:
    """The default of an architecture: of each `every` layers, all but the last one have a window.

    key: of config.json, if it can give another number. fixed: vLLM does not read `layer_types`, so
    only this pattern is supported.
    """

    every: int
    key: str | None = None
    fixed: bool = False

    def layer_types(self, config: dict[str, Any]) -> list[str]:
        """Return the type of every layer."""
        every = config.get(self.key, self.every) if self.key else self.every
        layers = range(1, config["num_hidden_layers"] + 1)
        default = [_LOCAL if layer % every else _FULL for layer in layers]
        return config.get("layer_types") or default

    def read(self, config: dict[str, Any]) -> LocalLayers:
        """Read the layers of a config.json without unsupported features."""
        kinds = self.layer_types(config)
        full = tuple(layer for layer, kind in enumerate(kinds) if kind == _FULL)
        return LocalLayers(full, config.get("rope_local_base_freq"))

    def unsupported(self, config: dict[str, Any]) -> list[str]:
        """List features of the layers in this config.json that are not supported."""
        kinds = self.layer_types(config)
        unsupported = [f"layer type {kind!r}" for kind in sorted({*kinds} - {_LOCAL, _FULL})]
        if len(kinds) != config["num_hidden_layers"]:
            unsupported.append(f"{len(kinds)} layer_types for all layers")
        if self.fixed and kinds != self.layer_types({**config, "layer_types": None}):
            unsupported.append(f"layer_types other than a full layer after {self.every - 1} local")
        if config.get("sliding_window") is None:
            unsupported.append("sliding_window null")
        return unsupported


def common_rotary_keys(
    config: dict[str, Any], *, default_base: float, default_local_base: float
) -> dict[str, Any]:
    """Return config.json with one set of rotary parameters, those of layers without a window.

    `rope_parameters` of transformers 5 has them by layer type; earlier releases wrote `rope_theta`,
    `rope_scaling` and `rope_local_base_freq`, the base of layers with a window.
    """
    by_type = config.get("rope_parameters") or {}
    full = {**(by_type.get(_FULL) or {}), **(config.get("rope_scaling") or {})}
    full.setdefault("rope_theta", config.get("rope_theta", default_base))
    local = by_type.get(_LOCAL) or {}
    base = local.get("rope_theta", config.get("rope_local_base_freq", default_local_base))
    # A set of sets is refused by name, as for other architectures.
    others = {key: value for key, value in by_type.items() if key not in (_FULL, _LOCAL)}
    plain = {"rope_type", "rope_theta"} >= local.keys() and not others
    plain = plain and local.get("rope_type", "default") == "default"
    parameters = full if plain else {**others, _LOCAL: local, _FULL: full}
    return config | {
        "rope_parameters": parameters,
        "rope_scaling": None,
        "rope_local_base_freq": float(base),
    }
