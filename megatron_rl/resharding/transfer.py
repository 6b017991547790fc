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

`Assembly` puts slices together to tensors of full shape for the engine's loaders; memory outside
the engine's own slices is never touched. `Overwriting` writes them into the engine's parameters.

*Verification.* A message contains the sum of its words, computed by its sender at memory speed;
each receiver computes it again. A full check adds a checksum of every slice, which also detects
rows or columns in wrong positions, computed where the receiver passes the slice to the engine: with
bits b[r, c] of the elements as integers,

    sum_r (r + 1) K sum_c b[r, c]  +  sum_c (c + 1) K' sum_r b[r, c]      modulo 2^64.

Sums stay on the device; all of them are read together at the end of the transfer.
"""

import functools
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed.link import Link
from megatron_rl.resharding.adapted import AdaptedWeight, LocalWeight
from megatron_rl.resharding.layouts import ActorLayout
from megatron_rl.resharding.pieces import Matrix, Piece, parameter_shapes
from megatron_rl.resharding.push_schedule import (
    SUM_BYTES,
    CopyRun,
    Frame,
    Message,
    RankPlan,
    Slice,
    frames_of,
    without_garbage_collection,
)


@dataclass(slots=True)
class Parcel:
    """A message in memory.

    frame: its places. buffer: that of its round, in bytes. elements: the same memory as elements.
    wire: its bytes in the buffer, to send or receive.
    """

    frame: Frame
    buffer: Tensor
    elements: Tensor
    wire: Tensor

    @property
    def message(self) -> Message:
        """Return the message."""
        return self.frame.message

    @property
    def layout(self) -> tuple[int, int]:
        """Return its bytes in the buffer and its number of checksums."""
        return self.frame.stop - self.frame.start, self.frame.sum_count

    def runs(self) -> Iterator[tuple[CopyRun, Tensor]]:
        """Yield each run with its slices in the buffer, [n, h, w]."""
        offset = self.frame.first // self.elements.itemsize
        for run in self.message.runs:
            size, strides = (run.stop - run.first, run.height, run.width), (run.width, 1)
            start = offset + run.start
            yield run, self.elements.as_strided(size, (run.height * run.width, *strides), start)


def groups_of_equal_layout(parcels: Sequence[Parcel]) -> Iterator[list[Parcel]]:
    """Yield parcels that follow each other with equal layouts."""
    group: list[Parcel] = []
    for parcel in parcels:
        if group and parcel.layout != group[0].layout:
            yield group
            group = []
        group.append(parcel)
    if group:
        yield group


def copy_all(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Copy matrices: one call for the contiguous matrices, and one for the strided."""
    contiguous: tuple[list[Tensor], list[Tensor]] = [], []
    others: tuple[list[Tensor], list[Tensor]] = [], []
    for to, of in zip(destinations, sources, strict=True):
        chosen = contiguous if of.is_contiguous() and to.is_contiguous() else others
        chosen[0].append(to)
        chosen[1].append(of)
    for copied, copies in (contiguous, others):
        if copied:
            torch._foreach_copy_(copied, copies)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd, so that multiplication modulo 2^64 loses nothing; within int64 (2^64 / golden ratio, halved).
_ROW_FACTOR = 0x4F1BBCDCBFA53E0B
_COLUMN_FACTOR = 0x27BB2EE687B0B0FD


def check_parameters(
    parameters: Mapping[str, LocalWeight], pieces: tuple[Piece, ...], *, layout: ActorLayout
) -> None:
    """Raise ValueError naming every local parameter that is missing, extra or of a wrong shape.

    Rows beyond the pieces are allowed as padding of the vocabulary.
    """
    shapes = parameter_shapes(pieces)
    problems = [f"{name} is missing" for name in shapes.keys() - parameters.keys()]
    for name, parameter in parameters.items():
        height, width = parameter.shape[0], math.prod(parameter.shape[1:])
        padded = "word_embeddings" in name or "output_layer" in name
        if name not in shapes:
            if not padded:  # a shard of the vocabulary may be padding only
                problems.append(f"{name} {tuple(parameter.shape)} is not expected")
        elif width != shapes[name][1] or not (
            height == shapes[name][0] or (padded and height > shapes[name][0])
        ):
            problems.append(f"{name} has shape {tuple(parameter.shape)}, expected {shapes[name]}")
    if problems:
        raise ValueError(f"parameters of {layout}: " + "; ".join(sorted(problems)))


