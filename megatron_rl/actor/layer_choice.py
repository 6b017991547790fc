"""Choice between Transformer Engine's layers and Megatron's local layers."""

import warnings

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.actor.gated_delta_net import GatedDeltaNet
from megatron_rl.actor.latent_attention import LatentAttention
from megatron_rl.actor.layers import build_local_layer_spec
from megatron_rl.actor.norms import RmsNorm
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape

# Compute capabilities whose cuDNN attends THD packs in linear memory with correct gradients. Below
# 9.0 Transformer Engine does not use cuDNN for THD; on 12.x gradients were wrong
# (github.com/NVIDIA/TransformerEngine issue 3333).
FIRST_CAPABILITY, FIRST_WRONG_CAPABILITY = (9, 0), (12, 0)


def uses_transformer_engine(
    settings: ActorSettings,
    *,
    device: torch.device,
    window: int | None = None,
    cp_size: int = 1,
    local_only: str | None = None,
) -> bool:
    """Return True if the model uses Transformer Engine's layers.

    By default they are used if installed, in bfloat16, on a CUDA device of compute capability 9.0
    to below 12.0, unless the model has a sliding window (`window` tokens) under context
    parallelism, or adapters. Raises ValueError if they are required but not installed, with such a
    window, or for a model that has `local_only`, which they lack.
    """
    required = settings.transformer_engine or settings.fp8 is not None
    window_in_ring = window is not None and cp_size > 1
    if required and local_only:
        raise UserError(
            f"transformer_engine={settings.transformer_engine}, fp8={settings.fp8}, but the model "
            f"has {local_only}, which Transformer Engine's layers lack; unset both"
        )
    if required and window_in_ring:
        raise UserError(
            f"transformer_engine={settings.transformer_engine}, fp8={settings.fp8}, but the model "
            f"has a sliding window of {window} tokens and parallel.context={cp_size}: Transformer "
            "Engine's ring of keys and values does not support windows; set parallel.context to 1, "
            "or unset transformer_engine and fp8"
        )
    if required and not te.HAVE_TE:
        raise UserError(
            f"transformer_engine={settings.transformer_engine}, fp8={settings.fp8}, but Megatron "
            "finds no Transformer Engine: `megatron-rl doctor` prints how to install it, or unset "
            "them"
        )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if settings.transformer_engine is None and not required:
        return (
            te.HAVE_TE
            and not window_in_ring
            and local_only is None
            and settings.lora is None  # no GPU has run adapters on its layers
            and settings.dtype == torch.bfloat16
            and capability is not None
            and FIRST_CAPABILITY <= capability < FIRST_WRONG_CAPABILITY
        )
    if required and capability is not None and capability >= FIRST_WRONG_CAPABILITY:
        warnings.warn(
            f"Transformer Engine on compute capability {capability[0]}.{capability[1]}: its "
            "attention has computed wrong gradients there; run tools/gpu_check.sh, or set "
            "transformer_engine to false",
            stacklevel=2,
        )
    return bool(required)


def build_block_spec(
    shape: ModelShape, *, config: TransformerConfig, layers: range
) -> TransformerBlockSubmodules:
    """Build the spec of these layers of the model and a final norm."""
    if config.transformer_impl == "transformer_engine":
        # This import fails without Transformer Engine.
        from megatron_rl.actor.transformer_engine_layers import (
            TENorm,
            build_transformer_engine_spec,
        )

        build, norm = build_transformer_engine_spec, TENorm
    else:
        build, norm = build_local_layer_spec, RmsNorm
    nets = shape.layers_with("delta") if shape.delta else ()
    kinds = [(number in shape.layers_with("experts"), number in nets) for number in layers]
    specs = {kind: build(shape, experts=kind[0]) for kind in set(kinds)}
    for (_, is_net), spec in specs.items():
        if is_net or shape.latent:
            module = GatedDeltaNet if is_net else LatentAttention
            spec.submodules.self_attention = ModuleSpec(module=module, params={"shape": shape})
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=norm)


def mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark weights that are sharded over tensor parallelism, as Megatron's initialisation would.

    The gradient norm counts unmarked parameters on the first tensor-parallel rank only. Megatron
    does not pass the sharding to Transformer Engine's grouped linears, so from version 2.13 on they
    do not mark their weights.
    """
    shard_dimension = {ColumnParallelLinear: 0, RowParallelLinear: 1, VocabParallelEmbedding: 0}
    if te.HAVE_TE:
        shard_dimension[te.TEColumnParallelGroupedLinear] = 0
        shard_dimension[te.TERowParallelGroupedLinear] = 1
    for module in model.modules():
        if type(module) not in shard_dimension:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if name.startswith("weight") and not hasattr(parameter, "tensor_model_parallel"):
                dimension = shard_dimension[type(module)]
                set_tensor_model_parallel_attributes(parameter, True, dimension, 1)


def fuse_gradient_accumulation(model: torch.nn.Module) -> None:
    """Let Transformer Engine's linears add their weight gradients to the float32 `main_grad`.

    Otherwise each micro-batch's gradient is rounded to the weight's dtype and added afterwards.
    Megatron's own option is not used: it also requires apex for the output layer, whose gradient
    our head accumulates in float32 anyway.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            setattr(module, "fuse_wgrad_accumulation", True)  # noqa: B010 - mypy takes it for a tensor
