"""The shape of a model, read from its config.json: its sizes and the names of its weights."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_rl.errors import UserError
from megatron_rl.models.architectures import ARCHITECTURES
from megatron_rl.models.config_keys import (
    NAMES,
    TEXT_MODELS,
    UNKNOWN,
    RotaryScaling,
    read_rotary_base,
    read_rotary_part,
    read_rotary_scaling,
    reason_unsupported,
    shape_problems,
    unsupported_keys,
    unsupported_rotary_features,
    with_defaults,
    wrong_types,
    wrong_types_of_model,
)
from megatron_rl.models.delta_net import DeltaShape, delta_sizes, read_delta
from megatron_rl.models.latent import (
    LatentShape,
    latent_sizes,
    read_latent,
    unsupported_latent_features,
)
from megatron_rl.models.safetensors_headers import EXPERTS_IN_ONE, find_files
from megatron_rl.models.weights import (
    OUTPUT_LAYER,
    QK_NORM,
    QKV_BIAS,
    SIGMOID_ROUTER,
    VALUE_HEAD,
    Architecture,
    Factors,
    Layers,
    LocalLayers,
    Traits,
    Weight,
    factor_weights,
)

# softmax: over all experts or the chosen ones. sigmoid: of each expert's score; experts are chosen
# by it plus a bias of the expert, which training by policy gradients does not change.
Scoring = Literal["softmax", "sigmoid"]
# Megatron scores a group of experts by the sum of its k / chosen_groups best ones; transformers and
# vLLM by the sum of the two best.
BEST_OF_GROUP = 2
# Of the last hidden states: log-probs of tokens; of a critic one value, of which the head is in the
# model's files or in none.
Head = Literal["tokens", "value", "none"]


@dataclass(frozen=True)
class ExpertShape:
    """The mixture of experts that replaces the MLP of every layer from `first_layer` on.

    scale: factor of the chosen experts' weights. The experts are divided into `groups`, and a
    token's experts come from `chosen_groups` of them.
    """

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    normalize_top_k: bool
    shared_ffn_hidden_size: int | None = None  # of the shared expert, which processes every token
    first_layer: int = 0
    scoring: Scoring = "softmax"
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1


def unsupported_expert_features(config: dict[str, Any], architecture: Architecture) -> list[str]:
    """List features of this config.json's mixture of experts that Megatron's router lacks."""
    if not architecture.mixture_of_experts:
        return []
    sigmoid = architecture.scoring == "sigmoid"
    chosen, groups = config["num_experts_per_tok"], config.get("n_group", 1)
    best = BEST_OF_GROUP * config.get("topk_group", 1)
    # Without these two keys vLLM would choose DeepSeek's experts otherwise than transformers.
    needed = SIGMOID_ROUTER if architecture.latent_attention else {}
    names = ("num_experts", "num_local_experts")
    features = {
        "num_experts other than num_local_experts": len({config.get(n) for n in names} - {None})
        > 1,
        **{f"no {key}": key not in config for key in needed},
        "num_experts_per_tok 1 with normalized weights (norm_topk_prob), which are then 1 whatever "
        "the router computes": chosen == 1 and (sigmoid or bool(config["norm_topk_prob"])),
        f"num_experts_per_tok {chosen} in {best // BEST_OF_GROUP} of {groups} groups (must be 2 "
        "for each of topk_group)": sigmoid and groups > 1 and chosen != best,
        "no shared experts": sigmoid and not config["n_shared_experts"],
    }
    return [feature for feature, present in features.items() if present]


def read_experts(config: dict[str, Any], architecture: Architecture) -> ExpertShape:
    """Read the mixture of experts from a config.json without unsupported features."""
    if architecture.scoring == "sigmoid":
        size = config["moe_intermediate_size"]
        return ExpertShape(
            num_experts=config["n_routed_experts"],
            experts_per_token=config["num_experts_per_tok"],
            ffn_hidden_size=size,
            normalize_top_k=True,
            shared_ffn_hidden_size=size * config["n_shared_experts"],
            first_layer=min(config["first_k_dense_replace"], config["num_hidden_layers"]),
            scoring="sigmoid",
            scale=float(config["routed_scaling_factor"]),
            groups=config["n_group"],
            chosen_groups=config["topk_group"],
        )
    shared = any("shared_ffn" in weight.size for weight in architecture.weights)
    name = "num_experts" if "num_local_experts" not in config else "num_local_experts"
    return ExpertShape(
        num_experts=config[name],
        experts_per_token=config["num_experts_per_tok"],
        ffn_hidden_size=config["moe_intermediate_size"],
        normalize_top_k=bool(config["norm_topk_prob"]),
        shared_ffn_hidden_size=config["shared_expert_intermediate_size"] if shared else None,
    )


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model from its config.json."""

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
    sliding_window: int | None = None  # tokens that layers attend to; None: unlimited
    local_layers: LocalLayers | None = None  # those with the window; None: all
    softmax_scale: float | None = None  # of attention scores; None: 1 / sqrt(head size)
    rotary_part: float = 1.0  # of each head, from its first element
    latent: LatentShape | None = None  # of multi-head latent attention
    delta: DeltaShape | None = None  # of gated delta nets
    options: tuple[str, ...] = ()  # of the architecture, that this model sets
    wrapper: str | None = None  # class of files that also have a vision tower
    fused_experts: bool = False  # files have all experts of a layer in one tensor
    lists_frozen: bool = True  # whether `weights` lists those that training does not change
    head: Head = "tokens"
    factors: Factors | None = None  # of adapters, which `weights` then lists alone

    @property
    def traits(self) -> Traits:
        """Differences of this architecture's computation from Llama's."""
        return ARCHITECTURES[self.architecture].traits

    @property
    def has_sinks(self) -> bool:
        """True if every head has a learned score without a value."""
        return any(weight.size == ("heads",) for weight in self.weights)

    @property
    def local_rotary(self) -> "ModelShape | None":
        """This shape with the rotary embeddings of layers with a window, if these layers differ."""
        if self.local_layers is None or self.local_layers.rotary_base is None:
            return None
        base = self.local_layers.rotary_base
        return replace(self, rotary_base=base, rotary_scaling=None, local_layers=None)

    @property
    def qkv_bias(self) -> bool:
        """True if the q, k and v projections have biases."""
        return QKV_BIAS in self.weights

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys are normalised per head."""
        names = [weight.megatron for weight in self.weights if weight.size == ("head",)]
        return QK_NORM[0].megatron in names

    @property
    def shared_expert_gate(self) -> bool:
        """True if a gate scales the output of the shared expert."""
        gates = (weight for weight in self.weights if weight.part == "layer")
        return any(weight.size == ("one", "hidden") for weight in gates)

    @property
    def rotary_size(self) -> int:
        """Elements of a head that are rotated."""
        if self.latent is not None:
            return self.latent.rotated
        return int(self.head_dim * self.rotary_part)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights of this architecture, without the output layer if embeddings are tied."""
        weights = ARCHITECTURES[self.architecture].weights_of(self.options)
        if self.factors is not None:
            return tuple(factor_weights(weights, self.factors.targets))
        has_output_layer = self.head == "tokens" and not self.tied_embeddings
        listed = tuple(
            w
            for w in weights
            if (has_output_layer or w is not OUTPUT_LAYER) and (self.lists_frozen or not w.frozen)
        )
        return (*listed, VALUE_HEAD) if self.head == "value" else listed

    def layers_with(self, kind: Layers, among: range | None = None) -> Sequence[int]:
        """Return the layers of one kind, optionally within the range `among`."""
        layers = range(self.num_layers) if among is None else among
        first = self.experts.first_layer if self.experts else self.num_layers
        if kind in ("delta", "attention"):
            nets = self.delta.layers if self.delta else ()
            return [layer for layer in layers if (layer in nets) == (kind == "delta")]
        if kind == "dense":
            return range(layers.start, max(layers.start, min(first, layers.stop)))
        if kind == "experts":
            return range(min(max(first, layers.start), layers.stop), layers.stop)
        return layers

    @property
    def sizes(self) -> dict[str, int]:
        """The value of each `Size` name that the weights use."""
        sizes = {
            "hidden": self.hidden_size,
            "query": self.num_attention_heads * self.head_dim,
            "key": self.num_query_groups * self.head_dim,
            "head": self.head_dim,
            "ffn": self.ffn_hidden_size,
            "vocabulary": self.vocab_size,
            "one": 1,
            "heads": self.num_attention_heads,
        }
        sizes["gated_query"] = 2 * sizes["query"]
        if self.delta is not None:
            sizes |= delta_sizes(self.delta)
        if self.factors is not None:
            sizes["adapter_rank"] = self.factors.rank
        if self.latent is not None:
            heads, head_dim = self.num_attention_heads, self.head_dim
            sizes |= latent_sizes(self.latent, heads=heads, head_dim=head_dim)
        if self.experts is None:
            return sizes
        return sizes | {
            "experts": self.experts.num_experts,
            "expert_ffn": self.experts.ffn_hidden_size,
            "expert_gate_up": 2 * self.experts.ffn_hidden_size,
            "shared_ffn": self.experts.shared_ffn_hidden_size or 0,
        }


