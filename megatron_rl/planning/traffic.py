"""Seconds of the messages of one rank, by the groups that exchange them.

Ranks are numbered tp-cp-ep-dp-pp, node by node: a group whose ranks lie apart by more than a node
goes over the network, where every device has its own share. Rings: of n bytes in all, a group of g
moves n (g - 1) / g through every rank (Thakur et al., 2005).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.devices import Device
from megatron_rl.planning.parts import Parts, count_parameters

# Of a link's rate that large collectives reach: 360 of 450 GB/s is what nccl-tests show on 8 H100.
LINK_EFFICIENCY = 0.8
LATENCY = 15e-6  # seconds of one collective, launch included; within a node


@dataclass(frozen=True)
class Traffic:
    """How fast a layout's groups are on a kind of device."""

    parts: Parts
    device: Device

    def seconds(self, size: float, *, ranks: int, stride: int, calls: float = 1) -> float:
        """Of a ring collective whose whole result has `size` bytes, in a group of `ranks`."""
        if ranks == 1:
            return 0.0
        inside = ranks * stride <= self.device.per_node
        rate = self.device.link_gb_s if inside else self.device.network_gb_s
        wire = size * (ranks - 1) / ranks / (rate * 1e9 * LINK_EFFICIENCY)
        return wire + calls * LATENCY * (1 if inside else 2)

    def tensor(self, size: float, calls: float) -> float:
        """Over tensor parallelism."""
        return self.seconds(size, ranks=self.parts.tensor, stride=1, calls=calls)

    def context(self, size: float, calls: float) -> float:
        """Over context parallelism."""
        return self.seconds(size, ranks=self.parts.context, stride=self.parts.tensor, calls=calls)

    def expert(self, size: float, calls: float) -> float:
        """Over expert parallelism."""
        return self.seconds(size, ranks=self.parts.expert, stride=self.parts.tensor, calls=calls)

    def pipeline(self, size: float) -> float:
        """From one stage to the next."""
        parts = self.parts
        if parts.pipeline == 1:
            return 0.0
        inside = parts.world_size <= self.device.per_node
        rate = self.device.link_gb_s if inside else self.device.network_gb_s
        return size / (rate * 1e9 * LINK_EFFICIENCY) + LATENCY

    def replicas(self, shape: ModelShape, stage: int) -> float:
        """Of one update: float32 gradients are reduced to shards, bfloat16 weights gathered.

        Nothing is taken to overlap with them. Megatron's chained optimizer gathers twice where
        there are experts.
        """
        parts, held = self.parts, count_parameters(shape, self.parts, stage=stage)
        per_parameter = 4 + (2 if shape.experts is None else 4)
        seconds = self.seconds(
            per_parameter * held.dense, ranks=parts.replicas, stride=parts.tensor, calls=2
        )
        if held.expert:
            seconds += self.seconds(
                per_parameter * held.expert,
                ranks=parts.replicas // parts.expert,
                stride=parts.tensor * parts.expert,
                calls=3,
            )
        return seconds
