"""Building blocks of architectures: weights with sizes and sharding, and differences from Llama.

Names come from Hugging Face's `modeling_<type>.py`, Megatron-core's `gpt_layer_specs.py` (local
layers, and the fused names of Transformer Engine's layers) and vLLM's `models/<type>.py` (its
merged modules).

The factors of low-rank adapters (LoRA) are the weights of a model of their own. It has the layouts,
pieces and plans of any other model, so adapters are pushed, checked and counted by the same code.
q, k and v share one A, and so do gate and up: it has the name of the first of them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

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
    """Return config.json with the rotary parameters of layers without a window alone.

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


# Sharding of a weight over tensor parallelism, and the HF tensors it consists of:
#   replicated  every rank has all of one tensor, or of several, one above the other
#   vocabulary  rows split evenly after padding to the layout's vocabulary size
#   rows        rows split evenly (the output dimension of a column-parallel linear)
#   columns     columns split evenly (the input dimension of a row-parallel linear)
#   qkv         (q, k, v): Megatron interleaves them per query group, vLLM concatenates them
#   gated_qkv   the same with [query; gate] of each head in q; Megatron's groups are queries, gates,
#               key, value
#   gate_up     (gate, up): each rank's [gate shard; up shard]
#   by_head     `parts` of each key head of a gated delta net: Megatron has a head's parts together,
#               vLLM each rank's shards of the parts, one above the other
Cut = Literal[
    "replicated", "vocabulary", "rows", "columns", "qkv", "gated_qkv", "gate_up", "by_head"
]
Part = Literal["first", "layer", "expert", "last"]
# A size by name; `ModelShape.sizes` has the values. "qkv" is the query size + 2 * the key size.
Size = Literal["hidden", "query", "qkv", "head", "ffn", "expert_ffn", "shared_ffn",
               "experts", "vocabulary", "one",
               "query_rank", "rank", "latent", "keys_values", "values",
               "heads", "expert_gate_up", "adapter_rank", "gated_query", "gated_qkv",
               "delta_keys", "delta_values", "delta_qkv", "delta_qkvz", "delta_ba",
               "delta_heads", "delta_head", "kernel"]  # fmt: skip
# Layers with a weight: all, those with a dense MLP, with a mixture of experts, with a gated delta
# net, or with attention in a model that has such nets.
Layers = Literal["all", "dense", "experts", "delta", "attention"]


@dataclass(frozen=True)
class Weight:
    """One kind of parameter: its HF tensors and its name in Megatron-core and in vLLM.

    Names are templates with the layer index `{layer}` and the expert index `{expert}`; both are
    local in Megatron names and global in HF names. `fused` is the name with Transformer Engine's
    layers if it differs. `size` is the shape of each HF tensor, (rows, columns) for matrices;
    `heights`: row counts, one for each tensor, if not all have size[0].
    `parts` are sections of the tensors, in order: (which tensor, rows); see `by_head`.
    `frozen` is a buffer in float32, whatever the other weights are, that training does not change.
    `stored` is the tensor of files that has all experts', each transposed (`stored_tensors.py`).
    """

    part: Part
    cut: Cut
    size: tuple[Size, ...]
    hf: tuple[str, ...]
    megatron: str
    vllm: str
    fused: str | None = None
    layers: Layers = "all"
    heights: tuple[Size, ...] | None = None
    frozen: bool = False
    stored: str | None = None
    parts: tuple[tuple[int, Size], ...] = ()


_L = "model.layers.{layer}."
_M = "decoder.layers.{layer}."
_SELF, _MEGATRON_SELF = _L + "self_attn.", _M + "self_attention."

