"""Execution of a plan: exchange the messages of one rank in rounds.

    launch round 0
    for each round k:
        pack and launch round k + 1          (while k is on the wire)
        wait for round k, forward it within this node, wait for the forwarded messages
        unpack it                            (and load it, while k + 1 is on the wire)

All ranks run the same number of rounds, so no rank waits for one that has finished. At most two
rounds exist at once, each bounded by the plan. Slices are sent in the engine's dtype, those of a
message in one flat buffer after its checksums. On CPU the host waits for each round. On CUDA the
stream waits, and the host only at the end. One deadline applies to the whole exchange.

`unpacking.py` has the two ways to unpack a round.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.resharding.adapted import AdaptedWeight, LocalWeight
from megatron_rl.resharding.parcels import Frame, Parcel, copy_all, frames_of
from megatron_rl.resharding.pieces import Matrix
from megatron_rl.resharding.push_schedule import RankPlan
from megatron_rl.resharding.slices import Slice
from megatron_rl.resharding.verify import Ledger

PHASES = ("pack", "transfer", "unpack", "cache_reset", "verify")
_POLL = 0.001  # seconds


class ExchangeError(RuntimeError):
    """A rank did not respond in time, or died; the exchange cannot continue."""


@dataclass(frozen=True)
class Flight:
    """One round in progress: its received messages and the operations to wait for."""

    number: int
    received: list[Parcel]
    work: list[Any]


@dataclass(kw_only=True)
class Transfer:
    """One execution of a plan on this rank.

    parameters: the actor's, by local name. ledger: records checksums. time_limit: seconds for the
    whole exchange. seconds: time of this rank by phase; `transfer` is the time spent waiting for
    messages.
    """

    plan: RankPlan
    parameters: Mapping[str, LocalWeight]
    dtype: torch.dtype
    device: torch.device
    ledger: Ledger
    time_limit: float
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.time_limit
        self._matrices: dict[str, Matrix] = {}
        self._flight: Flight | None = None
        self._launched = False
        self._events: list[tuple[int, Any]] = []  # CUDA events after each round

    def destination(self, slice_: Slice) -> Tensor:
        """Return the memory [h, w] in which this rank needs a slice."""
        raise NotImplementedError

    def source(self, slice_: Slice) -> Tensor:
        """Return a slice [h, w] of the actor's parameters: a view, or computed for adapters."""
        owned = slice_.owned
        matrix = self._matrices.get(owned.parameter)
        if matrix is None:
            weight = self.parameters[owned.parameter]
            if isinstance(weight, AdaptedWeight):
                return weight.rectangle(owned)
            matrix = self._matrices[owned.parameter] = Matrix(weight.detach())
        return owned.of_matrix(matrix)

    def drain(self) -> None:
        """Take part in the remaining rounds, so that the other ranks can finish theirs."""
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

    def _advance(self) -> list[Parcel]:
        """Launch the next round and finish this one; returns the messages that arrived."""
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
        parcels = self._parcels(self._frames[number], self._buffers[number % 2])
        sent, received = parcels[: len(part.sends)], parcels[len(part.sends) :]
        for parcel in sent:
            self._pack(parcel)
        self.ledger.seal(sent)
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
    def _frames(self) -> list[list[Frame]]:
        """Places of messages in the buffer of each round, computed once for all pushes."""
        key = (self.ledger.full, self.dtype.itemsize)
        if key not in self.plan.frames:
            self.plan.frames[key] = [
                frames_of((*part.sends, *part.receives), *key) for part in self.plan.rounds
            ]
        return self.plan.frames[key]

    @cached_property
    def _buffers(self) -> list[Tensor]:
        """Memory of the rounds, which use it in turn."""
        size = max((frames[-1].stop for frames in self._frames if frames), default=0)
        return [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]

    def _parcels(self, frames: list[Frame], buffer: Tensor) -> list[Parcel]:
        """Return the messages of a round in its buffer."""
        elements = buffer.view(self.dtype)
        return [
            Parcel(frame, buffer, elements, buffer[frame.start : frame.stop]) for frame in frames
        ]

    def _pack(self, parcel: Parcel) -> None:
        slices = parcel.message.slices
        destinations, sources = list[Tensor](), list[Tensor]()
        for run, matrices in parcel.runs():
            destinations += matrices.unbind()
            sources += [self.source(each) for each in slices[run.first : run.stop]]
        copy_all(destinations, sources)

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

    def _open_parcels(self, flight: Flight) -> list[Parcel]:
        start = time.perf_counter()
        self.ledger.note_messages(flight.received)
        self.seconds["unpack"] += time.perf_counter() - start
        return flight.received


def _start(sends: Iterable[Parcel], receives: Iterable[Parcel]) -> list[Any]:
    """Start messages; those between two ranks are matched by order, the same on both."""
    out = [(dist.isend, each, to) for each in sends for to in each.message.to]
    into = [(dist.irecv, each, each.message.sender) for each in receives]
    operations = [dist.P2POp(kind, each.wire, peer) for kind, each, peer in (*out, *into)]
    return dist.batch_isend_irecv(operations) if operations else []
