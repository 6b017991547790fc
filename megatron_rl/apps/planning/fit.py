"""Check that a run fits in device memory, and find settings that make it fit.

Three memory phases are compared with a device's memory: training (the dry run's peak next to a
sleeping engine), the weight push (the engine's weights next to the actor's) and generating (the
engine's share next to the actor's weights). The engine itself must also fit in its share. With
`parallel.engine_ranks` actor and engine have devices of their own, so neither counts the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from megatron_rl.apps.planning.dry_run import DryRun, dry_run_rank, stage_ranks
from megatron_rl.apps.planning.generation import engine_sizes
from megatron_rl.columns import ARRAYS, Column
from megatron_rl.config import Config, ConfigError
from megatron_rl.data.token_rows import PIECE_BYTES
from megatron_rl.models.adapters import count_adapter_parameters, slot_elements
from megatron_rl.models.shape import ModelShape, read_model_shape
from megatron_rl.objectives import build_objective
from megatron_rl.objectives.spec import needs_reference
from megatron_rl.preflight.layout import layout_problems
from megatron_rl.resharding.layouts import EngineLayout, largest_module
from megatron_rl.trainer.actor_settings import build_adapter_settings

GIB = 2**30
MIB = 2**20
# Memory of a sleeping engine: CUDA graphs, buffers and communicators. vLLM logged "5.82 GiB memory
# is still in use" on a 96 GiB device, CUDA context included
# (imokuri.com/blog/2025/07/vllm-sleep-mode).
ENGINE_ASLEEP = 4 * GIB
# Memory that torch's allocator does not count or cannot use: the CUDA context, NCCL (0.5 to 0.7 GiB
# per communicator: github.com/NVIDIA/nccl issue 964), cuBLAS workspaces, fragmentation.
RESERVE = 6 * GIB
COMMUNICATOR = GIB // 2  # of a process group beyond those that the reserve covers
RESERVED_COMMUNICATORS = 4
PREPARED = 80  # bytes per token of a prepared pack, if all of its tokens are responses
COLUMN = 4  # bytes of a token id
OF_MASKS = ("mask_ids", "mask_counts")  # columns of sampling masks
KEPT_OF_NUCLEUS = 16  # tokens that top-p or min-p keep, generously
SUGGESTIONS = 2  # number of suggestions to find
# Settings of engines that are among the suggestions; the actor, and so a dry run, has none of them.
OF_ENGINES = {"rollout.gpu_memory_utilization": 0.5, "rollout.tensor": 1}
# The responses of a pack may all have different prompts.
WHOLE = {"trainer.share_prompts": False}
TRAINING, PUSH, GENERATING, ENGINE = "training", "a weight push", "generating", "the engine's share"
SENDING = "sending weights"  # to engines on ranks of their own
HOST = "a process on the host"


Progress = Callable[[str], None]


def _silent(message: str) -> None: ...


class DoesNotFitError(ConfigError):
    """Run that needs more memory than its devices have, with suggested settings."""


@dataclass(frozen=True)
class MemoryPhase:
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
) -> list[MemoryPhase]:
    """Return training, push and generating on one rank's device, and the engine in its share.

    Without `device_bytes`, returns only the first two, which do not depend on the device's size.
    With `host_bytes`, one process's share of its host, includes what the process pins there and
    the responses that it receives.
    """
    weights, keys = _engine_bytes(config, dry_run)
    slots, is_shared = slot_bytes(config), config.parallel.engine_ranks is None
    asleep = {"the actor asleep": sum(dry_run.asleep.values())} if is_shared else {}
    phase = max(dry_run.phases, key=lambda name: dry_run.phases[name].peak)
    training = {
        f"the actor's peak, {phase}": dry_run.peak,
        "prepared packs": prepared_bytes(config, dry_run),
        **_engine_beside_training(config, device_bytes),
        "reserve": RESERVE,
    }
    further = max(0, dry_run.communicators - RESERVED_COMMUNICATORS)
    if further:
        training[f"{further} further communicators"] = further * COMMUNICATOR
    buckets = {"buckets": 2 * config.resharding.bucket_bytes(cuda=True)}
    push = {
        **asleep,
        "the engine's weights": weights,
        **slots,
        **buckets,
        **loader_bytes(config, dry_run),
        "the rest of the engine": ENGINE_ASLEEP,
        "reserve": RESERVE,
    }
    first = [MemoryPhase(TRAINING, device_bytes, training), MemoryPhase(PUSH, device_bytes, push)]
    if not is_shared:
        parts = {"the actor": sum(dry_run.states.values()), **buckets, "reserve": RESERVE}
        first.append(MemoryPhase(SENDING, device_bytes, parts))
    if device_bytes is None:
        return first
    fraction = config.rollout.gpu_memory_utilization
    share = math.ceil(fraction * device_bytes)
    generating = {
        **asleep,
        f"rollout.gpu_memory_utilization={fraction:g}": share,
        "reserve": RESERVE,
    }
    engine = {"its weights": weights, **slots, "KV cache of one longest sequence": keys}
    received = response_bytes(config, trainers=dry_run.processes)
    on_host = {
        "responses of a step": received.rank if dry_run.rank else received.writer,
        **mask_host_bytes(config, dry_run),
        **_pinned_bytes(config, dry_run, engine=weights + sum(slots.values())),
    }
    return [
        *first,
        MemoryPhase(GENERATING, device_bytes, generating),
        MemoryPhase(ENGINE, share, engine),
        *([] if host_bytes is None else [MemoryPhase(HOST, host_bytes, on_host)]),
    ]


def _engine_beside_training(config: Config, device_bytes: int | None) -> dict[str, int]:
    """Return what an engine on the same device keeps: its whole share if requests are paused."""
    if config.parallel.engine_ranks is not None:
        return {}
    if config.lag.partial_rollouts is None or device_bytes is None:
        return {"a sleeping engine": ENGINE_ASLEEP}
    share = math.ceil(config.rollout.gpu_memory_utilization * device_bytes)
    return {"an engine with paused requests (rollout.gpu_memory_utilization)": share}


def _pinned_bytes(config: Config, dry_run: DryRun, *, engine: int) -> dict[str, int]:
    """Return what a rank pins on its host; engine: bytes that its engine computes with.

    A rank that only trains offloads nothing without a critic, and keeps a copy of the weights.
    """
    asleep = dry_run.asleep_host
    if config.parallel.engine_ranks is None:
        return {
            "optimizer states while the engine generates, reference policy": asleep,
            **adapter_host_bytes(config, engine=engine),
        }
    weights = _width(config) * dry_run.parameters
    kept = weights if config.behavior == "actor" else 0
    if config.critic is not None:
        first = {"policy or critic while the other trains, reference policy": asleep}
    else:
        needs = build_objective(config.objective.name, **config.objective.overrides).needs
        copies = len(set(config.references.values()))
        first = {"reference policy": weights * copies if needs_reference(needs) else 0}
    return {**first, "weights kept for behavior log-probs": kept}


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
    engines = config.parallel.engine_ranks or dry_run.processes
    layout = EngineLayout(config.rollout.tensor, engines, config.rollout.expert_parallel)
    rank = dry_run.rank % engines  # all ranks of an engine have the same sizes
    largest = largest_module(read_model_shape(config.model.path), layout, rank=rank)
    return _width(config) * largest * config.parallel.pipeline


def prepared_bytes(config: Config, dry_run: DryRun) -> int:
    """Return bytes of the rollout batch's prepared packs that the dry run did not have.

    A rank keeps the packs of all minibatches; every response has the maximum length.
    """
    packs = config.trainer.minibatches * dry_run.micro_batches_of_update
    shape, parallel = read_model_shape(config.model.path), config.parallel
    routes = route_bytes(shape, tensor=parallel.tensor, stages=parallel.pipeline)
    missing = max(0, packs - dry_run.micro_batches) * dry_run.local_tokens
    return math.ceil(missing * (PREPARED + routes))


def describe_phases(moments: list[MemoryPhase]) -> str:
    """Format one row per moment: its needed memory and its parts."""
    width = max(len(moment.amount) for moment in moments)
    rows = [f"  {each.name:<20}{each.amount:>{width}}   {each.items}" for each in moments]
    return "\n".join(["  memory needed at the same time on the device", *rows])


def summarize_fit(moments: list[MemoryPhase]) -> str:
    """Format one line: the moment of all ranks that needs the most memory, and whether it fits."""
    worst = max(moments, key=lambda each: each.needed / (each.room or 1))
    if worst.room is None:
        return f"peak {worst.amount}, in {worst.name}; --fit GIB compares it with a device"
    fits = "fits" if worst.missing <= 0 else "does not fit"
    return f"{fits}: peak {worst.amount}, in {worst.name} ({worst.items})"


def _engine_bytes(config: Config, dry_run: DryRun) -> tuple[int, int]:
    """Return bytes of one engine rank: its weights, and the cache of one longest sequence."""
    rollout, width = config.rollout, _width(config)
    sizes = engine_sizes(
        read_model_shape(config.model.path), rollout.tensor, rollout.expert_parallel
    )
    cache = width * int(sizes.cached) * config.max_model_tokens + int(sizes.states)
    return width * sizes.weights, cache


def route_bytes(shape: ModelShape, *, tensor: int, stages: int) -> float:
    """Return the bytes of the recorded experts per token of a context-parallel shard.

    Each layer of a rank records the chosen experts of its tokens, in one byte each, or two if the
    model has more than 256 experts.
    """
    if shape.experts is None:
        return 0.0
    layers = min(math.ceil(shape.num_layers / stages), len(shape.layers_with("experts")))
    width = 1 if shape.experts.num_experts <= 256 else 2
    return layers * shape.experts.experts_per_token * width / tensor


def kept_tokens(config: Config) -> int:
    """Return the number of tokens that a sampling mask keeps on average.

    With `top_k` alone it keeps that many. Next to `top_p` or `min_p` it is an assumption, since the
    number depends on the model's distributions.
    """
    rollout = config.rollout
    if rollout.top_k is None:
        return 0
    is_bounded = rollout.top_p < 1 or rollout.min_p > 0
    return min(rollout.top_k, KEPT_OF_NUCLEUS) if is_bounded else rollout.top_k


def mask_host_bytes(config: Config, dry_run: DryRun) -> dict[str, int]:
    """Return the bytes of a rollout batch's sampling masks in packs, by name; empty without any.

    Those of the whole pack, and of this rank's shard.
    """
    if not config.rollout.removes_tokens:
        return {}
    packs = config.trainer.minibatches * dry_run.micro_batches_of_update
    tokens = packs * dry_run.local_tokens * (config.parallel.context + 1)
    return {"sampling masks of its packs": COLUMN * (kept_tokens(config) + 1) * tokens}


def slot_bytes(config: Config) -> dict[str, int]:
    """Return bytes of one engine rank's slots on the device, by name; empty without adapters."""
    settings = build_adapter_settings(config)
    if settings is None:
        return {}
    elements = slot_elements(
        read_model_shape(config.model.path), rank=settings.lora.rank, targets=settings.lora.targets,
        tensor=config.rollout.tensor,
    )  # fmt: skip
    return {f"{settings.versions} slots of adapters": _width(config) * settings.versions * elements}


