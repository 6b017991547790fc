"""Differences of an architecture's computation from Llama's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.models.local_layers import LocalPattern

Keys = dict[str, Any]  # of a config.json


@dataclass(frozen=True)
class Traits:
    """Differences from Llama's computation, and from its config.json.

    activation: of the gated MLP or the experts. biases: every linear and the router have one.
    zero_centered_norms: norms multiply by 1 + weight.
    scaled_embeddings: embeddings are multiplied by sqrt(hidden size), rounded to the model's dtype.
    engine_shares_key_heads: vLLM copies a key head to several ranks where there are more ranks.
    output_gate: attention's output is multiplied by the sigmoid of a gate.
    engine_imports: packages that vLLM's code of this architecture imports, which others do not.
    local_only: what Transformer Engine's layers, as Megatron builds them, do not have.
    keys: brings a config.json to the keys that all architectures share. refuse: lists unsupported
    features in such a config.json.
    """

    activation: Literal["silu", "gelu_tanh", "clamped_silu"] = "silu"
    biases: bool = False
    zero_centered_norms: bool = False
    post_norms: bool = False
    scaled_embeddings: bool = False
    local_pattern: LocalPattern | None = None
    engine_shares_key_heads: bool = True
    output_gate: bool = False
    engine_imports: tuple[str, ...] = ()
    local_only: str | None = None
    keys: Callable[[Keys], Keys] = dict
    refuse: Callable[[Keys], list[str]] = lambda config: []


LIKE_LLAMA = Traits()
