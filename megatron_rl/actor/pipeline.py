"""Pipeline communication of packs whose sizes every stage knows, and of their results.

Packs have different numbers of tokens. Megatron therefore sends the shape of every tensor ahead of
it, and the host waits for the device twice per tensor to read that shape. Here every stage knows
every pack, so nothing is sent ahead and nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.topology import Topology

_GROUPS = ["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"]  # those that Megatron's schedules use


class KnownShapes(P2PCommunicator):
    """Megatron's communicator for one pass over micro-batches of known sizes.

    tokens: of each micro-batch on one context-parallel rank, in order. A stage receives and sends
    in the order in which Megatron's schedules execute micro-batches and model chunks.
    """

    def __init__(self, *, config: TransformerConfig, tokens: Sequence[int]) -> None:
        super().__init__(pp_group=parallel_state.get_pipeline_model_parallel_group(), config=config)
        shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._shapes = [[count // shards, 1, config.hidden_size] for count in tokens]
        chunks = config.virtual_pipeline_model_parallel_size or 1
        order = get_schedule_table(
            len(tokens), chunks, config.microbatch_group_size_per_vp_stage
        )  # (micro-batch, model chunk); the backward pass counts model chunks from the last
        last = self.pp_group.size() - 1
        begins, ends = self.pp_group.rank() == 0, self.pp_group.rank() == last
        # The input's side of the model is open at chunk 0 of the first stage; mirrored, the
        # output's side is open at chunk 0 (from the last) of the last stage.
        inner = [batch for batch, chunk in order if chunk > 0]
        left = [batch for batch, chunk in order if chunk < chunks - 1]
        every = [batch for batch, _ in order]
        self._from_previous = self._walk(inner if begins else every)
        self._to_next = self._walk(left if ends else every)
        self._from_next = self._walk(inner if ends else every)
        self._to_previous = self._walk(left if begins else every)

    def _walk(self, batches: Sequence[int]) -> Iterator[list[int]]:
        return iter([self._shapes[batch] for batch in batches])

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        """Return the shapes of the tensors to receive from the previous and the next stage."""
        for tensor, shapes in (
            (tensor_send_next, self._to_next),
            (tensor_send_prev, self._to_previous),
        ):
            if tensor is not None:
                shape = next(shapes)
                assert list(tensor.shape) == shape, (
                    f"a stage sends {list(tensor.shape)} where the others expect {shape}: "
                    "Megatron's schedule has another order"
                )
        none = [0, 0, 0]
        from_previous = next(self._from_previous) if recv_prev else none
        return from_previous, next(self._from_next) if recv_next else none


def pipeline_arguments(config: TransformerConfig, *, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the arguments with which Megatron's schedule uses `KnownShapes`; {} for one stage."""
    if config.pipeline_model_parallel_size == 1:
        return {}
    return {
        "p2p_communicator": KnownShapes(config=config, tokens=tokens),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(_GROUPS),
    }


def gather_packs(
    layouts: Sequence[SequenceLayout], local: Sequence[Tensor], *, rows: int, topology: Topology
) -> list[Tensor]:
    """Gather the last stage's [rows, t] of each pack to [T, rows] on all ranks of a replica.

    local: of each pack, on the last stage; other stages receive them.
    """
    sizes = [layout.local_tokens for layout in layouts]
    if topology.is_last_stage:
        flat = torch.cat(list(local), dim=1)
    else:
        flat = torch.empty((rows, sum(sizes)), dtype=torch.float32, device=topology.device)
    if topology.pp_size > 1:
        dist.broadcast(flat, group=topology.pp_group, group_src=topology.pp_size - 1)
    parts = zip(layouts, flat.split(sizes, dim=1), strict=True)
    return [layout.gather(part.t().contiguous()) for layout, part in parts]
