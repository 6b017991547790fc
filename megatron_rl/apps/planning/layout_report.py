"""Text report of a layout search, and the config of one of its layouts."""

from __future__ import annotations

import re
from collections import Counter

from megatron_rl.apps.planning.devices import Device
from megatron_rl.apps.planning.parts import model_parameters
from megatron_rl.apps.planning.run_cost import run_cost
from megatron_rl.apps.planning.search import PHASES, Fixed, Option, Search, search
from megatron_rl.apps.planning.workload import Workload
from megatron_rl.config import Config, dump_config, parse_config
from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import EngineLayout, largest_module

_NEEDED = re.compile(r"needs [\d.]+ of")
MAX_DEVICES = 4096  # limit of the search for the smallest number that fits
SIMILAR = 0.10  # step times closer than this are equal within the planner's error
HEADER = (
    "  #  tp pp cp ep  dp vllm | recompute  tokens | rollout behavior  train push offload   step |"
    "  hours | rollout behavior  train   push | share   GiB\n"
    "                          |            of a   |              seconds of one step            |"
    " of the |   GiB on a device at that moment | of the engine\n"
    "                          |            pack   |                                             |"
    "    run |"
)
EXPERTS = """no training of a mixture of experts has been measured: these times are too short as
  products are priced as dense ones, and sorting tokens by expert, uneven shares and the host's
  reads of their sizes are not priced"""
LOADERS = """on {name} vLLM may choose kernels for experts that need its loaders: a push then keeps
  {size:.1f} GiB more for each pipeline stage, which is not counted in this table, and is not
  priced; rollout.engine.moe_backend=triton writes experts directly"""
LEGEND = """tokens: per pack, before parallel.context splits it. offload: optimizer states to the
  host and back. GiB: of {room:.1f} on a device, including the engine (4 while it sleeps) and a
  reserve of 6. share: rollout.gpu_memory_utilization, for the engine's weights and cache."""


def describe(result: Search, config: Config, *, top: int, show_rejected: bool, choice: int) -> str:
    """Format the fastest layouts as a table, the cost of one run, and why others were rejected."""
    size, load = model_parameters(result.shape) / 1e9, result.workload
    lines = [
        f"{size:.1f}B parameters on {result.devices} x {result.device.name}: {load.prompts} x "
        f"{load.samples} responses of {load.mean_response} tokens (maximum {load.max_response}), "
        f"{load.epochs} epochs of {load.minibatches} minibatches",
        f"{len(result.options)} layouts fit, {len(result.rejected)} do not; estimated by formula, "
        "not measured",
        *([EXPERTS] if result.shape.experts else []),
        *_uncounted(result),
        HEADER,
        *_rows(result, config, top),
        LEGEND.format(room=result.device.memory_gib),
        f"cost of a run with the layout of row {choice}",
        *run_cost(result.options[choice - 1], config, result).describe(),
    ]
    reasons = Counter(_NEEDED.sub("needs more than", each.reason) for each in result.rejected)
    if show_rejected:
        lines += [f"  rejected {each.parts}: {each.reason}" for each in result.rejected]
    elif reasons:
        lines.append("rejected (--rejected lists every layout):")
        lines += [f"  {count} x {reason}" for reason, count in reasons.most_common(8)]
    return "\n".join(lines)


def _uncounted(result: Search) -> list[str]:
    """Format what the formulas leave out where vLLM itself may choose its loaders."""
    if result.shape.experts is None or not result.device.newer_than_h100:
        return []
    size = 2 * largest_module(result.shape, EngineLayout(1, 1)) / 2**30
    return [LOADERS.format(name=result.device.name, size=size)]


def _rows(result: Search, config: Config, top: int) -> list[str]:
    """Format the rows of the table; group rows that differ by less than the planner's error."""
    lines, shown = [], result.options[:top]
    first = 0
    while first < len(shown):
        limit = shown[first].step_seconds * (1 + SIMILAR)
        similar = [option for option in shown[first:] if option.step_seconds <= limit]
        if len(similar) > 1:
            lines.append(
                f"     rows {first + 1} to {first + len(similar)} are equal within the planner's "
                f"error: their steps differ by less than {SIMILAR:.0%}"
            )
        elif lines:
            lines.append("")
        lines += [_row(first + 1 + n, o, config, result) for n, o in enumerate(similar)]
        first += len(similar)
    return lines


