"""Search over all parallel layouts: which fit, their step times, and why others do not fit.

With a lag, engines may have their own ranks: then trainers and engines are laid out separately.

A lower bound excludes layouts. Memory, FLOPs and traffic of the remaining layouts come from dry
runs of shallow models: two depths give a layer's part, so the cost does not grow with the model.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache, partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

import megatron_rl
from megatron_rl.apps.planning.dry_run import DryRun, dry_run_rank
from megatron_rl.apps.planning.fit import (
    COMMUNICATOR,
    ENGINE_ASLEEP,
    PREPARED,
    RESERVE,
    RESERVED_COMMUNICATORS,
    route_bytes,
    slot_bytes,
)
from megatron_rl.apps.planning.generation import Engine, Packs, Workload, engine_sizes
from megatron_rl.apps.planning.rates import (
    GIB,
    RATES,
    Device,
    kernel_seconds,
    message_seconds,
    push_seconds,
)
from megatron_rl.config import Config, ParallelSection
from megatron_rl.config.sections import LoraSection
from megatron_rl.errors import UserError
from megatron_rl.models.adapters import count_adapter_parameters
from megatron_rl.models.shape import ModelShape, read_critic_shape, read_model_shape, tensor_shapes
from megatron_rl.objectives.spec import needs_reference
from megatron_rl.preflight.layout import cut_problems
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout

MAX_SIZE = 16  # maximum tensor, pipeline and context parallel size
MIN_TOKENS = 1024  # minimum tokens of a full pack on one rank
MAX_ENGINE_SHARE = 0.9  # of a device's memory
LARGEST_SHARE = 0.97  # of a device's memory, for a layout of the first rows
MAX_DRY_RUNS = 96  # of one search: half a minute on two cores
LARGER_PACKS = 2  # layouts on shared and on separate ranks for which larger packs are tried
PHASES = ("rollout", "behavior", "train", "push", "offload")
Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # fastest first
WORK = ("products", "attention", "moved", "kernels", "stalls")
PER_UPDATE = ("dp", "dp_cp", "expert_dp", "embedding", "model", "all", "world")  # process groups
Fixed = Mapping[str, object]  # fields of Layout fixed by the caller
Counts = dict[str, float]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Layout(ActorLayout):
    """Layout of the actor, its activation recomputation and the engines' tensor parallel size.

    tokens: size of a pack, over all its context-parallel shards. engine_ranks: ranks that only
    generate, besides those of the actor; 0: all ranks train and generate in turn.
    """

    rollout_tensor: int = 1
    recompute: Recompute = "none"
    tokens: int = 16384
    engine_ranks: int = 0

    @property
    def engine_layout(self) -> EngineLayout:
        """All engines."""
        first = self.world_size if self.engine_ranks else 0
        return EngineLayout(self.rollout_tensor, self.engine_ranks or self.world_size, first=first)

    @property
    def engines(self) -> int:
        """Number of engines."""
        return (self.engine_ranks or self.world_size) // self.rollout_tensor

    @property
    def replicas(self) -> int:
        """Number of ranks with the same non-expert parameters."""
        return self.context * self.data

    @property
    def expert_slices(self) -> int:
        """Number of ranks that share each expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def alignment(self) -> int:
        """Multiple to which sequences are padded."""
        return 2 * self.context * self.tensor

    def group(self, name: str) -> tuple[int, int]:
        """Return the size of a process group, and the distance of its ranks."""
        expert = self.expert * self.expert_slices
        groups = {
            "tp": (self.tensor, 1),
            "cp": (self.context, self.tensor),
            "ep": (self.expert, self.expert_slices),
            "expert_tp": (self.expert_slices, 1),
            "tp_ep": (expert, 1),
            "dp": (self.data, self.tensor * self.context),
            "dp_cp": (self.replicas, self.tensor),
            "expert_dp": (self.tensor * self.replicas // expert, expert),
            "pp": (2, self.world_size // self.pipeline),
        }
        return groups.get(name, (self.world_size, 1))

    def __str__(self) -> str:
        return (
            f"tp{self.tensor} pp{self.pipeline} cp{self.context} ep{self.expert} "
            f"etp{self.expert_slices} dp{self.data} "
            f"vllm{self.rollout_tensor} "
            + (f"on {self.engine_ranks} ranks of their own " if self.engine_ranks else "")
            + f"recompute={self.recompute} tokens={self.tokens}"
        )


@dataclass(frozen=True)
class Option:
    """Layout that fits."""

    layout: Layout
    gpu_memory_utilization: float  # the engine's share of the device
    memory: Mapping[str, float]  # by phase: fraction of the device, including reserves
    seconds: Mapping[str, float]  # of one step, by phase: means over the steps between two pushes
    host_bytes: int  # of one rank: what sleep offloads, and a reference policy
    prepared_bytes: int  # prepared packs of a rollout batch
    batches: int = 1  # generated together, between two pushes

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        if not self.layout.engine_ranks:
            return sum(self.seconds.values())
        rollout, behavior, train, push = (self.seconds[phase] for phase in PHASES[:4])
        return overlapped_seconds(rollout, behavior, train, push, batches=self.batches)

    def order(self) -> tuple[bool, float]:
        """Return the sort key of layouts; layouts that nearly fill a device come last."""
        own = ("rollout",) if self.layout.engine_ranks else ()  # an engine alone fills its device
        shared = [part for phase, part in self.memory.items() if phase not in own]
        return max(shared) > LARGEST_SHARE, self.step_seconds


def overlapped_seconds(
    rollout: float, behavior: float, train: float, push: float, *, batches: int = 1
) -> float:
    """Return the seconds of a step in which other ranks generate, from those of its phases.

    Whatever the lag, a push waits for the updates and for the simultaneous generation. Scoring
    follows it, during the next generation. Several batches between two pushes are all generated
    during the first step, and scored afterwards.
    """
    if batches == 1:
        return push + max(rollout, behavior + train)
    first = max(batches * rollout, train)
    return push + (first + batches * behavior + (batches - 1) * train) / batches


@dataclass(frozen=True)
class Rejection:
    """Layout that is impossible or does not fit, and the reason."""

    layout: Layout
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
    slower: int = 0  # layouts that a lower bound puts behind the options
    unmeasured: int = 0  # layouts left out by MAX_DRY_RUNS
    dry_runs: int = 0
    is_interrupted: bool = False


# Dry runs of shallow models


@dataclass(frozen=True)
class Probe:
    """A layout to run dry with few layers; `layers` of each of one or two pipeline stages."""

    layout: Layout  # of `len(layers)` stages
    layers: tuple[int, ...]
    stage: int


@lru_cache(maxsize=32)
def layer_pattern(shape: ModelShape) -> tuple[int, int]:
    """Return the number of dense layers below the sparse ones, and the period of layer kinds."""
    first = shape.experts.first_layer if shape.experts else 0
    windows = shape.local_layers.flags(shape.num_layers) if shape.local_layers else None
    nets = shape.delta.layers if shape.delta else ()
    kinds = [(layer in nets, windows and windows[layer]) for layer in range(shape.num_layers)]
    for period in range(1, shape.num_layers - first):
        if all(kinds[i] == kinds[i + period] for i in range(first, shape.num_layers - period)):
            return first, period
    return first, 1


def probes_of(shape: ModelShape, layout: Layout) -> tuple[Probe, ...]:
    """Return the dry runs that a layout's counts come from; equal for many layouts.

    Without pipeline: two depths of the whole model. Otherwise, of two stages: two depths of the
    first, and the last. Replicas are as few as have the same kinds of messages.
    """
    before, period = layer_pattern(shape)
    model = layout.tensor * layout.context
    needed = math.lcm(model, layout.expert * layout.expert_slices) // model
    small = replace(
        layout,
        pipeline=min(layout.pipeline, 2),
        data=needed if layout.data == needed else 2 * needed,
        rollout_tensor=1,
        engine_ranks=0,
    )
    one, two = before + period, before + 2 * period
    if layout.pipeline == 1:
        return Probe(small, (one,), 0), Probe(small, (two,), 0)
    sizes = (one, period), (two, period), (one, period)
    return tuple(Probe(small, each, n // 2) for n, each in enumerate(sizes))


def run_probe(config: Config, probe: Probe) -> Counts:
    """Run one rank dry, on a copy of the model's config.json with fewer layers.

    With pipeline stages a critic's own model, which has as many layers, has as few.
    """
    with TemporaryDirectory() as folder:
        _write_shallow(config.model.path, folder, sum(probe.layers))
        layers = probe.layers if len(probe.layers) > 1 else None
        critic = config.critic
        if layers and critic is not None and critic.path is not None:
            _write_shallow(critic.path, f"{folder}/critic", sum(layers))
            changed = critic.model_copy(update={"path": f"{folder}/critic"})
            config = config.model_copy(update={"critic": changed})
        run = dry_run_rank(
            _with_layout(config, probe.layout, folder, layers),
            processes=probe.layout.world_size,
            rank=probe.stage * (probe.layout.world_size // probe.layout.pipeline),
            micro_batches=1,
        )
    return flatten(run)


def _write_shallow(model: str, folder: str, layers: int) -> None:
    source = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    Path(folder).mkdir(exist_ok=True)
    shallow = json.dumps(with_layers(source, layers))
    (Path(folder) / "config.json").write_text(shallow, encoding="utf-8")


def with_layers(source: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the config.json of the same model with its first `layers` layers."""
    changed = dict(source)
    if isinstance(source.get("text_config"), dict):
        changed["text_config"] = with_layers(source["text_config"], layers)
    if "num_hidden_layers" in source:
        changed["num_hidden_layers"] = layers
    if isinstance(source.get("layer_types"), list):
        changed["layer_types"] = source["layer_types"][:layers]
    return changed


def _with_layout(
    config: Config, layout: Layout, model: str, layers: Sequence[int] | None
) -> Config:
    """Return the config of a dry run with this layout and model."""
    sections = {
        # `Planner` adds those of another shape
        "model": {"path": model, "reference": None},
        "parallel": {
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "context": layout.context,
            "data": None,
            "expert": layout.expert,
            "expert_tensor": layout.expert_slices if layout.expert > 1 else None,
            "virtual_stages": 1,
            "stage_layers": layers and list(layers),
        },
        "rollout": {"tensor": 1},
        # Times without sharing: an upper bound that does not depend on how alike prompts are.
        "trainer": {
            "recompute": layout.recompute,
            "tokens_per_micro_batch": layout.tokens,
            "share_prompts": False,
        },
    }
    for section, values in sections.items():
        changed = getattr(config, section).model_copy(update=values)
        config = config.model_copy(update={section: changed})
    return config


def flatten(run: DryRun) -> Counts:
    """Return a dry run's counts by name, for extrapolation."""
    counts: Counts = {f"states {name}": size for name, size in run.states.items()}
    counts |= {"asleep": sum(run.asleep.values()), "communicators": run.communicators}
    counts["tokens"] = sum(run.sequences)
    counts["squares"] = sum(length**2 for length in run.sequences)
    for name in ("behavior", "update", "step"):
        phase = run.phases[name]
        counts |= {
            f"{name} peak": phase.peak,
            f"{name} kept": phase.kept or 0,
            f"{name} products": phase.flops - phase.attention_flops,
            f"{name} attention": phase.attention_flops,
            f"{name} moved": phase.moved,
            f"{name} kernels": phase.kernels,
            f"{name} stalls": phase.stalls.total(),
        }
        for each in phase.collectives:
            if each.ranks > 1:
                counts[f"{name} calls {each.operation} {each.group}"] = each.count
                counts[f"{name} bytes {each.operation} {each.group}"] = each.bytes
    if (critic := run.phases.get("critic")) is not None:
        counts |= {"critic peak": critic.peak, "critic kept": critic.kept or 0}
    return counts


def extrapolate(base: Counts, first: Counts, second: Counts, *, periods: float) -> Counts:
    """Add `periods` times the difference of two depths, except to what depends on the pack."""
    constant = ("tokens", "squares", "communicators")
    return {
        name: value
        if name in constant
        else value + periods * (second.get(name, 0) - first.get(name, 0))
        for name, value in base.items()
    }


@dataclass
class DryRuns:
    """Counts of probes, kept in memory and, if a folder is given, in files.

    config: of the run; its model.path is a folder with a config.json. workers: processes.
    """

    config: Config
    folder: Path | None = None
    workers: int = 1
    done: dict[Probe, Counts] = field(default_factory=dict)
    _pool: ProcessPoolExecutor | None = None

    def has(self, probes: Iterable[Probe]) -> bool:
        """Return whether the counts of these probes are known."""
        return all(probe in self.done for probe in probes)

    def run(self, probes: Iterable[Probe]) -> int:
        """Run the dry runs whose results are not known yet; return their number."""
        missing = [probe for probe in dict.fromkeys(probes) if probe not in self.done]
        for probe in missing:
            if self.folder is not None and (file := self._file(probe)).is_file():
                self.done[probe] = json.loads(file.read_text(encoding="utf-8"))
        missing = [probe for probe in missing if probe not in self.done]
        run = partial(run_probe, self.config)
        if self.workers > 1 and len(missing) > 1:
            results = list(self._start().map(run, missing))
        else:
            results = [run(probe) for probe in missing]
        for probe, counts in zip(missing, results, strict=True):
            self.done[probe] = counts
            if self.folder is not None:
                file = self._file(probe)
                file.parent.mkdir(parents=True, exist_ok=True)
                partial_file = file.with_suffix(f".{os.getpid()}")
                partial_file.write_text(json.dumps(counts), encoding="utf-8")
                partial_file.replace(file)
        return len(missing)

    def _start(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("fork")  # shares what was imported
            self._pool = ProcessPoolExecutor(
                self.workers, mp_context=context, initializer=_begin_worker
            )
        return self._pool

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _file(self, probe: Probe) -> Path:
        assert self.folder is not None
        critic = self.config.critic and self.config.critic.path
        models = [self.config.model.path, *([critic] if critic else [])]
        source = [(Path(model) / "config.json").read_text(encoding="utf-8") for model in models]
        values = self.config.model_dump(mode="json")
        values.pop("run"), values["model"].pop("path")
        share = self.config.run.largest_expert_share
        key = json.dumps([code_digest(), source, values, share, asdict(probe)], sort_keys=True)
        return self.folder / f"{sha256(key.encode()).hexdigest()}.json"


def _begin_worker() -> None:
    """Use one thread; leave Ctrl-C to the process that has the results."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Return a digest of the package's source files and of the releases that it runs on."""
    releases = [torch.__version__, version("megatron-core")]
    digest = sha256(repr(releases).encode())
    for file in sorted(Path(megatron_rl.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


# Memory and seconds of one layout


@dataclass(frozen=True)
class Planner:
    """Memory and seconds of layouts of one run on one kind of device."""

    config: Config
    shape: ModelShape
    device: Device
    workload: Workload
    engine_share: float = MAX_ENGINE_SHARE  # maximum part of the device's memory

    def evaluate(self, layout: Layout, dry_runs: DryRuns) -> Option | Rejection:
        """Return memory and seconds without the push, or the reason why the layout cannot run."""
        stages, replicas = self.stages(layout, dry_runs)
        packs = self.packs(layout)
        memory = self.memory(layout, stages, replicas)
        worst = max(("train", "push", "behavior"), key=lambda phase: memory[phase])
        room = self.device.memory
        if memory[worst] > room:
            reason = f"{worst} needs {memory[worst] / GIB:.1f} of {self.device.memory_gib:.1f} GiB"
            return Rejection(layout, reason, memory[worst] / room)
        used = memory["rollout"]
        if self._is_paused(layout):
            used = max(used, memory["behavior"] - ENGINE_ASLEEP, memory["train"] - ENGINE_ASLEEP)
        engine = self.engine_beside(layout, used)
        if misfit := self.cache_misfit(layout, engine, used):
            return misfit
        fraction = engine.memory / room
        memory["rollout"] += fraction * room
        if self._is_paused(layout):
            memory |= {p: memory[p] - ENGINE_ASLEEP + engine.memory for p in ("behavior", "train")}
            memory["push"] = memory["rollout"] + self._bucket_bytes
        optimizer = max(each["states optimizer"] for each in stages) * replicas
        weights = max(stage["states weights"] for stage in stages)
        host = optimizer
        if self.critic_shape is not None:  # one of the two is on the host while the other trains
            host += self._critic_part * optimizer
            host += weights * sum(_weights(self.critic_shape)) / sum(_weights(self.shape))
        batches = self.workload.batches
        seconds = {
            "rollout": self.rollout_seconds(engine, layout.engines) / batches,
            "behavior": self.scoring_passes
            * self.workload.minibatches
            * self.pass_seconds(layout, stages, "behavior", packs),
            "train": self.workload.epochs
            * self.workload.minibatches
            * self.update_seconds(layout, stages, replicas, packs),
            "push": 0.0,
            "offload": 2 * host / (self.device.host_gb_s * 1e9) / batches,
        }
        if layout.engine_ranks:  # whose trainers keep weights for behavior log-probs
            if self.critic_shape is None:  # and never sleep
                host = seconds["offload"] = 0.0
            host += weights * self._is_scored_by_actor
        return Option(
            layout,
            round(fraction, 2),
            {phase: size / room for phase, size in memory.items()},
            seconds,
            int(host + self._reference_bytes(stages)),
            int(self._prepared_bytes(layout)),
            batches,
        )

    def _is_paused(self, layout: Layout) -> bool:
        """Return whether the engine keeps its memory while the actor trains."""
        return bool(self.workload.every_tokens) and not layout.engine_ranks

    @property
    def _bucket_bytes(self) -> int:
        return 2 * self.config.resharding.bucket_bytes(cuda=True)

    @property
    def _is_scored_by_actor(self) -> bool:
        return self.config.behavior == "actor"

    def engine_beside(self, layout: Layout, used: float) -> Engine:
        """Return the engine with what `used` bytes leave, in hundredths of a device."""
        room = self.device.memory
        left = (1 if layout.engine_ranks else LARGEST_SHARE) * room - used
        fraction = min(self.engine_share, math.floor(100 * left / room) / 100)
        return self.engine(layout, int(fraction * room))

    def cache_misfit(self, layout: Layout, engine: Engine, used: float) -> Rejection | None:
        """Return why the engine cannot cache one longest sequence, if it cannot."""
        longest = self.workload.longest + engine.state_tokens
        if engine.cached_tokens >= longest:
            return None
        weights, room = 2 * engine.sizes.weights, self.device.memory
        reason = (
            f"engines of {layout.rollout_tensor} get {max(0.0, engine.memory / room):.2f} of each "
            f"device, {weights / GIB:.1f} GiB of it for weights: no room to cache "
            f"{self.workload.longest} tokens"
        )
        return Rejection(layout, reason, (used + weights + longest * engine.token_bytes) / room)

    @property
    def scoring_passes(self) -> float:
        """Forward passes over the rollout batch: of behavior policy, references and critic.

        Passes of a reference with another shape are scaled by its active weights. Each of several
        is counted as if it had rows in all packs.
        """
        own = self.workload.scored_part * self._is_scored_by_actor
        active = engine_sizes(self.shape, 1).active
        passes = own + sum(engine_sizes(one, 1).active / active for one in self.references.values())
        if self.critic_shape is None:
            return passes
        trained = 1 + 3 * self.workload.epochs  # values, and updates of a forward and a backward
        return passes + trained * engine_sizes(self.critic_shape, 1).active / active

    @cached_property
    def critic_shape(self) -> ModelShape | None:
        """Shape of the critic's model; None without a critic."""
        critic = self.config.critic
        if critic is None:
            return None
        return self.shape if critic.path is None else read_critic_shape(critic.path)

    @cached_property
    def _critic_part(self) -> float:
        """Trained weights of the critic over those of the policy: the part of optimizer states."""
        config = self.config
        if self.critic_shape is None or config.critic is None:
            return 0.0
        own = _trained(self.critic_shape, config.critic.lora)
        return own / _trained(self.shape, config.lora)

    def _reference_bytes(self, stages: Sequence[Counts], *, on_device: bool = False) -> float:
        """Return the bytes of the references on the host, except the model without its adapters.

        on_device: of the largest with another shape, which is on the device with the policy while
        it scores.
        """
        weights = max(stage["states weights"] for stage in stages)
        config, own = self.config, sum(_weights(self.shape))
        sizes = [
            weights * sum(_weights(shape)) / own
            for folder, shape in self.references.items()
            if (not on_device or shape != self.shape)
            and (config.lora is None or folder != config.model.path)
        ]
        return max(sizes, default=0.0) if on_device else sum(sizes)

    @cached_property
    def references(self) -> dict[str, ModelShape]:
        """Shapes of the reference policies by folder; empty if the objective needs none."""
        config = self.config
        if not needs_reference(config.objective.choice.needs):
            return {}
        path = config.model.path
        folders = dict.fromkeys(config.references.values())
        return {one: self.shape if one == path else read_model_shape(one) for one in folders}

    def stages(self, layout: Layout, dry_runs: DryRuns) -> tuple[list[Counts], float]:
        """Return the counts of the first (or only) and the last stage, and the replicas' share.

        The first stage's depth is that of the deepest stage but the last. The share is of the dry
        run's replicas over the layout's, which share the optimizer's states.
        """
        probes = probes_of(self.shape, layout)
        runs = [dry_runs.done[probe] for probe in probes]
        before, period = layer_pattern(self.shape)
        depths = [layout.depth(self.shape, stage=stage) for stage in range(layout.pipeline)]
        deepest = max(depths[:-1] or depths)
        grow = partial(extrapolate, first=runs[0], second=runs[1])
        stages = [grow(runs[0], periods=(deepest - before - period) / period)]
        if layout.pipeline > 1:
            stages.append(grow(runs[2], periods=(depths[-1] - period) / period))
        return stages, probes[0].layout.data / layout.data

    def memory(self, layout: Layout, stages: Sequence[Counts], replicas: float) -> dict[str, float]:
        """Return bytes by phase, with reserves; of rollout, without the engine's share."""
        packs = self.packs(layout)
        prepared = self._prepared_bytes(layout)
        found = []
        for number, stage in enumerate(stages):
            in_flight = min(1 if number else layout.pipeline, packs.count)
            optimizer = stage["states optimizer"]
            update = stage["update peak"] + (in_flight - 1) * stage["update kept"]
            further = max(0, stage["communicators"] - RESERVED_COMMUNICATORS) * COMMUNICATOR
            spread = (1 - replicas) * optimizer  # over replicas that the dry run did not have
            awake = max(update, stage["step peak"]) - spread
            critic = stage.get("critic peak", 0) + (in_flight - 1) * stage.get("critic kept", 0)
            awake = max(awake, critic - self._critic_part * spread)
            states = optimizer + stage.get("states gradients", 0)
            scoring = stage["behavior peak"] - (spread if layout.engine_ranks else states)
            scoring += self._reference_bytes(stages, on_device=True)
            found.append((awake + further, scoring, stage["asleep"], states - spread))
        train, behavior, asleep, states = map(max, zip(*found, strict=True))
        buckets = self._bucket_bytes
        if layout.engine_ranks:  # neither shares a device with the other
            return {
                "rollout": buckets + RESERVE,
                "behavior": behavior + prepared + RESERVE,
                "train": train + prepared + RESERVE,
                "push": asleep + states + buckets + RESERVE,
            }
        slots = sum(slot_bytes(_with_rollout(self.config, layout)).values())
        weights = 2 * self.engine(layout, 0).sizes.weights + slots
        return {
            "rollout": asleep + RESERVE,
            "behavior": behavior + prepared + ENGINE_ASLEEP + RESERVE,
            "train": train + prepared + ENGINE_ASLEEP + RESERVE,
            "push": asleep + weights + buckets + ENGINE_ASLEEP + RESERVE,
        }

    def _prepared_bytes(self, layout: Layout) -> float:
        """Return the bytes of a rollout batch's packs on the device."""
        routes = route_bytes(self.shape, tensor=layout.tensor, stages=layout.pipeline)
        packs = self.workload.minibatches * self.packs(layout).count
        return packs * (PREPARED + routes) * layout.tokens / layout.context

    def packs(self, layout: Layout) -> Packs:
        """Return the packs of a minibatch on the busiest data-parallel rank."""
        return self.workload.packs(
            ranks=layout.data, budget=layout.tokens, alignment=layout.alignment
        )

    def engine(self, layout: Layout, memory: int) -> Engine:
        """Return the layout's engine with this memory of each device."""
        return Engine(self.shape, layout.rollout_tensor, self.device, memory)

    def rollout_seconds(self, engine: Engine, engines: int) -> float:
        """Estimate the time of generating a rollout batch."""
        return _rollout_seconds(engine, replace(self.workload, epochs=1), engines)

    def update_seconds(
        self, layout: Layout, stages: Sequence[Counts], replicas: float, packs: Packs
    ) -> float:
        """Estimate one optimizer update."""
        steps = []
        for stage in stages:
            # Weights and gradients are whole on each replica, the optimizer's states are shared.
            sharded = 2 * stage["states optimizer"] * (1 - replicas)
            work = {name: stage[f"step {name}"] for name in WORK}
            work |= {"kernels": 0, "stalls": 0}  # CUDA's fused Adam is a few kernels
            work["moved"] = max(0.0, work["moved"] + stage.get("states gradients", 0) - sharded)
            seconds = kernel_seconds(work, self.device)
            for phase in ("update", "step"):
                seconds += self._message_seconds(layout, stage, phase, per_update=True)
            steps.append(seconds)
        return self.pass_seconds(layout, stages, "update", packs) + max(steps)

    def pass_seconds(
        self, layout: Layout, stages: Sequence[Counts], phase: str, packs: Packs
    ) -> float:
        """Estimate the busiest rank's packs on the slowest stage, plus the pipeline bubble.

        phase: behavior (forward only) or update.
        """
        slowest = 0.0
        for stage in stages:
            tokens = packs.tokens / stage["tokens"]
            work = {name: stage[f"{phase} {name}"] for name in WORK}
            if phase == "update":  # zeroing, which is once in an update
                work["moved"] -= stage.get("states gradients", 0)
            work |= {name: tokens * work[name] for name in ("products", "moved")}
            work["attention"] *= packs.squares / stage["squares"]
            seconds = kernel_seconds(work, self.device)
            seconds += self._message_seconds(layout, stage, phase, tokens=tokens)
            slowest = max(slowest, seconds)
        return (packs.count + layout.pipeline - 1) * slowest

    def _message_seconds(
        self,
        layout: Layout,
        stage: Counts,
        phase: str,
        *,
        tokens: float = 1.0,
        per_update: bool = False,
    ) -> float:
        """Estimate the messages of one pack, or those of one update; without overlap."""
        seconds = 0.0
        for name, size in stage.items():
            if not name.startswith(f"{phase} bytes "):
                continue
            operation, group = name.split(" ")[2:]
            if (group in PER_UPDATE or phase == "step") is not per_update:
                continue
            ranks, stride = layout.group(group)
            point_to_point = operation.startswith(("send", "recv"))
            seconds += message_seconds(
                tokens * size * (2 if point_to_point else 1),  # of two ranks: half of it each
                device=self.device,
                ranks=ranks,
                stride=stride,
                calls=stage[f"{phase} calls {operation} {group}"],
                passes=2 if operation.startswith("allreduce") else 1,
            )
        return seconds

    def with_push(self, option: Option) -> Option:
        """Add the time of the weight push."""
        layout, lora = option.layout, self.config.lora
        alone = (lora.rank, tuple(lora.targets)) if lora and lora.push == "adapters" else None
        seconds = push_seconds(
            self.shape,
            layout,
            self.device,
            engine=layout.engine_layout,
            engine_weights=engine_sizes(self.shape, layout.rollout_tensor).weights,
            adapters=alone,
        )
        return replace(option, seconds={**option.seconds, "push": seconds / option.batches})

    # Lower bounds, from the sizes of the weights alone

    def least_memory(self, layout: Layout) -> float:
        """Return bytes that training needs in any case: weights, gradients, optimizer, reserves."""
        dense, experts = _weights(self.shape)
        share = dense / layout.tensor + experts / (layout.expert * layout.expert_slices)
        per_weight = 6 if self.config.lora is None else 2
        optimizer = 0.0 if self.config.lora else 12 * (dense + experts) / layout.world_size
        states = per_weight * share / layout.pipeline + optimizer
        return states + RESERVE + (0 if layout.engine_ranks else ENGINE_ASLEEP)

    def least_asleep(self, layout: Layout) -> float:
        """Return bytes of a sleeping actor's weights, and of the reserve.

        For engines on ranks of their own: buckets of a push and the reserve.
        """
        if layout.engine_ranks:
            return self._bucket_bytes + RESERVE
        dense, experts = _weights(self.shape)
        share = dense / layout.tensor + experts / (layout.expert * layout.expert_slices)
        return 2 * share / layout.pipeline + RESERVE

    def least_seconds(self, layout: Layout, engine: Engine) -> float:
        """Return seconds that a step takes in any case: decoding, and products at full rate."""
        rollout = self.rollout_seconds(engine, layout.engines) / self.workload.batches
        active = engine_sizes(self.shape, 1).active
        packs = self.packs(layout)
        passes = self.workload.epochs * (3 if self.config.lora is None else 2) + self.scoring_passes
        flops = 2 * active * packs.tokens * (packs.count + layout.pipeline - 1)
        shards = layout.tensor * layout.context * layout.pipeline
        peak = self.device.tflops * 1e12 * RATES.products
        train = passes * self.workload.minibatches * flops / shards / peak
        return max(rollout, train) if layout.engine_ranks else rollout + train


def _trained(shape: ModelShape, lora: LoraSection | None) -> int:
    """Count the weights that have an optimizer's states."""
    if lora is None:
        return sum(_weights(shape))
    return count_adapter_parameters(shape, rank=lora.rank, targets=lora.targets)


@lru_cache(maxsize=32)
def _weights(shape: ModelShape) -> tuple[int, int]:
    """Count the model's dense weights and those of experts."""
    dense = experts = 0
    for name, size in tensor_shapes(shape).items():
        if ".experts." in name:
            experts += math.prod(size)
        else:
            dense += math.prod(size)
    return dense, experts


@lru_cache(maxsize=1024)
def _rollout_seconds(engine: Engine, workload: Workload, engines: int) -> float:
    return engine.seconds(workload, engines=engines)


def _with_rollout(config: Config, layout: Layout) -> Config:
    rollout = config.rollout.model_copy(update={"tensor": layout.rollout_tensor})
    return config.model_copy(update={"rollout": rollout})


# The search

Queue = list[tuple[float, int, Layout]]  # by lower bound of a step's seconds


def search(
    planner: Planner,
    dry_runs: DryRuns,
    devices: int,
    fixed: Fixed | None = None,
    *,
    top: int = 10,
    progress: Progress = lambda message: None,
) -> Search:
    """Find the `top` fastest layouts. Raises UserError if the devices do not fill whole nodes.

    fixed: given fields of `Layout` (tensor, pipeline, ..., recompute, tokens); engine_ranks may be
    several numbers, and is 0 by default. progress: called with a message after each group of dry
    runs.
    """
    check_nodes(planner.device, devices)
    fixed = {"engine_ranks": 0, **(fixed or {})}
    queue, rejected = _candidates(planner, devices, fixed)
    options: list[Option] = []
    interrupted = False
    try:
        _measure_all(planner, dry_runs, fixed, queue, options, rejected, top=top, progress=progress)
    except KeyboardInterrupt:
        interrupted = True
        progress("interrupted: what was measured so far follows")
    is_complete = not queue or (not interrupted and _is_complete(options, queue[0][0], top))
    left = len(queue)
    options.sort(key=Option.order)
    options, further = options[:top], options[top:]
    first = [
        option
        for of_kind in (_is_shared, _is_split)
        for option in list(filter(of_kind, options))[:LARGER_PACKS]
    ]
    if not interrupted:
        rest = [option for option in options if option not in first]
        try:
            options = _with_larger_packs(planner, dry_runs, first, fixed) + rest
        except KeyboardInterrupt:
            interrupted = True
            progress("interrupted: larger packs were not tried")
    pushed = sorted(map(planner.with_push, options), key=Option.order)
    return Search(
        planner.shape, planner.device, devices, planner.workload, pushed + further, rejected,
        slower=left if is_complete else 0, unmeasured=0 if is_complete else left,
        dry_runs=len(dry_runs.done), is_interrupted=interrupted,
    )  # fmt: skip


def _measure_all(
    planner: Planner,
    dry_runs: DryRuns,
    fixed: Fixed,
    queue: Queue,
    options: list[Option],
    rejected: list[Rejection],
    *,
    top: int,
    progress: Progress,
) -> None:
    """Move layouts from the queue to the options, by time, or to those that do not fit."""
    count, total = 0, len(queue)
    while queue and not _is_complete(options, queue[0][0], top) and count < MAX_DRY_RUNS:
        count += dry_runs.run(_next_probes(planner, queue, dry_runs))
        waiting: Queue = []
        for bound, number, layout in list(queue):
            found = _measure(planner, layout, dry_runs, fixed)
            if isinstance(found, Layout):
                waiting.append((bound, number, found))
            elif isinstance(found, Option):
                options.append(found)
            else:
                rejected.append(found)
        queue[:] = sorted(waiting)
        options.sort(key=lambda option: option.step_seconds)
        best = f"; fastest so far {options[0].step_seconds:.0f} s a step" if options else ""
        progress(f"{count} dry runs, {total - len(queue)} of {total} layouts{best}")


def _is_split(option: Option) -> bool:
    return option.layout.engine_ranks > 0


def _is_shared(option: Option) -> bool:
    return not _is_split(option)


def _measure(
    planner: Planner, layout: Layout, dry_runs: DryRuns, fixed: Fixed
) -> Option | Rejection | Layout:
    """Evaluate a layout with more recomputation until it fits; return it if it needs a dry run."""
    while dry_runs.has(probes_of(planner.shape, layout)):
        found = planner.evaluate(layout, dry_runs)
        more = _next_recompute(layout, fixed)
        if isinstance(found, Option) or more is None:
            return found
        layout = more
    return layout


def _next_probes(planner: Planner, queue: Queue, dry_runs: DryRuns) -> list[Probe]:
    """Return the probes of the next layouts that are not known yet, some for every worker."""
    probes: dict[Probe, None] = {}
    for _, _, layout in queue:
        needed = probes_of(planner.shape, layout)
        probes |= dict.fromkeys(probe for probe in needed if probe not in dry_runs.done)
        if len(probes) >= 4 * dry_runs.workers:
            break
    return list(probes)


def _is_complete(options: Sequence[Option], bound: float, top: int) -> bool:
    """Return whether no layout with this lower bound can be among the first `top`."""
    return len(options) >= top and options[top - 1].step_seconds <= bound


def _candidates(planner: Planner, devices: int, fixed: Fixed) -> tuple[Queue, list[Rejection]]:
    """Return the layouts that may fit, by lower bound of a step's seconds, and the others."""
    queue: Queue = []
    rejected = []
    every = (
        layout
        for engine_ranks in split_sizes(fixed["engine_ranks"])
        for layout in layouts(planner.shape, devices, fixed, engine_ranks=engine_ranks)
    )
    for number, sizes in enumerate(every):
        if reason := _misfit(planner, sizes):
            rejected.append(Rejection(sizes, reason))
            continue
        layout = _with_shortest_packs(planner.workload, sizes, fixed)
        least, room = planner.least_memory(layout), planner.device.memory
        asleep = planner.least_asleep(layout)
        engine = planner.engine_beside(layout, asleep)
        if least > room:
            reason = f"train needs {least / GIB:.1f} of {planner.device.memory_gib:.1f} GiB"
            rejected.append(Rejection(layout, reason, least / room))
        elif misfit := planner.cache_misfit(layout, engine, asleep):
            rejected.append(misfit)
        else:
            queue.append((planner.least_seconds(layout, engine), number, layout))
    return sorted(queue), rejected


def _with_shortest_packs(workload: Workload, layout: Layout, fixed: Fixed) -> Layout:
    """Return the layout with packs of one longest sequence and the least recomputation."""
    alignment = layout.alignment
    tokens = math.ceil(workload.longest / alignment) * alignment
    if "tokens" in fixed:
        tokens = max(tokens, int(str(fixed["tokens"])) // alignment * alignment)
    index = RECOMPUTE.index(str(fixed["recompute"])) if "recompute" in fixed else 0
    return replace(layout, recompute=RECOMPUTE[index], tokens=tokens)


def _next_recompute(layout: Layout, fixed: Fixed) -> Layout | None:
    if "recompute" in fixed or layout.recompute == RECOMPUTE[-1]:
        return None
    return replace(layout, recompute=RECOMPUTE[RECOMPUTE.index(layout.recompute) + 1])


def _with_larger_packs(
    planner: Planner, dry_runs: DryRuns, options: Sequence[Option], fixed: Fixed
) -> list[Option]:
    """Try packs of two and four of the longest sequences; return the fastest of each layout."""
    if "tokens" in fixed:
        return list(options)
    larger = {
        option.layout: [replace(option.layout, tokens=n * option.layout.tokens) for n in (2, 4)]
        for option in options
    }
    every = [layout for several in larger.values() for layout in several]
    dry_runs.run(probe for layout in every for probe in probes_of(planner.shape, layout))
    best = []
    for option in options:
        found = [planner.evaluate(layout, dry_runs) for layout in larger[option.layout]]
        fits = [option, *(each for each in found if isinstance(each, Option))]
        best.append(min(fits, key=lambda each: each.step_seconds))
    return best


def check_nodes(device: Device, devices: int) -> None:
    """Raise UserError unless the devices fill whole nodes or fit in one."""
    if devices > device.per_node and devices % device.per_node:
        below = devices // device.per_node * device.per_node
        raise UserError(
            f"--devices {devices}: nodes of {device.name} have {device.per_node} devices, which do "
            f"not divide {devices}; use {below} or {below + device.per_node}, or set --per-node"
        )


def split_sizes(engine_ranks: object) -> tuple[int, ...]:
    """Return the numbers of ranks that only generate, as `search` tries them."""
    return engine_ranks if isinstance(engine_ranks, tuple) else (int(str(engine_ranks)),)


def shares(device: Device, devices: int) -> tuple[int, ...]:
    """Return up to seven numbers of ranks that may only generate, in eighths of the devices.

    On several nodes they are whole nodes.
    """
    unit = 1 if devices <= device.per_node else device.per_node
    eighth = max(unit, devices // 8 // unit * unit)
    return tuple(range(eighth, devices, eighth))


def layouts(
    shape: ModelShape, devices: int, fixed: Fixed, *, engine_ranks: int = 0
) -> Iterator[Layout]:
    """Yield every (tp, pp, cp, ep, dp, vLLM tp) whose product is the number of devices.

    Without `engine_ranks` of them, which are divided over engines. The experts' tensor parallel
    size is the config's default unless `fixed` has it.
    """
    devices -= engine_ranks
    sizes, of_engines = (
        [size for size in range(1, min(ranks, MAX_SIZE) + 1) if ranks % size == 0]
        for ranks in (devices, engine_ranks or devices)
    )

    def choose(name: str, candidates: list[int]) -> list[int]:
        return [int(str(fixed[name]))] if name in fixed else candidates

    for tensor, pipeline, context, rollout in itertools.product(
        *(choose(name, sizes) for name in ("tensor", "pipeline", "context")),
        choose("rollout_tensor", of_engines),
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
                yield Layout(
                    tensor, pipeline, context, data, expert=expert, expert_tensor=slices,
                    rollout_tensor=rollout, engine_ranks=engine_ranks,
                )  # fmt: skip


def _misfit(planner: Planner, layout: Layout) -> str:
    """Return why the model or the batch cannot or should not be divided this way, or ''."""
    shape, workload = planner.shape, planner.workload
    cut = (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.expert_slices)
    if problem := _cut_problem(shape, *cut):
        return problem
    critic = planner.critic_shape
    if critic is not None and critic is not shape:
        if layout.pipeline > 1 and critic.num_layers != shape.num_layers:
            return "a critic of another depth is not planned with pipeline stages"
        if problem := _cut_problem(critic, *cut):
            return f"critic.path: {problem}"
    stage = layout.tensor * layout.replicas
    if stage % (layout.expert * layout.expert_slices):
        return (
            f"expert {layout.expert} * expert_tensor {layout.expert_slices} does not divide "
            f"tensor * context * data = {stage}"
        )
    if layout.tensor > planner.device.per_node:
        return f"tensor {layout.tensor} would span nodes of {planner.device.per_node}"
    if workload.longest // layout.context < MIN_TOKENS and layout.context > 1:
        return f"context {layout.context} leaves less than {MIN_TOKENS} tokens per rank"
    minibatch = workload.responses // workload.minibatches
    if layout.data > minibatch:
        return f"a minibatch of {minibatch} responses cannot feed {layout.data} replicas"
    return _engine_misfit(shape, layout.engine_layout)


@lru_cache(maxsize=4096)
def _cut_problem(
    shape: ModelShape, tensor: int, pipeline: int, context: int, expert: int, slices: int
) -> str:
    sizes = ParallelSection(
        tensor=tensor, pipeline=pipeline, context=context, expert=expert,
        expert_tensor=slices if shape.experts else None,
    )  # fmt: skip
    return next(iter(cut_problems(sizes, shape)), "")


@lru_cache(maxsize=1024)
def _engine_misfit(shape: ModelShape, engines: EngineLayout) -> str:
    """Return why the model cannot be divided over these engines, or ''."""
    try:
        engines.check(replace(shape, num_layers=1))
    except ValueError as error:
        return str(error)
    return ""
