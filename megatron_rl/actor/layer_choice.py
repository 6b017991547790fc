"""Which layers a model is built of: Transformer Engine's or Megatron's local ones with ours."""

import warnings

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.actor.layers import RmsNorm, build_local_layer_spec
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.models.shape import ModelShape

# Of a device whose cuDNN attends THD packs in linear memory and with right gradients: below 9.0 it
# is missing or refused by Transformer Engine, on 12.x gradients were wrong
# (github.com/NVIDIA/TransformerEngine issue 3333).
FIRST_CAPABILITY, FIRST_WRONG_CAPABILITY = (9, 0), (12, 0)


def uses_transformer_engine(settings: ActorSettings, *, device: torch.device) -> bool:
    """Whether the layers are Transformer Engine's: as set, else where they are there and right.

    That is in bfloat16 on a CUDA device of compute capability 9.0 to below 12.0. Raises ValueError
    where it is asked for and missing.
    """
    wanted = settings.transformer_engine or settings.fp8 is not None
    if wanted and not te.HAVE_TE:
        raise ValueError(
            f"transformer_engine={settings.transformer_engine}, fp8={settings.fp8}, but Megatron "
            "finds no Transformer Engine: `megatron-rl doctor` says how to install it, or unset "
            "them"
        )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if settings.transformer_engine is None and not wanted:
        return (
            te.HAVE_TE
            and settings.dtype == torch.bfloat16
            and capability is not None
            and FIRST_CAPABILITY <= capability < FIRST_WRONG_CAPABILITY
        )
    if wanted and capability is not None and capability >= FIRST_WRONG_CAPABILITY:
        warnings.warn(
            f"Transformer Engine on compute capability {capability[0]}.{capability[1]}: its "
            "attention has given wrong gradients there; run tools/gpu_check.sh, or set "
            "transformer_engine to false",
            stacklevel=2,
        )
    return bool(wanted)


def build_block_spec(
    shape: ModelShape, *, config: TransformerConfig, depth: int
) -> TransformerBlockSubmodules:
    """`depth` layers and a final norm, of the kind that `config.transformer_impl` names."""
    if config.transformer_impl == "transformer_engine":
        # Not to be imported where Transformer Engine is missing.
        from megatron_rl.actor.transformer_engine_layers import (
            TENorm,
            build_transformer_engine_spec,
        )

        layer, norm = build_transformer_engine_spec(shape), TENorm
    else:
        layer, norm = build_local_layer_spec(shape), RmsNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * depth, layer_norm=norm)


def mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark weights that are cut over tensor parallelism, as Megatron's initialisation would.

    The gradient norm counts unmarked parameters on the first tensor-parallel rank only. Megatron
    builds Transformer Engine's grouped linears without telling them that their weights are cut, so
    from 2.13 on they mark none.
    """
    cut_dimension = {ColumnParallelLinear: 0, RowParallelLinear: 1, VocabParallelEmbedding: 0}
    if te.HAVE_TE:
        cut_dimension[te.TEColumnParallelGroupedLinear] = 0
        cut_dimension[te.TERowParallelGroupedLinear] = 1
    for module in model.modules():
        if type(module) not in cut_dimension:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if name.startswith("weight") and not hasattr(parameter, "tensor_model_parallel"):
                dimension = cut_dimension[type(module)]
                set_tensor_model_parallel_attributes(parameter, True, dimension, 1)
