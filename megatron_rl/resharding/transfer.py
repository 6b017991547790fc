"""Executing a plan: exchange slices in rounds, hand over whole tensors.

    launch round 0
    for each round k:
        pack and launch round k + 1          (while k is on the wire)
        wait for round k, pass on what other ranks of this node need of it, wait for that
        tensor by tensor: unpack, hand over  (loaded while k + 1 is on the wire)

Every rank runs as many rounds, so no rank waits for one that has finished. At most two rounds are
alive at once, each bounded by the plan. Slices travel in the engine's dtype, those of a message in
one flat buffer behind its checksums; on CPU, where copying is what costs, a large one is sent from
where it lies and received where it belongs. On CPU the host waits for each round. On CUDA the
stream does, and the host only at the end. One deadline holds for the whole exchange.

The engine takes tensors of full shape of which it reads its own slice: where a rank needs no more,
the rest of that tensor is memory that is never touched.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.resharding.plan import Message, RankPlan
from megatron_rl.resharding.scratch import Scratch
from megatron_rl.resharding.senders import Slice
from megatron_rl.resharding.verify import SUM_BYTES, Ledger

PHASES = ("pack", "transfer", "unpack", "cache_reset", "verify")
OWN_WIRE = 1 << 16  # elements from which a slice travels by itself on CPU
ALIGNMENT = 16  # bytes
_POLL = 0.001  # seconds
_NOTHING = torch.empty(0)  # stands for a tensor whose slices are already where they belong


Arrived = dict[str, list[tuple[Slice, Tensor | None]]]  # by tensor; None: where it belongs


class ExchangeError(RuntimeError):
    """A rank did not take part in time, or died: the exchange cannot be continued."""


@dataclass(frozen=True)
class Parcel:
    """A message in memory.

    matrices: its slices [h, w]. in_place: which of them are where they lie or belong, and not in
    the buffer. payload: all of them, flat. wires: what travels, the payload with the checksums.
    """

    message: Message
    matrices: list[Tensor]
    in_place: list[bool]
    sums: Tensor  # int64
    payload: list[Tensor]
    wires: list[Tensor]


@dataclass(frozen=True)
class Flight:
    """One round under way: its messages in their buffers, and what to wait for."""

    number: int
    received: list[Parcel]
    work: list[Any]


@dataclass
class Transfer:
    """One execution of a plan on this rank.

    parameters: the actor's, by local name. shapes: full shapes of the HF tensors.
    ledger: takes checksums on the way. time_limit: seconds for the whole exchange.
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

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.time_limit
        self._open: dict[str, Tensor] = {}
        self._arrived: dict[str, list[Slice]] = defaultdict(list)
        self._flight: Flight | None = None
        self._launched = self._draining = False
        self._marks: list[tuple[int, Any]] = []  # CUDA events behind each round

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Exchange all rounds; yield each HF tensor once this rank's part of it is there.

        Of a push into `live` parameters the tensors are empty: their slices are in their places.
        """
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
        self._await_marks()

    def drain(self) -> None:
        """Take part in the rounds that are left, so that the other ranks can finish theirs."""
        self._draining = True
        if not self._launched:
            self._launch(0)
        while self._flight is not None:
            self._advance()
        self._await_marks()

    def changed(self) -> list[str]:
        """The tensors that arrived here and are not what was sent."""
        start = time.perf_counter()
        changed = self.ledger.changed()
        self.seconds["verify"] += time.perf_counter() - start
        return changed

    def _advance(self) -> Arrived:
        """Launch the next round, finish this one; the slices that arrived, by tensor."""
        flight = self._flight
        assert flight is not None, "no round is under way"
        self._launch(flight.number + 1)
        start = time.perf_counter()
        self._wait(flight.number, flight.work)
        self._wait(flight.number, self._pass_on(flight))
        self.seconds["transfer"] += time.perf_counter() - start
        return self._open_parcels(flight)

    def _launch(self, number: int) -> None:
        self._launched = True
        if number >= len(self.plan.rounds):
            self._flight = None
            return
        start = time.perf_counter()
        part = self.plan.rounds[number]
        # The round before last, which used the same buffer, has been sent and unpacked.
        free = self.scratch.wire(number, self._wire_bytes)
        sent, received = [], []
        for message in part.sends:
            size = self._buffer_bytes(message)
            sent.append(self._packed(message, free[:size]))
            free = free[size:]
        for message in part.receives:
            size = self._buffer_bytes(message)
            received.append(self._parcel(message, free[:size]))
            free = free[size:]
        self.seconds["pack"] += time.perf_counter() - start
        start = time.perf_counter()
        at_once = (each for each in received if each.message.sender == each.message.source)
        self._flight = Flight(number, received, _start(sent, at_once))
        self.seconds["transfer"] += time.perf_counter() - start

    def _pass_on(self, flight: Flight) -> list[Any]:
        """Start what travels within nodes after it came from another: to this rank or from it."""
        late = (each for each in flight.received if each.message.sender != each.message.source)
        return _start(flight.received, late)

    @cached_property
    def _wire_bytes(self) -> int:
        return max(
            sum(map(self._buffer_bytes, (*part.sends, *part.receives))) for part in self.plan.rounds
        )

    def _buffer_bytes(self, message: Message) -> int:
        sizes = (_aligned(each.size * self.dtype.itemsize) for each in message.slices)
        return sum(sizes) + _aligned(SUM_BYTES * self.ledger.sums_of(message))

    def _parcel(self, message: Message, buffer: Tensor) -> Parcel:
        """Places for a message: its sums, small slices, then those that travel by themselves."""
        slices, own = message.slices, []
        alone = [self.device.type == "cpu" and each.size >= OWN_WIRE for each in slices]
        matrices, in_place = [_NOTHING] * len(slices), [False] * len(slices)
        sums = buffer[: SUM_BYTES * self.ledger.sums_of(message)]
        first = at = end = _aligned(sums.numel())
        for number in sorted(range(len(slices)), key=alone.__getitem__):
            size = slices[number].size * self.dtype.itemsize
            matrix = buffer[at : at + size].view(self.dtype).view(slices[number].held.shape)
            at += _aligned(size)
            if alone[number]:
                place = self._place(message, slices[number])
                in_place[number] = place is not None
                matrix = matrix if place is None else place
                own.append(matrix.view(-1))
            else:
                end = at
            matrices[number] = matrix
        payload, wires = [buffer[first:end], *own], [buffer[:end], *own]
        return Parcel(message, matrices, in_place, sums.view(torch.int64), payload, wires)

    def _place(self, message: Message, slice_: Slice) -> Tensor | None:
        """Where a slice can be sent from, or received, without a copy."""
        if message.source == self.plan.rank:
            place = self._held(slice_)
        elif self._draining:  # nobody takes the tensors then
            return None
        else:
            place = self._destination(slice_)
        return place if place.is_contiguous() and place.dtype == self.dtype else None

    def _packed(self, message: Message, buffer: Tensor) -> Parcel:
        parcel = self._parcel(message, buffer)
        parts = zip(message.slices, parcel.matrices, parcel.in_place, strict=True)
        for each, matrix, in_place in parts:
            if not in_place:
                matrix.copy_(self._held(each))
        self.ledger.seal(parcel.sums, parcel.payload, parcel.matrices)
        return parcel

    def _wait(self, number: int, work: list[Any]) -> None:
        """Wait for messages: the host on CPU, elsewhere the stream, and the host at the end."""
        if not work:
            return
        try:
            for each in work:
                if self.device.type == "cpu":
                    left = max(self._deadline - time.monotonic(), 0.001)
                    each.wait(timedelta(seconds=left))
                else:
                    each.wait()  # with a time limit the host would wait too
        except RuntimeError as error:
            raise self._late(number, error) from error
        if self.device.type != "cpu":
            mark = torch.cuda.Event()
            mark.record()
            self._marks.append((number, mark))

    def _await_marks(self) -> None:
        """Wait on the host until all rounds are over; nothing to do where it waited for each."""
        start = time.perf_counter()
        for number, mark in self._marks:
            try:
                while not mark.query():
                    if time.monotonic() > self._deadline:
                        raise RuntimeError("it is still running")
                    time.sleep(_POLL)
            except RuntimeError as error:
                raise self._late(number, error) from error
        self.seconds["transfer"] += time.perf_counter() - start

    def _late(self, number: int, why: object) -> ExchangeError:
        """An error that names the round, what this rank waits for in it, and from whom."""
        text = f"round {number + 1} of {len(self.plan.rounds)}"
        receives = self.plan.rounds[number].receives
        names = list(dict.fromkeys(each.tensor for m in receives for each in m.slices))
        if names:
            senders = sorted({message.sender for message in receives})
            more = f" and {len(names) - 3} more" if names[3:] else ""
            text += f" ({', '.join(names[:3])}{more} from ranks {senders})"
        return ExchangeError(
            f"{text} of the weight exchange did not finish on rank {self.plan.rank} within "
            f"{self.time_limit:g} s of its beginning, or another rank died: {why}"
        )

    def _open_parcels(self, flight: Flight) -> Arrived:
        start = time.perf_counter()
        arrived: Arrived = defaultdict(list)
        for parcel in flight.received:
            self.ledger.note_message(parcel.message, parcel.sums, parcel.payload)
            parts = zip(parcel.message.slices, parcel.matrices, parcel.in_place, strict=True)
            for each, matrix, in_place in parts:
                arrived[each.tensor].append((each, None if in_place else matrix))
        self.seconds["unpack"] += time.perf_counter() - start
        return arrived

    def _unpack(self, parts: list[tuple[Slice, Tensor | None]]) -> None:
        start = time.perf_counter()
        for each, matrix in parts:
            if matrix is not None:  # else it arrived in its place
                self._destination(each).copy_(matrix)
            self._arrived[each.tensor].append(each)
        self.seconds["unpack"] += time.perf_counter() - start

    def _assemble(self, name: str) -> Tensor:
        """The tensor `name` with every slice that this rank needs; local ones are added here."""
        start = time.perf_counter()
        local, full = self.plan.local.get(name, []), self.shapes[name]
        held = self._held(local[0]) if self.live is None and len(local) == 1 else _NOTHING
        if held.shape.numel() == math.prod(full) and held.dtype == self.dtype:
            tensor = held.reshape(full)  # a single slice that is the whole tensor
        else:
            tensor = self._filled(name, local)
        self.seconds["unpack"] += time.perf_counter() - start
        return tensor

    def _filled(self, name: str, local: list[Slice]) -> Tensor:
        for each in local:
            self._destination(each).copy_(self._held(each))
            self.ledger.note_local(each, self._held(each))
        for each in (*local, *self._arrived.pop(name, [])):
            self.ledger.note_slice(each, self._destination(each))
        if self.live is not None:
            return _NOTHING
        tensor = self._target(name)
        del self._open[name]
        return tensor

    def _destination(self, slice_: Slice) -> Tensor:
        """Where a slice goes: into the live parameter, or into the tensor being assembled."""
        needed = slice_.needed
        if self.live is not None:
            return needed.of_parameter(self.live[needed.parameter].detach())
        return needed.of_tensor(self._target(slice_.tensor))

    def _target(self, name: str) -> Tensor:
        if name not in self._open:
            self._open[name] = self.scratch.tensor(self.shapes[name])
        return self._open[name]

    def _held(self, slice_: Slice) -> Tensor:
        return slice_.held.of_parameter(self.parameters[slice_.held.parameter].detach())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _start(sends: Iterable[Parcel], receives: Iterable[Parcel]) -> list[Any]:
    """Start messages; those between two ranks are matched by their order, the same on both."""
    out = [(dist.isend, each, to) for each in sends for to in each.message.to]
    into = [(dist.irecv, each, each.message.sender) for each in receives]
    operations = [
        dist.P2POp(kind, wire, peer) for kind, each, peer in (*out, *into) for wire in each.wires
    ]
    return dist.batch_isend_irecv(operations) if operations else []
