"""Planned and verified weight transfer from actor to engine: steps, errors and statistics.

Frozen tensors are in float32 whatever the engine's dtype, and constant in a run. The exchange would
round them. They are small, so the first push collects them on the host of every rank, and later
pushes only check that none has changed.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.sections import ReshardingSection
from megatron_rl.distributed.agreement import (
    gather_from_ranks,
    raise_across_ranks,
    sum_over_ranks,
)
from megatron_rl.distributed.link import Link
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.adapted import LocalWeight
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout, has_fused_names, layout_of
from megatron_rl.resharding.pieces import Piece
from megatron_rl.resharding.push_schedule import RankPlan, plan_for_rank
from megatron_rl.resharding.transfer import (
    Assembly,
    ExchangeError,
    Ledger,
    Overwriting,
    check_parameters,
)


def without_frozen(shape: ModelShape) -> ModelShape:
    """Return the shape of what the exchange moves."""
    return replace(shape, lists_frozen=False)


@dataclass
class FrozenTensors:
    """Host copies of float32 tensors that are not trained, from the last push, by HF name."""

    _own: dict[str, Tensor] = field(default_factory=dict)
    _all: dict[str, Tensor] = field(default_factory=dict)

    def collect(
        self,
        shape: ModelShape,
        pieces: Iterable[Piece],
        parameters: Mapping[str, LocalWeight],
        *,
        doing: str,
        time_limit: float,
        link: Link | None = None,
    ) -> Mapping[str, Tensor]:
        """Return all ranks' frozen tensors; collective if the model has any.

        Raises RuntimeError if a tensor is on no rank, or if ranks have different values of a
        tensor.
        """
        names = tensor_shapes(shape).keys() - tensor_shapes(without_frozen(shape)).keys()
        if not names:
            return {}
        own = {p.tensor: _on_host(parameters[p.parameter]) for p in pieces if p.tensor in names}
        changed = int(not _equal(own, self._own))
        if sum_over_ranks(changed, doing=doing, time_limit=time_limit, link=link):
            self._own, self._all = own, _merge(gather_from_ranks(own, link=link))
        if missing := sorted(names - self._all.keys()):
            raise RuntimeError(f"{doing}: no rank has {missing}")
        return self._all


def _on_host(weight: LocalWeight) -> Tensor:
    assert isinstance(weight, Tensor), "a frozen tensor with an adapter"
    return weight.detach().to("cpu", torch.float32, copy=True)


def _equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def _merge(by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for rank, tensors in enumerate(by_rank):
        for name, tensor in tensors.items():
            if not torch.equal(merged.setdefault(name, tensor), tensor):
                raise RuntimeError(f"rank {rank} has other values of {name} than an earlier rank")
    return merged


def writing_frozen(
    write: Callable[[], object],
    frozen: Mapping[str, Tensor],
    live: Mapping[str, Tensor],
    *,
    shape: ModelShape,
    layout: EngineLayout,
    rank: int,
) -> Callable[[], None]:
    """Return a function that calls `write`, then copies frozen tensors into `live` parameters."""
    places = {p.tensor: p.parameter for p in layout.pieces(shape, rank=rank) if p.tensor in frozen}

    def write_all() -> None:
        write()
        for name, tensor in frozen.items():
            live[places[name]].copy_(tensor)

    return write_all


class WeightSource(Protocol):
    """An object with Megatron shards of a model, such as the actor."""

    @property
    def shape(self) -> ModelShape:
        """Shape of the whole model."""
        ...

    @property
    def topology(self) -> Topology:
        """Topology of this rank."""
        ...

    def named_parameters_local(self) -> Mapping[str, LocalWeight]:
        """Return this rank's parameters by their local names."""
        ...


@dataclass(frozen=True)
class LocalWeights:
    """Some weights of a rank as a source."""

    shape: ModelShape
    topology: Topology
    parameters: Mapping[str, LocalWeight]

    def named_parameters_local(self) -> Mapping[str, LocalWeight]:
        """Return the weights by their local names."""
        return self.parameters


