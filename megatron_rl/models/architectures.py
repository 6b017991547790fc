"""What each supported architecture's weights are called, their shapes, and how they are cut.

One table per architecture, one row per kind of parameter. A row names the Hugging Face tensors it
is made of and the parameter that holds them in Megatron-core and in vLLM; `pieces.py` turns rows
into rectangles. Adding an architecture means adding rows here and a line to `ARCHITECTURES`.

Names: Hugging Face's `modeling_<type>.py`, Megatron-core's `gpt_layer_specs.py` (local layers, and
the fused names of Transformer Engine's layers), vLLM's `models/<type>.py` (its merged modules).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_rl.models.rotary_scaling import (
    RotaryScaling,
    read_rotary_base,
    read_rotary_scaling,
    unsupported_rotary_features,
)

# How a parameter is laid out over tensor parallelism, and of which HF tensors it consists:
#   replicated  every rank holds all of one tensor
#   vocabulary  rows cut evenly after padding to the layout's vocabulary size
#   columns     columns cut evenly (the input dimension of a row-parallel linear)
#   qkv         (q, k, v): Megatron interleaves them per query group, vLLM concatenates them
#   gate_up     (gate, up): each rank's [gate shard; up shard]
Kind = Literal["replicated", "vocabulary", "columns", "qkv", "gate_up"]
Place = Literal["first", "layer", "expert", "last"]


@dataclass(frozen=True)
class Row:
    """One kind of parameter: its HF tensors and its name in Megatron-core and in vLLM.

    Names are templates: `{layer}` is the layer, `{expert}` the expert (both counted locally in
    Megatron names, globally in HF names). `fused` is the name with Transformer Engine's layers
    where it differs.
    """

    place: Place
    kind: Kind
    hf: tuple[str, ...]
    megatron: str
    vllm: str
    fused: str | None = None


@dataclass(frozen=True)
class ExpertShape:
    """The mixture of experts that replaces the MLP of every layer."""

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    normalize_top_k: bool


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
    def rows(self) -> tuple[Row, ...]:
        """The table of this architecture; without the output layer where it is the embedding."""
        rows = ARCHITECTURES[self.architecture].rows
        return tuple(row for row in rows if not (self.tied_embeddings and row is OUTPUT_LAYER))


_L = "model.layers.{layer}."
_M = "decoder.layers.{layer}."

EMBEDDING = Row(
    "first",
    "vocabulary",
    ("model.embed_tokens.weight",),
    "embedding.word_embeddings.weight",
    "model.embed_tokens.weight",
)
FINAL_NORM = Row(
    "last",
    "replicated",
    ("model.norm.weight",),
    "decoder.final_layernorm.weight",
    "model.norm.weight",
)
OUTPUT_LAYER = Row(
    "last", "vocabulary", ("lm_head.weight",), "output_layer.weight", "lm_head.weight"
)
ATTENTION = (
    Row(
        "layer",
        "replicated",
        (_L + "input_layernorm.weight",),
        _M + "input_layernorm.weight",
        _L + "input_layernorm.weight",
        fused=_M + "self_attention.linear_qkv.layer_norm_weight",
    ),
    Row(
        "layer",
        "qkv",
        tuple(_L + f"self_attn.{name}_proj.weight" for name in "qkv"),
        _M + "self_attention.linear_qkv.weight",
        _L + "self_attn.qkv_proj.weight",
    ),
    Row(
        "layer",
        "columns",
        (_L + "self_attn.o_proj.weight",),
        _M + "self_attention.linear_proj.weight",
        _L + "self_attn.o_proj.weight",
    ),
)
QKV_BIAS = (
    Row(
        "layer",
        "qkv",
        tuple(_L + f"self_attn.{name}_proj.bias" for name in "qkv"),
        _M + "self_attention.linear_qkv.bias",
        _L + "self_attn.qkv_proj.bias",
    ),
)
QK_NORM = tuple(
    Row(
        "layer",
        "replicated",
        (_L + f"self_attn.{name}_norm.weight",),
        _M + f"self_attention.{name}_layernorm.weight",
        _L + f"self_attn.{name}_norm.weight",
    )
    for name in "qk"
)
DENSE_MLP = (
    Row(
        "layer",
        "replicated",
        (_L + "post_attention_layernorm.weight",),
        _M + "pre_mlp_layernorm.weight",
        _L + "post_attention_layernorm.weight",
        fused=_M + "mlp.linear_fc1.layer_norm_weight",
    ),
    Row(
        "layer",
        "gate_up",
        (_L + "mlp.gate_proj.weight", _L + "mlp.up_proj.weight"),
        _M + "mlp.linear_fc1.weight",
        _L + "mlp.gate_up_proj.weight",
    ),
    Row(
        "layer",
        "columns",
        (_L + "mlp.down_proj.weight",),
        _M + "mlp.linear_fc2.weight",
        _L + "mlp.down_proj.weight",
    ),
)
MIXTURE_OF_EXPERTS = (
    Row(
        "layer",
        "replicated",
        (_L + "post_attention_layernorm.weight",),
        _M + "pre_mlp_layernorm.weight",
        _L + "post_attention_layernorm.weight",
    ),
    Row(
        "layer",
        "replicated",
        (_L + "mlp.gate.weight",),
        _M + "mlp.router.weight",
        _L + "mlp.gate.weight",
    ),
    Row(
        "expert",
        "gate_up",
        (_L + "mlp.experts.{expert}.gate_proj.weight", _L + "mlp.experts.{expert}.up_proj.weight"),
        _M + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        _L + "mlp.experts.routed_experts.w13_weight",
        fused=_M + "mlp.experts.linear_fc1.weight{expert}",
    ),
    Row(
        "expert",
        "columns",
        (_L + "mlp.experts.{expert}.down_proj.weight",),
        _M + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        _L + "mlp.experts.routed_experts.w2_weight",
        fused=_M + "mlp.experts.linear_fc2.weight{expert}",
    ),
)


@dataclass(frozen=True)
class Architecture:
    """One family: its rows, and the two facts about attention that a shape does not state."""

    rows: tuple[Row, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    mixture_of_experts: bool = False
    default_head_dim: int | None = None  # where config.json has none; None: hidden size / heads


ARCHITECTURES = {
    "Qwen2ForCausalLM": Architecture(
        (EMBEDDING, *ATTENTION, *QKV_BIAS, *DENSE_MLP, FINAL_NORM, OUTPUT_LAYER), qkv_bias=True
    ),
    "LlamaForCausalLM": Architecture((EMBEDDING, *ATTENTION, *DENSE_MLP, FINAL_NORM, OUTPUT_LAYER)),
    "Qwen3ForCausalLM": Architecture(
        (EMBEDDING, *ATTENTION, *QK_NORM, *DENSE_MLP, FINAL_NORM, OUTPUT_LAYER),
        qk_norm=True,
        default_head_dim=128,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        (EMBEDDING, *ATTENTION, *QK_NORM, *MIXTURE_OF_EXPERTS, FINAL_NORM, OUTPUT_LAYER),
        qk_norm=True,
        mixture_of_experts=True,
    ),
}


def _unsupported_features(config: dict[str, Any], architecture: Architecture) -> list[str]:
    """What this config.json asks for that the tables (or Megatron-core as we build it) lack."""
    layer_types = config.get("layer_types") or []
    found = {
        "sliding-window attention": bool(config.get("use_sliding_window"))
        or any(kind != "full_attention" for kind in layer_types),
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
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
        # transformers 5 writes num_local_experts, earlier releases num_experts.
        num_experts = config.get("num_experts") or config["num_local_experts"]
        experts = ExpertShape(
            num_experts=num_experts,
            experts_per_token=config["num_experts_per_tok"],
            ffn_hidden_size=config["moe_intermediate_size"],
            normalize_top_k=bool(config.get("norm_topk_prob", False)),
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


def row_shapes(row: Row, *, shape: ModelShape) -> tuple[tuple[int, ...], ...]:
    """The shape of each HF tensor of `row`, in the order of `row.hf`."""
    hidden, dim = shape.hidden_size, shape.head_dim
    query, key = shape.num_attention_heads * dim, shape.num_query_groups * dim
    experts = shape.experts
    ffn = experts.ffn_hidden_size if row.place == "expert" and experts else shape.ffn_hidden_size
    if row.kind == "vocabulary":
        return ((shape.vocab_size, hidden),)
    if row.kind == "qkv":
        is_bias = row.hf[0].endswith("bias")
        return tuple((n,) if is_bias else (n, hidden) for n in (query, key, key))
    if row.kind == "gate_up":
        return ((ffn, hidden), (ffn, hidden))
    if row.kind == "columns":
        return ((hidden, query if "self_attn" in row.hf[0] else ffn),)
    if row.hf[0].endswith("mlp.gate.weight"):
        assert experts is not None, "only a mixture of experts has a router"
        return ((experts.num_experts, hidden),)
    return ((dim,) if row in QK_NORM else (hidden,),)


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model's safetensors files by its Hugging Face name, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for row in shape.rows:
        layers = range(shape.num_layers) if row.place in ("layer", "expert") else range(1)
        experts = range(shape.experts.num_experts if row.place == "expert" and shape.experts else 1)
        for layer in layers:
            for expert in experts:
                for name, size in zip(row.hf, row_shapes(row, shape=shape), strict=True):
                    shapes[name.format(layer=layer, expert=expert)] = size
    return shapes
