"""Seconds of a weight push, from the bytes that the resharding plan moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.devices import Device
from megatron_rl.planning.parts import Parts, engine_parameters
from megatron_rl.planning.traffic import LINK_EFFICIENCY
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.senders import WITHIN, Slice, plan_slices

# The busiest rank over the mean, as plans of this project show (docs/resharding.md: 7.6 to 5.7).
IMBALANCE = 1.33
# Waking the engine, checksums at both ends, resetting its cache: an assumption. Published colocated
# pushes of 30B take 3 s in all where buckets are flattened.
FIXED_SECONDS = 1.0


@dataclass(frozen=True)
class PushBytes:
    """Of one push, over all ranks: what travels within nodes, between them, and not at all."""

    ranks: int
    within: float
    between: float


def push_seconds(shape: ModelShape, parts: Parts, device: Device) -> float:
    """Of one push."""
    moved = push_bytes(shape, parts, device.per_node)
    rates = {"within": device.link_gb_s, "between": device.network_gb_s}
    wire = sum(
        IMBALANCE * getattr(moved, way) / moved.ranks / (rate * 1e9 * LINK_EFFICIENCY)
        for way, rate in rates.items()
    )
    copied = 4 * engine_parameters(shape, parts.rollout_tensor)  # packed and loaded: read, written
    return FIXED_SECONDS + wire + 2 * copied / (device.memory_gb_s * 1e9)


def push_bytes(shape: ModelShape, parts: Parts, per_node: int) -> PushBytes:
    """Bytes by the plan of a model with one layer per stage and one expert per rank, scaled up.

    More replicas than a few change nothing for a rank, so that a large cluster is planned as a
    smaller one of the same nodes.
    """
    unit = math.lcm(parts.tensor * parts.pipeline * parts.expert, parts.rollout_tensor)
    wanted = min(parts.world_size, parts.pipeline * per_node)
    ranks = min(parts.world_size, -(-wanted // unit) * unit)
    return _push_bytes(
        shape, parts.tensor, parts.pipeline, parts.expert, parts.rollout_tensor, ranks, per_node
    )


@lru_cache(maxsize=256)
def _push_bytes(
    shape: ModelShape, tensor: int, pipeline: int, expert: int, rollout: int, ranks: int, node: int
) -> PushBytes:
    small = replace(shape, num_layers=pipeline)
    depth, experts = shape.num_layers // pipeline, 1
    if shape.experts is not None:
        experts = shape.experts.num_experts // expert
        small = replace(small, experts=replace(shape.experts, num_experts=expert))
    layout = ActorLayout(
        tensor=tensor, pipeline=pipeline, expert=expert, data=ranks // (tensor * pipeline)
    )
    slices = plan_slices(small, layout, EngineLayout(rollout, ranks), ranks_per_node=node)
    within = between = 0.0
    for name, of_tensor in slices.items():
        times = (depth if ".layers." in name else 1) * (experts if ".experts." in name else 1)
        for each in of_tensor:
            near, far = _hops(each, node)
            within += 2 * times * each.size * near
            between += 2 * times * each.size * far
    return PushBytes(ranks, within, between)


def _hops(slice_: Slice, node: int) -> tuple[int, int]:
    """How often a slice travels within a node and between nodes: once into each other node."""
    if slice_.source == WITHIN:
        return 0, 0
    home = slice_.source // node
    far = {rank // node for rank in slice_.destinations} - {home}
    return len(slice_.destinations) - len(far), len(far)
