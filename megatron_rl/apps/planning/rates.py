"""Rates of GPUs, and the seconds that counted work takes on them.

Sources: NVIDIA's data sheets of A100 (80GB SXM), H100 (SXM5), H200 (SXM), L40S and B200 (DGX B200),
and its product brief of H20 (148 TFLOP/s, 96 GB, 4.0 TB/s, NVLink 900 GB/s). TFLOP/s are for dense
bfloat16. Link rates are per direction, half of the data sheet's value. The network is typical for
such nodes, with one adapter per device: 200 Gb/s for A100, 400 Gb/s for later devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_rl.errors import UserError
from megatron_rl.models.adapters import count_adapter_parameters
from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.push_schedule import WITHIN, Slice, plan_slices

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One GPU and its links to the other devices and to the host."""

    name: str
    memory_gib: float  # as torch reports it
    tflops: float  # 10^12 / s
    memory_gb_s: float  # 10^9 bytes / s, as all rates below
    link_gb_s: float  # to the other devices of its node, one direction
    network_gb_s: float  # network bandwidth per device, one direction
    host_gb_s: float  # to the host's memory, one direction
    per_node: int = 8

    @property
    def newer_than_h100(self) -> bool:
        """True if vLLM prefers kernels for experts that need its loaders."""
        return self.name in ("b200", "gb200")

    @property
    def memory(self) -> int:
        """Device memory in bytes."""
        return int(self.memory_gib * GIB)


DEVICES = {
    device.name: device
    for device in (
        Device("a100-40", 39.4, 312, 1555, 300, 25, 25),
        Device("a100", 79.2, 312, 2039, 300, 25, 25),
        Device("l40s", 44.4, 362, 864, 25, 25, 25),
        Device("h20", 95.1, 148, 4000, 450, 50, 50),
        Device("h800", 79.1, 989, 3350, 200, 50, 50),
        Device("h100", 79.1, 989, 3350, 450, 50, 50),
        Device("h200", 139.8, 989, 4800, 450, 50, 50),
        Device("b200", 178.4, 2250, 8000, 900, 50, 50),
        Device("gb200", 184.0, 2500, 8000, 900, 50, 200, per_node=4),
    )
}


def find_device(name: str) -> Device:
    """Return the device with this name; raise UserError with the known names otherwise."""
    device = DEVICES.get(name.lower())
    if device is None:
        raise UserError(f"--device {name}: unknown; choose one of {', '.join(DEVICES)}")
    return device


@dataclass(frozen=True)
class Rates:
    """Achieved fractions of a device's rates, and the host's seconds, on every device.

    The training rates of products, attention and memory are fitted to thirteen updates and log-prob
    passes of a 1.5B on an H100.
    """

    products: float = 0.66  # of the bfloat16 peak
    attention: float = 0.62  # of the same peak: fused attention
    memory: float = 0.95  # of the bandwidth, by all other operations
    launch: float = 35e-6  # seconds of the host per operation
    stall: float = 50e-6  # seconds of a read by the host
    link: float = 0.80  # nccl-tests reach 360 of 450 GB/s on 8 H100
    latency: float = 15e-6  # seconds of one collective within a node, launch included
    decode_products: float = 0.5
    decode_memory: float = 0.75
    decode_step: float = 3e-3  # scheduling, sampling, launching a captured graph
    # Per running sequence: scheduling its token, its log-prob and its output. vLLM prepares one
    # step while the device computes another, so a step takes the longer of the two.
    decode_sequence: float = 30e-6
    decode_layer: float = 12e-6  # small kernels of one layer


RATES = Rates()


def message_seconds(
    size: float,
    *,
    device: Device,
    ranks: int,
    stride: int,
    calls: float = 1,
    passes: int = 1,
) -> float:
    """Estimate ring collectives whose larger side has `size` bytes, in a group of `ranks`.

    Each rank transfers size (ranks - 1) / ranks in a pass (Thakur et al., 2005); an all-reduce has
    two. Ranks are numbered node by node, `stride` apart: a group that spans more than one node uses
    the network, where every device has its own share.
    """
    if ranks == 1:
        return 0.0
    inside = ranks * stride <= device.per_node
    rate = device.link_gb_s if inside else device.network_gb_s
    wire = passes * size * (ranks - 1) / ranks / (rate * 1e9 * RATES.link)
    return wire + calls * RATES.latency * (1 if inside else 2)


def kernel_seconds(work: Mapping[str, float], device: Device) -> float:
    """Estimate products, attention (FLOPs), moved (bytes), kernels and stalls (their number)."""
    peak = device.tflops * 1e12
    busy = (
        work["products"] / (peak * RATES.products)
        + work["attention"] / (peak * RATES.attention)
        + work["moved"] / (device.memory_gb_s * 1e9 * RATES.memory)
    )
    return max(busy, work["kernels"] * RATES.launch) + work["stalls"] * RATES.stall