def _row(number: int, option: Option, config: Config, result: Search) -> str:
    parts, room = option.parts, result.device.memory_gib
    rollout, behavior, train, push, offload = (option.seconds[phase] for phase in PHASES)
    gib = {phase: part * room for phase, part in option.memory.items()}
    return (
        f"{number:3d}  {parts.tensor:2d} {parts.pipeline:2d} {parts.context:2d} {parts.expert:2d} "
        f"{parts.data:3d} {parts.rollout_tensor:4d} | {parts.recompute:9s} {parts.tokens:7d} | "
        f"{rollout:7.1f} {behavior:8.1f} {train:6.1f} {push:4.1f} {offload:7.1f} "
        f"{option.step_seconds:6.0f} | {run_cost(option, config, result).hours:6.1f} | "
        f"{gib['rollout']:7.1f} {gib['behavior']:8.1f} {gib['train']:6.1f} {gib['push']:6.1f} | "
        f"{option.gpu_memory_utilization:5.2f} {option.gpu_memory_utilization * room:5.1f}"
    )


def require_fit(result: Search, fixed: Fixed) -> None:
    """Raise UserError with the missing memory and the smallest number of devices that fits."""
    if result.options:
        return
    too_large = [each for each in result.rejected if each.needed > 0]
    where = f"on {result.devices} x {result.device.name}"
    if not too_large:
        reasons = {each.reason for each in result.rejected}
        why = "; ".join(sorted(reasons)[:4]) or "their product is not the number of devices"
        raise UserError(f"no layout divides the model {where}: {why}")
    smallest = min(too_large, key=lambda each: each.needed)
    raise UserError(
        f"no layout fits {where}: the smallest needs {smallest.needed:.1f}x the memory "
        f"({smallest.parts}: {smallest.reason}); {_fewest_devices(result, fixed)}"
    )


def _fewest_devices(result: Search, fixed: Fixed) -> str:
    devices = result.devices
    while (devices := _next(devices, result.device)) <= MAX_DEVICES:
        larger = search(result.shape, result.device, devices, result.workload, fixed)
        if larger.options:
            return f"smallest that fits: {devices} devices, {larger.options[0].parts}"
    return f"no number of {result.device.name} up to {MAX_DEVICES} fits: use larger devices"


def _next(devices: int, device: Device) -> int:
    return 2 * devices if devices < device.per_node else -(-2 * devices // device.per_node) * (
        device.per_node
    )  # fmt: skip


def config_of(option: Option, base: Config) -> Config:
    """Return the base config with this layout's settings."""
    parts, values = option.parts, base.model_dump()
    values["parallel"] |= {
        "tensor": parts.tensor,
        "pipeline": parts.pipeline,
        "context": parts.context,
        "data": parts.data,
        "expert": parts.expert,
        "expert_tensor": parts.expert_tensor if parts.expert > 1 else None,
        "virtual_stages": 1,
        "stage_layers": None,
    }
    values["rollout"] |= {
        "tensor": parts.rollout_tensor,
        "gpu_memory_utilization": option.gpu_memory_utilization,
    }
    values["trainer"] |= {
        "recompute": parts.recompute,
        "tokens_per_micro_batch": parts.tokens,
    }
    return parse_config(values)


def config_text(option: Option, base: Config, result: Search) -> str:
    """Format the layout's config as YAML, with the plan's estimates as a comment above."""
    moments = ", ".join(
        f"{phase} {part * result.device.memory_gib:.1f}" for phase, part in option.memory.items()
    )
    cost = run_cost(option, base, result)
    return (
        f"# Planned for {result.devices} x {result.device.name} ({option.parts}).\n"
        f"# Estimated by formula, not measured: {option.step_seconds:.0f} s per step, "
        f"{cost.hours:.1f} hours for {cost.steps} steps;\n"
        f"# GiB of {result.device.memory_gib:.1f} on a device, including engine and reserve: "
        f"{moments}.\n" + dump_config(config_of(option, base))
    )


def plan(
    shape: ModelShape, device: Device, devices: int, workload: Workload, fixed: Fixed
) -> Search:
    """Search all layouts; raise UserError with a device count that fits if none does."""
    result = search(shape, device, devices, workload, fixed)
    require_fit(result, fixed)
    return result
