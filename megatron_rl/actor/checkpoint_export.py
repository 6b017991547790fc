"""Export of a distributed checkpoint to a Hugging Face folder.

Each rank exports its own shards; its memory is limited to these, one full tensor and, on rank 0,
one file of the export.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_rl.actor.build import build_chunks
from megatron_rl.actor.checkpoint import load_checkpoint
from megatron_rl.actor.checkpoint_contents import read_state
from megatron_rl.actor.cpu_adaptation import megatron_runtime
from megatron_rl.actor.export import export_weights
from megatron_rl.actor.lora import adapted_weights, add_adapters, describe_adapters
from megatron_rl.actor.model import PolicyModel
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.actor.weights import (
    ProgressCallback,
    load_model,
    named_parameters,
    stored_dtypes,
)
from megatron_rl.config.sections import LoraSection
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import ModelShape, read_model_shape
from megatron_rl.resharding.adapted import LocalWeight


def export_checkpoint(
    checkpoint: str | Path,
    target: str | Path,
    *,
    like: str | Path,
    topology: Topology,
    progress: ProgressCallback,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder. Collective.

    like: the model folder that provides config, tokenizer files and each tensor's dtype, and for a
    checkpoint of adapters the weights that these are added to.
    """
    shape = read_model_shape(like)
    stored = read_state(checkpoint).get("adapters")
    weights: Mapping[str, LocalWeight]
    with megatron_runtime():
        chunks = _build(shape, stored_dtypes(like, shape), topology)
        if stored is None:
            load_checkpoint(checkpoint, chunks=chunks, topology=topology)
            weights = named_parameters(chunks)
        else:
            load_model(chunks, shape=shape, topology=topology, folder=like)
            lora = LoraSection(**{key: stored[key] for key in ("rank", "alpha", "targets")})
            seed = stored["seed"]
            add_adapters(chunks, lora, seed=seed, shape=shape, topology=topology)
            adapters = describe_adapters(lora, seed=seed, folder=like)
            updates = load_checkpoint(
                checkpoint, chunks=chunks, topology=topology, adapters=adapters
            )
            weights = adapted_weights(chunks, lora, seed=seed, updates=updates)
    export_weights(
        weights,
        shape=shape,
        topology=topology,
        source=like,
        folder=target,
        progress=progress,
    )


def _build(
    shape: ModelShape, dtypes: dict[str, torch.dtype], topology: Topology
) -> list[PolicyModel]:
    """Build chunks in the dtype that represents every tensor exactly."""
    dtype = torch.bfloat16 if set(dtypes.values()) == {torch.bfloat16} else torch.float32
    return build_chunks(shape, settings=ActorSettings(dtype=dtype), topology=topology)
