"""Qwen3.5 and 3.6, dense, on text: gated delta nets in three of four layers.

Names of transformers' `modeling_qwen3_5.py`. Rotary sections for images and video ("mrope") rotate
text as ordinary embeddings do: all three positions of a token are equal.
"""

from typing import Any

from megatron_rl.models.delta_net import (
    DEFAULTS,
    GATED_ATTENTION,
    KEYS,
    ONLY,
    ROWS_BY_PART,
    unsupported_delta_features,
)
from megatron_rl.models.weights import (
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT_LAYER,
    Architecture,
    Traits,
)


def text_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json without the rotary sections, which are for images and video."""
    sections = ("mrope_section", "mrope_interleaved")
    rotary = {
        name: {key: value for key, value in config[name].items() if key not in sections}
        for name in ("rope_parameters", "rope_scaling")
        if config.get(name)
    }
    return config | rotary


IGNORED = ("mtp_num_hidden_layers", "language_model_only")
TRAITS = Traits(
    zero_centered_norms=True,
    output_gate=True,
    local_only="gated delta nets",
    engine_imports=("torchvision",),
    keys=text_keys,
    refuse=unsupported_delta_features,
)
ARCHITECTURE = Architecture(
    "Qwen3_5ForCausalLM",
    (EMBEDDING, *GATED_ATTENTION, *ROWS_BY_PART, *DENSE_MLP, FINAL_NORM, OUTPUT_LAYER),
    keys=KEYS,
    defaults=DEFAULTS,
    only=ONLY,
    ignored=IGNORED,
    traits=TRAITS,
    wrapper="Qwen3_5ForConditionalGeneration",
)