EMBEDDING = Weight(
    "first", "vocabulary", ("vocabulary", "hidden"),
    ("model.embed_tokens.weight",),
    "embedding.word_embeddings.weight",
    "model.embed_tokens.weight",
)  # fmt: skip
FINAL_NORM = Weight(
    "last", "replicated", ("hidden",),
    ("model.norm.weight",),
    "decoder.final_layernorm.weight",
    "model.norm.weight",
)  # fmt: skip
OUTPUT_LAYER = Weight(
    "last", "vocabulary", ("vocabulary", "hidden"),
    ("lm_head.weight",),
    "output_layer.weight",
    "lm_head.weight",
)  # fmt: skip
VALUE_HEAD = Weight(  # of a critic, as of transformers' models for classification with one label
    "last", "replicated", ("one", "hidden"),
    ("score.weight",),
    "output_layer.weight",
    "score.weight",
)  # fmt: skip
ATTENTION = (
    Weight(
        "layer", "replicated", ("hidden",),
        (_L + "input_layernorm.weight",),
        _M + "input_layernorm.weight",
        _L + "input_layernorm.weight",
        fused=_MEGATRON_SELF + "linear_qkv.layer_norm_weight",
    ),
    Weight(
        "layer", "qkv", ("qkv", "hidden"),
        tuple(_SELF + f"{name}_proj.weight" for name in "qkv"),
        _MEGATRON_SELF + "linear_qkv.weight",
        _SELF + "qkv_proj.weight",
    ),
    Weight(
        "layer", "columns", ("hidden", "query"),
        (_SELF + "o_proj.weight",),
        _MEGATRON_SELF + "linear_proj.weight",
        _SELF + "o_proj.weight",
    ),
)  # fmt: skip
QKV_BIAS = Weight(
    "layer", "qkv", ("qkv",),
    tuple(_SELF + f"{name}_proj.bias" for name in "qkv"),
    _MEGATRON_SELF + "linear_qkv.bias",
    _SELF + "qkv_proj.bias",
)  # fmt: skip
QK_NORM = tuple(
    Weight(
        "layer", "replicated", ("head",),
        (_SELF + f"{name}_norm.weight",),
        _MEGATRON_SELF + f"{name}_layernorm.weight",
        _SELF + f"{name}_norm.weight",
    )
    for name in "qk"
)  # fmt: skip


def gated_mlp(
    size: Size, module: str, *, layers: Layers, stored: str | None = None
) -> tuple[Weight, ...]:
    """Return both weights of a gated MLP at `module` of a layer; `stored`: its name in files."""
    place = _L + (stored or module)
    return (
        Weight(
            "layer", "gate_up", (size, "hidden"),
            (f"{place}.gate_proj.weight", f"{place}.up_proj.weight"),
            f"{_M}{module}.linear_fc1.weight",
            f"{place}.gate_up_proj.weight",
            layers=layers,
        ),
        Weight(
            "layer", "columns", ("hidden", size),
            (f"{place}.down_proj.weight",),
            f"{_M}{module}.linear_fc2.weight",
            f"{place}.down_proj.weight",
            layers=layers,
        ),
    )  # fmt: skip


DENSE_MLP = (
    Weight(
        "layer", "replicated", ("hidden",),
        (_L + "post_attention_layernorm.weight",),
        _M + "pre_mlp_layernorm.weight",
        _L + "post_attention_layernorm.weight",
        fused=_M + "mlp.linear_fc1.layer_norm_weight",
        layers="dense",
    ),
    *gated_mlp("ffn", "mlp", layers="dense"),
)  # fmt: skip
MIXTURE_OF_EXPERTS = (
    Weight(
        "layer", "replicated", ("hidden",),
        (_L + "post_attention_layernorm.weight",),
        _M + "pre_mlp_layernorm.weight",
        _L + "post_attention_layernorm.weight",
        layers="experts",
    ),
    Weight(
        "layer", "replicated", ("experts", "hidden"),
        (_L + "mlp.gate.weight",),
        _M + "mlp.router.weight",
        _L + "mlp.gate.weight",
        layers="experts",
    ),
    Weight(
        "expert", "gate_up", ("expert_ffn", "hidden"),
        (_L + "mlp.experts.{expert}.gate_proj.weight", _L + "mlp.experts.{expert}.up_proj.weight"),
        _M + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        _L + "mlp.experts.routed_experts.w13_weight",
        fused=_M + "mlp.experts.linear_fc1.weight{expert}",
        layers="experts",
    ),
    Weight(
        "expert", "columns", ("hidden", "expert_ffn"),
        (_L + "mlp.experts.{expert}.down_proj.weight",),
        _M + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        _L + "mlp.experts.routed_experts.w2_weight",
        fused=_M + "mlp.experts.linear_fc2.weight{expert}",
        layers="experts",
    ),
)  # fmt: skip


