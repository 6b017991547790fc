"""Check that a run fits in device memory, and find settings that make it fit.

Three moments are compared with a device's memory: training (the dry run's peak next to a sleeping
engine), the weight push (the engine's weights next to the actor's) and generating (the engine's
share next to the actor's weights). The engine itself must also fit in its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from megatron_rl.apps.planning.adapter_bytes import host_bytes as host_bytes_of_engine
from megatron_rl.apps.planning.adapter_bytes import slot_bytes
from megatron_rl.apps.planning.dry_run import DryRun, dry_run_rank, stage_ranks
from megatron_rl.apps.planning.footprint import (
    COMMUNICATOR,
    ENGINE_ASLEEP,
    PREPARED,
    RESERVE,
    RESERVED_COMMUNICATORS,
    route_bytes,
)
from megatron_rl.apps.planning.parts import cached_elements, state_bytes
from megatron_rl.apps.planning.response_bytes import response_bytes
from megatron_rl.config import Config, ConfigError
from megatron_rl.models.shape import read_model_shape
from megatron_rl.preflight.layout import layout_problems
from megatron_rl.resharding.layouts import EngineLayout, largest_module

GIB = 2**30
SUGGESTIONS = 2  # number of suggestions to find
TRAINING, PUSH, GENERATING, ENGINE = "training", "a weight push", "generating", "the engine's share"
HOST = "a process on the host"


Progress = Callable[[str], None]


def _silent(message: str) -> None: ...


class DoesNotFitError(ConfigError):
    """Run that needs more memory than its devices have, with suggested settings."""


@dataclass(frozen=True)
class Moment:
    """Memory that is needed at the same time, in bytes."""

    name: str
    room: int | None  # None: unknown
    parts: dict[str, int]

    @property
    def needed(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())

    @property
    def missing(self) -> int:
        """Bytes over the available room; negative if there is free room."""
        return self.needed - (self.needed if self.room is None else self.room)

    @property
    def amount(self) -> str:
        """Needed and available memory, as in `91.2 of 79.6 GiB`."""
        room = "" if self.room is None else f" of {self.room / GIB:.1f}"
        return f"{self.needed / GIB:.1f}{room} GiB"

    @property
    def items(self) -> str:
        """Name and GiB of each part."""
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items())

    def describe(self) -> str:
        """Format the moment as `training needs 91.2 of 79.6 GiB (...)`."""
        return f"{self.name} needs {self.amount} ({self.items})"


def moments(
    config: Config, dry_run: DryRun, device_bytes: int | None, host_bytes: int | None = None
) -> list[Moment]:
    """Return training, push and generating on one rank's device, and the engine in its share.

    Without `device_bytes`, returns only the first two, which do not depend on the device's size.
    With `host_bytes`, one process's share of its host, includes what the process pins there and
    the responses that it receives.
    """
    weights, keys = _engine_bytes(config, dry_run)
    slots = slot_bytes(config)
    asleep = sum(dry_run.asleep.values())
    phase = max(dry_run.phases, key=lambda name: dry_run.phases[name].peak)
    training = {
        f"the actor's peak, {phase}": dry_run.peak,
        "prepared packs": prepared_bytes(config, dry_run),
        "a sleeping engine": ENGINE_ASLEEP,
        "reserve": RESERVE,
    }
    further = max(0, dry_run.communicators - RESERVED_COMMUNICATORS)
    if further:
        training[f"{further} further communicators"] = further * COMMUNICATOR
    push = {
        "the actor asleep": asleep,
        "the engine's weights": weights,
        **slots,
        "buckets": 2 * config.resharding.bucket_bytes(cuda=True),
        **loader_bytes(config, dry_run),
        "the rest of the engine": ENGINE_ASLEEP,
        "reserve": RESERVE,
    }
    first = [Moment(TRAINING, device_bytes, training), Moment(PUSH, device_bytes, push)]
    if device_bytes is None:
        return first
    fraction = config.rollout.gpu_memory_utilization
    share = math.ceil(fraction * device_bytes)
    generating = {
        "the actor asleep": asleep,
        f"rollout.gpu_memory_utilization={fraction:g}": share,
        "reserve": RESERVE,
    }
    engine = {"its weights": weights, **slots, "KV cache of one longest sequence": keys}
    received = response_bytes(config, processes=dry_run.processes)
    on_host = {
        "responses of a step": received.rank if dry_run.rank else received.writer,
        "optimizer states while the engine generates, reference policy": dry_run.asleep_host,
        **host_bytes_of_engine(config, engine=weights + sum(slots.values())),
    }
    return [
        *first,
        Moment(GENERATING, device_bytes, generating),
        Moment(ENGINE, share, engine),
        *([] if host_bytes is None else [Moment(HOST, host_bytes, on_host)]),
    ]


def loader_bytes(config: Config, dry_run: DryRun) -> dict[str, int]:
    """Return bytes of the modules that vLLM's loaders keep, if the settings lead to loaders.

    They keep one module of each pipeline stage until it is complete, in full shape. CUDA's default
    is to write weights directly.
    """
    kernel = config.rollout.engine.get("moe_backend", "triton")
    shape = read_model_shape(config.model.path)
    if shape.experts is None or kernel == "triton":
        return {}
    return {"modules that vLLM's loaders keep": _module_bytes(config, dry_run)}


def uncounted_loaders(config: Config, dry_run: DryRun) -> str | None:
    """Format what `loader_bytes` leaves out, because vLLM itself chooses by device; None: nothing.

    The kernels that it prefers on devices newer than H100 need its loaders.
    """
    is_chosen = "moe_backend" in config.rollout.engine or loader_bytes(config, dry_run)
    if read_model_shape(config.model.path).experts is None or is_chosen:
        return None
    size = _module_bytes(config, dry_run) / GIB
    return (
        f"  not counted: {size:.1f} GiB in a weight push on devices newer than H100, where vLLM\n"
        "  may choose kernels that need its loaders; rollout.engine.moe_backend=triton avoids them"
    )


def _module_bytes(config: Config, dry_run: DryRun) -> int:
    """Return bytes of the largest module of a layer, in full shape, of each pipeline stage."""
    layout = EngineLayout(config.rollout.tensor, dry_run.processes, config.rollout.expert_parallel)
    largest = largest_module(read_model_shape(config.model.path), layout, rank=dry_run.rank)
    width = 4 if config.trainer.dtype == "float32" else 2
    return width * largest * config.parallel.pipeline


def prepared_bytes(config: Config, dry_run: DryRun) -> int:
    """Return bytes of the rollout batch's prepared packs that the dry run did not have.

    A rank keeps the packs of all minibatches; every response has the maximum length.
    """
    packs = config.trainer.minibatches * dry_run.micro_batches_of_update
    shape, parallel = read_model_shape(config.model.path), config.parallel
    routes = route_bytes(shape, tensor=parallel.tensor, stages=parallel.pipeline)
    missing = max(0, packs - dry_run.micro_batches) * dry_run.local_tokens
    return math.ceil(missing * (PREPARED + routes))


def describe_moments(moments: list[Moment]) -> str:
    """Format one row per moment: its needed memory and its parts."""
    width = max(len(moment.amount) for moment in moments)
    rows = [f"  {each.name:<20}{each.amount:>{width}}   {each.items}" for each in moments]
    return "\n".join(["  memory needed at the same time on the device", *rows])


def summarize_fit(moments: list[Moment]) -> str:
    """Format one line: the moment of all ranks that needs the most memory, and whether it fits."""
    worst = max(moments, key=lambda each: each.needed / (each.room or 1))
    if worst.room is None:
        return f"peak {worst.amount}, in {worst.name}; --fit GIB compares it with a device"
    fits = "fits" if worst.missing <= 0 else "does not fit"
    return f"{fits}: peak {worst.amount}, in {worst.name} ({worst.items})"


def _engine_bytes(config: Config, dry_run: DryRun) -> tuple[int, int]:
    """Return bytes of one engine rank: its weights, and the cache of one longest sequence."""
    shape, tensor = read_model_shape(config.model.path), config.rollout.tensor
    layout = EngineLayout(tensor, dry_run.processes, config.rollout.expert_parallel)
    sizes = layout.parameter_shapes(shape, rank=dry_run.rank)
    if shape.tied_embeddings:
        sizes.pop("lm_head.weight", None)
    width = 4 if config.trainer.dtype == "float32" else 2
    per_token = int(cached_elements(shape, tensor))
    weights = sum(math.prod(size) for size in sizes.values())
    cache = width * per_token * config.max_model_tokens + int(state_bytes(shape, tensor))
    return width * weights, cache


def find_lacking(
    config: Config,
    *,
    processes: int,
    device_bytes: int,
    host_bytes: int | None = None,
    progress: Progress = _silent,
) -> tuple[list[Moment], list[DryRun]]:
    """Return the moments that do not fit, largest excess first, and the dry runs.

    Runs the first rank of the first, the middle and the last pipeline stage.
    """
    ranks = stage_ranks(config, processes)
    dry_runs = []
    for rank in ranks:
        progress(f"rank {rank} of {processes}")
        dry_runs.append(dry_run_rank(config, processes=processes, rank=rank))
    all_moments = [
        moment
        for dry_run in dry_runs
        for moment in moments(config, dry_run, device_bytes, host_bytes)
    ]
    lacking = [moment for moment in all_moments if moment.missing > 0]
    return sorted(lacking, key=lambda moment: -moment.missing), dry_runs


def check_fit(
    config: Config,
    *,
    processes: int,
    device_bytes: int,
    host_bytes: int | None = None,
    progress: Progress = _silent,
) -> list[DryRun]:
    """Return the dry runs; raise DoesNotFitError with suggested settings if the run does not fit.

    progress: called with a message at each step; the check takes minutes for large models.
    """
    find = partial(
        find_lacking,
        processes=processes,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        progress=progress,
    )
    lacking, dry_runs = find(config)
    if not lacking:
        return dry_runs
    suggestions = [
        " ".join(f"{key}={value}" for key, value in changes.items())
        for changes in islice(_suggestions(config, {}, lacking, find, progress), SUGGESTIONS)
    ]
    advice = "use more devices, or larger ones"
    if lacking[0].name == HOST:
        advice = "use more nodes, or nodes with more memory"
    if suggestions:
        advice = f"these settings fit: {', or '.join(suggestions)}"
    raise DoesNotFitError(
        f"this run does not fit on its devices: {lacking[0].describe()}; {advice}"
    )


def _suggestions(
    config: Config,
    changes: dict[str, Any],
    lacking: list[Moment],
    find: partial[tuple[list[Moment], list[DryRun]]],
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """Yield changes with which everything fits, found by fixing one moment after the other."""
    if not lacking:
        yield changes
        return
    processes = find.keywords["processes"]
    for further in candidates(config, lacking[0], processes=processes):
        changed = apply_changes(config, further)
        if layout_problems(changed, read_model_shape(changed.model.path), processes):
            continue
        progress("trying " + " ".join(f"{key}={value}" for key, value in further.items()))
        left, _ = find(changed)
        if lacking[0].name not in {moment.name for moment in left}:
            yield from _suggestions(changed, changes | further, left, find, progress)


def candidates(config: Config, moment: Moment, *, processes: int) -> Iterator[dict[str, Any]]:
    """Yield changes to try, those that cost the least speed first."""
    if moment.name == HOST:  # ranks share the states of one model, however it is sharded
        return
    rollout = config.rollout
    fractions = [tenths / 10 for tenths in range(1, 9)]
    if moment.name == GENERATING:
        lower = [f for f in reversed(fractions) if f < rollout.gpu_memory_utilization]
        yield from ({"rollout.gpu_memory_utilization": fraction} for fraction in lower)
    if moment.name == ENGINE:
        higher = [f for f in fractions if f > rollout.gpu_memory_utilization]
        yield from ({"rollout.gpu_memory_utilization": fraction} for fraction in higher)
    if moment.name in (PUSH, ENGINE):
        yield from ({"rollout.tensor": times * rollout.tensor} for times in (2, 4, 8))
    yield from _actor_candidates(config, processes=processes)


def _actor_candidates(config: Config, *, processes: int) -> Iterator[dict[str, Any]]:
    """Yield more expert parallelism, smaller packs, recomputation, and larger parallel sizes."""
    parallel, trainer = config.parallel, config.trainer
    # First: most weights, gradients and optimizer states of a mixture are the experts'.
    yield from ({"parallel.expert": times * parallel.expert} for times in (2, 4, 8))
    smaller: dict[str, Any] = {}
    if trainer.tokens_per_micro_batch > config.max_packed_tokens:
        smaller = {"trainer.tokens_per_micro_batch": config.max_packed_tokens}
        yield smaller
    kinds = ("none", "selective", "full")
    recomputed = [{"trainer.recompute": kind} for kind in kinds[kinds.index(trainer.recompute) :]]
    for recompute in recomputed[1:]:
        yield recompute
        if smaller:
            yield smaller | recompute
    for times in (2, 4, 8):
        if processes % (times * parallel.model_size) == 0:
            for key in ("context", "tensor", "pipeline"):
                yield {f"parallel.{key}": times * getattr(parallel, key), **recomputed[-1]}


def apply_changes(config: Config, changes: dict[str, Any]) -> Config:
    """Return the config with new values of the given `section.key` settings."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    return config
