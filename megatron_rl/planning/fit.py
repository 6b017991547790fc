"""Whether a run fits on its devices, and which settings would make it fit.

Three moments are compared with a device's memory: training (the rehearsed peak beside a sleeping
engine), the push (the engine's weights beside the actor's) and generating (the engine's share
beside the actor's weights). The engine's share must hold the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megatron_rl.config import Config, ConfigError
from megatron_rl.models.shape import read_model_shape
from megatron_rl.planning.footprint import ENGINE_ASLEEP, RESERVE
from megatron_rl.planning.rehearsal import Rehearsal, rehearse, stage_ranks
from megatron_rl.preflight.layout import layout_problems
from megatron_rl.resharding.layouts import EngineLayout

GIB = 2**30
CURES = 2  # that are looked for
TRAINING, PUSH, GENERATING, ENGINE = "training", "a weight push", "generating", "the engine's share"


class DoesNotFitError(ConfigError):
    """A run needs more memory than its devices have; the message says where, and what cures it."""


@dataclass(frozen=True)
class Moment:
    """What must find room at once; bytes."""

    name: str
    room: int
    parts: dict[str, int]

    @property
    def needed(self) -> int:
        """All of it."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """`training needs 91.2 of 79.6 GiB (...)`."""
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items())
        return f"{self.name} needs {self.needed / GIB:.1f} of {self.room / GIB:.1f} GiB ({parts})"


def moments(config: Config, rehearsal: Rehearsal, device_bytes: int) -> list[Moment]:
    """Training, push and generating on one rank's device, and what the engine's share must hold."""
    weights, keys = _engine_bytes(config, rehearsal)
    asleep = sum(rehearsal.asleep.values())
    phase = max(rehearsal.phases, key=lambda name: rehearsal.phases[name].peak)
    fraction = config.rollout.memory_fraction
    share = math.ceil(fraction * device_bytes)
    training = {
        f"the actor's peak, {phase}": rehearsal.peak,
        "a sleeping engine": ENGINE_ASLEEP,
        "reserve": RESERVE,
    }
    push = {
        "the actor asleep": asleep,
        "the engine's weights": weights,
        "buckets": 2 * config.resharding.bucket_mib * 2**20,
        "the rest of the engine": ENGINE_ASLEEP,
        "reserve": RESERVE,
    }
    generating = {
        "the actor asleep": asleep,
        f"rollout.memory_fraction={fraction:g}": share,
        "reserve": RESERVE,
    }
    engine = {"its weights": weights, "keys and values of one longest sequence": keys}
    return [
        Moment(TRAINING, device_bytes, training),
        Moment(PUSH, device_bytes, push),
        Moment(GENERATING, device_bytes, generating),
        Moment(ENGINE, share, engine),
    ]


def _engine_bytes(config: Config, rehearsal: Rehearsal) -> tuple[int, int]:
    """One rank's part of an engine: weights, and keys and values of one longest sequence."""
    shape, tensor = read_model_shape(config.model.path), config.rollout.tensor
    layout = EngineLayout(tensor, rehearsal.processes, config.rollout.expert_parallel)
    sizes = layout.parameter_shapes(shape, rank=rehearsal.rank)
    if shape.tied_embeddings:
        sizes.pop("lm_head.weight", None)
    width = 4 if config.trainer.dtype == "float32" else 2
    heads = max(1, shape.num_query_groups // tensor)  # repeated where there are too few
    per_token = 2 * shape.num_layers * heads * shape.head_dim
    weights = sum(math.prod(size) for size in sizes.values())
    return width * weights, width * per_token * config.max_model_tokens


def find_lacking(
    config: Config, *, processes: int, device_bytes: int
) -> tuple[list[Moment], list[Rehearsal]]:
    """Moments without room, that which lacks most first; and the rehearsals.

    Of the first rank of the first, the middle and the last stage.
    """
    ranks = stage_ranks(config, processes)
    rehearsals = [rehearse(config, processes=processes, rank=rank) for rank in ranks]
    every = [one for each in rehearsals for one in moments(config, each, device_bytes)]
    lacking = [one for one in every if one.needed > one.room]
    return sorted(lacking, key=lambda one: one.room - one.needed), rehearsals


def check_fit(config: Config, *, processes: int, device_bytes: int) -> list[Rehearsal]:
    """The rehearsals of a run that fits; DoesNotFitError with what would make it fit where not."""
    places = {"processes": processes, "device_bytes": device_bytes}
    lacking, rehearsals = find_lacking(config, **places)
    if not lacking:
        return rehearsals
    cures = [
        " ".join(f"{key}={value}" for key, value in changes.items())
        for changes in islice(_cures(config, {}, lacking, **places), CURES)
    ]
    cure = f"what fits: {', or '.join(cures)}" if cures else "use more devices, or larger ones"
    raise DoesNotFitError(f"this run does not fit on its devices: {lacking[0].describe()}; {cure}")


def _cures(
    config: Config,
    changes: dict[str, Any],
    lacking: list[Moment],
    *,
    processes: int,
    device_bytes: int,
) -> Iterator[dict[str, Any]]:
    """Changes under which nothing lacks room: one after the other for each moment that does."""
    if not lacking:
        yield changes
        return
    for further in candidates(config, lacking[0], processes=processes):
        changed = apply_changes(config, further)
        if layout_problems(changed, read_model_shape(changed.model.path), processes):
            continue
        left, _ = find_lacking(changed, processes=processes, device_bytes=device_bytes)
        if lacking[0].name not in {moment.name for moment in left}:
            yield from _cures(
                changed, changes | further, left, processes=processes, device_bytes=device_bytes
            )


def candidates(config: Config, moment: Moment, *, processes: int) -> Iterator[dict[str, Any]]:
    """Changes worth a try, those first that cost least speed."""
    rollout = config.rollout
    fractions = [tenths / 10 for tenths in range(1, 9)]
    if moment.name == GENERATING:
        lower = [each for each in reversed(fractions) if each < rollout.memory_fraction]
        yield from ({"rollout.memory_fraction": fraction} for fraction in lower)
    if moment.name == ENGINE:
        higher = [each for each in fractions if each > rollout.memory_fraction]
        yield from ({"rollout.memory_fraction": fraction} for fraction in higher)
    if moment.name in (PUSH, ENGINE):
        yield from ({"rollout.tensor": times * rollout.tensor} for times in (2, 4, 8))
    yield from _actor_candidates(config, processes=processes)


def _actor_candidates(config: Config, *, processes: int) -> Iterator[dict[str, Any]]:
    """Smaller packs, recomputation, the model or its sequences over more devices."""
    parallel, trainer = config.parallel, config.trainer
    smaller: dict[str, Any] = {}
    if trainer.tokens_per_micro_batch > config.max_model_tokens:
        smaller = {"trainer.tokens_per_micro_batch": config.max_model_tokens}
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
    """The config with other values of `section.key`."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    return config