# Added to an expert's score where experts are chosen, but not to its weight in the mixture.
EXPERT_BIAS = Weight(
    "layer", "replicated", ("experts",),
    (_L + "mlp.gate.e_score_correction_bias",),
    _M + "mlp.router.expert_bias",
    _L + "mlp.gate.e_score_correction_bias",
    layers="experts",
    frozen=True,
)  # fmt: skip
SHARED_EXPERTS = gated_mlp("shared_ffn", "mlp.shared_experts", layers="experts")
SIGMOID_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # keys of config.json


@dataclass(frozen=True)
class OptionalWeights:
    """A key of config.json that decides which weights a model has; unset, null and 0 are false."""

    key: str
    present: tuple[Weight, ...]
    absent: tuple[Weight, ...] = ()


@dataclass(frozen=True)
class Architecture:
    """One family of models, named as in `architectures` of its config.json.

    keys: of config.json, read for this architecture besides those of all (`config_keys.py`).
    defaults: keys that may be missing, with the values that transformers then takes; head_dim None:
    hidden size / heads; num_key_value_heads None: heads. only: keys with their one value.
    ignored: keys that change nothing in this architecture, here, in transformers and in vLLM.
    traits: differences from Llama's computation. scoring: how a router scores experts
    (`models/shape.py`). options: weights that only some models have; `weights` lists the weights of
    all layers. latent_attention: as in `models/latent.py`. wrapper: published class that has this
    model as its text model (`models/stored_tensors.py`).
    """

    name: str
    weights: tuple[Weight, ...]
    keys: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    traits: Traits = LIKE_LLAMA
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    options: tuple[OptionalWeights, ...] = ()
    latent_attention: bool = False
    wrapper: str | None = None

    def set_options(self, config: dict[str, Any]) -> tuple[str, ...]:
        """Return the options that this config.json sets."""
        return tuple(option.key for option in self.options if config.get(option.key))

    def weights_of(self, options: tuple[str, ...]) -> tuple[Weight, ...]:
        """Return the weights of a model that sets these options."""
        without = {
            weight
            for option in self.options
            for weight in (option.absent if option.key in options else option.present)
        }
        return tuple(weight for weight in self.weights if weight not in without)

    @property
    def qkv_bias(self) -> bool:
        """True if the q, k and v projections of every model have biases."""
        return QKV_BIAS in self.weights_of(())

    @property
    def has_delta_nets(self) -> bool:
        """True if layers have gated delta nets (`models/delta_net.py`)."""
        return any(weight.layers == "delta" for weight in self.weights)

    @property
    def mixture_of_experts(self) -> bool:
        """True if the MLP of most layers is a mixture of experts."""
        return any(weight.part == "expert" for weight in self.weights)


class Factors(NamedTuple):
    """Rank of adapters and the linears with adapters, by the endings of Megatron's names."""

    rank: int
    targets: tuple[str, ...]


def is_adapted(weight: Weight, targets: Collection[str]) -> bool:
    """Return whether a weight or bias belongs to a linear with an adapter."""
    stem = weight.megatron.rpartition(".")[0]
    return stem.rpartition(".linear_")[2] in targets


def factor_weights(weights: Sequence[Weight], targets: Collection[str]) -> Iterator[Weight]:
    """Yield A and B of every kind of linear with an adapter.

    Under tensor parallelism one of them is cut like the weight, and the other one is whole.
    """
    for weight in weights:
        if not is_adapted(weight, targets) or not weight.megatron.endswith(".weight"):
            continue
        hf = [name.removesuffix(".weight") for name in weight.hf]
        megatron, vllm = (name.removesuffix(".weight") for name in (weight.megatron, weight.vllm))
        rows, columns = weight.size
        by_columns = weight.cut == "columns"
        yield Weight(
            weight.part, "columns" if by_columns else "replicated", ("adapter_rank", columns),
            (f"{hf[0]}.lora_A.weight",), f"{megatron}.lora_a", f"{vllm}.lora_a",
            layers=weight.layers,
        )  # fmt: skip
        yield Weight(
            weight.part, "replicated" if by_columns else weight.cut, (rows, "adapter_rank"),
            tuple(f"{name}.lora_B.weight" for name in hf), f"{megatron}.lora_b", f"{vllm}.lora_b",
            layers=weight.layers,
        )  # fmt: skip
