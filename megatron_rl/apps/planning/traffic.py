"""Communication time of one rank, by process group.

Ranks are numbered tp-cp-ep-dp-pp, node by node: a group that spans more than one node uses the
network, where every device has its own share. In a ring collective of n bytes, each of the g ranks
transfers n (g - 1) / g (Thakur et al., 2005).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.apps.planning.devices import Device
from megatron_rl.apps.planning.parts import Parts, count_trained
from megatron_rl.models.shape import ModelShape

# Fraction of a link's rate in large collectives: nccl-tests reach 360 of 450 GB/s on 8 H100.
LINK_EFFICIENCY = 0.8
LATENCY = 15e-6  # seconds of one collective, launch included; within a node


@dataclass(frozen=True)
class Traffic:
    """Communication time of a layout's groups on one type of device."""

    parts: Parts
    device: Device

    def seconds(self, size: float, *, ranks: int, stride: int, calls: float = 1) -> float:
        """Estimate a ring collective with a result of `size` bytes in a group of `ranks`."""
        if ranks == 1:
            return 0.0
        inside = ranks * stride <= self.device.per_node
        rate = self.device.link_gb_s if inside else self.device.network_gb_s
        wire = size * (ranks - 1) / ranks / (rate * 1e9 * LINK_EFFICIENCY)
        return wire + calls * LATENCY * (1 if inside else 2)

    def tensor(self, size: float, calls: float) -> float:
        """Estimate collectives over tensor-parallel ranks."""
        return self.seconds(size, ranks=self.parts.tensor, stride=1, calls=calls)

    def context(self, size: float, calls: float) -> float:
        """Estimate collectives over context-parallel ranks."""
        return self.seconds(size, ranks=self.parts.context, stride=self.parts.tensor, calls=calls)

    def expert(self, size: float, calls: float) -> float:
        """Estimate collectives over expert-parallel ranks."""
        parts = self.parts
        return self.seconds(size, ranks=parts.expert, stride=parts.expert_slices, calls=calls)

    def expert_tensor(self, size: float, calls: float) -> float:
        """Estimate collectives over the ranks that share each expert."""
        return self.seconds(size, ranks=self.parts.expert_slices, stride=1, calls=calls)

    def pipeline(self, size: float) -> float:
        """Estimate a transfer from one pipeline stage to the next."""
        parts = self.parts
        if parts.pipeline == 1:
            return 0.0
        inside = parts.world_size <= self.device.per_node
        rate = self.device.link_gb_s if inside else self.device.network_gb_s
        return size / (rate * 1e9 * LINK_EFFICIENCY) + LATENCY

    def replicas(self, shape: ModelShape, stage: int) -> float:
        """Estimate one update's reduce-scatter of float32 gradients and all-gather of weights.

        Assumes no overlap with computation. Weights are bfloat16.
        """
        parts, counts = self.parts, count_trained(shape, self.parts, stage=stage)
        per_parameter = 4 + 2
        seconds = self.seconds(
            per_parameter * counts.dense, ranks=parts.replicas, stride=parts.tensor, calls=2
        )
        if counts.expert:
            seconds += self.seconds(
                per_parameter * counts.expert,
                ranks=parts.expert_replicas,
                stride=parts.expert_slices * parts.expert,
                calls=2,
            )
        return seconds
