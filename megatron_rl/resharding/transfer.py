"""Execution of a plan: exchange slices in rounds, yield whole tensors.

    launch round 0
    for each round k:
        pack and launch round k + 1          (while k is on the wire)
        wait for round k, forward it within this node, wait for the forwarded messages
        tensor by tensor: unpack, yield      (loaded while k + 1 is on the wire)

All ranks run the same number of rounds, so no rank waits for one that has finished. At most two
rounds exist at once, each bounded by the plan. Slices are sent in the engine's dtype, those of a
message in one flat buffer after its checksums. On CPU, where copying dominates, large slices do
without the buffer, and the host waits for each round. On CUDA the stream waits, and the host only
at the end. One deadline applies to the whole exchange.

The engine receives tensors of full shape; memory outside its own slices is never touched.
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

from megatron_rl.resharding.push_schedule import Message, RankPlan
from megatron_rl.resharding.scratch import Scratch
from megatron_rl.resharding.senders import Slice
from megatron_rl.resharding.verify import SUM_BYTES, Ledger

PHASES = ("pack", "transfer", "unpack", "cache_reset", "verify")
LARGE_SLICE = 1 << 16  # elements from which a slice is sent without the buffer on CPU
ALIGNMENT = 16  # bytes
_POLL = 0.001  # seconds
_EMPTY = torch.empty(0)  # placeholder for a tensor whose slices are already at their destination


Arrived = dict[str, list[tuple[Slice, Tensor | None]]]  # by tensor; None: already in place


class ExchangeError(RuntimeError):
    """A rank did not respond in time, or died; the exchange cannot continue."""


@dataclass(frozen=True)
class Parcel:
    """A message in memory.

    matrices: its slices [h, w]. in_place: True for slices outside the buffer, at their source or
    destination. payload: all slices, flat. wires: the tensors to send: checksums and payload.
    """

    message: Message
    matrices: list[Tensor]
    in_place: list[bool]
    sums: Tensor  # int64
    payload: list[Tensor]
    wires: list[Tensor]


@dataclass(frozen=True)
class Flight:
    """One round in progress: its received messages and the operations to wait for."""

    number: int
    received: list[Parcel]
    work: list[Any]


@dataclass
class Transfer:
    """One execution of a plan on this rank.

    parameters: the actor's, by local name. shapes: full shapes of the HF tensors.
    ledger: records checksums. time_limit: seconds for the whole exchange.
    scratch: memory for messages and tensors.
    live: the engine's own parameters; if given, slices are written into them and no tensors are
    assembled.
    seconds: time of this rank by phase; `transfer` is the time spent waiting for messages.
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
        self._events: list[tuple[int, Any]] = []  # CUDA events after each round

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Exchange all rounds; yield each HF tensor once this rank's part of it has arrived.

        With `live` parameters the tensors are empty: their slices were written in place.
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
        self._await_events()

    def drain(self) -> None:
        """Take part in the remaining rounds, so that the other ranks can finish theirs."""
        self._draining = True
        if not self._launched:
            self._launch(0)
        while self._flight is not None:
            self._advance()
        self._await_events()

    def changed(self) -> list[str]:
        """Return the names of tensors that differ from what was sent."""
        start = time.perf_counter()
        changed = self.ledger.changed()
        self.seconds["verify"] += time.perf_counter() - start
        return changed

    def _advance(self) -> Arrived:
        """Launch the next round and finish this one; returns the slices that arrived, by tensor."""
        flight = self._flight
        assert flight is not None, "no round is in progress"
        self._launch(flight.number + 1)
        start = time.perf_counter()
        self._wait(flight.number, flight.work)
        self._wait(flight.number, self._forward(flight))
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
        immediate = (each for each in received if each.message.sender == each.message.source)
        self._flight = Flight(number, received, _start(sent, immediate))
        self.seconds["transfer"] += time.perf_counter() - start

    def _forward(self, flight: Flight) -> list[Any]:
        """Start forwarding within the node, to this rank or from it, of messages of other nodes."""
        forwarded = (each for each in flight.received if each.message.sender != each.message.source)
        return _start(flight.received, forwarded)

    @cached_property
    def _wire_bytes(self) -> int:
        return max(
            sum(map(self._buffer_bytes, (*part.sends, *part.receives))) for part in self.plan.rounds
        )

    def _buffer_bytes(self, message: Message) -> int:
        sizes = (_aligned(each.size * self.dtype.itemsize) for each in message.slices)
        return sum(sizes) + _aligned(SUM_BYTES * self.ledger.sums_of(message))

    def _parcel(self, message: Message, buffer: Tensor) -> Parcel:
        """Lay out a message: its sums, small slices, then those sent without the buffer."""
        slices, separate = message.slices, []
        large = [self.device.type == "cpu" and each.size >= LARGE_SLICE for each in slices]
        matrices, in_place = [_EMPTY] * len(slices), [False] * len(slices)
        sums = buffer[: SUM_BYTES * self.ledger.sums_of(message)]
        first = at = end = _aligned(sums.numel())
        for number in sorted(range(len(slices)), key=large.__getitem__):
            size = slices[number].size * self.dtype.itemsize
            matrix = buffer[at : at + size].view(self.dtype).view(slices[number].owned.shape)
            at += _aligned(size)
            if large[number]:
                direct = self._direct(message, slices[number])
                in_place[number] = direct is not None
                matrix = matrix if direct is None else direct
                separate.append(matrix.view(-1))
            else:
                end = at
            matrices[number] = matrix
        payload, wires = [buffer[first:end], *separate], [buffer[:end], *separate]
        return Parcel(message, matrices, in_place, sums.view(torch.int64), payload, wires)

    def _direct(self, message: Message, slice_: Slice) -> Tensor | None:
        """Return the memory where a slice can be sent or received without a copy, or None."""
        if message.source == self.plan.rank:
            direct = self._source(slice_)
        elif self._draining:  # the tensors are not used then
            return None
        else:
            direct = self._destination(slice_)
        return direct if direct.is_contiguous() and direct.dtype == self.dtype else None

    def _packed(self, message: Message, buffer: Tensor) -> Parcel:
        parcel = self._parcel(message, buffer)
        parts = zip(message.slices, parcel.matrices, parcel.in_place, strict=True)
        for each, matrix, in_place in parts:
            if not in_place:
                matrix.copy_(self._source(each))
        self.ledger.seal(parcel.sums, parcel.payload, parcel.matrices)
        return parcel

    def _wait(self, number: int, work: list[Any]) -> None:
        """Wait for messages: on the host for CPU, otherwise on the stream."""
        if not work:
            return
        try:
            for each in work:
                if self.device.type == "cpu":
                    left = max(self._deadline - time.monotonic(), 0.001)
                    each.wait(timedelta(seconds=left))
                else:
                    each.wait()  # with a time limit the host would wait as well
        except RuntimeError as error:
            raise self._timeout_error(number, error) from error
        if self.device.type != "cpu":
            event = torch.cuda.Event()
            event.record()
            self._events.append((number, event))

    def _await_events(self) -> None:
        """Wait on the host until all rounds are over; a no-op on CPU."""
        start = time.perf_counter()
        for number, event in self._events:
            try:
                while not event.query():
                    if time.monotonic() > self._deadline:
                        raise RuntimeError("it is still running")
                    time.sleep(_POLL)
            except RuntimeError as error:
                raise self._timeout_error(number, error) from error
        self.seconds["transfer"] += time.perf_counter() - start

    def _timeout_error(self, number: int, why: object) -> ExchangeError:
        """Build an error that names the round, the tensors it lacks and their senders."""
        text = f"round {number + 1} of {len(self.plan.rounds)}"
        receives = self.plan.rounds[number].receives
        names = list(dict.fromkeys(each.tensor for m in receives for each in m.slices))
        if names:
            senders = sorted({message.sender for message in receives})
            more = f" and {len(names) - 3} more" if names[3:] else ""
            text += f" ({', '.join(names[:3])}{more} from ranks {senders})"
        return ExchangeError(
            f"{text} of the weight exchange did not finish on rank {self.plan.rank} within "
            f"{self.time_limit:g} s of its start, or another rank died: {why}"
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
            if matrix is not None:  # otherwise it was received in place
                self._destination(each).copy_(matrix)
            self._arrived[each.tensor].append(each)
        self.seconds["unpack"] += time.perf_counter() - start

    def _assemble(self, name: str) -> Tensor:
        """Return the tensor `name` with every slice that this rank needs; copies local slices."""
        start = time.perf_counter()
        local, full = self.plan.local.get(name, []), self.shapes[name]
        owned = self._source(local[0]) if self.live is None and len(local) == 1 else _EMPTY
        if owned.shape.numel() == math.prod(full) and owned.dtype == self.dtype:
            tensor = owned.reshape(full)  # a single slice covers the whole tensor
        else:
            tensor = self._filled(name, local)
        self.seconds["unpack"] += time.perf_counter() - start
        return tensor

    def _filled(self, name: str, local: list[Slice]) -> Tensor:
        for each in local:
            self._destination(each).copy_(self._source(each))
            self.ledger.note_local(each, self._source(each))
        for each in (*local, *self._arrived.pop(name, [])):
            self.ledger.note_slice(each, self._destination(each))
        if self.live is not None:
            return _EMPTY
        tensor = self._target(name)
        del self._open[name]
        return tensor

    def _destination(self, slice_: Slice) -> Tensor:
        """Return a slice's destination: in the live parameter or the tensor being assembled."""
        needed = slice_.needed
        if self.live is not None:
            return needed.of_parameter(self.live[needed.parameter].detach())
        return needed.of_tensor(self._target(slice_.tensor))

    def _target(self, name: str) -> Tensor:
        if name not in self._open:
            self._open[name] = self.scratch.tensor(self.shapes[name])
        return self._open[name]

    def _source(self, slice_: Slice) -> Tensor:
        return slice_.owned.of_parameter(self.parameters[slice_.owned.parameter].detach())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _start(sends: Iterable[Parcel], receives: Iterable[Parcel]) -> list[Any]:
    """Start messages; those between two ranks are matched by order, the same on both."""
    out = [(dist.isend, each, to) for each in sends for to in each.message.to]
    into = [(dist.irecv, each, each.message.sender) for each in receives]
    operations = [
        dist.P2POp(kind, wire, peer) for kind, each, peer in (*out, *into) for wire in each.wires
    ]
    return dist.batch_isend_irecv(operations) if operations else []
