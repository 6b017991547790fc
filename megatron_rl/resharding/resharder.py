"""A weight push by plan, verified: the sequence of one push, its errors and its numbers."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed.agreement import raise_together, sum_over_ranks
from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.exchange import Exchange, ExchangeError
from megatron_rl.resharding.layouts import ActorLayout
from megatron_rl.resharding.ledger import Ledger
from megatron_rl.resharding.push import WeightReceiver, check_ends, gather_push
from megatron_rl.resharding.rounds import RankPlan, plan_for_rank
from megatron_rl.resharding.scratch import Scratch
from megatron_rl.resharding.source import SyncStats, WeightHolder, has_fused_names, layout_of


@dataclass(frozen=True)
class ReshardSettings:
    """How weights are moved and how closely that is watched.

    bucket_bytes: half of the extra memory of a push: two rounds on the wire and, on the way through
        the engine's loaders, the tensors that are being assembled. On CPU it is kept for the next.
    full_check_every: pushes between checks of every single slice; the first one always is one,
        0 means no further ones. Every push compares a checksum of every message.
    direct: write into the engine's own parameters where they are laid out as the table says
        (unquantized, on CUDA); otherwise, and where False, through vLLM's loaders.
    repair: after a mismatch push everything by gathering, and count it, instead of stopping.
    time_limit: seconds to wait for one round before giving up.
    ranks_per_node: for the choice of the nearest replica; None: all ranks are on one node.
    """

    bucket_bytes: int = 64 << 20
    full_check_every: int = 50
    direct: bool = True
    repair: bool = False
    time_limit: float = 300.0
    ranks_per_node: int | None = None


@dataclass
class Resharder:
    """Pushes weights from one actor layout to one receiver, again and again."""

    receiver: WeightReceiver
    settings: ReshardSettings = ReshardSettings()
    repairs: int = 0
    _pushes: int = 0
    _scratch: Scratch | None = None
    _plans: dict[tuple[ModelShape, ActorLayout, bool, bool], RankPlan] = field(default_factory=dict)

    def push(self, holder: WeightHolder, *, version: int) -> SyncStats:
        """Bring all weights over; collective over all processes.

        Raises on every rank: the error itself where it happened, RuntimeError elsewhere;
        ExchangeError or RankTimeoutError when a rank hangs or dies. Nothing has changed when
        parameters do not fit the table or an engine is generating. After any later error, as when
        an engine refuses weights or checksums differ (unless `repair`), no receiver has valid
        weights.
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
            repairs=self.repairs,
        )

    def _transfer(
        self, holder: WeightHolder, parameters: Mapping[str, Tensor], *, version: int, doing: str
    ) -> tuple[RankPlan, dict[str, float]]:
        """Exchange, load, compare; the plan and the seconds of each phase."""
        start = time.perf_counter()
        if not self._pushes and holder.topology.device.type == "cuda":
            # NCCL's first point-to-point message needs a communicator that all ranks made together.
            dist.all_reduce(torch.zeros(1, device=holder.topology.device))
        live = self.receiver.live_parameters() if self.settings.direct else None
        if sum_over_ranks(int(live is None), doing=doing, time_limit=self.settings.time_limit):
            live = None  # the rounds of the two ways differ: all ranks go the same
        plan = self._plan(holder, fused=has_fused_names(parameters), direct=live is not None)
        plan_seconds = time.perf_counter() - start
        device = holder.topology.device
        scratch = self._scratch or Scratch(
            self.receiver.dtype, device, limit=self.settings.bucket_bytes
        )
        self._scratch = None  # of a push that fails the memory may still be written to
        every = self.settings.full_check_every
        full = self._pushes % every == 0 if every else self._pushes == 0
        exchange = Exchange(
            plan=plan,
            parameters=parameters,
            shapes=tensor_shapes(holder.shape),
            dtype=self.receiver.dtype,
            device=device,
            ledger=Ledger(plan, full=full, dtype=self.receiver.dtype, device=device),
            time_limit=self.settings.time_limit,
            scratch=scratch,
            live=live,
        )
        self._pushes += 1
        load_seconds = self._load(exchange, version=version, doing=doing)
        changed = _agree_on_names(
            exchange.settle(), doing=doing, time_limit=self.settings.time_limit
        )
        if device.type == "cpu":
            self._scratch = scratch
        if changed:
            self._repair_or_raise(holder, changed, version=version, doing=doing)
        return plan, {"plan": plan_seconds, "load": load_seconds, **exchange.seconds}

    def _plan(self, holder: WeightHolder, *, fused: bool, direct: bool) -> RankPlan:
        layout = layout_of(holder.topology)
        key = (holder.shape, layout, fused, direct)
        if key not in self._plans:
            # Two rounds are alive at once, on the wire and in what they add to. For loaders that is
            # half a bucket on the wire and one of tensors; the rest is for tensors that they keep.
            bucket = self.settings.bucket_bytes // self.receiver.dtype.itemsize
            wire, tensors = (bucket, None) if direct else (bucket // 4, bucket // 2)
            self._plans[key] = plan_for_rank(
                holder.shape,
                layout,
                self.receiver.layout,
                rank=holder.topology.rank,
                bucket_elements=max(1, wire),
                tensor_elements=tensors,
                fused=fused,
                ranks_per_node=self.settings.ranks_per_node,
            )
        return self._plans[key]

    def _load(self, exchange: Exchange, *, version: int, doing: str) -> float:
        """Let the receiver pull all tensors; seconds that it spent outside the exchange."""
        error: Exception | None = None
        start = time.perf_counter()
        try:
            if exchange.live is not None:
                cache_seconds = self.receiver.overwrite(exchange.write, version=version)
            else:
                cache_seconds = self.receiver.receive(exchange.tensors(), version=version)
            exchange.seconds["cache_reset"] += cache_seconds
        except ExchangeError:
            raise  # the others cannot be asked any more; each finds out by itself
        except Exception as found:  # noqa: BLE001 - loaders raise KeyError, AssertionError, ...
            error = found
            exchange.drain()
        seconds = time.perf_counter() - start - sum(exchange.seconds.values())
        raise_together(error, doing=doing, time_limit=self.settings.time_limit)
        return seconds

    def _repair_or_raise(
        self, holder: WeightHolder, changed: list[str], *, version: int, doing: str
    ) -> None:
        shown = ", ".join(changed[:8]) + (f" and {len(changed) - 8} more" if changed[8:] else "")
        if not self.settings.repair:
            raise RuntimeError(f"{doing}: checksums differ after the transfer for {shown}")
        self.repairs += 1
        gather_push(holder, self.receiver, version=version)


def _agree_on_names(names: list[str], *, doing: str, time_limit: float) -> list[str]:
    """Every rank's names together, sorted, on every rank; one integer where there are none."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return names
    if not sum_over_ranks(len(names), doing=doing, time_limit=time_limit):
        return []
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, names)
    return sorted({name for each in everyone for name in each})
