"""Checks that a model can be sharded over a layout and that its ranks get enough responses."""

import math

from megatron_rl.config import Config, ConfigError, ParallelSection
from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.resharding.pieces import sharded_sizes


def check_layout(config: Config, shape: ModelShape, *, world_size: int) -> None:
    """Raise ConfigError listing every conflict between model, layout and rollout sizes."""
    problems = [*layout_problems(config, shape, world_size), *length_problems(config, shape)]
    if problems:
        raise ConfigError("this layout is impossible:\n  " + "\n  ".join(problems))


def layout_problems(config: Config, shape: ModelShape, world_size: int) -> list[str]:
    """List the conflicts between the model, the layouts, and the minibatch size."""
    parallel, rollout = config.parallel, config.rollout
    problems = engine_layout_problems(config, shape, world_size)
    problems += cut_problems(parallel, shape)
    if shape.experts and parallel.tensor > 1 and not parallel.sequence:
        problems.append(
            f"parallel.sequence=false: Megatron trains experts under parallel.tensor="
            f"{parallel.tensor} with sequence parallelism only; leave it true"
        )
    replicas = world_size // parallel.model_size
    per_minibatch = (
        rollout.prompts_per_step * rollout.responses_per_prompt // config.trainer.minibatches
    )
    if replicas > per_minibatch:
        problems.append(
            f"a minibatch of {per_minibatch} responses cannot feed {replicas} data-parallel "
            "replicas; raise rollout.prompts_per_step or lower trainer.minibatches"
        )
    return problems


def engine_layout_problems(config: Config, shape: ModelShape, world_size: int) -> list[str]:
    """List the conflicts between process count, layout and vLLM's sharding."""
    rollout, problems = config.rollout, config.process_problems(world_size)
    if world_size % rollout.tensor == 0:
        try:
            EngineLayout(rollout.tensor, world_size, rollout.expert_parallel).check(shape)
        except ValueError as error:
            problems.append(f"rollout.tensor={rollout.tensor}: {error}; choose another")
    return problems


def cut_problems(parallel: ParallelSection, shape: ModelShape) -> list[str]:
    """List why the model cannot be sharded this way, for any number of processes."""
    stages, chunks, expert = parallel.pipeline, parallel.virtual_stages, parallel.expert
    sizes = {
        "tensor": ("parallel.tensor", parallel.tensor),
        "expert tensor": ("parallel.tensor", parallel.tensor),
        "expert parallel": ("parallel.expert", expert),
    }
    sharded = [(*sizes[kind], whole, name) for kind, whole, name in sharded_sizes(shape)]
    problems = []
    for key, size, whole, name in sharded:
        if whole % size:
            common = math.gcd(*(other for of, _, other, _ in sharded if of == key))
            fitting = [str(divisor) for divisor in range(1, common + 1) if common % divisor == 0]
            problems.append(
                f"{key}={size} does not divide the model's {whole} {name}; choose from "
                f"{', '.join(fitting)}"
            )
    if chunks > 1 and stages == 1:
        problems.append(
            f"parallel.virtual_stages={chunks} interleaves pipeline stages, but parallel.pipeline "
            "is 1; set it to 1, or use more pipeline stages"
        )
    elif shape.num_layers % (stages * chunks):
        product = f" * parallel.virtual_stages={chunks}" if chunks > 1 else ""
        problems.append(
            f"parallel.pipeline={stages}{product} does not divide the model's {shape.num_layers} "
            "layers; every chunk must have the same number"
        )
    if expert > 1 and shape.experts is None:
        problems.append(f"parallel.expert={expert}, but the model has no experts; set it to 1")
    return problems


def length_problems(config: Config, shape: ModelShape) -> list[str]:
    if config.max_model_tokens <= shape.max_position_embeddings:
        return []
    return [too_long(config, shape)]


def too_long(config: Config, shape: ModelShape) -> str:
    """Describe why a prompt and its response may have more tokens than the model has positions."""
    positions = shape.max_position_embeddings
    if config.environment is not None:
        return (
            f"environment.max_context_tokens={config.max_model_tokens} exceeds the model's "
            f"{positions} positions; lower it"
        )
    return (
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_response_tokens="
        f"{config.rollout.max_response_tokens} exceed the model's {positions} positions; lower one "
        "of them"
    )


def product_sizes(parallel: ParallelSection, shape: ModelShape) -> dict[str, int]:
    """Return the dimensions of the layers' weights on one rank."""
    ffn = shape.experts.ffn_hidden_size if shape.experts else shape.ffn_hidden_size
    heads = shape.num_attention_heads * shape.head_dim
    merged = heads + 2 * shape.num_query_groups * shape.head_dim
    return {
        "hidden size": shape.hidden_size,
        "queries' size": heads // parallel.tensor,
        "queries', keys' and values' size": merged // parallel.tensor,
        "feed-forward size": ffn // parallel.tensor,
    }
