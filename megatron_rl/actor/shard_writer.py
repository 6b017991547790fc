"""Writing of sharded states, with what the ranks agree on kept from one save to the next.

In a save Megatron-core exchanges a description of every shard between all ranks: to choose who
writes which replica, to check that each part is written once, and to write the table of contents.
With 1,024 ranks these are millions of objects on every rank. They are the same in every save of a
model, so the first save exchanges them, and the second one those of the table for the last time.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron_rl.distributed.agreement import sum_over_ranks
from megatron_rl.distributed.collectives import Group, group_size


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
