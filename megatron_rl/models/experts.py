"""Mixtures of experts as described by a config.json: sizes, and how the router chooses."""

from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.models.weights import Architecture

# softmax: over all experts or the chosen ones. sigmoid: of each expert's score; experts are chosen
# by it plus a bias of the expert, which training by policy gradients does not change.
Scoring = Literal["softmax", "sigmoid"]
# Megatron scores a group of experts by the sum of its k / chosen_groups best ones; transformers and
# vLLM by the sum of the two best.
BEST_OF_GROUP = 2


@dataclass(frozen=True)
class ExpertShape:
    """The mixture of experts that replaces the MLP of every layer from `first_layer` on.

    scale: factor of the chosen experts' weights. A token's experts are those of `chosen_groups` of
    the `groups` into which the experts are divided.
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
    chosen, groups = config.get("num_experts_per_tok"), config.get("n_group") or 1
    best = BEST_OF_GROUP * (config.get("topk_group") or 1)
    # Without these two keys vLLM would choose DeepSeek's experts otherwise than transformers.
    is_named = architecture.latent_attention
    scoring = config.get("scoring_func", None if is_named else architecture.scoring)
    method = config.get("topk_method", None if is_named else "noaux_tc")
    features = {
        "dense layers in a mixture of experts": config.get("decoder_sparse_step", 1) != 1
        or bool(config.get("mlp_only_layers"))
        or config.get("moe_layer_freq", 1) != 1,
        f"scoring_func {scoring!r}": scoring != architecture.scoring,
        f"topk_method {method!r}": sigmoid and method != "noaux_tc",
        "norm_topk_prob false": sigmoid and not config.get("norm_topk_prob", True),
        "num_experts_per_tok 1": sigmoid and chosen == 1,
        f"num_experts_per_tok {chosen} in {best // BEST_OF_GROUP} of {groups} groups (must be 2 "
        "for each of topk_group)": sigmoid and groups > 1 and chosen != best,
        "no shared experts": sigmoid and not config.get("n_shared_experts", 1),
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
            shared_ffn_hidden_size=size * config.get("n_shared_experts", 1),
            first_layer=min(config["first_k_dense_replace"], config["num_hidden_layers"]),
            scoring="sigmoid",
            scale=float(config.get("routed_scaling_factor", 1.0)),
            groups=config.get("n_group") or 1,
            chosen_groups=config.get("topk_group") or 1,
        )
    shared = any("shared_ffn" in weight.size for weight in architecture.weights)
    # transformers 5 writes num_local_experts, earlier releases num_experts.
    return ExpertShape(
        num_experts=config.get("num_experts") or config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        ffn_hidden_size=config["moe_intermediate_size"],
        normalize_top_k=bool(config.get("norm_topk_prob", False)),
        shared_ffn_hidden_size=config["shared_expert_intermediate_size"] if shared else None,
    )
