"""Search over all parallel layouts: which fit, their step times, and why others do not fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_rl.apps.planning.devices import GIB, Device
from megatron_rl.apps.planning.footprint import ENGINE_ASLEEP, RESERVE, Footprint, footprint
from megatron_rl.apps.planning.generation import Engine
from megatron_rl.apps.planning.parts import Parts, Recompute
from megatron_rl.apps.planning.push_time import push_seconds
from megatron_rl.apps.planning.training_time import TrainingTime
from megatron_rl.apps.planning.workload import Workload
from megatron_rl.config import ParallelSection
from megatron_rl.config.sections import LoraSection
from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape
from megatron_rl.preflight.layout import cut_problems
from megatron_rl.resharding.layouts import EngineLayout

MAX_SIZE = 16  # maximum tensor, pipeline and context parallel size
MIN_TOKENS = 1024  # minimum tokens of a full pack on one rank
MAX_PUSH_PLANS = 48  # number of the fastest layouts whose weight push is estimated
MAX_ENGINE_SHARE = 0.9  # of a device's memory
PHASES = ("rollout", "behavior", "train", "push", "offload")
Fixed = Mapping[str, object]  # fields of Parts fixed by the caller


@dataclass(frozen=True)
class Option:
    """Layout that fits."""

    parts: Parts
    gpu_memory_utilization: float  # the engine's share of the device
    memory: Mapping[str, float]  # by phase: fraction of the device, including reserves
    seconds: Mapping[str, float]  # of one step, by phase
    footprint: Footprint

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Rejection:
    """Layout that is impossible or does not fit, and the reason."""

    parts: Parts
    reason: str
    needed: float = 0.0  # fraction of a device's memory; 0: the reason is not memory


@dataclass(frozen=True)
class Search:
    """All layouts of one model on one number of devices, fastest first."""

    shape: ModelShape
    device: Device
    devices: int
    workload: Workload
    options: list[Option]
    rejected: list[Rejection]


def search(
    shape: ModelShape,
    device: Device,
    devices: int,
    workload: Workload,
    fixed: Fixed | None = None,
    *,
    pushes: int = MAX_PUSH_PLANS,
) -> Search:
    """Estimate every layout. Raises UserError if the devices do not fill whole nodes.

    fixed: given fields of `Parts` (tensor, pipeline, ..., recompute, tokens). pushes: number of the
    fastest layouts whose weight push is estimated.
    """
    check_nodes(device, devices)
    fixed = fixed or {}
    options, rejected = [], []
    for parts in layouts(shape, devices, fixed):
        reason = _misfit(shape, device, devices, workload, parts)
        if reason:
            rejected.append(Rejection(parts, reason))
            continue
        estimates = [
            _estimate(shape, device, workload, candidate)
            for candidate in _variants(shape, workload, parts, fixed)
        ]
        fits = [estimate for estimate in estimates if isinstance(estimate, Option)]
        if fits:
            options.append(min(fits, key=lambda option: option.step_seconds))
        else:
            misfits = [estimate for estimate in estimates if isinstance(estimate, Rejection)]
            rejected.append(min(misfits, key=lambda misfit: misfit.needed))
    options.sort(key=lambda option: option.step_seconds)
    pushed = [_with_push(shape, device, option) for option in options[:pushes]]
    pushed.sort(key=lambda option: option.step_seconds)
    return Search(shape, device, devices, workload, pushed + options[pushes:], rejected)


def check_nodes(device: Device, devices: int) -> None:
    """Raise UserError unless the devices fill whole nodes or fit in one."""
    if devices > device.per_node and devices % device.per_node:
        below = devices // device.per_node * device.per_node
        raise UserError(
            f"--devices {devices}: nodes of {device.name} have {device.per_node} devices, which do "
            f"not divide {devices}; use {below} or {below + device.per_node}, or set --per-node"
        )


def layouts(shape: ModelShape, devices: int, fixed: Fixed) -> Iterator[Parts]:
    """Yield every (tp, pp, cp, ep, dp, vLLM tp) whose product is the number of devices.

    The experts' tensor parallel size is the config's default unless `fixed` has it; `fixed` may
    also have the config's section lora.
    """
    sizes = [size for size in range(1, min(devices, MAX_SIZE) + 1) if devices % size == 0]
    lora = fixed.get("lora")
    assert lora is None or isinstance(lora, LoraSection)

    def choose(name: str, candidates: list[int]) -> list[int]:
        return [int(str(fixed[name]))] if name in fixed else candidates

    for tensor, pipeline, context, rollout in itertools.product(
        *(choose(name, sizes) for name in ("tensor", "pipeline", "context", "rollout_tensor"))
    ):
        data, rest = divmod(devices, tensor * pipeline * context)
        if rest or data == 0:
            continue
        experts = [1]
        if shape.experts is not None:
            count = shape.experts.num_experts
            experts = [n for n in range(1, count + 1) if count % n == 0]
        for expert in choose("expert", experts):
            given = choose("expert_tensor", [0])[0] or None
            section = ParallelSection(tensor=tensor, expert=expert, expert_tensor=given)
            slices = section.expert_tensor_size
            if devices // pipeline % (expert * slices) == 0 or "expert" in fixed:
                yield Parts(
                    tensor, pipeline, context, data, expert=expert, expert_tensor=slices,
                    rollout_tensor=rollout, expert_share=expert_share(fixed, expert),
                    lora_rank=lora.rank if lora else 0,
                    lora_targets=tuple(lora.targets) if lora else (),
                    lora_versions=int(lora is not None and lora.push == "adapters"),
                )  # fmt: skip


def expert_share(fixed: Fixed, expert: int) -> float:
    """Return the largest expert share; without expert parallelism a rank receives all tokens."""
    return float(str(fixed.get("expert_share", 1.0))) if expert > 1 else 1.0


def _misfit(
    shape: ModelShape, device: Device, devices: int, workload: Workload, parts: Parts
) -> str:
    """Return why the model or the batch cannot or should not be divided this way, or ''."""
    sizes = ParallelSection(
        tensor=parts.tensor,
        pipeline=parts.pipeline,
        context=parts.context,
        expert=parts.expert,
        expert_tensor=parts.expert_tensor if shape.experts else None,
    )
    if problems := cut_problems(sizes, shape):
        return problems[0]
    stage = parts.tensor * parts.replicas
    if stage % (parts.expert * parts.expert_slices):
        return (
            f"expert {parts.expert} * expert_tensor {parts.expert_slices} does not divide tensor * "
            f"context * data = {stage}"
        )
    if parts.tensor > device.per_node:
        return f"tensor {parts.tensor} would span nodes of {device.per_node}"
    if workload.longest // parts.context < MIN_TOKENS and parts.context > 1:
        return f"context {parts.context} leaves less than {MIN_TOKENS} tokens per rank"
    minibatch = workload.responses // workload.minibatches
    if parts.data > minibatch:
        return f"a minibatch of {minibatch} responses cannot feed {parts.data} replicas"
    return _engine_misfit(shape, parts.rollout_tensor, devices)


@lru_cache(maxsize=1024)
def _engine_misfit(shape: ModelShape, tensor: int, devices: int) -> str:
    """Return why the model cannot be divided over engines of `tensor` ranks, or ''."""
    try:
        EngineLayout(tensor, devices).check(replace(shape, num_layers=1))
    except ValueError as error:
        return str(error)
    return ""


def _variants(shape: ModelShape, workload: Workload, parts: Parts, fixed: Fixed) -> Iterator[Parts]:
    """Yield kinds of recomputation and packs of one, two or four of the longest sequences."""
    kinds: list[Recompute] = ["none", "selective", "full"]
    if "recompute" in fixed:
        kinds = [fixed["recompute"]]  # type: ignore[list-item]
    longest = math.ceil(workload.longest / parts.alignment) * parts.alignment
    tokens = [longest, 2 * longest, 4 * longest]
    if "tokens" in fixed:
        tokens = [max(longest, int(str(fixed["tokens"])) // parts.alignment * parts.alignment)]
    for recompute, size in itertools.product(kinds, tokens):
        yield replace(parts, recompute=recompute, tokens=size)


def _estimate(
    shape: ModelShape, device: Device, workload: Workload, parts: Parts
) -> Option | Rejection:
    packs = workload.packs(ranks=parts.data, budget=parts.tokens, alignment=parts.alignment)
    micro_batches = packs.count
    needed = footprint(
        shape,
        parts,
        micro_batches=micro_batches,
        packs=workload.minibatches * micro_batches,
        prompt_part=workload.max_prompt / workload.longest,
    )
    fraction = math.floor(100 * (device.memory - needed.asleep - RESERVE) / device.memory) / 100
    fraction = min(MAX_ENGINE_SHARE, fraction)
    reserved = ENGINE_ASLEEP + RESERVE
    memory = {
        "train": (needed.train + reserved) / device.memory,
        "behavior": (needed.behavior + reserved) / device.memory,
        "push": (needed.push + reserved) / device.memory,
        "rollout": (needed.asleep + RESERVE) / device.memory + max(0.0, fraction),
    }
    worst = max(("train", "push", "behavior"), key=lambda phase: memory[phase])
    if memory[worst] > 1:
        gib = memory[worst] * device.memory / GIB
        reason = f"{worst} needs {gib:.1f} of {device.memory_gib:.1f} GiB"
        return Rejection(parts, reason, memory[worst])
    engine = Engine(shape, parts.rollout_tensor, device, int(fraction * device.memory))
    longest = workload.longest + engine.state_tokens
    if engine.cached_tokens < longest:
        weights = needed.engine_weights / GIB
        return Rejection(
            parts,
            f"engines of {parts.rollout_tensor} get {max(0.0, fraction):.2f} of each device, "
            f"{weights:.1f} GiB of it for weights: no room to cache {workload.longest} tokens",
            (needed.asleep + RESERVE + needed.engine_weights + longest * engine.token_bytes)
            / device.memory,
        )
    seconds = _seconds(shape, parts, device, workload, engine)
    return Option(parts, fraction, memory, seconds, needed)


def _seconds(
    shape: ModelShape, parts: Parts, device: Device, workload: Workload, engine: Engine
) -> dict[str, float]:
    behavior, update, offload = _training_seconds(
        shape, replace(parts, rollout_tensor=1), device, workload
    )
    return {
        "rollout": _rollout_seconds(engine, workload, parts.world_size // parts.rollout_tensor),
        "behavior": behavior,
        "train": workload.epochs * workload.minibatches * update,
        "push": 0.0,
        "offload": offload,
    }


@lru_cache(maxsize=16384)
def _training_seconds(
    shape: ModelShape, parts: Parts, device: Device, workload: Workload
) -> tuple[float, float, float]:
    """Estimate (behavior pass, one update, offloading)."""
    training = TrainingTime(shape, parts, device)
    return training.behavior(workload), training.update(workload), training.offload()


@lru_cache(maxsize=1024)
def _rollout_seconds(engine: Engine, workload: Workload, engines: int) -> float:
    return engine.seconds(replace(workload, epochs=1), engines=engines)


def _with_push(shape: ModelShape, device: Device, option: Option) -> Option:
    seconds = push_seconds(shape, option.parts, device)
    return replace(option, seconds={**option.seconds, "push": seconds})
