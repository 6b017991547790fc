"""Values of a config.json that no model can have."""

from typing import Any

# Fields of ModelShape, ExpertShape, LatentShape and DeltaShape, and their keys in config.json.
_SIZES = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "head_dim": "head_dim",
    "num_attention_heads": "num_attention_heads", "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size", "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}  # fmt: skip
_SIZES_OF_EXPERTS = {
    "num_experts": "num_experts (num_local_experts, n_routed_experts)",
    "experts_per_token": "num_experts_per_tok", "ffn_hidden_size": "moe_intermediate_size",
    "groups": "n_group", "chosen_groups": "topk_group",
}  # fmt: skip
_SIZES_OF_LATENTS = {
    "rank": "kv_lora_rank", "rotated": "qk_rope_head_dim", "value": "v_head_dim",
}  # fmt: skip
_SIZES_OF_DELTA_NETS = {
    "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim", "value_dim": "linear_value_head_dim",
}  # fmt: skip


def shape_problems(shape: Any) -> list[str]:
    """List the values of a shape that are no sizes, no positive numbers, or do not fit together.

    shape: a ModelShape, whose module imports this one.
    """
    experts, latent = shape.experts, shape.latent
    problems = _not_whole(shape, _SIZES)
    problems += _not_whole(experts, _SIZES_OF_EXPERTS) if experts else []
    problems += _not_whole(latent, _SIZES_OF_LATENTS) if latent else []
    problems += _not_whole(shape.delta, _SIZES_OF_DELTA_NETS) if shape.delta else []
    window, numbers = shape.sliding_window, _numbers(shape)
    if window is not None and not _is_whole(window):
        problems.append(
            f"sliding_window is {window!r}; it must be null or a whole number, 1 or more"
        )
    problems += [
        f"{key} is {value!r}; it must be a number above 0"
        for key, value in numbers.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0
    ]
    if problems:
        return problems
    if shape.num_attention_heads % shape.num_query_groups:
        problems.append(
            f"num_key_value_heads={shape.num_query_groups} does not divide "
            f"num_attention_heads={shape.num_attention_heads}"
        )
    if experts and experts.experts_per_token > experts.num_experts:
        problems.append(
            f"num_experts_per_tok={experts.experts_per_token} of {experts.num_experts} experts"
        )
    if experts and (experts.num_experts % experts.groups or experts.chosen_groups > experts.groups):
        problems.append(
            f"topk_group={experts.chosen_groups} of n_group={experts.groups} for "
            f"{experts.num_experts} experts"
        )
    return problems


def _numbers(shape: Any) -> dict[str, Any]:
    numbers: dict[str, Any] = {"rms_norm_eps": shape.norm_epsilon, "rope_theta": shape.rotary_base}
    scaling = dict(shape.rotary_scaling.parameters) if shape.rotary_scaling else {}
    numbers |= {key: value for key, value in scaling.items() if key != "truncate"}
    if shape.experts is not None:
        numbers["routed_scaling_factor"] = shape.experts.scale
    return numbers | {"partial_rotary_factor": shape.rotary_part}


def _not_whole(of: object, sizes: dict[str, str]) -> list[str]:
    values = {key: getattr(of, field) for field, key in sizes.items()}
    return [
        f"{key} is {value!r}; it must be a whole number, 1 or more"
        for key, value in values.items()
        if not _is_whole(value)
    ]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
