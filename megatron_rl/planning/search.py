"""Every way of dividing a run over devices: what fits, how long a step takes, why others do not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_rl.config import ParallelSection
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.devices import GIB, Device
from megatron_rl.planning.footprint import ENGINE_ASLEEP, RESERVE, Footprint, footprint
from megatron_rl.planning.generation import Engine
from megatron_rl.planning.parts import Parts, Recompute
from megatron_rl.planning.push_time import push_seconds
from megatron_rl.planning.training_time import TrainingTime
from megatron_rl.planning.workload import Workload
from megatron_rl.preflight.layout import cut_problems
from megatron_rl.resharding.layouts import EngineLayout

LARGEST = 16  # of tensor, pipeline and context parallel sizes that are looked at
LEAST_TOKENS = 1024  # of a full pack on one rank
PUSHED = 48  # layouts, the fastest ones, whose push is planned
MOST_OF_DEVICE = 0.9  # that an engine may take
PHASES = ("rollout", "behavior", "train", "push", "offload")
Fixed = Mapping[str, object]  # fields of Parts that the caller has decided


@dataclass(frozen=True)
class Option:
    """A layout that fits."""

    parts: Parts
    memory_fraction: float  # of the device, for the engine
    memory: Mapping[str, float]  # by phase: part of the device, reserves included
    seconds: Mapping[str, float]  # of one step, by phase
    footprint: Footprint

    @property
    def step_seconds(self) -> float:
        """Of one step."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Rejection:
    """A layout that cannot be, and why."""

    parts: Parts
    reason: str
    needed: float = 0.0  # of a device's memory; 0: it is not memory


@dataclass(frozen=True)
class Search:
    """All layouts of one model on one number of devices: the fastest first."""

    shape: ModelShape
    device: Device
    devices: int
    workload: Workload
    options: list[Option]
    rejected: list[Rejection]


def search(
    shape: ModelShape, device: Device, devices: int, workload: Workload, fixed: Fixed | None = None
) -> Search:
    """Look at every layout. Raises ValueError where nodes do not divide.

    fixed: what is given of `Parts` (tensor, pipeline, ..., recompute, tokens).
    """
    check_nodes(device, devices)
    fixed = fixed or {}
    options, rejected = [], []
    for parts in layouts(shape, devices, fixed):
        reason = _misfit(shape, device, devices, workload, parts)
        if reason:
            rejected.append(Rejection(parts, reason))
            continue
        found = [
            _judge(shape, device, workload, candidate)
            for candidate in _variants(shape, workload, parts, fixed)
        ]
        fits = [each for each in found if isinstance(each, Option)]
        if fits:
            options.append(min(fits, key=lambda option: option.step_seconds))
        else:
            misfits = [each for each in found if isinstance(each, Rejection)]
            rejected.append(min(misfits, key=lambda misfit: misfit.needed))
    options.sort(key=lambda option: option.step_seconds)
    pushed = [_with_push(shape, device, option) for option in options[:PUSHED]]
    pushed.sort(key=lambda option: option.step_seconds)
    return Search(shape, device, devices, workload, pushed + options[PUSHED:], rejected)


def check_nodes(device: Device, devices: int) -> None:
    """ValueError unless the devices fill whole nodes, or are less than one."""
    if devices > device.per_node and devices % device.per_node:
        below = devices // device.per_node * device.per_node
        raise ValueError(
            f"--devices {devices}: nodes of {device.name} have {device.per_node} devices, which do "
            f"not divide {devices}; take {below} or {below + device.per_node}, or say --per-node"
        )


def layouts(shape: ModelShape, devices: int, fixed: Fixed) -> Iterator[Parts]:
    """Every (tp, pp, cp, ep, dp, vLLM tp) whose product is the number of devices."""
    sizes = [size for size in range(1, min(devices, LARGEST) + 1) if devices % size == 0]

    def choose(name: str, every: list[int]) -> list[int]:
        return [int(str(fixed[name]))] if name in fixed else every

    for tensor, pipeline, context, rollout in itertools.product(
        *(choose(name, sizes) for name in ("tensor", "pipeline", "context", "rollout_tensor"))
    ):
        data, rest = divmod(devices, tensor * pipeline * context)
        if rest or data == 0:
            continue
        spread = context * data
        experts = [1]
        if shape.experts is not None:
            count = shape.experts.num_experts
            experts = [n for n in range(1, count + 1) if count % n == 0 and spread % n == 0]
        for expert in choose("expert", experts):
            yield Parts(tensor, pipeline, context, data, expert=expert, rollout_tensor=rollout)