# Time of the rounds of a push over that of the mean rank's bytes: the largest of the layouts that
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


def push_seconds(
    shape: ModelShape,
    layout: ActorLayout,
    device: Device,
    *,
    engine: EngineLayout,
    engine_weights: int,
    adapters: tuple[int, tuple[str, ...]] | None = None,
) -> float:
    """Estimate the duration of one push: of all weights, or of adapters alone to every rank.

    engine: on the ranks of `layout`, or on those that follow them. engine_weights: elements of one
    engine rank. adapters: rank and targets, if they are sent alone.
    """
    if adapters is not None:
        count = count_adapter_parameters(shape, rank=adapters[0], targets=adapters[1])
        rate = device.link_gb_s if engine.ranks.stop <= device.per_node else device.network_gb_s
        return FIXED_SECONDS + IMBALANCE * 2 * count / (rate * 1e9 * RATES.link)
    if engine.first:
        volume = link_bytes(shape, layout, engine, device.per_node)
    else:
        volume = push_bytes(shape, layout, engine.tensor, device.per_node)
    ways = {"within": device.link_gb_s, "between": device.network_gb_s}
    wire = sum(
        IMBALANCE * getattr(volume, way) / volume.ranks / (rate * 1e9 * RATES.link)
        for way, rate in ways.items()
    )
    copied = 4 * engine_weights  # packed and loaded: each reads and writes
    return FIXED_SECONDS + wire + 2 * copied / (device.memory_gb_s * 1e9)


def push_bytes(
    shape: ModelShape, layout: ActorLayout, rollout_tensor: int, per_node: int
) -> PushBytes:
    """Compute bytes from the plan of a model with one layer per stage and one expert per rank.

    The result is scaled up. Additional replicas do not change a rank's bytes, so a large cluster is
    planned as a smaller one with the same nodes.
    """
    slices = layout.tensor if layout.expert_tensor is None else layout.expert_tensor
    stage = math.lcm(layout.tensor, layout.expert * slices)
    unit = math.lcm(stage * layout.pipeline, rollout_tensor)
    sufficient = min(layout.world_size, layout.pipeline * per_node)
    ranks = min(layout.world_size, -(-sufficient // unit) * unit)
    smaller = ActorLayout(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        expert=layout.expert,
        expert_tensor=slices,
        data=ranks // (layout.tensor * layout.pipeline),
    )
    return _push_bytes(shape, smaller, rollout_tensor, per_node)


def link_bytes(
    shape: ModelShape, layout: ActorLayout, engine: EngineLayout, per_node: int
) -> PushBytes:
    """Compute bytes of a push to other ranks from the plan for one replica and one node of engines.

    Each node of engines receives the same. The result is of the busier side's ranks: those of the
    smaller side, except for what engines forward to others of their node.
    """
    slices = layout.tensor if layout.expert_tensor is None else layout.expert_tensor
    model = layout.tensor * layout.pipeline
    replica = math.lcm(model, layout.pipeline * layout.expert * slices)
    is_one = engine.ranks.stop <= per_node
    senders = replica if is_one else math.lcm(replica, per_node)
    receivers = min(engine.world_size, math.lcm(per_node, engine.tensor))
    smaller = ActorLayout(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        expert=layout.expert,
        expert_tensor=slices,
        data=senders // model,
    )
    node = senders + receivers if is_one else per_node
    volume = _push_bytes(shape, smaller, engine.tensor, node, engines=receivers)
    ranks, times = min(layout.world_size, engine.world_size), engine.world_size / receivers
    forwarded = 1.0 if is_one else ranks / engine.world_size
    return PushBytes(ranks, times * volume.within * forwarded, times * volume.between)


@lru_cache(maxsize=256)
def _push_bytes(
    shape: ModelShape,
    layout: ActorLayout,
    rollout: int,
    node: int,
    engines: int = 0,
) -> PushBytes:
    """Count the bytes of a push to engines on the same ranks, or on `engines` ranks after them."""
    ranks = layout.world_size
    small = replace(shape, num_layers=layout.pipeline)
    depth, experts = shape.num_layers / layout.pipeline, 1
    if shape.experts is not None:
        experts = shape.experts.num_experts // layout.expert
        # Layers without experts count as layers with them.
        few = replace(shape.experts, num_experts=layout.expert, first_layer=0, groups=1)
        small = replace(small, experts=few)
    destination = EngineLayout(rollout, engines or ranks, first=ranks if engines else 0)
    slices = plan_slices(small, layout, destination, ranks_per_node=node)
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
