"""A weight push by plan, verified: the sequence of one push, its errors and its numbers."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed.agreement import raise_together, sum_over_ranks
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout, has_fused_names, layout_of
from megatron_rl.resharding.plan import RankPlan, plan_for_rank
from megatron_rl.resharding.scratch import Scratch
from megatron_rl.resharding.transfer import ExchangeError, Transfer
from megatron_rl.resharding.verify import Ledger, check_parameters


class WeightHolder(Protocol):
    """Anything that holds Megatron shards of a model: the actor, or shards cut by a test."""

    @property
    def shape(self) -> ModelShape:
        """The whole model's shape."""
        ...

    @property
    def topology(self) -> Topology:
        """This rank's place."""
        ...

    def named_parameters_local(self) -> Mapping[str, Tensor]:
        """This rank's parameters by their local names."""
        ...


class WeightReceiver(Protocol):
    """The part of a rollout engine that weights go into."""

    layout: EngineLayout
    dtype: torch.dtype

    def check_idle(self) -> None:
        """RuntimeError while requests are running: weights must not change under them."""
        ...

    def receive(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> float:
        """Replace every parameter; returns the seconds that resetting caches took."""
        ...

    def live_parameters(self) -> Mapping[str, Tensor] | None:
        """The engine's own parameters, laid out as its table says; None where they are not."""
        ...

    def overwrite(self, write: Callable[[], object], *, version: int) -> float:
        """Let `write` replace every live parameter; returns seconds as `receive` does."""
        ...

    def invalidate(self) -> None:
        """Refuse to generate until other weights are received."""
        ...


@dataclass(frozen=True)
class SyncStats:
    """What one weight push cost: seconds on this rank, bytes summed over all ranks."""

    seconds: float
    bytes_sent: int  # between processes
    bytes_local: int  # copied within a process
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds by phase

    def to_metrics(self) -> dict[str, float]:
        """Metrics of a training step, by their names in metrics.jsonl."""
        rate = self.bytes_sent / self.seconds / 1e9 if self.seconds > 0 else 0.0
        return {
            "sync/seconds": self.seconds,
            "sync/bytes_sent": float(self.bytes_sent),
            "sync/bytes_local": float(self.bytes_local),
            "sync/gigabytes_per_second": rate,
            **{f"sync/{phase}_seconds": seconds for phase, seconds in self.phases.items()},
        }


@dataclass(frozen=True)
class ReshardSettings:
    """How weights are moved and how closely that is watched.

    bucket_bytes: half of the extra memory of a push: two rounds on the wire and, on the way through
        the engine's loaders, the tensors that are being assembled. On CPU it is kept for the next.
    full_check_every: pushes between checks of every single slice; the first one always is one,
        0 means no further ones. Every push compares a checksum of every message.
    direct: write into the engine's own parameters where they are laid out as the table says
        (on CUDA); otherwise, and where False, through vLLM's loaders.
    time_limit: seconds for the exchange of one push before giving up.
    ranks_per_node: what one rank of a node has, the others get from it; None: all are on one node.
    """

    bucket_bytes: int = 64 << 20
    full_check_every: int = 50
    direct: bool = True
    time_limit: float = 300.0
    ranks_per_node: int | None = None


def check_ends(
    holder: WeightHolder, receiver: WeightReceiver, *, doing: str, time_limit: float | None = None
) -> Mapping[str, Tensor]:
    """The holder's local parameters, once all ranks are ready; collective, changes nothing.

    Raises on every rank when parameters of any rank do not fit the table (naming them) or its
    engine is generating: the error itself on that rank, RuntimeError elsewhere.
    """
    error: Exception | None = None
    parameters: Mapping[str, Tensor] = {}
    try:
        receiver.check_idle()
        parameters = holder.named_parameters_local()
        layout, fused = layout_of(holder.topology), has_fused_names(parameters)
        pieces = layout.pieces(holder.shape, rank=holder.topology.rank, fused=fused)
        check_parameters(parameters, pieces, layout=layout)
    except Exception as found:  # noqa: BLE001 - the others must not wait, whatever it is
        error = found
    raise_together(error, doing=doing, time_limit=time_limit)
    return parameters


@dataclass
class Resharder:
    """Pushes weights from one actor layout to one receiver, again and again."""

    receiver: WeightReceiver
    settings: ReshardSettings = ReshardSettings()
    _pushes: int = 0
    _scratch: Scratch | None = None
    _plans: dict[tuple[ModelShape, ActorLayout, bool, bool], RankPlan] = field(default_factory=dict)

    def push(self, holder: WeightHolder, *, version: int) -> SyncStats:
        """Bring all weights over; collective over all processes.

        Raises on every rank: the error itself where it happened, RuntimeError elsewhere;
        ExchangeError or RankTimeoutError when a rank hangs or dies. Nothing has changed when
        parameters do not fit the table or an engine is generating. After any later error, as when
        an engine refuses weights or checksums differ, no receiver has valid weights.
        """
        start = time.perf_counter()
        doing = f"weight push {version}, {layout_of(holder.topology)} to {self.receiver.layout}"
        limit = self.settings.time_limit
        parameters = check_ends(holder, self.receiver, doing=doing, time_limit=limit)
        try:
            plan, phases = self._transfer(holder, parameters, version=version, doing=doing)
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
        self, holder: WeightHolder, parameters: Mapping[str, Tensor], *, version: int, doing: str
    ) -> tuple[RankPlan, dict[str, float]]:
        """Exchange, load, compare; the plan and the seconds of each phase."""
        start = time.perf_counter()
        limit, device = self.settings.time_limit, holder.topology.device
        if not self._pushes and device.type == "cuda":
            # NCCL's first point-to-point message needs a communicator that all ranks made together.
            dist.all_reduce(torch.zeros(1, device=device))
        live = self.receiver.live_parameters() if self.settings.direct else None
        if sum_over_ranks(int(live is None), doing=doing, time_limit=limit):
            live = None  # the rounds of the two ways differ: all ranks go the same
        plan = self._plan(holder, fused=has_fused_names(parameters), direct=live is not None)
        plan_seconds = time.perf_counter() - start
        dtype = self.receiver.dtype
        scratch = self._scratch or Scratch(dtype, device, limit=self.settings.bucket_bytes)
        self._scratch = None  # of a push that fails the memory may still be written to
        every = self.settings.full_check_every
        full = self._pushes % every == 0 if every else self._pushes == 0
        transfer = Transfer(
            plan=plan,
            parameters=parameters,
            shapes=tensor_shapes(holder.shape),
            dtype=dtype,
            device=device,
            ledger=Ledger(plan, full=full, dtype=dtype, device=device),
            time_limit=limit,
            scratch=scratch,
            live=live,
        )
        self._pushes += 1
        load_seconds = self._load(transfer, version=version, doing=doing)
        changed = _agree_on_names(transfer.changed(), doing=doing, time_limit=limit)
        if device.type == "cpu":
            self._scratch = scratch
        if changed:
            more = f" and {len(changed) - 8} more" if changed[8:] else ""
            names = ", ".join(changed[:8]) + more
            raise RuntimeError(f"{doing}: checksums differ after the transfer for {names}")
        return plan, {"plan": plan_seconds, "load": load_seconds, **transfer.seconds}

    def _plan(self, holder: WeightHolder, *, fused: bool, direct: bool) -> RankPlan:
        layout = layout_of(holder.topology)
        key = (holder.shape, layout, fused, direct)
        if key not in self._plans:
            # Two rounds are alive at once, on the wire and in what they add to. For loaders that is
            # half a bucket on the wire and one of tensors; the rest is for tensors that they keep.
            most = self.settings.bucket_bytes // self.receiver.dtype.itemsize
            wire, tensors = (most, None) if direct else (most // 4, most // 2)
            self._plans[key] = plan_for_rank(
                holder.shape,
                layout,
                self.receiver.layout,
                rank=holder.topology.rank,
                wire_elements=max(1, wire),
                tensor_elements=tensors,
                fused=fused,
                ranks_per_node=self.settings.ranks_per_node,
            )
        return self._plans[key]

    def _load(self, transfer: Transfer, *, version: int, doing: str) -> float:
        """Let the receiver pull all tensors; seconds that it spent outside the exchange."""
        error: Exception | None = None
        start = time.perf_counter()
        try:
            if transfer.live is not None:
                cache_seconds = self.receiver.overwrite(
                    lambda: deque(transfer.tensors(), maxlen=0), version=version
                )
            else:
                cache_seconds = self.receiver.receive(transfer.tensors(), version=version)
            transfer.seconds["cache_reset"] += cache_seconds
        except ExchangeError:
            raise  # the others cannot be asked any more; each finds out by itself
        except Exception as found:  # noqa: BLE001 - loaders raise KeyError, AssertionError, ...
            error = found
            transfer.drain()
        seconds = time.perf_counter() - start - sum(transfer.seconds.values())
        raise_together(error, doing=doing, time_limit=self.settings.time_limit)
        return seconds


def _agree_on_names(names: list[str], *, doing: str, time_limit: float) -> list[str]:
    """Every rank's names together, sorted, on every rank; one integer where there are none."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return names
    if not sum_over_ranks(len(names), doing=doing, time_limit=time_limit):
        return []
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, names)
    return sorted({name for each in everyone for name in each})