class WeightReceiver(Protocol):
    """The part of a rollout engine that receives weights."""

    layout: EngineLayout
    dtype: torch.dtype

    def check_idle(self) -> None:
        """Raise RuntimeError while requests are running: their weights must not change."""
        ...

    def receive(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> float:
        """Replace every parameter; returns the seconds spent resetting caches."""
        ...

    def live_parameters(self) -> Mapping[str, Tensor] | None:
        """Return the engine's own parameters; None unless their layout is as expected."""
        ...

    def overwrite(self, write: Callable[[], object], *, version: int) -> float:
        """Call `write` to replace every live parameter; returns seconds like `receive`."""
        ...

    def invalidate(self) -> None:
        """Refuse to generate until new weights arrive."""
        ...


@dataclass(frozen=True)
class EnginesElsewhere:
    """Engines on ranks of their own, as a trainer sees them: it sends and receives nothing."""

    layout: EngineLayout
    dtype: torch.dtype

    def check_idle(self) -> None:
        """Do nothing: the engines check it."""

    def live_parameters(self) -> Mapping[str, Tensor]:
        """Return no parameters; the engines' own may still be written directly."""
        return {}

    def invalidate(self) -> None:
        """Do nothing: the engines refuse to generate."""


@dataclass(frozen=True)
class SyncStats:
    """Cost of one weight sync: seconds on this rank, bytes summed over all ranks."""

    seconds: float
    bytes_sent: int  # between processes
    bytes_local: int  # copied within a process
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds by phase

    def __add__(self, other: "SyncStats") -> "SyncStats":
        """Return the cost of both, of which this came first."""
        return SyncStats(
            self.seconds + other.seconds,
            self.bytes_sent + other.bytes_sent,
            self.bytes_local + other.bytes_local,
            {name: seconds + other.phases[name] for name, seconds in self.phases.items()},
        )

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics of a training step, by their names in metrics.jsonl."""
        rate = self.bytes_sent / self.seconds / 1e9 if self.seconds > 0 else 0.0
        return {
            "sync/seconds": self.seconds,
            "sync/bytes_sent": float(self.bytes_sent),
            "sync/bytes_local": float(self.bytes_local),
            "sync/gigabytes_per_second": rate,
            **{f"sync/{phase}_seconds": seconds for phase, seconds in self.phases.items()},
        }


def check_ends(
    source: WeightSource,
    receiver: WeightReceiver | EnginesElsewhere,
    *,
    doing: str,
    time_limit: float | None = None,
    link: Link | None = None,
) -> Mapping[str, LocalWeight]:
    """Return the source's local parameters once all ranks are ready; collective, read-only.

    Raises on every rank if any rank's parameters are not as expected (naming them) or its engine
    is generating: the error itself on that rank, RuntimeError elsewhere.
    """
    error: Exception | None = None
    parameters: Mapping[str, LocalWeight] = {}
    try:
        receiver.check_idle()
        parameters = source.named_parameters_local()
        layout, fused = layout_of(source.topology), has_fused_names(parameters)
        if source.topology.rank in layout.ranks:
            pieces = layout.pieces(source.shape, rank=source.topology.rank, fused=fused)
            check_parameters(parameters, pieces, layout=layout)
    except Exception as caught:  # noqa: BLE001 - other ranks must not wait, whatever it is
        error = caught
    raise_across_ranks(error, doing=doing, time_limit=time_limit, link=link)
    return parameters


@dataclass
class Resharder:
    """Repeated weight transfers from actor layouts to one receiver, with cached plans.

    The engine's own parameters are written if their layout is the expected one (on CUDA); otherwise
    weights are loaded through vLLM's loaders. ranks_per_node: weights cross between nodes once and
    are forwarded within each; None: one node. link: joins trainers, whose receiver is
    `EnginesElsewhere`, and engines, whose source has no parameters and the link's number of this
    rank; None: every rank trains and generates. full_check_every: transfers of which the first
    compares every slice; all compare checksums.
    """

    receiver: WeightReceiver | EnginesElsewhere
    settings: ReshardingSection = field(default_factory=ReshardingSection)
    ranks_per_node: int | None = None
    link: Link | None = None
    full_check_every: int = 50
    _pushes: int = 0
    _frozen: FrozenTensors = field(default_factory=FrozenTensors)
    _plans: dict[tuple[ModelShape, ActorLayout, bool, bool], RankPlan] = field(default_factory=dict)

    def push(self, source: WeightSource, *, version: int) -> SyncStats:
        """Transfer all weights; collective over all processes.

        Raises on every rank: the error itself where it happened, RuntimeError elsewhere;
        ExchangeError or RankTimeoutError if a rank hangs or dies. If parameters are not as
        expected or an engine is generating, nothing has changed. After any later error, such as an
        engine rejecting weights or differing checksums, no receiver has valid weights.
        """
        start = time.perf_counter()
        doing = f"weight sync {version}, {layout_of(source.topology)} to {self.receiver.layout}"
        limit = self.settings.time_limit_seconds
        parameters = check_ends(
            source, self.receiver, doing=doing, time_limit=limit, link=self.link
        )
        try:
            plan, phases = self._transfer(source, parameters, version=version, doing=doing)
        except BaseException as error:
            self.receiver.invalidate()
            if isinstance(error, ExchangeError):
                raise ExchangeError(f"{doing}: {error}") from error
            raise
        itemsize = self.receiver.dtype.itemsize
        return SyncStats(
            seconds=time.perf_counter() - start,
            bytes_sent=plan.elements_sent * itemsize,
            bytes_local=plan.elements_local * itemsize,
            phases=phases,
        )

    def _transfer(
        self,
        source: WeightSource,
        parameters: Mapping[str, LocalWeight],
        *,
        version: int,
        doing: str,
    ) -> tuple[RankPlan, dict[str, float]]:
        """Exchange, load and verify; returns the plan and the seconds of each phase."""
        start = time.perf_counter()
        limit, device = self.settings.time_limit_seconds, source.topology.device
        frozen = self._collect_frozen(source, parameters, doing=doing)
        if not self._pushes and device.type == "cuda" and self.link is None:
            # NCCL's first point-to-point message needs a communicator that all ranks create.
            dist.all_reduce(torch.zeros(1, device=device))
        live = self.receiver.live_parameters()
        if sum_over_ranks(int(live is None), doing=doing, time_limit=limit, link=self.link):
            live = None  # the two modes have different rounds: all ranks use the same one
        plan = self._plan(source, fused=has_fused_names(parameters), direct=live is not None)
        plan_seconds = time.perf_counter() - start
        dtype = self.receiver.dtype
        full = self._pushes % self.full_check_every == 0
        common: dict[str, Any] = {
            "plan": plan,
            "parameters": parameters,
            "dtype": dtype,
            "device": device,
            "ledger": Ledger(plan, full=full, dtype=dtype, device=device),
            "time_limit": limit,
            "link": self.link,
        }
        transfer = (
            Assembly(**common, shapes=tensor_shapes(source.shape))
            if live is None
            else Overwriting(**common, live=live)
        )
        self._pushes += 1
        load_seconds = self._load(transfer, source, frozen, version=version, doing=doing)
        changed = _agree_on_names(transfer.changed(), self.link, doing=doing, time_limit=limit)
        if changed:
            more = f" and {len(changed) - 8} more" if changed[8:] else ""
            names = ", ".join(changed[:8]) + more
            raise RuntimeError(f"{doing}: checksums differ after the transfer for {names}")
        return plan, {"plan": plan_seconds, "load": load_seconds, **transfer.seconds}

    def _plan(self, source: WeightSource, *, fused: bool, direct: bool) -> RankPlan:
        layout = layout_of(source.topology)
        key = (source.shape, layout, fused, direct)
        if key not in self._plans:
            # Two rounds exist at once, in messages and in the tensors being assembled. For loaders
            # that is half a bucket of messages and one of tensors; the rest is for tensors that
            # they keep.
            on_cuda = source.topology.device.type == "cuda"
            bucket = self.settings.bucket_bytes(cuda=on_cuda)
            elements = bucket // self.receiver.dtype.itemsize
            wire, tensors = (elements, None) if direct else (elements // 4, elements // 2)
            self._plans[key] = plan_for_rank(
                without_frozen(source.shape),
                layout,
                self.receiver.layout,
                rank=source.topology.rank,
                wire_elements=max(1, wire),
                tensor_elements=tensors,
                fused=fused,
                ranks_per_node=self.ranks_per_node,
            )
        return self._plans[key]

    def _collect_frozen(
        self, source: WeightSource, parameters: Mapping[str, LocalWeight], *, doing: str
    ) -> Mapping[str, Tensor]:
        """Return the tensors that the exchange would round, from all ranks."""
        layout, rank, pieces = layout_of(source.topology), source.topology.rank, tuple[Piece, ...]()
        if rank in layout.ranks:
            fused = has_fused_names(parameters)
            pieces = layout.pieces(source.shape, rank=rank, fused=fused)
        return self._frozen.collect(
            source.shape, pieces, parameters,
            doing=doing, time_limit=self.settings.time_limit_seconds, link=self.link,
        )  # fmt: skip

    def _load(
        self,
        transfer: Assembly | Overwriting,
        source: WeightSource,
        frozen: Mapping[str, Tensor],
        *,
        version: int,
        doing: str,
    ) -> float:
        """Load all tensors into the receiver; returns the seconds spent outside the exchange."""
        error: Exception | None = None
        start = time.perf_counter()
        try:
            if isinstance(self.receiver, EnginesElsewhere):
                cache_seconds = 0.0
                transfer.drain()
            elif isinstance(transfer, Overwriting):
                write = writing_frozen(
                    transfer.write,
                    frozen,
                    transfer.live,
                    shape=source.shape,
                    layout=self.receiver.layout,
                    rank=source.topology.rank,
                )
                cache_seconds = self.receiver.overwrite(write, version=version)
            else:
                tensors = chain(transfer.tensors(), frozen.items())
                cache_seconds = self.receiver.receive(tensors, version=version)
            transfer.seconds["cache_reset"] += cache_seconds
        except ExchangeError:
            raise  # no further collective is possible; each rank raises its own
        except Exception as caught:  # noqa: BLE001 - loaders raise KeyError, AssertionError, ...
            error = caught
            transfer.drain()
        seconds = time.perf_counter() - start - sum(transfer.seconds.values())
        limit = self.settings.time_limit_seconds
        raise_across_ranks(error, doing=doing, time_limit=limit, link=self.link)
        return seconds


def _agree_on_names(
    names: list[str], link: Link | None, *, doing: str, time_limit: float
) -> list[str]:
    """Return all ranks' names, sorted; only one integer is exchanged if there are none."""
    if not sum_over_ranks(len(names), doing=doing, time_limit=time_limit, link=link):
        return []
    gathered = gather_from_ranks(names, link=link)
    return sorted({name for names_of_rank in gathered for name in names_of_rank})
