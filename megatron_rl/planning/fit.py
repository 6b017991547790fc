"""Whether a run fits on its devices, and which settings would make it fit.

Three moments are compared with a device's memory: training (the rehearsed peak beside a sleeping
engine), the push (the engine's weights beside the actor's) and generating (the engine's share
beside the actor's weights).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_rl.config import Config, ConfigError
from megatron_rl.models.shape import read_model_shape
from megatron_rl.planning.footprint import ENGINE_ASLEEP, RESERVE
from megatron_rl.planning.rehearsal import Rehearsal, rehearse, stage_ranks
from megatron_rl.preflight.layout import layout_problems
from megatron_rl.resharding.layouts import EngineLayout

GIB = 2**30
CURES = 2  # that are looked for
TRAINING, PUSH, GENERATING = "training", "a weight push", "generating"


class DoesNotFitError(ConfigError):
    """A run needs more memory than its devices have; the message says where, and what cures it."""


@dataclass(frozen=True)
class Moment:
    """What a device must hold at once; parts in bytes."""

    name: str
    parts: dict[str, int]

    @property
    def needed(self) -> int:
        """All of it."""
        return sum(self.parts.values())

    def describe(self, device_bytes: int) -> str:
        """`training needs 91.2 of 79.6 GiB: ...`."""
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items())
        return f"{self.name} needs {self.needed / GIB:.1f} of {device_bytes / GIB:.1f} GiB: {parts}"


def moments(config: Config, rehearsal: Rehearsal, device_bytes: int) -> list[Moment]:
    """Training, push and generating on one rank's device."""
    engine = _engine_weights(config, rehearsal)
    asleep = sum(rehearsal.asleep.values())
    phase = max(rehearsal.phases, key=lambda name: rehearsal.phases[name].peak)
    share = math.ceil(config.rollout.memory_fraction * device_bytes)
    return [
        Moment(
            TRAINING,
            {
                f"the actor's peak ({phase})": rehearsal.peak,
                "a sleeping engine": ENGINE_ASLEEP,
                "reserve": RESERVE,
            },
        ),
        Moment(
            PUSH,
            {
                "the actor asleep": asleep,
                "the engine's weights": engine,
                "buckets": 2 * config.resharding.bucket_mib * 2**20,
                "the rest of the engine": ENGINE_ASLEEP,
                "reserve": RESERVE,
            },
        ),
        Moment(
            GENERATING,
            {
                "the actor asleep": asleep,
                f"the engine (rollout.memory_fraction={config.rollout.memory_fraction:g})": share,
                "reserve": RESERVE,
            },
        ),
    ]


def _engine_weights(config: Config, rehearsal: Rehearsal) -> int:
    """Bytes of one rank's share of an engine, in the actor's precision."""
    shape = read_model_shape(config.model.path)
    layout = EngineLayout(
        config.rollout.tensor, rehearsal.processes, config.rollout.expert_parallel
    )
    sizes = layout.parameter_shapes(shape, rank=rehearsal.rank)
    if shape.tied_embeddings:
        sizes.pop("lm_head.weight", None)
    width = 4 if config.trainer.dtype == "float32" else 2
    return width * sum(math.prod(size) for size in sizes.values())


def tightest(
    config: Config, *, processes: int, device_bytes: int
) -> tuple[Moment, list[Rehearsal]]:
    """The moment that needs most, over the first rank of the first, middle and last stage."""
    ranks = stage_ranks(config, processes)
    rehearsals = [rehearse(config, processes=processes, rank=rank) for rank in ranks]
    found = [one for each in rehearsals for one in moments(config, each, device_bytes)]
    return max(found, key=lambda moment: moment.needed), rehearsals


def check_fit(config: Config, *, processes: int, device_bytes: int) -> list[Rehearsal]:
    """The rehearsals of a run that fits; DoesNotFitError with what would make it fit where not."""
    moment, rehearsals = tightest(config, processes=processes, device_bytes=device_bytes)
    if moment.needed <= device_bytes:
        return rehearsals
    found: list[str] = []
    for changes in candidates(config, moment, processes=processes):
        changed = apply_changes(config, changes)
        if layout_problems(changed, read_model_shape(changed.model.path), processes):
            continue
        other, _ = tightest(changed, processes=processes, device_bytes=device_bytes)
        if other.needed <= device_bytes:
            found.append(" ".join(f"{key}={value}" for key, value in changes.items()))
        if len(found) == CURES:
            break
    cure = f"what fits: {', or '.join(found)}" if found else "use more devices, or larger ones"
    raise DoesNotFitError(
        f"this run does not fit on its devices: {moment.describe(device_bytes)}; {cure}"
    )


def candidates(config: Config, moment: Moment, *, processes: int) -> Iterator[dict[str, Any]]:
    """Changes worth a try, those first that cost least speed."""
    parallel, rollout, trainer = config.parallel, config.rollout, config.trainer
    if moment.name == GENERATING:
        for fraction in (0.4, 0.3, 0.2):
            if fraction < rollout.memory_fraction:
                yield {"rollout.memory_fraction": fraction}
    if moment.name == PUSH:
        for size in (2, 4, 8):
            yield {"rollout.tensor": size * rollout.tensor}
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
