"""Conversion of models between Hugging Face folders and distributed checkpoints.

Each rank converts its own shards; its memory is limited to these, one full tensor and, on rank 0,
one file of the export.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.actor.build import build_chunks
from megatron_rl.actor.checkpoint import load_checkpoint, save_checkpoint
from megatron_rl.actor.checkpoint_contents import FOLDER
from megatron_rl.actor.cpu_adaptation import megatron_runtime
from megatron_rl.actor.export import begin_folder, export_weights
from megatron_rl.actor.model import PolicyModel
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.actor.shard_writer import ShardWriter
from megatron_rl.actor.weights import (
    ProgressCallback,
    load_weights,
    named_parameters,
    stored_dtypes,
)
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import ModelShape, read_model_shape


def convert_to_checkpoint(
    source: str | Path, target: str | Path, *, topology: Topology, progress: ProgressCallback
) -> None:
    """Write a model folder whose weights are a distributed checkpoint. Collective.

    Copies config and tokenizer files; the folder appears under its final name when complete.
    """
    target = Path(target)
    partial = target.with_name(f".{target.name}.partial")
    shape = read_model_shape(source)
    dtypes = stored_dtypes(source, shape)
    if topology.rank == 0:
        begin_folder(partial, source)
    with megatron_runtime():
        chunks = _build(shape, dtypes, topology)
        parameters = named_parameters(chunks)
        load_weights(parameters, shape=shape, topology=topology, folder=source, progress=progress)
        writer = ShardWriter(topology.host_group)
        save_checkpoint(partial / FOLDER, chunks=chunks, writer=writer, dtypes=dtypes)
    if topology.rank == 0:
        partial.rename(target)
    dist.barrier()


def convert_to_hugging_face(
    checkpoint: str | Path,
    target: str | Path,
    *,
    like: str | Path,
    topology: Topology,
    progress: ProgressCallback,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder. Collective.

    like: the model folder that provides config, tokenizer files and each tensor's dtype.
    """
    shape = read_model_shape(like)
    with megatron_runtime():
        chunks = _build(shape, stored_dtypes(like, shape), topology)
        load_checkpoint(checkpoint, chunks=chunks, topology=topology)
    export_weights(
        named_parameters(chunks),
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
