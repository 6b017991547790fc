"""Mixtures of experts as described by a config.json: sizes, and how the router chooses."""

from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.models.weights import SIGMOID_ROUTER, Architecture

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