def slice_checksum(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Compute a position-dependent checksum of a matrix [h, w]: int64 scalar, device-independent.

    dtype: convert the elements to it first.
    """
    return slice_checksums(matrix[None], dtype)[0]


def slice_checksums(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the checksum of each matrix [n, h, w]: int64 [n].

    Works on blocks of rows, without copying the matrices.
    """
    number, height, width = matrices.shape
    step = max(1, block_elements(matrices.device) // max(1, number * width))
    of_rows, of_columns = [], 0
    for part in matrices.split(step, dim=1):
        block = part.to(dtype or matrices.dtype).contiguous()
        bits = block.view(_INTEGERS[block.dtype.itemsize])
        of_rows.append(bits.sum(2, dtype=torch.int64))
        of_columns = bits.sum(1, dtype=torch.int64) + of_columns
    rows = of_rows[0] if len(of_rows) == 1 else torch.cat(of_rows, dim=1)
    down, across = _place_factors(1 << (max(height, width) - 1).bit_length(), matrices.device)
    return (rows * down[:height]).sum(1) + (of_columns * across[:width]).sum(1)


@functools.lru_cache(maxsize=32)
def _place_factors(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the factors of rows and of columns, int64 [count] each.

    They are kept because a full check needs them for thousands of slices; `count` is a power of
    two, so that few sizes take memory. Valid on the stream that asked for them first.
    """
    places = torch.arange(1, count + 1, device=device)
    return places * _ROW_FACTOR, places * _COLUMN_FACTOR


def block_elements(device: torch.device) -> int:
    """Return the elements of a block: a CPU's cache; elsewhere enough to amortize a kernel."""
    return 1 << (16 if device.type == "cpu" else 24)


class Ledger:
    """Sums of everything that this rank receives, from the sender and computed here.

    full: also of every slice, including those that stay within the rank. dtype: the engine's.
    """

    def __init__(
        self, plan: RankPlan, *, full: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.full, self.dtype = full, dtype
        self._indices: dict[int, int] = {}  # by id of the Message or the Slice
        self._tensors: list[tuple[str, ...]] = []  # covered by the sum at each index
        for part in plan.rounds:
            for message in part.receives:
                self._indices[id(message)] = len(self._tensors)
                self._tensors.append(message.tensors)
                self._add(message.slices)
        for slices in plan.local.values():
            self._add(slices)
        # One tensor for all sums: separate ones would fragment the heap.
        self._expected, self._actual = torch.zeros(
            2, len(self._tensors), dtype=torch.int64, device=device
        )

    def _add(self, slices: Iterable[Slice]) -> None:
        for each in slices if self.full else ():
            self._indices[id(each)] = len(self._tensors)
            self._tensors.append((each.tensor,))

    def seal(self, parcels: Sequence[Parcel]) -> None:
        """Compute the sums of messages: of their tensors on the wire, and of their slices."""
        for group in groups_of_equal_layout(parcels):
            _sums(group)[:, 0] = _totals(group)
        for parcel in parcels if self.full else ():
            of_slices = _sums([parcel])[0, 1:]
            for run, matrices in parcel.runs():
                of_slices[run.first : run.stop] = slice_checksums(matrices, self.dtype)

    def note_messages(self, parcels: Sequence[Parcel]) -> None:
        """Record messages that arrived, in the order of the plan, and the sums in them."""
        for group in groups_of_equal_layout(parcels):
            first, size = self._indices[id(group[0].message)], group[0].frame.sum_count
            stop = first + len(group) * size
            self._expected[first:stop].view(len(group), size).copy_(_sums(group))
            self._actual[first:stop:size] = _totals(group)

    def note_local(self, slice_: Slice, matrix: Tensor) -> None:
        """Record a slice that stays within this rank, as the actor has it; only in full checks."""
        if self.full:
            self._expected[self._indices[id(slice_)]] = slice_checksum(matrix, self.dtype)

    def note_slices(self, first: Slice, matrices: Tensor) -> None:
        """Record a message's slices [n, h, w], `first` and those after it, as the engine has them.

        Only in full checks.
        """
        if self.full:
            index = self._indices[id(first)]
            self._actual[index : index + len(matrices)] = slice_checksums(matrices, self.dtype)

    def changed(self) -> list[str]:
        """Return the sorted names of changed tensors; waits for the device."""
        differs = (self._expected != self._actual).tolist()
        changed = {
            names
            for names, is_different in zip(self._tensors, differs, strict=True)
            if is_different
        }
        # A slice identifies its tensor; a message only that one of its tensors changed.
        single = {names for names in changed if len(names) == 1}
        return sorted({name for names in single or changed for name in names})


def _sums(group: list[Parcel]) -> Tensor:
    """Return the sums in parcels of equal layout, as a view of the buffer [parcels, sums]."""
    words, frame = group[0].buffer.view(torch.int64), group[0].frame
    return words.as_strided(
        (len(group), frame.sum_count), (_stride(group), 1), frame.start // SUM_BYTES
    )


def _totals(group: list[Parcel]) -> Tensor:
    """Compute the sum of the words of the slices of parcels of equal layout: int64 [parcels]."""
    words, frame = group[0].buffer.view(torch.int64), group[0].frame
    size = (len(group), (frame.stop - frame.first) // SUM_BYTES)
    return words.as_strided(size, (_stride(group), 1), frame.first // SUM_BYTES).sum(1)


def _stride(group: list[Parcel]) -> int:
    return (group[0].frame.stop - group[0].frame.start) // SUM_BYTES


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
    messages. link: joins engines on ranks of their own; None: torch's default group.
    """

    plan: RankPlan
    parameters: Mapping[str, LocalWeight]
    dtype: torch.dtype
    device: torch.device
    ledger: Ledger
    time_limit: float
    link: Link | None = None
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
        self._flight = Flight(number, received, _start(sent, immediate, self.link))
        self.seconds["transfer"] += time.perf_counter() - start

    def _forward(self, flight: Flight) -> list[Any]:
        """Start forwarding within the node, to this rank or from it, of messages of other nodes."""
        forwarded = (each for each in flight.received if each.message.sender != each.message.source)
        return _start(flight.received, forwarded, self.link)

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
        """Build an error that names the round, and what it lacks of whom or to whom it sends."""
        text = f"round {number + 1} of {len(self.plan.rounds)}"
        receives = self.plan.rounds[number].receives
        names = list(dict.fromkeys(each.tensor for m in receives for each in m.slices))
        if names:
            senders = sorted({message.sender for message in receives})
            more = f" and {len(names) - 3} more" if names[3:] else ""
            text += f" ({', '.join(names[:3])}{more} from ranks {senders})"
        elif sends := self.plan.rounds[number].sends:
            text += f" (to ranks {sorted({to for message in sends for to in message.to})})"
        return ExchangeError(
            f"{text} of the weight exchange did not finish on rank {self.plan.rank} within "
            f"{self.time_limit:g} s of its start, or another rank died: {why}"
        )

    def _open_parcels(self, flight: Flight) -> list[Parcel]:
        start = time.perf_counter()
        self.ledger.note_messages(flight.received)
        self.seconds["unpack"] += time.perf_counter() - start
        return flight.received


def _start(sends: Iterable[Parcel], receives: Iterable[Parcel], link: Link | None) -> list[Any]:
    """Start messages; those between two ranks are matched by order, the same on both."""
    if link is not None:
        return link.weights.start(
            sends=[(each.wire, to) for each in sends for to in each.message.to],
            receives=[(each.wire, each.message.sender) for each in receives],
        )
    out = [(dist.isend, each, to) for each in sends for to in each.message.to]
    into = [(dist.irecv, each, each.message.sender) for each in receives]
    operations = [dist.P2POp(kind, each.wire, peer) for kind, each, peer in (*out, *into)]
    return dist.batch_isend_irecv(operations) if operations else []


LOCAL_ELEMENTS = 1 << 25  # of local slices that are copied together
_Arrived = dict[str, list[tuple[Slice, Tensor]]]  # by tensor


@dataclass(kw_only=True)
class Assembly(Transfer):
    """A transfer that yields HF tensors. shapes: their full shapes."""

    shapes: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._open: dict[str, Tensor] = {}
        self._slices: dict[str, list[Slice]] = defaultdict(list)  # that have arrived

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Exchange all rounds; yield each HF tensor once this rank's part of it has arrived."""
        due: dict[int, list[str]] = defaultdict(list)
        for name, last in self.plan.last_round.items():
            due[last].append(name)
        self._launch(0)
        for name in due[-1]:
            yield name, self._assemble(name)
        for number in range(len(self.plan.rounds)):
            arrived = _by_tensor(self._advance())
            for name in arrived.keys() - due[number]:
                self._unpack(arrived[name])
            for name in due[number]:
                self._unpack(arrived.get(name, []))
                yield name, self._assemble(name)
        self._await_events()

    def destination(self, slice_: Slice) -> Tensor:
        return slice_.needed.of_tensor(self._target(slice_.tensor))

    def _unpack(self, parts: list[tuple[Slice, Tensor]]) -> None:
        start = time.perf_counter()
        for each, matrix in parts:
            self.destination(each).copy_(matrix)
            self._slices[each.tensor].append(each)
        self.seconds["unpack"] += time.perf_counter() - start

    def _assemble(self, name: str) -> Tensor:
        """Return the tensor `name` with every slice that this rank needs; copies local slices."""
        start = time.perf_counter()
        local, full = self.plan.local.get(name, []), self.shapes[name]
        whole = len(local) == 1 and local[0].size == math.prod(full)
        owned = self.source(local[0]) if whole else None
        if owned is not None and owned.dtype == self.dtype:
            tensor = owned.reshape(full)  # a single slice covers the whole tensor
        else:
            tensor = self._filled(name, local)
        self.seconds["unpack"] += time.perf_counter() - start
        return tensor

    def _filled(self, name: str, local: list[Slice]) -> Tensor:
        for each in local:
            source = self.source(each)
            self.destination(each).copy_(source)
            self.ledger.note_local(each, source)
        for each in (*local, *self._slices.pop(name, [])):
            self.ledger.note_slices(each, self.destination(each)[None])
        tensor = self._target(name)
        del self._open[name]
        return tensor

    def _target(self, name: str) -> Tensor:
        if name not in self._open:
            shape = self.shapes[name]
            self._open[name] = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._open[name]


def _by_tensor(parcels: list[Parcel]) -> _Arrived:
    arrived: _Arrived = defaultdict(list)
    for parcel in parcels:
        for run, matrices in parcel.runs():
            slices = parcel.message.slices[run.first : run.stop]
            for each, matrix in zip(slices, matrices.unbind(), strict=True):
                arrived[each.tensor].append((each, matrix))
    return arrived


def _batches(slices: list[Slice]) -> Iterator[list[Slice]]:
    """Yield slices in batches: those of weights with adapters are computed, not views."""
    batch, size = list[Slice](), 0
    for each in slices:
        if batch and size + each.size > LOCAL_ELEMENTS:
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += each.size
    yield batch


@dataclass(kw_only=True)
class Overwriting(Transfer):
    """A transfer that writes into `live`, the engine's own parameters by name."""

    live: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._live: dict[str, Matrix] = {}

    @without_garbage_collection()
    def write(self) -> None:
        """Exchange all rounds; write each slice that this rank needs."""
        self._launch(0)
        start = time.perf_counter()
        local = [each for slices in self.plan.local.values() for each in slices]
        for batch in _batches(local):
            sources = [self.source(each) for each in batch]
            destinations = [self.destination(each) for each in batch]
            copy_all(destinations, sources)
            if self.ledger.full:
                for each, source, place in zip(batch, sources, destinations, strict=True):
                    self.ledger.note_local(each, source)
                    self.ledger.note_slices(each, place[None])
        self.seconds["unpack"] += time.perf_counter() - start
        for _ in self.plan.rounds:
            self._unpack(self._advance())
        self._await_events()

    def destination(self, slice_: Slice) -> Tensor:
        return slice_.needed.of_matrix(self._parameter(slice_.needed.parameter))

    def _unpack(self, parcels: list[Parcel]) -> None:
        start = time.perf_counter()
        destinations, sources = list[Tensor](), list[Tensor]()
        for parcel in parcels:
            for run, matrices in parcel.runs():
                destinations.append(self._rows(run))
                sources.append(matrices.view(-1, run.width))
        copy_all(destinations, sources)
        if self.ledger.full:
            self._note(parcels)
        self.seconds["unpack"] += time.perf_counter() - start

    def _note(self, parcels: list[Parcel]) -> None:
        """Record the sums of slices as the engine has them."""
        for parcel in parcels:
            for run in parcel.message.runs:
                matrices = self._rows(run).unflatten(0, (-1, run.height))
                self.ledger.note_slices(parcel.message.slices[run.first], matrices)

    def _rows(self, run: CopyRun) -> Tensor:
        """Return the rectangle of the engine's parameter that a run is for."""
        first, stop, _, height, width, name, top, left = run
        matrix = self._live.get(name) or self._parameter(name)
        return matrix.rectangle((stop - first) * height, width, top, left)

    def _parameter(self, name: str) -> Matrix:
        if name not in self._live:
            self._live[name] = Matrix(self.live[name].detach())
        return self._live[name]