def adapter_host_bytes(config: Config, *, engine: int) -> dict[str, int]:
    """Return bytes that one engine rank has on its host, by name; empty without adapters.

    engine: of what it computes with, which vLLM copies to the host while it sleeps (level 1).
    """
    settings = build_adapter_settings(config)
    if settings is None:
        return {}
    shape = read_model_shape(config.model.path)
    one = count_adapter_parameters(shape, rank=settings.lora.rank, targets=settings.lora.targets)
    return {
        "the sleeping engine's weights": engine,
        "adapters": _width(config) * settings.versions * one,
    }


def _width(config: Config) -> int:
    return 4 if config.trainer.dtype == "float32" else 2


@dataclass(frozen=True)
class ResponseBytes:
    """Upper limits of one step, if every response has the maximum length; without texts."""

    rank: int  # of any rank but 0: what it trains, and the behavior log-probs of what it owns
    writer: int  # of rank 0, which writes all rollouts
    piece: int  # sent or received in one collective, unless a single response is longer

    def __str__(self) -> str:
        return (
            f"responses of a step, on the host: a rank receives at most {self.rank / MIB:,.1f} MiB "
            f"and rank 0, which writes them, {self.writer / MIB:,.1f} MiB, in pieces of "
            f"{self.piece / MIB:,.0f} MiB"
        )


