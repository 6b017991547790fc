"""Checkpoints of model and optimizer with Megatron-core's distributed checkpointing.

Shards store their position in the global tensor, so a checkpoint loads under any layout. It is
written under a temporary name and renamed when complete, so an interrupted save is never loaded.
"""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, package_info
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.optimizer import MegatronOptimizer

from megatron_rl.actor.build import step_in_one_kernel
from megatron_rl.actor.checkpoint_contents import (
    COMPLETE,
    STATE,
    check_adapters,
    read_state,
)
from megatron_rl.actor.memory import optimizer_parts
from megatron_rl.actor.model import PolicyModel
from megatron_rl.actor.optimizer_slices import load_options, sliced_optimizers
from megatron_rl.actor.shard_writer import ShardWriter
from megatron_rl.actor.weights import ADAPTER
from megatron_rl.distributed.topology import Topology
from megatron_rl.runtime.checkpoint_format import FORMAT, stamp

# Passed as copies: Megatron-core adds its process groups to the dictionary.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}

# Queue for the results of Megatron-core's writers. The default, for asynchronous saves, is a
# process that takes seconds to start and survives a killed rank. Saves here are synchronous.
filesystem_async._results_queue = queue.Queue()


def _sharded_state(
    chunks: list[PolicyModel],
    optimizer: MegatronOptimizer | None,
    *,
    adapters: bool,
    is_loading: bool,
    written_format: int = FORMAT,
) -> dict[str, Any]:
    """Return the tensors of a checkpoint: those of the adapters, or of the model without them."""
    # Before format 2 keys had the number of the optimizer that Megatron chains for experts.
    metadata = _METADATA | {"chained_optim_avoid_prefix": written_format >= 2}
    models = {}
    for index, chunk in enumerate(chunks):
        state = chunk.sharded_state_dict(metadata=dict(_METADATA))
        models[f"model{index}" if len(chunks) > 1 else "model"] = {
            key: value for key, value in state.items() if (ADAPTER in key) == adapters
        }
    if optimizer is None:
        return models
    with sliced_optimizers():
        state = optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    return {**models, "optimizer": state}


def save_checkpoint(
    folder: str | Path,
    *,
    chunks: list[PolicyModel],
    writer: ShardWriter,
    optimizer: MegatronOptimizer | None = None,
    updates: int = 0,
    adapters: Mapping[str, Any] | None = None,
) -> None:
    """Write a complete checkpoint folder, replacing one of the same name. Collective.

    Every rank writes its slice of the optimizer and a share of the weights of its data-parallel
    group. Without an optimizer only weights are written.
    writer: the one of earlier saves of this model, whose agreements it uses again.
    adapters: description of the adapters, which are then saved instead of the model.
    """
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    if dist.get_rank() == 0:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(chunks, optimizer, adapters=adapters is not None, is_loading=False)
    writer.write(state, partial, content_metadata=dict(_METADATA))
    dist.barrier()
    if dist.get_rank() == 0:
        # Its `__version__` has the commit of the repository in which it is installed, if any.
        metadata = stamp(megatron_core=package_info.__shortversion__)
        metadata |= {"updates": updates, "optimizer": optimizer is not None}
        if adapters is not None:
            metadata["adapters"] = dict(adapters)
        (partial / STATE).write_text(json.dumps(metadata), encoding="utf-8")
        (partial / COMPLETE).touch()
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    dist.barrier()


class _ShareReader(FullyParallelLoadStrategyWrapper):
    """Reads a share of the tensors on each rank of the group, which then exchanges them.

    Who reads what is agreed on the host.
    """

    parallelization_group: Any
    host_group: dist.ProcessGroup | None = None

    def apply_loading_parallelization(self, sharded_state_dict: Any) -> Any:
        group, self.parallelization_group = self.parallelization_group, self.host_group
        try:
            return super().apply_loading_parallelization(sharded_state_dict)
        finally:
            self.parallelization_group = group


def load_checkpoint(
    folder: str | Path,
    *,
    chunks: list[PolicyModel],
    topology: Topology,
    optimizer: MegatronOptimizer | None = None,
    adapters: Mapping[str, Any] | None = None,
) -> int:
    """Load model and optimizer in place, under any layout; return the number of updates done.

    Each rank reads its slice of the optimizer and a share of the weights for its data-parallel
    group. Without an optimizer in the checkpoint, a new one is initialized from the weights.
    adapters: description of the adapters to load; None loads the model's own parameters.
    Collective. Raises ValueError if the folder is missing, its save did not finish, or it has other
    adapters, or adapters of another model.
    """
    state = read_state(folder)
    check_adapters(folder, stored=state.get("adapters"), expected=adapters)
    stored = optimizer if state["optimizer"] else None
    sharded = _sharded_state(chunks, stored, adapters=adapters is not None, is_loading=True,
                             written_format=state.get("format", 0))  # fmt: skip
    reader = _ShareReader(get_default_load_sharded_strategy(str(folder)), topology.dp_cp_group)
    reader.host_group = topology.host_group
    # Without Megatron's check that ranks share the reading well, which gathers every shard.
    loaded = dist_checkpointing.load(sharded, str(folder), reader, validate_access_integrity=False)
    for index, chunk in enumerate(chunks):
        values = loaded[f"model{index}" if len(chunks) > 1 else "model"]
        rest = {key: value for key, value in chunk.state_dict().items() if key not in values}
        if adapters is None:  # strictly
            rest = {key: value for key, value in rest.items() if ADAPTER in key}
        chunk.load_state_dict(rest | values)
    if stored is not None:
        load_options(stored, loaded["optimizer"])  # tensors were read in place
        for part in optimizer_parts(stored):
            _normalize_optimizer_state(part.optimizer)
            step_in_one_kernel(part.optimizer, topology.device)
    elif optimizer is not None:
        optimizer.reload_model_params()
    return int(state["updates"])


def _normalize_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Adapt a loaded state to this kind of optimizer, whichever kind wrote it.

    Restores options that the writer did not have (Transformer Engine's Adam has more than torch's)
    and gives every parameter its own step count: Megatron-core loads one shared tensor, which
    torch's Adam would increment once per parameter.
    """
    for group in optimizer.param_groups:
        for name, value in optimizer.defaults.items():
            group.setdefault(name, value)
        if "step" in group:  # torch's Adam wrote a float
            group["step"] = int(group["step"])
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
