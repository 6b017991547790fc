"""Cost of a whole run with one layout: hours, evaluations, disk and host memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.apps.planning.footprint import (
    GRADIENT,
    WEIGHT,
    prepared_pack_bytes,
    state_bytes,
)
from megatron_rl.apps.planning.generation import Engine
from megatron_rl.apps.planning.parts import Parts, count_parameters, count_trained
from megatron_rl.apps.planning.response_bytes import ResponseBytes, response_bytes
from megatron_rl.apps.planning.search import Option, Search
from megatron_rl.config import Config
from megatron_rl.data.rows import count_rows
from megatron_rl.objectives.spec import needs_reference
from megatron_rl.preflight.resources import describe_size, disk_needs
from megatron_rl.runs.directory import RunDirectory

PROBLEMS = 30  # assumed size of an evaluation set whose file does not exist here


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
    host_bytes: (
        int  # per node, for optimizer states while the engine generates and a reference policy
    )
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


def run_cost(option: Option, config: Config, result: Search) -> RunCost:
    """Estimate the cost of a run with this layout."""
    parts, shape, trainer = option.parts, result.shape, config.trainer
    counts = {name: count_rows(data.path) for name, data in config.eval.sets.items()}
    problems = {name: int(n) if math.isfinite(n) else None for name, n in counts.items()}
    evaluations = (
        1 + -(-trainer.steps // config.eval.every) if problems else 0
    )  # one before training
    awake, asleep = state_bytes(shape, parts, stage=0)
    gradients = GRADIENT * count_trained(shape, parts, stage=0).total
    compared = needs_reference(config.objective.choice.needs)
    is_own = config.lora is not None and config.reference_path == config.model.path
    copied = compared and not is_own  # else the reference is the model without adapters
    reference = WEIGHT * count_parameters(shape, parts, stage=0).total if copied else 0
    load = result.workload
    packs = load.packs(ranks=parts.data, budget=parts.tokens, alignment=parts.alignment)
    return RunCost(
        steps=trainer.steps,
        devices=result.devices,
        training_seconds=trainer.steps * option.step_seconds,
        evaluations=evaluations,
        evaluation_seconds=sum(
            evaluation_seconds(option, config, result, count or PROBLEMS)
            for count in problems.values()
        ),
        assumed=tuple(name for name, count in problems.items() if not count),
        disk=disk_needs(config, RunDirectory(Path(config.run.dir) / "planned"), shape),
        host_bytes=(awake - asleep - gradients + reference)
        * min(result.devices, result.device.per_node),
        prepared_bytes=load.minibatches * packs.count * prepared_pack_bytes(shape, parts),
        responses=response_bytes(_with_sizes(config, parts), processes=result.devices),
    )


def _with_sizes(config: Config, parts: Parts) -> Config:
    sizes = {"tensor": parts.tensor, "pipeline": parts.pipeline, "context": parts.context}
    parallel = config.parallel.model_copy(update=sizes)
    rollout = config.rollout.model_copy(update={"tensor": parts.rollout_tensor})
    return config.model_copy(update={"parallel": parallel, "rollout": rollout})


def evaluation_seconds(option: Option, config: Config, result: Search, problems: int) -> float:
    """Estimate the time of one evaluation set, with the engines and lengths of training."""
    parts, device = option.parts, result.device
    samples = 1 if config.eval.temperature == 0 else config.eval.samples
    engine = Engine(
        result.shape,
        parts.rollout_tensor,
        device,
        int(option.gpu_memory_utilization * device.memory),
    )
    workload = replace(result.workload, prompts=problems, samples=samples)
    return engine.seconds(workload, engines=parts.world_size // parts.rollout_tensor)
