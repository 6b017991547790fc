"""One pack as this rank's model and objective see it: sharded, with its rotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_rl.actor.layers import PackContext
from megatron_rl.actor.model import ModelInput
from megatron_rl.actor.rotary import build_rotation
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.to_device import to_device
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import ModelShape
from megatron_rl.types import TokenBatch


@dataclass
class LocalPack:
    """What stays the same each time a pack is run: its layout and the model's input."""

    layout: SequenceLayout
    inputs: ModelInput
    _local: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def shard(self, values: Tensor) -> Tensor:
        """This rank's part of a per-token tensor of the whole pack; [T] -> [t]."""
        return self._once(values, self.layout.shard)

    def spread(self, values: Tensor) -> Tensor:
        """Each local token's value, that of its sequence; [S] -> [t]."""
        return self._once(values, self.layout.spread)

    def _once(self, values: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
        """What `cut` makes of `values` on the device, kept while the caller keeps them unchanged.

        A rollout batch is trained on many times: its log-probs and advantages are copied once.
        """
        version, local = self._local.get(values, (None, None))
        if version != values._version:
            local = cut(to_device(values, self.layout.device))
            self._local[values] = (values._version, local)
        return local


class PackCache:
    """Prepares packs, and keeps them as long as the caller keeps the pack.

    A rollout batch is walked many times; layout, attention plan and rotation are made once. The key
    is the pack's response mask: its identity stands for the pack. Making one asks the device for
    nothing: what depends on values is made on the host.
    """

    def __init__(self, shape: ModelShape, topology: Topology, *, dtype: torch.dtype) -> None:
        self.shape, self.topology, self.dtype = shape, topology, dtype
        self._packs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.on_prepare: Callable[[], object] = lambda: None  # as each micro-batch does

    def prepare(self, batch: TokenBatch) -> LocalPack:
        """This rank's view of a pack."""
        self.on_prepare()
        if batch.response_mask not in self._packs:
            self._packs[batch.response_mask] = self._build(batch)
        return self._packs[batch.response_mask]

    def clear(self) -> None:
        """Give the device's memory back; packs that are asked for again are made again."""
        self._packs.clear()

    def _build(self, batch: TokenBatch) -> LocalPack:
        device = self.topology.device
        host = self._layout(batch, batch.response_mask)
        tokens, labels, positions = map(
            host.shard, (batch.tokens, batch.labels, batch.position_ids)
        )
        response_positions = host.mask.nonzero().squeeze(1)
        layout = host
        if device != batch.response_mask.device:
            layout = self._layout(batch, to_device(batch.response_mask, device))
        rotation = build_rotation(to_device(positions, device), self.shape, dtype=self.dtype)
        inputs = ModelInput(
            tokens=to_device(tokens[None], device),
            labels=to_device(labels[response_positions], device),
            response_positions=to_device(response_positions, device),
            context=PackContext(layout=layout, host=host, rotation=rotation),
        )
        return LocalPack(layout, inputs)

    def _layout(self, batch: TokenBatch, response_mask: Tensor) -> SequenceLayout:
        return SequenceLayout(
            batch.lengths,
            response_mask,
            cp_rank=self.topology.cp_rank,
            cp_size=self.topology.cp_size,
            cp_group=self.topology.cp_group if self.topology.cp_size > 1 else None,
        )


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
