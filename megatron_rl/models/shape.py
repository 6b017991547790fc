"""The shape of a model, read from its config.json: sizes, and what its weights are called."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.models.architectures import ARCHITECTURES
from megatron_rl.models.rotary_scaling import (
    RotaryScaling,
    read_rotary_base,
    read_rotary_scaling,
    unsupported_rotary_features,
)
from megatron_rl.models.weights import OUTPUT_LAYER, Architecture, Weight


@dataclass(frozen=True)
class ExpertShape:
    """The mixture of experts that replaces the MLP of every layer."""

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    normalize_top_k: bool
    shared_ffn_hidden_size: int | None = None  # of the expert that every token goes through


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model, as its config.json states them."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    rotary_base: float
    norm_epsilon: float
    tied_embeddings: bool
    experts: ExpertShape | None = None
    rotary_scaling: RotaryScaling | None = None

    @property
    def qkv_bias(self) -> bool:
        """Whether the q, k and v projections have biases."""
        return ARCHITECTURES[self.architecture].qkv_bias

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return ARCHITECTURES[self.architecture].qk_norm

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights of this architecture; no output layer where it is the embedding."""
        weights = ARCHITECTURES[self.architecture].weights
        return tuple(one for one in weights if not (self.tied_embeddings and one is OUTPUT_LAYER))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that weights name."""
        sizes = {
            "hidden": self.hidden_size,
            "query": self.num_attention_heads * self.head_dim,
            "key": self.num_query_groups * self.head_dim,
            "head": self.head_dim,
            "ffn": self.ffn_hidden_size,
            "vocabulary": self.vocab_size,
            "one": 1,
        }
        if self.experts is None:
            return sizes
        return sizes | {
            "experts": self.experts.num_experts,
            "expert_ffn": self.experts.ffn_hidden_size,
            "shared_ffn": self.experts.shared_ffn_hidden_size or 0,
        }


def _unsupported_features(config: dict[str, Any], architecture: Architecture) -> list[str]:
    """What this config.json asks for that the tables (or Megatron-core as we build it) lack."""
    layer_types = config.get("layer_types") or []
    found = {
        "sliding-window attention": bool(config.get("use_sliding_window"))
        or any(kind != "full_attention" for kind in layer_types),
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "qkv_bias false": architecture.qkv_bias and config.get("qkv_bias", True) is False,
        "mlp_bias": bool(config.get("mlp_bias")),
        "quantized weights": config.get("quantization_config") is not None,
        "dense layers among the experts": architecture.mixture_of_experts
        and (config.get("decoder_sparse_step", 1) != 1 or bool(config.get("mlp_only_layers"))),
    }
    named = [feature for feature, present in found.items() if present]
    return [*unsupported_rotary_features(config), *named]


def read_model_shape(folder: str | Path) -> ModelShape:
    """Read the shape of a Hugging Face model from `folder`/config.json.

    Raises ValueError naming the file when it is missing, incomplete, of an architecture without a
    table, or asks for features that are not supported (all of them are listed at once).
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {folder} is not a Hugging Face model folder")
    config = json.loads(path.read_text())
    name = (config.get("architectures") or ["(none stated)"])[0]
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{path}: architecture {name} is not supported; {sorted(ARCHITECTURES)} are"
        )
    if unsupported := _unsupported_features(config, ARCHITECTURES[name]):
        raise ValueError(f"{path}: {name} with {', '.join(unsupported)} is not supported")
    try:
        return _build_shape(config, name)
    except KeyError as missing:
        raise ValueError(f"{path} has no {missing}") from None


def _build_shape(config: dict[str, Any], name: str) -> ModelShape:
    architecture = ARCHITECTURES[name]
    heads = config["num_attention_heads"]
    scaling = read_rotary_scaling(config)
    stated = config["max_position_embeddings"]
    experts = None
    if architecture.mixture_of_experts:
        shared = any("shared_ffn" in weight.size for weight in architecture.weights)
        # transformers 5 writes num_local_experts, earlier releases num_experts.
        num_experts = config.get("num_experts") or config["num_local_experts"]
        experts = ExpertShape(
            num_experts=num_experts,
            experts_per_token=config["num_experts_per_tok"],
            ffn_hidden_size=config["moe_intermediate_size"],
            normalize_top_k=bool(config.get("norm_topk_prob", False)),
            shared_ffn_hidden_size=config["shared_expert_intermediate_size"] if shared else None,
        )
    head_dim = config.get("head_dim") or architecture.default_head_dim
    return ModelShape(
        architecture=name,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        head_dim=head_dim or config["hidden_size"] // heads,
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=scaling.positions(stated) if scaling else stated,
        rotary_base=read_rotary_base(config),
        rotary_scaling=scaling,
        norm_epsilon=config["rms_norm_eps"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
    )


def weight_shapes(weight: Weight, *, shape: ModelShape) -> tuple[tuple[int, ...], ...]:
    """The shape of each HF tensor of `weight`, in the order of `weight.hf`."""
    sizes = shape.sizes
    rest = tuple(sizes[name] for name in weight.size[1:])
    if weight.cut == "qkv":
        return tuple((sizes[name], *rest) for name in ("query", "key", "key"))
    return ((sizes[weight.size[0]], *rest),) * len(weight.hf)


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model's safetensors files by its Hugging Face name, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in shape.weights:
        layers = range(shape.num_layers) if weight.part in ("layer", "expert") else range(1)
        experts = range(
            shape.experts.num_experts if weight.part == "expert" and shape.experts else 1
        )
        for layer in layers:
            for expert in experts:
                for name, size in zip(weight.hf, weight_shapes(weight, shape=shape), strict=True):
                    shapes[name.format(layer=layer, expert=expert)] = size
    return shapes