def _misfit(
    shape: ModelShape, device: Device, devices: int, workload: Workload, parts: Parts
) -> str:
    """Why the model or the batch cannot be divided so, or should not; empty if it can."""
    sizes = ParallelSection(
        tensor=parts.tensor, pipeline=parts.pipeline, context=parts.context, expert=parts.expert
    )
    if problems := cut_problems(sizes, shape):
        return problems[0]
    if parts.expert > 1 and parts.replicas % parts.expert:
        return f"expert {parts.expert} does not divide context * data = {parts.replicas}"
    if parts.tensor > device.per_node:
        return f"tensor {parts.tensor} would span nodes of {device.per_node}"
    if workload.longest // parts.context < LEAST_TOKENS and parts.context > 1:
        return f"context {parts.context} leaves less than {LEAST_TOKENS} tokens to a rank"
    minibatch = workload.responses // workload.minibatches
    if parts.data > minibatch:
        return f"a minibatch of {minibatch} responses cannot feed {parts.data} replicas"
    return _engine_misfit(shape, parts.rollout_tensor, devices)


@lru_cache(maxsize=1024)
def _engine_misfit(shape: ModelShape, tensor: int, devices: int) -> str:
    """Why engines of `tensor` ranks cannot hold the model; one layer shows it."""
    try:
        EngineLayout(tensor, devices).check(replace(shape, num_layers=1))
    except ValueError as error:
        return str(error)
    return ""


def _variants(shape: ModelShape, workload: Workload, parts: Parts, fixed: Fixed) -> Iterator[Parts]:
    """What may be computed again, and packs of one, two or four of the longest sequences."""
    kinds: list[Recompute] = ["none", "selective", "full"]
    if "recompute" in fixed:
        kinds = [fixed["recompute"]]  # type: ignore[list-item]
    longest = math.ceil(workload.longest / parts.alignment) * parts.alignment
    tokens = [longest, 2 * longest, 4 * longest]
    if "tokens" in fixed:
        tokens = [max(longest, int(str(fixed["tokens"])) // parts.alignment * parts.alignment)]
    for recompute, size in itertools.product(kinds, tokens):
        yield replace(parts, recompute=recompute, tokens=size)


def _judge(
    shape: ModelShape, device: Device, workload: Workload, parts: Parts
) -> Option | Rejection:
    packs = workload.packs(ranks=parts.data, budget=parts.tokens, alignment=parts.alignment)
    micro_batches = packs.count
    held = footprint(
        shape,
        parts,
        micro_batches=micro_batches,
        packs=workload.minibatches * micro_batches,
        prompt_part=workload.max_prompt / workload.longest,
    )
    fraction = math.floor(100 * (device.memory - held.asleep - RESERVE) / device.memory) / 100
    fraction = min(MOST_OF_DEVICE, fraction)
    beside = ENGINE_ASLEEP + RESERVE
    memory = {
        "train": (held.train + beside) / device.memory,
        "behavior": (held.behavior + beside) / device.memory,
        "push": (held.push + beside) / device.memory,
        "rollout": (held.asleep + RESERVE) / device.memory + max(0.0, fraction),
    }
    worst = max(("train", "push", "behavior"), key=lambda phase: memory[phase])
    if memory[worst] > 1:
        needed = memory[worst] * device.memory / GIB
        reason = f"{worst} needs {needed:.1f} of {device.memory_gib:.1f} GiB"
        return Rejection(parts, reason, memory[worst])
    engine = Engine(shape, parts.rollout_tensor, device, int(fraction * device.memory))
    if engine.cached_tokens < workload.longest:
        weights = held.engine_weights / GIB
        return Rejection(
            parts,
            f"an engine of {parts.rollout_tensor} has {max(0.0, fraction):.2f} of its devices, "
            f"{weights:.1f} GiB of it weights: no room to cache {workload.longest} tokens",
            (held.asleep + RESERVE + held.engine_weights + workload.longest * engine.token_bytes)
            / device.memory,
        )
    seconds = _seconds(shape, parts, device, workload, engine)
    return Option(parts, fraction, memory, seconds, held)


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
    """(behavior pass, one update, offloading)."""
    training = TrainingTime(shape, parts, device)
    return training.behavior(workload), training.update(workload), training.offload()


@lru_cache(maxsize=1024)
def _rollout_seconds(engine: Engine, workload: Workload, engines: int) -> float:
    return engine.seconds(replace(workload, epochs=1), engines=engines)


def _with_push(shape: ModelShape, device: Device, option: Option) -> Option:
    seconds = push_seconds(shape, option.parts, device)
    return replace(option, seconds={**option.seconds, "push": seconds})