_MALFORMED = (TypeError, AttributeError, ZeroDivisionError)  # values of other types


def _unsupported_features(config: dict[str, Any], architecture: Architecture) -> list[str]:
    """List features in this config.json that the weight tables or our Megatron model lack.

    config: with the defaults of the architecture.
    """
    layer_types, pattern = config.get("layer_types") or [], architecture.traits.local_pattern
    unsupported = pattern.unsupported(config) if pattern else []
    has_kinds = pattern is not None or architecture.has_delta_nets
    if not has_kinds and any(kind != "full_attention" for kind in layer_types):
        unsupported.append("sliding-window attention in some layers")
    size = config.get("head_dim")
    is_free = size is None or "head_dim" in {*architecture.defaults, *architecture.ignored}
    if not is_free and size * config["num_attention_heads"] != config["hidden_size"]:
        unsupported.append(f"head_dim {size} other than hidden_size / num_attention_heads")
    if (kind := config.get("model_type")) in TEXT_MODELS and TEXT_MODELS[kind] != architecture.name:
        unsupported.append(f"model_type {kind!r}, which transformers reads as {TEXT_MODELS[kind]}")
    unsupported += unsupported_expert_features(config, architecture)
    if architecture.latent_attention:
        unsupported += unsupported_latent_features(config)
    rotary = unsupported_rotary_features(config, architecture)
    return [*rotary, *unsupported, *architecture.traits.refuse(config)]


