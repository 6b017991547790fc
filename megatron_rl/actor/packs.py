"""One pack as this rank's model and objective see it: sharded, with its rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_rl.actor.layers import PackContext
from megatron_rl.actor.model import ModelInput
from megatron_rl.actor.rotary import build_rotation
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import ModelShape
from megatron_rl.types import TokenBatch


@dataclass
class LocalPack:
    """What stays the same each time a pack is run: its layout and the model's input."""

    layout: SequenceLayout
    inputs: ModelInput

    def shard(self, values: Tensor) -> Tensor:
        """This rank's part of a per-token tensor of the whole pack; [T] -> [t]."""
        return self.layout.shard(values.to(self.layout.device))


class PackCache:
    """Prepares packs, and keeps them as long as the caller keeps the pack.

    A rollout batch is walked many times; layout, attention plan and rotation are made once. The key
    is the pack's response mask: its identity stands for the pack.
    """

    def __init__(self, shape: ModelShape, topology: Topology, *, dtype: torch.dtype) -> None:
        self.shape, self.topology, self.dtype = shape, topology, dtype
        self._packs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def prepare(self, batch: TokenBatch) -> LocalPack:
        """This rank's view of a pack."""
        if batch.response_mask not in self._packs:
            self._packs[batch.response_mask] = self._build(batch)
        return self._packs[batch.response_mask]

    def _build(self, batch: TokenBatch) -> LocalPack:
        topology = self.topology
        layout = SequenceLayout(
            batch.lengths,
            batch.response_mask.to(topology.device),
            cp_rank=topology.cp_rank,
            cp_size=topology.cp_size,
            cp_group=topology.cp_group if topology.cp_size > 1 else None,
        )
        tokens, labels, positions = (
            layout.shard(x.to(topology.device))
            for x in (batch.tokens, batch.labels, batch.position_ids)
        )
        response_positions = layout.mask.nonzero().squeeze(1)
        rotation = build_rotation(positions, self.shape, dtype=self.dtype)
        inputs = ModelInput(
            tokens=tokens[None],
            labels=labels[response_positions],
            response_positions=response_positions,
            context=PackContext(layout=layout, rotation=rotation),
        )
        return LocalPack(layout, inputs)


def check_pack(batch: TokenBatch, *, alignment: int, vocab_size: int) -> None:
    """Raise ValueError where a pack does not fit the layout or the vocabulary."""
    for length in batch.lengths:
        if length % alignment:
            raise ValueError(
                f"a sequence of the pack has padded length {length}; it must be a multiple of "
                f"{alignment} (2 cp, times tp with sequence parallelism)"
            )
    highest = int(torch.maximum(batch.tokens.max(), batch.labels.max()))
    if highest >= vocab_size:
        raise ValueError(f"token id {highest} is outside the model's vocabulary of {vocab_size}")
