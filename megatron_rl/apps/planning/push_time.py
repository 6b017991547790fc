"""Duration of a weight push, from the bytes that the resharding plan moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_rl.apps.planning.devices import Device
from megatron_rl.apps.planning.parts import Parts, engine_parameters
from megatron_rl.apps.planning.traffic import LINK_EFFICIENCY
from megatron_rl.models.adapters import count_adapter_parameters
from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.push_schedule import WITHIN, Slice, plan_slices

# Time of the rounds over that of the mean rank's bytes: the largest of the layouts that
# tests/unit/resharding/test_push_balance.py simulates, with buckets of 512 MiB, and of those of
# Qwen3-235B-A22B in research/docs/scale.md.
IMBALANCE = 2.0
# Assumed for waking the engine, checksums on both sides and resetting its cache. Published
# colocated pushes of 30B models take 3 s in total with flattened buckets.
FIXED_SECONDS = 1.0


@dataclass(frozen=True)
class PushBytes:
    """Bytes of one push over all ranks, within nodes and between nodes."""

    ranks: int
    within: float
    between: float


def push_seconds(shape: ModelShape, parts: Parts, device: Device) -> float:
    """Estimate the duration of one push: of all weights, or of adapters alone to every rank."""
    if parts.lora_versions:
        count = count_adapter_parameters(shape, rank=parts.lora_rank, targets=parts.lora_targets)
        rate = device.link_gb_s if parts.world_size <= device.per_node else device.network_gb_s
        return FIXED_SECONDS + IMBALANCE * 2 * count / (rate * 1e9 * LINK_EFFICIENCY)
    volume = push_bytes(shape, parts, device.per_node)
    rates = {"within": device.link_gb_s, "between": device.network_gb_s}
    wire = sum(
        IMBALANCE * getattr(volume, way) / volume.ranks / (rate * 1e9 * LINK_EFFICIENCY)
        for way, rate in rates.items()
    )
    copied = 4 * engine_parameters(
        shape, parts.rollout_tensor
    )  # packed and loaded: each reads and writes
    return FIXED_SECONDS + wire + 2 * copied / (device.memory_gb_s * 1e9)


def push_bytes(shape: ModelShape, parts: Parts, per_node: int) -> PushBytes:
    """Compute bytes from the plan of a model with one layer per stage and one expert per rank.

    The result is scaled up. Additional replicas do not change a rank's bytes, so a large cluster is
    planned as a smaller one with the same nodes.
    """
    stage = math.lcm(parts.tensor, parts.expert * parts.expert_slices)
    unit = math.lcm(stage * parts.pipeline, parts.rollout_tensor)
    sufficient = min(parts.world_size, parts.pipeline * per_node)
    ranks = min(parts.world_size, -(-sufficient // unit) * unit)
    layout = ActorLayout(
        tensor=parts.tensor,
        pipeline=parts.pipeline,
        expert=parts.expert,
        expert_tensor=parts.expert_slices,
        data=ranks // (parts.tensor * parts.pipeline),
    )
    return _push_bytes(shape, layout, parts.rollout_tensor, per_node)


@lru_cache(maxsize=256)
def _push_bytes(shape: ModelShape, layout: ActorLayout, rollout: int, node: int) -> PushBytes:
    ranks = layout.world_size
    small = replace(shape, num_layers=layout.pipeline)
    depth, experts = shape.num_layers / layout.pipeline, 1
    if shape.experts is not None:
        experts = shape.experts.num_experts // layout.expert
        # Layers without experts count as layers with them.
        few = replace(shape.experts, num_experts=layout.expert, first_layer=0, groups=1)
        small = replace(small, experts=few)
    slices = plan_slices(small, layout, EngineLayout(rollout, ranks), ranks_per_node=node)
    within = between = 0.0
    for name, of_tensor in slices.items():
        times = (depth if ".layers." in name else 1) * (experts if ".experts." in name else 1)
        for piece in of_tensor:
            near, far = _hops(piece, node)
            within += 2 * times * piece.size * near
            between += 2 * times * piece.size * far
    return PushBytes(ranks, within, between)


def _hops(slice_: Slice, node: int) -> tuple[int, int]:
    """Count a slice's transfers within a node and between nodes: once into each other node."""
    if slice_.source == WITHIN:
        return 0, 0
    home = slice_.source // node
    far = {rank // node for rank in slice_.destinations} - {home}
    return len(slice_.destinations) - len(far), len(far)
