"""Checkpointing of the distributed optimizer slice by slice, without gathering it.

Megatron's optimizer splits flat buffers over data (times context) parallelism: of each parameter a
rank owns elements [start, stop) in row order, mostly all or none. Such a range consists of a few
boxes of the parameter, and a box has a position in the global tensor under any layout.

Megatron-core chains a second optimizer for the experts of a rank where expert parallelism is above
1. Tensors have the same keys with and without it, and options are read from whichever the writer
had, so a checkpoint does not depend on it.

Megatron-core's own implementation of this format ("fully_reshardable") gathers 12 bytes per
parameter on one rank of each group to save, and reads them on every rank to load. Here each rank
writes its slice directly and loads it in place. The two implementations can read each other's
files.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_rl.actor.memory import optimizer_parts

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
    A group gets the options of the one with the same multipliers, of experts or not.
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
