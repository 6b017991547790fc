"""Checks that a model can be sharded over a layout and that its ranks get enough responses."""

import math

from megatron_rl.config import Config, ConfigError, ParallelSection
from megatron_rl.models.adapters import are_in_experts_only
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.stored_tensors import has_transposed_experts
from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.resharding.pieces import chunk_layers, sharded_sizes, shares_key_heads
from megatron_rl.runtime.processes import cuda_devices


def default_world_size(config: Config) -> int:
    """Number of processes on this machine: one per device; at least one replica, and engines."""
    engines = config.parallel.engine_ranks or 0
    replicas = max((cuda_devices() - engines) // config.parallel.model_size, 1)
    return config.parallel.model_size * (config.parallel.data or replicas) + engines


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
    slices = parallel.expert_tensor_size
    if config.lora is not None and shape.experts and slices not in (1, parallel.tensor):
        problems.append(
            f"parallel.expert_tensor={slices} cannot be combined with lora: adapters of experts "
            f"need 1 or parallel.tensor={parallel.tensor}; set one of them"
        )
    if config.lora is not None and has_transposed_experts(shape):
        problems.append(
            f"lora: adapters of {shape.architecture} are not supported, because its files have the "
            "experts of a layer in one tensor; unset lora"
        )
    if (
        config.lora is not None
        and parallel.expert > 1
        and are_in_experts_only(shape, config.lora.targets)
    ):
        problems.append(
            f"lora.targets={config.lora.targets} are in experts only, and parallel.expert="
            f"{parallel.expert}: Megatron then has no parameters for its other optimizer; add qkv "
            "or proj, or set parallel.expert to 1"
        )
    replicas = config.sides(world_size)[0] // parallel.model_size
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
    _, generating = config.sides(world_size)
    if generating % rollout.tensor == 0:
        try:
            EngineLayout(rollout.tensor, generating, rollout.expert_parallel).check(shape)
        except ValueError as error:
            problems.append(f"rollout.tensor={rollout.tensor}: {error}; choose another")
    return problems


def cut_problems(parallel: ParallelSection, shape: ModelShape) -> list[str]:
    """List why the model cannot be sharded this way, for any number of processes."""
    sizes = {
        "tensor": ("parallel.tensor", parallel.tensor),
        "expert tensor": ("parallel.expert_tensor", parallel.expert_tensor_size),
        "expert parallel": ("parallel.expert", parallel.expert),
    }
    sharded = [(*sizes[kind], whole, name) for kind, whole, name in sharded_sizes(shape)]
    problems = []
    for key, size, whole, name in sharded:
        if whole % size:
            problems.append(
                f"{key}={size} does not divide the model's {whole} {name}; choose from "
                f"{_fitting(key, sharded, shape)}"
            )
    if not shares_key_heads(shape, tp_size=parallel.tensor):
        problems.append(
            f"parallel.tensor={parallel.tensor} neither divides the model's "
            f"{shape.num_query_groups} key-value heads nor is a multiple of them; choose from "
            f"{_fitting('parallel.tensor', sharded, shape)}"
        )
    return [*problems, *_stage_problems(parallel, shape), *_expert_problems(parallel, shape)]


def _fitting(key: str, sharded: list[tuple[str, int, int, str]], shape: ModelShape) -> str:
    """List the values of `key` that divide everything it shards."""
    common = math.gcd(*(whole for of, _, whole, _ in sharded if of == key))
    fitting = (size for size in range(1, common + 1) if common % size == 0)
    if key == "parallel.tensor":
        fitting = (size for size in fitting if shares_key_heads(shape, tp_size=size))
    return ", ".join(map(str, fitting))


def _stage_problems(parallel: ParallelSection, shape: ModelShape) -> list[str]:
    stages, chunks = parallel.pipeline, parallel.virtual_stages
    if chunks > 1 and stages == 1:
        return [
            f"parallel.virtual_stages={chunks} interleaves pipeline stages, but parallel.pipeline "
            "is 1; set it to 1, or use more pipeline stages"
        ]
    if parallel.stage_layers is not None:
        try:
            chunk_layers(shape.num_layers, chunks=stages * chunks, sizes=parallel.stage_layers)
        except ValueError as error:
            return [f"parallel.{error}, or be null"]
    elif stages * chunks > shape.num_layers:
        product = f" * parallel.virtual_stages={chunks}" if chunks > 1 else ""
        return [
            f"parallel.pipeline={stages}{product} is more than the model's {shape.num_layers} "
            "layers; every chunk needs a layer"
        ]
    return []


def _expert_problems(parallel: ParallelSection, shape: ModelShape) -> list[str]:
    tensor, expert, slices = parallel.tensor, parallel.expert, parallel.expert_tensor_size
    if shape.experts is None:
        keys = {"expert": expert > 1, "expert_tensor": parallel.expert_tensor is not None}
        return [
            f"parallel.{key}={getattr(parallel, key)}, but the model has no experts; "
            f"set it to {'1' if key == 'expert' else 'null'}"
            for key, is_set in keys.items()
            if is_set
        ]
    if tensor % slices:
        return [f"parallel.expert_tensor={slices} does not divide parallel.tensor={tensor}"]
    if expert == 1 and slices < tensor:
        # Megatron would reduce their gradients over data parallelism alone.
        return [
            f"parallel.expert_tensor={slices} is below parallel.tensor={tensor}, which needs "
            "parallel.expert above 1; raise that, or set parallel.expert_tensor to null"
        ]
    return []


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
    ffn = shape.ffn_hidden_size // parallel.tensor
    if shape.experts:
        ffn = shape.experts.ffn_hidden_size // parallel.expert_tensor_size
    heads = shape.num_attention_heads * shape.head_dim
    merged = heads + 2 * shape.num_query_groups * shape.head_dim
    return {
        "hidden size": shape.hidden_size,
        "queries' size": heads // parallel.tensor,
        "queries', keys' and values' size": merged // parallel.tensor,
        "feed-forward size": ffn,
    }
