"""Executing a plan: exchange slices in rounds, hand over whole tensors.

    launch round 0
    for each round k:
        pack and launch round k + 1          (while k is on the wire)
        wait for round k
        tensor by tensor: unpack, hand over  (loaded while k + 1 is on the wire)

Every rank runs as many rounds, so no rank waits for one that has finished. At most two rounds are
alive at once, each bounded by the plan. Slices travel in the engine's dtype. A large slice is sent
from where it lies and received where it belongs, if it is in one piece there; others are packed
into flat buffers and unpacked.

The engine takes tensors of full shape of which it reads its own slice. Where a rank needs only a
slice, the rest of that tensor is memory that is never touched.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.resharding.ledger import Ledger
from megatron_rl.resharding.plan import Copy
from megatron_rl.resharding.rounds import Message, RankPlan, Round
from megatron_rl.resharding.scratch import Scratch

PHASES = ("pack", "transfer", "unpack", "cache_reset", "verify")
_NOTHING = torch.empty(0)  # stands for a tensor whose slices are already where they belong


class ExchangeError(RuntimeError):
    """A rank did not take part in time, or died: the exchange cannot be continued."""


@dataclass
class Flight:
    """One round under way: its messages in their buffers, and what to wait for."""

    number: int
    sent: list[tuple[Message, Tensor]]
    received: list[tuple[Message, Tensor]]
    work: list[Any]


@dataclass
class Exchange:
    """One execution of a plan on this rank.

    parameters: the actor's, by local name. shapes: full shapes of the HF tensors.
    ledger: takes checksums on the way. time_limit: seconds to wait for one round.
    scratch: memory for what is on its way.
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
    scratch: Scratch
    live: Mapping[str, Tensor] | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _open: dict[str, Tensor] = field(default_factory=dict)
    _arrived: dict[str, list[Copy]] = field(default_factory=lambda: defaultdict(list))
    _flight: Flight | None = None
    _launched: bool = False
    _draining: bool = False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Exchange all rounds; yield each HF tensor once this rank's part of it is there."""
        due: dict[int, list[str]] = defaultdict(list)
        for name, last in self.plan.last_round.items():
            due[last].append(name)
        self._launch(0)
        for name in due[-1]:
            yield name, self._assemble(name)
        for number in range(len(self.plan.rounds)):
            arrived = self._advance()
            for name in arrived.keys() - due[number]:
                self._unpack(arrived[name])
            for name in due[number]:
                self._unpack(arrived.get(name, []))
                yield name, self._assemble(name)

    def write(self) -> None:
        """Exchange all rounds, writing every slice straight into the engine's live parameters."""
        assert self.live is not None, "no live parameters to write into"
        for _ in self.tensors():
            pass

    def drain(self) -> None:
        """Take part in the rounds that are left, so that the other ranks can finish theirs."""
        self._draining = True
        if not self._launched:
            self._launch(0)
        while self._flight is not None:
            self._advance()

    def settle(self) -> list[str]:
        """The tensors whose checksums differ between the ends; collective among partners."""
        start = time.perf_counter()
        changed = self.ledger.settle(wait=self._wait_for_checksums)
        self.seconds["verify"] += time.perf_counter() - start
        return changed

    def _advance(self) -> dict[str, list[tuple[Copy, Tensor]]]:
        """Launch the next round, finish this one; the slices that arrived, by tensor."""
        flight = self._flight
        assert flight is not None, "no round is under way"
        self._launch(flight.number + 1)
        start = time.perf_counter()
        self._wait(flight.work, what=self._describe(flight))
        self.seconds["transfer"] += time.perf_counter() - start
        return self._open_messages(flight)

    def _launch(self, number: int) -> None:
        self._launched = True
        if number >= len(self.plan.rounds):
            self._flight = None
            return
        start = time.perf_counter()
        part = self.plan.rounds[number]
        # The round before last, which used the same buffer, has been sent and unpacked.
        buffer = self.scratch.wire(number, self._wire_size)
        free = _split(buffer, part)
        sent = [(message, self._outgoing(message, next(free))) for message in part.sends]
        received = [(message, self._incoming(message, next(free))) for message in part.receives]
        self.seconds["pack"] += time.perf_counter() - start
        start = time.perf_counter()
        # Messages between two ranks are matched by their order, which is the same on both.
        operations = [
            dist.P2POp(dist.isend, buffer, to)
            for message, buffer in sent
            for to in message.destinations
        ]
        operations += [dist.P2POp(dist.irecv, buffer, m.source) for m, buffer in received]
        work = dist.batch_isend_irecv(operations) if operations else []
        self._flight = Flight(number, sent, received, work)
        self.seconds["transfer"] += time.perf_counter() - start

    @cached_property
    def _wire_size(self) -> int:
        return max(map(_buffer_size, self.plan.rounds))

    def _outgoing(self, message: Message, buffer: Tensor) -> Tensor:
        """A message as it leaves, flat, in the engine's dtype: in place, or packed in `buffer`."""
        in_place = False
        if message.is_own:
            held = self._held(message.copies[0])
            in_place = held.is_contiguous() and held.dtype == self.dtype
            buffer = held.view(-1) if in_place else buffer
        for copy, part in _parts(message, buffer):
            if not in_place:
                part.copy_(self._held(copy))
            self.ledger.note_slice("sent", copy, part)
        self.ledger.note_message("sent", message, buffer)
        return buffer

    def _incoming(self, message: Message, buffer: Tensor) -> Tensor:
        """Where a message arrives: its place in the tensor, or `buffer` to unpack it from."""
        if message.is_own and not self._draining:  # nobody takes the tensors then
            place = self._destination(message.copies[0])
            if place.is_contiguous():
                return place.view(-1)
        return buffer

    def _wait(self, work: list[Any], *, what: str) -> None:
        try:
            for each in work:
                each.wait(timedelta(seconds=self.time_limit))
        except RuntimeError as error:
            raise ExchangeError(
                f"{what} of the weight exchange did not finish on rank {self.plan.rank} within "
                f"{self.time_limit:g} s, or another rank died: {error}"
            ) from error

    def _describe(self, flight: Flight) -> str:
        """A round as an error should name it: what this rank waits for, and from whom."""
        text = f"round {flight.number + 1} of {len(self.plan.rounds)}"
        names = list(dict.fromkeys(c.tensor for m, _ in flight.received for c in m.copies))
        if not names:
            return text
        sources = sorted({message.source for message, _ in flight.received})
        more = f" and {len(names) - 3} more" if names[3:] else ""
        return f"{text} ({', '.join(names[:3])}{more} from ranks {sources})"

    def _wait_for_checksums(self, work: list[Any]) -> None:
        self._wait(work, what="comparing checksums")

    def _open_messages(self, flight: Flight) -> dict[str, list[tuple[Copy, Tensor]]]:
        start = time.perf_counter()
        arrived: dict[str, list[tuple[Copy, Tensor]]] = defaultdict(list)
        for message, buffer in flight.received:
            self.ledger.note_message("received", message, buffer)
            for copy, part in _parts(message, buffer):
                arrived[copy.tensor].append((copy, part))
        self.seconds["unpack"] += time.perf_counter() - start
        return arrived

    def _unpack(self, parts: list[tuple[Copy, Tensor]]) -> None:
        start = time.perf_counter()
        for copy, part in parts:
            place = self._destination(copy)
            if place.data_ptr() != part.data_ptr():  # else it arrived in its place
                place.copy_(part)
            self._arrived[copy.tensor].append(copy)
        self.seconds["unpack"] += time.perf_counter() - start

    def _assemble(self, name: str) -> Tensor:
        """The tensor `name` with every slice that this rank needs; local ones are added here."""
        start = time.perf_counter()
        local = self.plan.local.get(name, [])
        full = self.shapes[name]
        held = self._held(local[0]) if self.live is None and len(local) == 1 else _NOTHING
        if held.shape.numel() == math.prod(full) and held.dtype == self.dtype:
            tensor = held.reshape(full)  # a single slice that is the whole tensor
        else:
            tensor = self._filled(name, local)
        self.seconds["unpack"] += time.perf_counter() - start
        return tensor

    def _filled(self, name: str, local: list[Copy]) -> Tensor:
        for copy in local:
            self._destination(copy).copy_(self._held(copy))
            self.ledger.note_slice("sent", copy, self._held(copy))
        arrived = self._arrived.pop(name, [])
        if self.ledger.full:
            for copy in (*local, *arrived):
                self.ledger.note_slice("received", copy, self._destination(copy))
        if self.live is not None:
            return _NOTHING
        tensor = self._target(name)
        del self._open[name]
        return tensor

    def _destination(self, copy: Copy) -> Tensor:
        """Where a slice goes: into the live parameter, or into the tensor being assembled."""
        if self.live is not None:
            return copy.needed.of_parameter(self.live[copy.needed.parameter].detach())
        return copy.needed.of_tensor(self._target(copy.tensor))

    def _target(self, name: str) -> Tensor:
        if name not in self._open:
            self._open[name] = self.scratch.tensor(self.shapes[name])
        return self._open[name]

    def _held(self, copy: Copy) -> Tensor:
        return copy.held.of_parameter(self.parameters[copy.held.parameter].detach())


def _aligned_sizes(part: Round) -> list[int]:
    """Elements of each message of a round, rounded up so that checksums read aligned words."""
    return [-(-message.size // 8) * 8 for message in (*part.sends, *part.receives)]


def _buffer_size(part: Round) -> int:
    """Elements that the messages of a round take in one buffer."""
    return sum(_aligned_sizes(part))


def _split(buffer: Tensor, part: Round) -> Iterator[Tensor]:
    """Places [size] in `buffer` for the messages of a round, those that it sends first."""
    at = 0
    for message, size in zip((*part.sends, *part.receives), _aligned_sizes(part), strict=True):
        yield buffer[at : at + message.size]
        at += size


def _parts(message: Message, buffer: Tensor) -> Iterator[tuple[Copy, Tensor]]:
    """The slices of a message with their places in its buffer, as matrices [h, w]."""
    at = 0
    for copy in message.copies:
        yield copy, buffer[at : at + copy.size].view(copy.held.shape)
        at += copy.size