def read_model_shape(folder: str | Path) -> ModelShape:
    """Read the shape of a Hugging Face model from `folder`/config.json.

    Raises ValueError naming the file if it is missing, incomplete, of an unsupported architecture,
    or uses unsupported features (all of them are listed at once).
    """
    path = _config_file(folder)
    return _read_shape(path, _read_object(path))


def read_critic_shape(folder: str | Path) -> ModelShape:
    """Read the shape of a critic that starts from a Hugging Face model.

    Its value head is `score.weight` of the files, as of transformers' models for classification
    with one label; without this tensor it is in no file, and starts at 0. The output layer is not
    read. Raises ValueError as `read_model_shape`.
    """
    path = _config_file(folder)
    config = _read_object(path)
    if isinstance(names := config.get("architectures"), list):
        named = [_CLASSIFIER.sub("ForCausalLM", str(name)) for name in names]
        config = config | {"architectures": named}
    is_stored = any(path.parent.glob("*.safetensors*")) and VALUE_HEAD.hf[0] in find_files(folder)
    shape = _read_shape(path, config)
    return replace(shape, tied_embeddings=False, head="value" if is_stored else "none")


_CLASSIFIER = re.compile(r"For(Sequence|Token)Classification$")


def _config_file(folder: str | Path) -> Path:
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(
            f"{path} does not exist: {folder} is not a Hugging Face model folder; "
            "give one with config.json, *.safetensors and the tokenizer's files"
        )
    return path


