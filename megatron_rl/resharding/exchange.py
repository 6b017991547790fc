"""Executing a plan: pack slices into flat buckets, exchange them, hand over whole tensors.

    launch round 0
    for each round k:
        pack and launch round k + 1          (while k is on the wire)
        wait for round k
        unpack it, hand over its tensors     (loaded while k + 1 is on the wire)

Every rank runs as many rounds, so no rank waits for one that has finished. At most two rounds are
alive at once; a round's buckets are bounded by the plan. Slices travel in the engine's dtype.

The engine takes tensors of full shape of which it reads its own slice. Where a rank needs only a
slice, the rest of that tensor is memory that is never touched.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.resharding.ledger import Ledger
from megatron_rl.resharding.plan import Copy, RankPlan

_NOTHING = torch.empty(0)  # stands for a tensor whose slices are already where they belong


class ExchangeError(RuntimeError):
    """A rank did not take part in time, or died: the exchange cannot be continued."""


@dataclass
class Flight:
    """One round under way: its buckets by the other rank, and what to wait for."""

    number: int
    sent: dict[int, Tensor]
    received: dict[int, Tensor]
    work: list[Any]


@dataclass
class Exchange:
    """One execution of a plan on this rank.

    parameters: the actor's, by local name. shapes: full shapes of the HF tensors.
    ledger: takes checksums on the way. time_limit: seconds to wait for one round.
    live: the engine's own parameters; where given, slices are written into them and the tensors
    are not assembled.
    seconds: time of this rank by phase; `transfer` is what it waited for the wire.
    """

    plan: RankPlan
    parameters: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    ledger: Ledger
    time_limit: float
    live: Mapping[str, Tensor] | None = None
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _open: dict[str, Tensor] = field(default_factory=dict)
    _arrived: dict[str, list[Copy]] = field(default_factory=lambda: defaultdict(list))
    _arenas: list[Tensor | None] = field(default_factory=lambda: [None, None])
    _flight: Flight | None = None
    _launched: bool = False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Exchange all rounds; yield each HF tensor once this rank's part of it is there."""
        self._launch(0)
        yield from self._complete(self.plan.ready)
        for names in self.plan.complete_after:
            self._advance()
            yield from self._complete(names)

    def write(self) -> None:
        """Exchange all rounds, writing every slice straight into the engine's live parameters."""
        assert self.live is not None, "no live parameters to write into"
        for _ in self.tensors():
            pass

    def drain(self) -> None:
        """Take part in the rounds that are left, so that the other ranks can finish theirs."""
        if not self._launched:
            self._launch(0)
        while self._flight is not None:
            self._advance()

    def settle(self) -> list[str]:
        """The tensors whose checksums differ between the ends; collective among partners."""
        start = time.perf_counter()
        changed = self.ledger.settle(self.plan, wait=self._wait_for_checksums)
        self.seconds["verify"] += time.perf_counter() - start
        return changed

    def _advance(self) -> None:
        flight = self._flight
        assert flight is not None, "no round is under way"
        self._launch(flight.number + 1)
        start = time.perf_counter()
        self._wait(flight.work, what=f"round {flight.number + 1} of {len(self.plan.rounds)}")
        self.seconds["transfer"] += time.perf_counter() - start
        self._unpack(flight)

    def _launch(self, number: int) -> None:
        self._launched = True
        if number >= len(self.plan.rounds):
            self._flight = None
            return
        start = time.perf_counter()
        exchange = self.plan.rounds[number]
        messages = self._messages(number)
        received = {rank: messages["received", rank] for rank in exchange.receives}
        sent = {to: messages["sent", to] for to in exchange.sends}
        for to, copies in exchange.sends.items():
            self._pack(number, to, copies, sent[to])
        self.seconds["pack"] += time.perf_counter() - start
        start = time.perf_counter()
        # Sorted alike on both sides: messages between two ranks are matched by their order.
        operations = [dist.P2POp(dist.isend, sent[to], to) for to in sorted(sent)]
        operations += [dist.P2POp(dist.irecv, received[of], of) for of in sorted(received)]
        work = dist.batch_isend_irecv(operations) if operations else []
        self._flight = Flight(number, sent, received, work)
        self.seconds["transfer"] += time.perf_counter() - start

    def _messages(self, number: int) -> dict[tuple[str, int], Tensor]:
        """Flat buffers of one round's messages, cut from the arena of every second round.

        The round before last, which used the same arena, has been sent and unpacked.
        """
        exchange = self.plan.rounds[number]
        sizes = {("sent", rank): _count(copies) for rank, copies in exchange.sends.items()}
        sizes |= {("received", of): _count(copies) for of, copies in exchange.receives.items()}
        arena = self._arenas[number % 2]
        if arena is None or arena.numel() < sum(sizes.values()):
            arena = torch.empty(sum(sizes.values()), dtype=self.dtype, device=self.device)
            self._arenas[number % 2] = arena
        parts = arena[: sum(sizes.values())].split(list(sizes.values()))
        return dict(zip(sizes, parts, strict=True))

    def _pack(self, number: int, to: int, copies: list[Copy], message: Tensor) -> None:
        at = 0
        for copy in copies:
            part = message[at : at + copy.size].view(copy.held.shape)
            part.copy_(self._held(copy))  # converts to the engine's dtype on the way
            self.ledger.note_slice("sent", copy, part)
            at += copy.size
        self.ledger.note_message("sent", number, to, message)

    def _wait(self, work: list[Any], *, what: str) -> None:
        try:
            for each in work:
                each.wait(timedelta(seconds=self.time_limit))
        except RuntimeError as error:
            raise ExchangeError(
                f"{what} of the weight exchange did not finish on rank {self.plan.rank} within "
                f"{self.time_limit:g} s, or another rank died: {error}"
            ) from error

    def _wait_for_checksums(self, work: list[Any]) -> None:
        self._wait(work, what="comparing checksums")

    def _unpack(self, flight: Flight) -> None:
        start = time.perf_counter()
        for rank, message in flight.received.items():
            at = 0
            for copy in self.plan.rounds[flight.number].receives[rank]:
                part = message[at : at + copy.size].view(copy.held.shape)
                self._destination(copy).copy_(part)
                self._arrived[copy.tensor].append(copy)
                at += copy.size
            self.ledger.note_message("received", flight.number, rank, message)
        self.seconds["unpack"] += time.perf_counter() - start

    def _complete(self, names: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            start = time.perf_counter()
            tensor = self._assemble(name)
            self.seconds["unpack"] += time.perf_counter() - start
            yield name, tensor

    def _assemble(self, name: str) -> Tensor:
        """The tensor `name` with every slice that this rank needs."""
        local = self.plan.local.get(name, [])
        full = self.shapes[name]
        if self.live is None and len(local) == 1 and local[0].size == torch.Size(full).numel():
            # A single slice that is the whole tensor: no copy where dtype and device agree.
            return self._held(local[0]).to(self.device, self.dtype).reshape(full)
        for copy in local:
            self._destination(copy).copy_(self._held(copy))
            if self.ledger.full:
                self.ledger.note_slice("sent", copy, self._held(copy).to(self.dtype))
        if self.ledger.full:
            for copy in (*local, *self._arrived[name]):
                self.ledger.note_slice("received", copy, self._destination(copy))
        return _NOTHING if self.live is not None else self._take(name)

    def _destination(self, copy: Copy) -> Tensor:
        """Where a slice goes: into the live parameter, or into the tensor being assembled."""
        if self.live is not None:
            return copy.needed.of_parameter(self.live[copy.needed.parameter].detach())
        return copy.needed.of_tensor(self._target(copy.tensor))

    def _take(self, name: str) -> Tensor:
        tensor = self._target(name)
        del self._open[name]
        return tensor

    def _target(self, name: str) -> Tensor:
        if name not in self._open:
            full = torch.empty(self.shapes[name], dtype=self.dtype, device=self.device)
            self._open[name] = full
        return self._open[name]

    def _held(self, copy: Copy) -> Tensor:
        return copy.held.of_parameter(self.parameters[copy.held.parameter].detach())


def _count(copies: list[Copy]) -> int:
    return sum(copy.size for copy in copies)
