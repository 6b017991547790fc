"""Checkpoints of model and optimizer with Megatron-core's distributed checkpointing.

Shards store their position in the global tensor, so a checkpoint loads under any layout. It is
written under a temporary name and renamed when complete, so an interrupted save is never loaded.

The distributed optimizer is saved slice by slice, without gathering it. Megatron's optimizer splits
flat buffers over data (times context) parallelism: of each parameter a rank owns elements
[start, stop) in row order, mostly all or none. Such a range consists of a few boxes of the
parameter, and a box has a position in the global tensor under any layout. Megatron-core chains a
second optimizer for the experts of a rank where expert parallelism is above 1. Tensors have the
same keys with and without it, and options are read from whichever the writer had, so a checkpoint
does not depend on it. Megatron-core's own implementation of this format ("fully_reshardable")
gathers 12 bytes per parameter on one rank of each group to save, and reads them on every rank to
load. Here each rank writes its slice directly and loads it in place. The two implementations can
read each other's files.

In a save Megatron-core exchanges a description of every shard between all ranks: to choose who
writes which replica, to check that each part is written once, and to write the table of contents.
With 1,024 ranks these are millions of objects on every rank. They are the same in every save of a
model, so the first save exchanges them, and the second one those of the table for the last time.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, package_info
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_rl.actor.build import step_in_one_kernel
from megatron_rl.actor.checkpoint_contents import (
    COMPLETE,
    STATE,
    check_adapters,
    read_state,
)
from megatron_rl.actor.memory import optimizer_parts
from megatron_rl.actor.model import PolicyModel
from megatron_rl.actor.weights import ADAPTER
from megatron_rl.distributed.agreement import sum_over_ranks
from megatron_rl.distributed.collectives import Group, group_size
from megatron_rl.distributed.topology import Topology
from megatron_rl.runtime.versions import FORMAT, stamp

# Maximum elements per box: a reader under another layout reads whole boxes, one at a time.
LARGEST_BOX = 1 << 24


def cut_into_boxes(
    shape: Sequence[int], start: int, stop: int, *, largest: int = LARGEST_BOX
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, size) of the boxes covering elements [start, stop) of a tensor in row order.

    In two dimensions these are the end of a row, whole rows and the beginning of a row.
    """
    row = math.prod(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        if within or stop - start < row or row > largest:
            end = min(stop, (index + 1) * row)
            parts = cut_into_boxes(shape[1:], within, end - index * row, largest=largest)
            yield from (((index, *offset), (1, *size)) for offset, size in parts)
        else:
            rows = min((stop - start) // row, max(1, largest // row))
            end = start + rows * row
            yield (index, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
        start = end


def _boxes_of(
    whole: ShardedTensor, start: int, stop: int, values: Tensor, *, key: str
) -> Iterator[ShardedTensor]:
    """Yield elements [start, stop) of a rank's shard as boxes of the global tensor.

    values: these elements, flat; the boxes are views of it.
    """
    done = 0
    for offset, size in cut_into_boxes(whole.local_shape, start, stop):
        box = (1,) * whole.prepend_axis_num + size
        position = (0,) * whole.prepend_axis_num + offset
        yield ShardedTensor(
            key=key,
            data=values[done : done + math.prod(size)].view(box),
            dtype=values.dtype,
            local_shape=box,
            global_shape=whole.global_shape,
            global_offset=tuple(map(sum, zip(whole.global_offset, position, strict=True))),
            axis_fragmentations=None,  # boxes of any size
            # Unique in its data-parallel group; other groups may have the same parameter.
            replica_id=(*whole.replica_id[:2], 0),
            allow_shape_mismatch=whole.allow_shape_mismatch,
        )
        done += math.prod(size)


def _own_slices(
    self: DistributedOptimizer,
    model_sharded_state_dict: Any,
    is_loading: bool = False,
    metadata: Any = None,
) -> dict[int, ShardedTensor]:
    """Return this rank's main weights and moments, as views, under Megatron-core's keys."""
    stored, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    of_parameter = {sharded.data: sharded for sharded in nested_values(stored)}
    state: list[ShardedTensor] = []
    buckets = (bucket for buffer in self.gbuf_ranges for kind in buffer.values() for bucket in kind)
    for parameter, ranges in (pair for bucket in buckets for pair in bucket["param_map"].items()):
        start, stop = ranges["param"].start, ranges["param"].end
        whole = of_parameter[parameter]
        # A gated MLP's first matrix is two tensors in a checkpoint, each a range of its rows.
        parts = whole.build() if isinstance(whole, ShardedTensorFactory) else [whole]
        for part in parts:
            assert part.data.is_contiguous(), f"{part.key} is not a contiguous range of rows"
            first = part.data.storage_offset() - parameter.storage_offset()
            begin, end = max(start, first), min(stop, first + part.data.numel())
            for name, tensor in self._get_main_param_and_optimizer_states(parameter).items():
                if name == "step" or begin >= end:  # step counts are stored separately
                    continue
                values = tensor.detach().view(-1)[begin - start : end - start]
                key = f"optimizer.state.{name}.{part.key}"
                state += _boxes_of(part, begin - first, end - first, values, key=key)
    return dict(enumerate(state))


@contextlib.contextmanager
def sliced_optimizers() -> Iterator[None]:
    """Make Megatron-core describe distributed optimizers slice by slice."""
    with mock.patch.object(
        DistributedOptimizer, "sharded_param_state_fully_reshardable", _own_slices
    ):
        yield


def load_options(optimizer: MegatronOptimizer, stored: Mapping[Any, Any]) -> None:
    """Set the options of all parameter groups, among them the step counts, to the stored ones.

    stored: the optimizer's entry of a loaded checkpoint, by chained optimizers or of a single one.
    A parameter group gets the options of the stored group with the same multipliers and kind
    (experts or not).
    """
    groups = list(_stored_groups(stored))
    alike = {_multipliers(group): group for group in groups}
    for part in optimizer_parts(optimizer):
        state = part.state_dict()
        for group in state["optimizer"]["param_groups"]:
            is_expert = group["is_expert_parallel"]
            source = alike.get(_multipliers(group), {"step": groups[0].get("step")})
            group.update({key: value for key, value in source.items() if value is not None})
            group["is_expert_parallel"] = is_expert
        part.load_state_dict(state)


def _stored_groups(stored: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    yield from stored.get("optimizer", {}).get("param_groups", [])
    for key, part in stored.items():
        if isinstance(key, int):
            yield from _stored_groups(part)


def _multipliers(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what distinguishes the groups of an optimizer in any release of Megatron-core."""
    names = ("wd_mult", "lr_mult", "is_decoupled_lr")
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in names)


class ShardWriter:
    """Writer of the checkpoints of one model.

    group: ranks that share replicas and each write a part of them; it accepts objects.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._structure: list[tuple] | None = None
        self._strategy: FullyParallelSaveStrategyWrapper | TorchDistSaveShardedStrategy | None = (
            None
        )

    def write(self, state: dict[str, Any], folder: Path, *, content_metadata: dict) -> None:
        """Write this rank's shards of a state; the folder must be empty. Collective."""
        structure = _describe(state)
        is_new = sum_over_ranks(
            int(structure != self._structure), doing="comparing the shards with the last saved ones"
        )
        if is_new or self._strategy is None:
            self._structure, self._strategy = structure, self._new_strategy()
        with mock.patch.object(FileSystemWriterAsync, "write_preloaded_data", _write_files):
            dist_checkpointing.save(
                state,
                str(folder),
                self._strategy,
                # With replicas the strategy itself checks, once it has chosen who writes them.
                validate_access_integrity=bool(is_new) and group_size(self._group) == 1,
                content_metadata=content_metadata,
            )

    def _new_strategy(self) -> FullyParallelSaveStrategyWrapper | TorchDistSaveShardedStrategy:
        """Return a strategy without agreements from earlier saves."""
        base = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
        if group_size(self._group) == 1:
            return base
        return FullyParallelSaveStrategyWrapper(base, self._group, do_cache_distribution=True)


def _write_files(*arguments: Any, **options: Any) -> Any:
    """Write files as Megatron-core does, but raise an error.

    Megatron-core returns it, and its caller reports the type alone: "OSError", of a full disk, too.
    """
    result = _MEGATRONS_WRITE(*arguments, **options)
    if result is not None and isinstance(result[1], Exception):
        raise result[1]
    return result


_MEGATRONS_WRITE = FileSystemWriterAsync.write_preloaded_data


def _describe(state: Mapping[str, Any]) -> list[tuple]:
    """Describe this rank's shards: equal descriptions on all ranks lead to equal agreements."""
    described: list[tuple] = []
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            shapes = (value.local_shape, value.global_shape, value.global_offset)
            described.append((value.key, value.dtype, *shapes, value.replica_id))
        elif isinstance(value, ShardedTensorFactory):
            described.append((value.key, value.data.dtype, value.data.shape, value.replica_id))
        elif isinstance(value, ShardedObject):
            described.append((value.unique_key, value.replica_id))
    return described


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
        alongside = chunk.trained_beside_adapters
        models[f"model{index}" if len(chunks) > 1 else "model"] = {
            key: value
            for key, value in state.items()
            if (ADAPTER in key) == adapters or key in alongside
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
    """Write a complete checkpoint folder, replacing a folder of the same name. Collective.

    Every rank writes its slice of the optimizer and a share of the weights of its data-parallel
    group. Without an optimizer only weights are written.
    writer: the writer of this model's earlier saves, whose agreements between ranks are reused.
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
            step_in_one_kernel(part.optimizer)
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
