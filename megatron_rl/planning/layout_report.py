"""A search as text, and as the config of one of its layouts."""

from __future__ import annotations

import re
from collections import Counter

from megatron_rl.config import Config, dump_config, parse_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.devices import GIB, Device
from megatron_rl.planning.parts import model_parameters
from megatron_rl.planning.search import PHASES, Fixed, Option, Search, search
from megatron_rl.planning.workload import Workload

_NEEDED = re.compile(r"needs [\d.]+ of")
MOST_DEVICES = 4096  # that are looked at for the smallest number that fits
HEADER = (
    "  #  tp pp cp ep  dp vllm | recompute  tokens | rollout behavior  train push offload | "
    "step s | GiB train behavior push | engine"
)


def describe(found: Search, *, top: int, show_rejected: bool) -> str:
    """A table of the fastest layouts, and why others were rejected."""
    size, load = model_parameters(found.shape) / 1e9, found.workload
    lines = [
        f"{size:.1f}B parameters on {found.devices} x {found.device.name}: {load.prompts} x "
        f"{load.samples} responses of {load.mean_response} tokens (at most {load.max_response}), "
        f"{load.epochs} epochs of {load.minibatches} minibatches",
        f"{len(found.options)} layouts fit, {len(found.rejected)} do not; by formula, not measured",
        HEADER,
    ]
    lines += [_row(place, option) for place, option in enumerate(found.options[:top], 1)]
    counted = Counter(_NEEDED.sub("needs more than", each.reason) for each in found.rejected)
    if show_rejected:
        lines += [f"  rejected {each.parts}: {each.reason}" for each in found.rejected]
    elif counted:
        lines.append("rejected (--rejected lists every layout):")
        lines += [f"  {count} x {reason}" for reason, count in counted.most_common(8)]
    return "\n".join(lines)


def _row(place: int, option: Option) -> str:
    parts, held = option.parts, option.footprint
    seconds = [option.seconds[phase] for phase in PHASES]
    rollout, behavior, train, push, offload = seconds
    return (
        f"{place:3d}  {parts.tensor:2d} {parts.pipeline:2d} {parts.context:2d} {parts.expert:2d} "
        f"{parts.data:3d} {parts.rollout_tensor:4d} | {parts.recompute:9s} {parts.tokens:7d} | "
        f"{rollout:7.1f} {behavior:8.1f} {train:6.1f} {push:4.1f} {offload:7.1f} | "
        f"{option.step_seconds:6.0f} | {held.train / GIB:9.1f} {held.behavior / GIB:8.1f} "
        f"{held.push / GIB:4.1f} | {option.memory_fraction:.2f}"
    )


def require_fit(found: Search, fixed: Fixed) -> None:
    """ValueError with what is missing, and the smallest number of devices that fits."""
    if found.options:
        return
    lacking = [each for each in found.rejected if each.needed > 0]
    where = f"on {found.devices} x {found.device.name}"
    if not lacking:
        reasons = {each.reason for each in found.rejected}
        why = "; ".join(sorted(reasons)[:4]) or "their product is not the number of devices"
        raise ValueError(f"no layout is possible {where}: {why}")
    least = min(lacking, key=lambda each: each.needed)
    raise ValueError(
        f"nothing fits {where}: the least needs {least.needed:.1f}x the memory ({least.parts}: "
        f"{least.reason}); {_smallest(found, fixed)}"
    )


def _smallest(found: Search, fixed: Fixed) -> str:
    devices = found.devices
    while (devices := _next(devices, found.device)) <= MOST_DEVICES:
        larger = search(found.shape, found.device, devices, found.workload, fixed)
        if larger.options:
            return f"smallest that fits: {devices} devices, {larger.options[0].parts}"
    return f"no number of {found.device.name} up to {MOST_DEVICES} fits: take larger devices"


def _next(devices: int, device: Device) -> int:
    return 2 * devices if devices < device.per_node else -(-2 * devices // device.per_node) * (
        device.per_node
    )  # fmt: skip


def config_of(option: Option, base: Config) -> Config:
    """The base config with this layout's settings."""
    parts, values = option.parts, base.model_dump()
    values["parallel"] |= {
        "tensor": parts.tensor,
        "pipeline": parts.pipeline,
        "context": parts.context,
        "data": parts.data,
        "expert": parts.expert,
        "virtual_stages": 1,
    }
    values["rollout"] |= {
        "tensor": parts.rollout_tensor,
        "memory_fraction": option.memory_fraction,
    }
    values["trainer"] |= {
        "recompute": parts.recompute,
        "tokens_per_micro_batch": parts.tokens,
    }
    return parse_config(values)


def config_text(option: Option, base: Config, found: Search) -> str:
    """The same as YAML, with what the plan expects of it above."""
    peak = max(option.memory[phase] for phase in ("train", "behavior", "push"))
    return (
        f"# Planned for {found.devices} x {found.device.name} ({option.parts}).\n"
        f"# By formula, not measured: {option.step_seconds:.0f} s per step, "
        f"{100 * peak:.0f}% of a device's memory at the peak.\n"
        + dump_config(config_of(option, base))
    )


def plan(
    shape: ModelShape, device: Device, devices: int, workload: Workload, fixed: Fixed
) -> Search:
    """The search, where something fits; ValueError with what would."""
    found = search(shape, device, devices, workload, fixed)
    require_fit(found, fixed)
    return found
