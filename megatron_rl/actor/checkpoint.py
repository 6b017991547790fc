"""Checkpoints of model and optimizer by Megatron-core's distributed checkpointing.

Shards carry their place in the whole, so a checkpoint loads under another layout. It is written
beside its final name and renamed when complete: a killed save leaves nothing that loads.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_rl.actor.model import PolicyModel

STATE = "actor.json"
COMPLETE = "complete"
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def _sharded_state(
    chunks: list[PolicyModel], optimizer: MegatronOptimizer, *, is_loading: bool
) -> dict[str, Any]:
    models = {
        (f"model{index}" if len(chunks) > 1 else "model"): chunk.sharded_state_dict(
            metadata=_METADATA
        )
        for index, chunk in enumerate(chunks)
    }
    state = optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=_METADATA)
    return {**models, "optimizer": state}


def save_checkpoint(
    folder: str | Path,
    *,
    chunks: list[PolicyModel],
    optimizer: MegatronOptimizer,
    updates: int,
) -> None:
    """Write a complete checkpoint folder; collective, replaces a folder of the same name."""
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    if dist.get_rank() == 0:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(chunks, optimizer, is_loading=False)
    dist_checkpointing.save(state, str(partial), content_metadata=_METADATA)
    dist.barrier()
    if dist.get_rank() == 0:
        (partial / STATE).write_text(json.dumps({"updates": updates}))
        (partial / COMPLETE).touch()
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    dist.barrier()


def load_checkpoint(
    folder: str | Path, *, chunks: list[PolicyModel], optimizer: MegatronOptimizer
) -> int:
    """Load model and optimizer in place, under any layout; returns the updates done so far.

    Collective. Raises ValueError when the folder is missing or its save did not finish.
    """
    folder = Path(folder)
    if not (folder / COMPLETE).is_file():
        problem = "is not a complete checkpoint" if folder.is_dir() else "does not exist"
        raise ValueError(f"checkpoint {folder} {problem}; choose one whose save finished")
    wanted = _sharded_state(chunks, optimizer, is_loading=True)
    loaded = dist_checkpointing.load(wanted, str(folder))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}" if len(chunks) > 1 else "model"])
    with mock.patch.object(
        DistributedOptimizer, "_set_main_param_and_optimizer_states", _set_shard_states
    ):
        optimizer.load_state_dict(loaded["optimizer"])
    _separate_steps(optimizer)
    return int(json.loads((folder / STATE).read_text())["updates"])


def _set_shard_states(self: DistributedOptimizer, model_param: Any, tensors: dict) -> None:
    """Copy one parameter's shard and moments from a checkpoint.

    Megatron-core 0.16 asks the checkpoint for torch Adam's per-parameter "step" too, which it keeps
    elsewhere (KeyError: 'step'); with apex or Transformer Engine there is none.
    """
    group, order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][order]
    targets = {"param": main_param, **self.optimizer.state[main_param]}
    for key, tensor in tensors.items():
        targets[key].copy_(tensor)


def _separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its own step count.

    Megatron-core loads one tensor for all of them, and torch's Adam then counts each update once
    per parameter.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