def _read_shape(path: Path, config: dict[str, Any]) -> ModelShape:
    _refuse(wrong_types(config, NAMES), path)
    config, wrapper = text_model(config)
    architecture = _find_architecture(config, path)
    _refuse(wrong_types_of_model(config, architecture), path)
    name = architecture.name
    try:
        unsupported = unsupported_keys(config, architecture)
        unsupported += ["quantized weights"] * (path.parent / "hf_quant_config.json").is_file()
        with suppress(*(_MALFORMED if unsupported else ())):
            unsupported += _unsupported_features(_complete(config), architecture)
        if unsupported:
            unknown = UNKNOWN in "".join(unsupported)
            raise UserError(
                f"{path}: {name} with {', '.join(unsupported)} is not supported; "
                "choose a model without these features, in floating point"
                + "; remove an unknown key if it does not change what the model computes"
                * unknown
            )
        shape = replace(build_shape(config), wrapper=wrapper)
        if architecture.mixture_of_experts and architecture.wrapper is not None:
            fused = _has_fused_experts(path.parent, published=wrapper is not None)
            shape = replace(shape, fused_experts=fused)
    except KeyError as missing:
        raise UserError(f"{path} has no {missing}; use the model's complete file") from None
    except _MALFORMED as error:
        raise UserError(f"{path}: a value is of another type ({error}); correct it") from None
    if problems := shape_problems(shape):
        raise UserError(f"{path}: {'; '.join(problems)}; correct it")
    return shape


def _refuse(problems: list[str], path: Path) -> None:
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")


_WRAPPERS = {each.wrapper: each.name for each in ARCHITECTURES.values() if each.wrapper}
_OF_WRAPPER = ("text_config", "vision_config", "architectures", "model_type")


