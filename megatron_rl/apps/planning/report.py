"""Text report of a layout search, the cost of a run, and the config of one of its layouts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.apps.planning.fit import ResponseBytes, response_bytes
from megatron_rl.apps.planning.generation import Workload
from megatron_rl.apps.planning.rates import Device
from megatron_rl.apps.planning.search import PHASES, Option, Planner, Search
from megatron_rl.config import Config, dump_config, parse_config
from megatron_rl.data.rows import count_rows
from megatron_rl.errors import UserError
from megatron_rl.models.shape import tensor_shapes
from megatron_rl.preflight.resources import describe_size, disk_needs
from megatron_rl.resharding.layouts import EngineLayout, largest_module
from megatron_rl.runs.directory import RunDirectory

PROBLEMS = 30  # assumed size of an evaluation set whose file does not exist here
SIMILAR = 0.10  # step times closer than this are equal within the planner's error
_NEEDED = re.compile(r"needs [\d.]+ of")
HEADER = (
    "  #  tp pp cp ep  dp vllm  own | recompute  tokens | "
    "rollout behavior  train push offload   step |  hours | "
    "rollout behavior  train   push | share   GiB\n"
    "                               |            of a   | "
    "             seconds of one step            | of the | "
    "  GiB on a device at that moment | of the engine\n"
    "                               |            pack   | "
    "                                            |    run |"
)
LOADERS = """on {name} vLLM may choose kernels for experts that need its loaders: a push then keeps
  {size:.1f} GiB more for each pipeline stage, which is not counted in this table, and is not
  priced; rollout.engine.moe_backend=triton writes experts directly"""
SHARED = (
    "trainer.share_prompts=true is not counted in seconds and memory, which are those of whole "
    "sequences"
)
LEGEND = """tokens: per pack, before parallel.context splits it. offload: optimizer states to the
  host and back. GiB: of {room:.1f} on a device, including the engine (4 while it sleeps) and a
  reserve of 6. share: rollout.gpu_memory_utilization, for the engine's weights and cache. own:
  parallel.engine_ranks, which only generate while the others train; 0: all do both in turn."""


@dataclass(frozen=True)
class RunCost:
    """Estimated cost of a run with one layout, in seconds and bytes."""

    steps: int
    devices: int
    training_seconds: float  # of all steps
    evaluations: int
    evaluation_seconds: float  # of one evaluation of all sets
    assumed: tuple[str, ...]  # sets whose size is assumed to be PROBLEMS
    disk: Mapping[str, float]  # bytes by purpose
    host_bytes: int  # per node: optimizer states while the engine generates, a reference policy
    prepared_bytes: int  # prepared packs of a rollout batch, on a device
    responses: ResponseBytes

    @property
    def hours(self) -> float:
        """Hours of the run, including evaluations."""
        return (self.training_seconds + self.evaluations * self.evaluation_seconds) / 3600

    def describe(self) -> list[str]:
        """Format one line each for time, evaluation, disk and host memory."""
        evaluation = "none (eval.sets is empty)"
        if self.evaluations:
            of_run = self.evaluations * self.evaluation_seconds / 3600
            evaluation = (
                f"{self.evaluations} times {self.evaluation_seconds:.0f} s, {of_run:.1f} hours of "
                "the time above"
            )
            if self.assumed:
                evaluation += f"; {PROBLEMS} problems assumed in {', '.join(self.assumed)}"
        disk = ", ".join(
            f"{describe_size(n)} for {purpose}" for purpose, n in self.disk.items() if n
        )
        return [
            f"  time: {self.hours:.1f} hours for {self.steps} steps, "
            f"{self.hours * self.devices:.0f} device-hours; checkpoints and start-up not included",
            f"  evaluation: {evaluation}",
            f"  disk: {describe_size(sum(self.disk.values()))}: {disk}",
            f"  host memory: {describe_size(self.host_bytes)} per node for optimizer states while "
            "the engine generates and for a reference policy, plus the memory of each process",
            f"  prepared packs of a step: {describe_size(self.prepared_bytes)} on a device, in the "
            "columns behavior and train",
            f"  {self.responses}",
        ]


def run_cost(option: Option, planner: Planner, devices: int) -> RunCost:
    """Estimate the cost of a run with this layout."""
    config, trainer = planner.config, planner.config.trainer
    counts = {name: count_rows(data.path) for name, data in config.eval.sets.items()}
    problems = {name: int(n) if math.isfinite(n) else None for name, n in counts.items()}
    evaluations = (
        1 + -(-trainer.steps // config.eval.every) if problems else 0
    )  # one before training
    return RunCost(
        steps=trainer.steps,
        devices=devices,
        training_seconds=trainer.steps * option.step_seconds,
        evaluations=evaluations,
        evaluation_seconds=sum(
            evaluation_seconds(option, planner, count or PROBLEMS) for count in problems.values()
        ),
        assumed=tuple(name for name, count in problems.items() if not count),
        disk=disk_needs(config, RunDirectory(Path(config.run.dir) / "planned"), planner.shape),
        host_bytes=option.host_bytes * min(option.layout.world_size, planner.device.per_node),
        prepared_bytes=option.prepared_bytes,
        responses=response_bytes(config_of(option, config), trainers=option.layout.world_size),
    )


def evaluation_seconds(option: Option, planner: Planner, problems: int) -> float:
    """Estimate the time of one evaluation set, with the engines and lengths of training."""
    layout, settings = option.layout, planner.config.eval
    samples = 1 if settings.temperature == 0 else settings.samples
    engine = planner.engine(layout, int(option.gpu_memory_utilization * planner.device.memory))
    workload = replace(
        planner.workload, prompts=problems, samples=samples, batches=1, every_tokens=0
    )
    return engine.seconds(workload, engines=layout.engines)


def describe(
    result: Search, planner: Planner, *, top: int, show_rejected: bool, choice: int
) -> str:
    """Format the fastest layouts as a table, the cost of a run, and why layouts were rejected."""
    size = sum(math.prod(each) for each in tensor_shapes(result.shape).values()) / 1e9
    load = result.workload
    others = [f"{len(result.rejected)} do not"]
    if result.slower:
        others.append(f"{result.slower} are slower by a lower bound")
    if result.unmeasured:
        others.append(f"{result.unmeasured} were not measured; fix a size to measure others")
    lines = [
        f"{size:.1f}B parameters on {result.devices} x {result.device.name}: {load.prompts} x "
        f"{load.samples} responses of {load.mean_response} tokens (maximum {load.max_response}), "
        f"{load.epochs} epochs of {load.minibatches} minibatches{_describe_turns(load)}",
        f"{len(result.options)} layouts fit, {', '.join(others)}; memory, FLOPs and traffic of "
        f"{result.dry_runs} dry runs",
        *_uncounted(result, planner),
        HEADER,
        *_rows(result, planner, top),
        LEGEND.format(room=result.device.memory_gib),
        f"cost of a run with the layout of row {choice}",
        *run_cost(result.options[choice - 1], planner, result.devices).describe(),
    ]
    reasons = Counter(_NEEDED.sub("needs more than", each.reason) for each in result.rejected)
    if show_rejected:
        lines += [f"  rejected {each.layout}: {each.reason}" for each in result.rejected]
    elif reasons:
        lines.append("rejected (--rejected lists every layout):")
        lines += [f"  {count} x {reason}" for reason, count in reasons.most_common(8)]
    return "\n".join(lines)


def _describe_turns(load: Workload) -> str:
    """Format what conversations wait for; nothing where answers take no time."""
    if load.answers is None:
        return ""
    return (
        f", in {load.turns} turns; answers take {load.answers.mean:g} s, 95% of them at most "
        f"{load.answers.p95:g} s"
    )


def _uncounted(result: Search, planner: Planner) -> list[str]:
    """Format what is left out: shared prompts, and loaders that vLLM itself may choose."""
    lines = [SHARED] if planner.config.trainer.share_prompts is True else []
    if result.shape.experts is not None and result.device.newer_than_h100:
        size = 2 * largest_module(result.shape, EngineLayout(1, 1)) / 2**30
        lines.append(LOADERS.format(name=result.device.name, size=size))
    return lines


def _rows(result: Search, planner: Planner, top: int) -> list[str]:
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
        lines += [_row(first + 1 + n, each, planner, result) for n, each in enumerate(similar)]
        first += len(similar)
    return lines


def _row(number: int, option: Option, planner: Planner, result: Search) -> str:
    layout, room = option.layout, result.device.memory_gib
    rollout, behavior, train, push, offload = (option.seconds[phase] for phase in PHASES)
    engines = f"{layout.rollout_tensor:4d} {layout.engine_ranks:4d}"
    gib = {phase: part * room for phase, part in option.memory.items()}
    hours = run_cost(option, planner, result.devices).hours
    return (
        f"{number:3d}  {layout.tensor:2d} {layout.pipeline:2d} {layout.context:2d} "
        f"{layout.expert:2d} {layout.data:3d} {engines} | "
        f"{layout.recompute:9s} {layout.tokens:7d} | "
        f"{rollout:7.1f} {behavior:8.1f} {train:6.1f} {push:4.1f} {offload:7.1f} "
        f"{option.step_seconds:6.0f} | {hours:6.1f} | "
        f"{gib['rollout']:7.1f} {gib['behavior']:8.1f} {gib['train']:6.1f} {gib['push']:6.1f} | "
        f"{option.gpu_memory_utilization:5.2f} {option.gpu_memory_utilization * room:5.1f}"
    )


def require_fit(result: Search, planner: Planner) -> None:
    """Raise UserError with the missing memory and a lower bound of the devices that fit."""
    if result.options:
        return
    too_large = [each for each in result.rejected if each.needed > 0]
    where = f"on {result.devices} x {result.device.name}"
    if not too_large:
        reasons = {each.reason for each in result.rejected}
        why = "; ".join(sorted(reasons)[:4]) or (
            "the product of the given sizes (parallel.*, rollout.tensor) does not divide the "
            "number of devices; change one of them, or --devices"
        )
        raise UserError(f"no layout divides the model {where}: {why}")
    smallest = min(too_large, key=lambda each: each.needed)
    fewest = _at_least(planner, result.devices, result.device)
    raise UserError(
        f"no layout fits {where}: the smallest needs {smallest.needed:.1f}x the memory "
        f"({smallest.layout}: {smallest.reason}); weights, gradients and optimizer states alone "
        f"fill {fewest} devices: try {_next(max(fewest, result.devices), result.device)}"
    )


def _at_least(planner: Planner, devices: int, device: Device) -> int:
    """Return how many devices the training states alone fill, at 18 bytes a weight."""
    weights = sum(math.prod(size) for size in tensor_shapes(planner.shape).values())
    per_weight = 2 if planner.config.lora else 18
    return max(1, math.ceil(per_weight * weights / device.memory))


def _next(devices: int, device: Device) -> int:
    larger = 2 ** math.floor(math.log2(devices) + 1)
    return larger if larger <= device.per_node else -(-larger // device.per_node) * device.per_node


def config_of(option: Option, base: Config) -> Config:
    """Return the base config with this layout's settings."""
    layout, values = option.layout, base.model_dump()
    values["parallel"] |= {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "data": layout.data,
        "expert": layout.expert,
        "expert_tensor": layout.expert_tensor if layout.expert > 1 else None,
        "virtual_stages": 1,
        "stage_layers": None,
        "engine_ranks": layout.engine_ranks or None,
    }
    values["rollout"] |= {
        "tensor": layout.rollout_tensor,
        "gpu_memory_utilization": option.gpu_memory_utilization,
    }
    values["trainer"] |= {
        "recompute": layout.recompute,
        "tokens_per_micro_batch": layout.tokens,
    }
    return parse_config(values)


def config_text(option: Option, planner: Planner, base: Config, devices: int) -> str:
    """Format the layout's config as YAML, with the plan's estimates as a comment above.

    base: the config to change, whose model.path need not exist here.
    """
    device = planner.device
    moments = ", ".join(
        f"{phase} {part * device.memory_gib:.1f}" for phase, part in option.memory.items()
    )
    cost = run_cost(option, planner, devices)
    return (
        f"# Planned for {devices} x {device.name} ({option.layout}).\n"
        f"# Estimated from dry runs, not measured: {option.step_seconds:.0f} s per step, "
        f"{cost.hours:.1f} hours for {cost.steps} steps;\n"
        f"# GiB of {device.memory_gib:.1f} on a device, including engine and reserve: "
        f"{moments}.\n" + dump_config(config_of(option, base))
    )