def response_bytes(config: Config, *, trainers: int) -> ResponseBytes:
    """Count the bytes on one of the processes that train from the settings."""
    rollout, minibatches = config.rollout, config.trainer.minibatches
    responses = rollout.prompts_per_step * rollout.responses_per_prompt
    replicas, engines = trainers // config.parallel.model_size, trainers // rollout.tensor
    trained = minibatches * -(-responses // (minibatches * replicas))
    owned = 0  # all are rank 0's if engines have ranks of their own
    if config.parallel.engine_ranks is None:
        prompts = -(-rollout.prompts_per_step // engines)
        owned = -(-prompts * rollout.responses_per_prompt // rollout.tensor)
    arrays = [one for one in ARRAYS if one.at_writer and _has_column(config, one)]
    every = sum(_bytes_of_response(config, one) for one in arrays)
    # An owner keeps what it does not train as well: what the trainer determined, and masks.
    kept = [one for one in arrays if one.by == "trainer" or one.name in OF_MASKS]
    of_owner = sum(_bytes_of_response(config, one) for one in kept)
    everything = every * responses
    partial = config.lag.partial_rollouts is not None  # every rank has all of them
    own = everything if partial else min(everything, every * trained + of_owner * owned)
    return ResponseBytes(
        0 if trainers == 1 else own, 0 if trainers == 1 else everything, PIECE_BYTES
    )


def _has_column(config: Config, column: Column) -> bool:
    """Return whether responses of a run have a column, if a group waits or is replayed."""
    present = {"values": config.critic is not None} | dict.fromkeys(
        OF_MASKS, config.rollout.removes_tokens
    )
    return present.get(column.name, True)


def _bytes_of_response(config: Config, column: Column) -> int:
    each = np.dtype(column.dtype).itemsize * config.rollout.max_response_tokens
    return each * kept_tokens(config) if column.unit == "kept" else each


def find_lacking(
    config: Config,
    *,
    processes: int,
    device_bytes: int,
    host_bytes: int | None = None,
    progress: Progress = _silent,
    done: dict[tuple[str, int, int], DryRun] | None = None,
) -> tuple[list[MemoryPhase], list[DryRun]]:
    """Return the memory phases that do not fit, largest excess first, and the dry runs.

    Runs the first rank of the first, the middle and the last pipeline stage, unless `done` has
    them from a config with the same actor; adds them to it.
    """
    trainers, _ = config.sides(processes)
    done = {} if done is None else done
    actor = apply_changes(config, OF_ENGINES | WHOLE)
    dry_runs = []
    for rank in stage_ranks(config, trainers):
        key = actor.model_dump_json(), trainers, rank
        if key not in done:
            progress(f"rank {rank} of {trainers}")
            done[key] = dry_run_rank(actor, processes=trainers, rank=rank)
        dry_runs.append(done[key])
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
        done={},
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
    lacking: list[MemoryPhase],
    find: partial[tuple[list[MemoryPhase], list[DryRun]]],
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """Yield config changes that fit in memory, one phase (train, push, generate) at a time."""
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


def candidates(config: Config, moment: MemoryPhase, *, processes: int) -> Iterator[dict[str, Any]]:
    """Yield changes to try, the change that costs the least speed first."""
    if moment.name == HOST:  # ranks share the states of one model, however it is sharded
        return
    rollout = config.rollout
    fractions = [tenths / 10 for tenths in range(1, 9)]
    if moment.name == GENERATING or (moment.name == TRAINING and config.lag.partial_rollouts):
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
    trainers, _ = config.sides(processes)
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
        if trainers % (times * parallel.model_size) == 0:
            for key in ("context", "tensor", "pipeline"):
                yield {f"parallel.{key}": times * getattr(parallel, key), **recomputed[-1]}


def apply_changes(config: Config, changes: dict[str, Any]) -> Config:
    """Return the config with new values of the given `section.key` settings."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    return config