def text_model(config: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the config.json of the text model, and the class that wraps it with a vision tower.

    A config.json of a text model is returned with None; without `architectures` it gets the class
    that transformers takes for its model_type. Embeddings are tied by the wrapper's own key,
    as in transformers.
    """
    if not config.get("architectures") and config.get("model_type") in TEXT_MODELS:
        return config | {"architectures": [TEXT_MODELS[config["model_type"]]]}, None
    names, text = config.get("architectures"), config.get("text_config")
    wrapper = names[0] if isinstance(names, list) and names else None
    if wrapper not in _WRAPPERS or not isinstance(text, dict):
        return config, None
    outer = {
        key: value
        for key, value in config.items()
        if key not in _OF_WRAPPER and text.get(key) is None
    }
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    inner = {"architectures": [_WRAPPERS[wrapper]], "tie_word_embeddings": tied}
    return text | outer | inner, wrapper


def _has_fused_experts(folder: Path, *, published: bool) -> bool:
    """Return whether files have all experts of a layer in one tensor; without files: `published`.

    So they are published; transformers from release 5 on saves them one by one.
    """
    if not any(folder.glob("*.safetensors*")):
        return published
    names = (name for name in find_files(folder) if name.startswith("model."))  # not of MTP
    return any(name.endswith(EXPERTS_IN_ONE) for name in names)


def _find_architecture(config: dict[str, Any], path: Path) -> Architecture:
    names = config.get("architectures")
    name = names[0] if names else "(none)"
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    why = f" ({reason})" if (reason := reason_unsupported(name, config)) else ""
    what = f"architecture {name}"
    if not names:
        what = f"model_type {json.dumps(config.get('model_type'))}, without architectures,"
    raise UserError(f"{path}: {what} is not supported{why}; choose from {sorted(ARCHITECTURES)}")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path} is not valid JSON ({error}); repair it, or download it again"
        ) from None
    if not isinstance(config, dict):
        raise UserError(f"{path} must be a JSON object, not a {type(config).__name__}")
    return config


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys that all architectures share and the defaults of its own."""
    architecture = ARCHITECTURES[config["architectures"][0]]
    return architecture.traits.keys(with_defaults(config, architecture))


def build_shape(config: dict[str, Any]) -> ModelShape:
    """Build the shape that a config.json of a supported architecture describes, unchecked."""
    config = _complete(config)
    name = config["architectures"][0]
    architecture = ARCHITECTURES[name]
    heads = config["num_attention_heads"]
    scaling = read_rotary_scaling(config)
    positions = config["max_position_embeddings"]
    if architecture.latent_attention:  # transformers writes the rotated part as head_dim
        head_dim, groups = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], heads
    else:
        head_dim, groups = config.get("head_dim"), config["num_key_value_heads"]
        head_dim = config["hidden_size"] // heads if head_dim is None else head_dim
        groups = heads if groups is None else groups
    has_window, pattern = (
        "sliding_window" in architecture.defaults,
        architecture.traits.local_pattern,
    )
    scalar = config.get("query_pre_attn_scalar")
    return ModelShape(
        architecture=name,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=head_dim,
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=scaling.positions(positions) if scaling else positions,
        rotary_base=read_rotary_base(config),
        rotary_scaling=scaling,
        norm_epsilon=config["rms_norm_eps"],
        tied_embeddings=config["tie_word_embeddings"],
        experts=read_experts(config, architecture) if architecture.mixture_of_experts else None,
        sliding_window=config["sliding_window"] if has_window else None,
        local_layers=pattern.read(config) if pattern else None,
        softmax_scale=None if scalar in (None, head_dim) else scalar**-0.5,
        rotary_part=read_rotary_part(config),
        options=architecture.set_options(config),
        latent=read_latent(config, scaling) if architecture.latent_attention else None,
        delta=read_delta(config) if architecture.has_delta_nets else None,
    )


def weight_shapes(weight: Weight, *, shape: ModelShape) -> tuple[tuple[int, ...], ...]:
    """Return the shape of each HF tensor of `weight`, in the order of `weight.hf`."""
    sizes = shape.sizes
    rest = tuple(sizes[name] for name in weight.size[1:])
    of_heads = {"qkv": ("query", "key", "key"), "gated_qkv": ("gated_query", "key", "key")}
    heights = of_heads.get(weight.cut, weight.heights)
    if heights is not None:
        return tuple((sizes[name], *rest) for name in heights)
    return ((sizes[weight.size[0]], *rest),) * len(weight.hf)


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by its Hugging Face name, of experts one by one.

    Files of some architectures have the experts of a layer in one tensor (`stored_tensors.py`).
    """
    return {each.name: each.size for each in each_tensor(shape)}


class ModelTensor(NamedTuple):
    """One weight of a model: its name, its shape, and which of `kind.hf` it is."""

    name: str
    size: tuple[int, ...]
    kind: Weight
    number: int
    layer: int
    expert: int


def each_tensor(shape: ModelShape) -> Iterator[ModelTensor]:
    """Yield all weights of a model, each expert's by itself."""
    for weight in shape.weights:
        sizes = weight_shapes(weight, shape=shape)
        layers = (
            shape.layers_with(weight.layers) if weight.part in ("layer", "expert") else range(1)
        )
        experts = range(
            shape.experts.num_experts if weight.part == "expert" and shape.experts else 1
        )
        for layer, expert in itertools.product(layers, experts):
            for number, (name, size) in enumerate(zip(weight.hf, sizes, strict=True)):
                full = name.format(layer=layer, expert=expert)
                yield ModelTensor(full, size, weight, number, layer, expert)
