"""The two ways to unpack the rounds of a transfer.

`Assembly` puts slices together to tensors of full shape for the engine's loaders; memory outside
the engine's own slices is never touched. `Overwriting` writes them into the engine's parameters.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.resharding.parcels import Block, Parcel, copy_all, stacked
from megatron_rl.resharding.pieces import as_matrix
from megatron_rl.resharding.slices import Slice
from megatron_rl.resharding.transfer import Transfer

LOCAL_ELEMENTS = 1 << 25  # of local slices that are copied together
_Arrived = dict[str, list[tuple[Slice, Tensor | None]]]  # by tensor; None: already in place


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

    def _unpack(self, parts: list[tuple[Slice, Tensor | None]]) -> None:
        start = time.perf_counter()
        for each, matrix in parts:
            if matrix is not None:  # otherwise it was received in place
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
            self._open[name] = self.scratch.tensor(self.shapes[name])
        return self._open[name]


def _by_tensor(parcels: list[Parcel]) -> _Arrived:
    arrived: _Arrived = defaultdict(list)
    for parcel in parcels:
        for number, each in enumerate(parcel.message.slices):
            matrix = None if number in parcel.outside else parcel.matrix(number)
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
        self._live: dict[str, Tensor] = {}

    def write(self) -> None:
        """Exchange all rounds; write each slice that this rank needs."""
        self._launch(0)
        start = time.perf_counter()
        local = [each for slices in self.plan.local.values() for each in slices]
        for batch in _batches(local):
            sources = [self.source(each) for each in batch]
            copy_all([self.destination(each) for each in batch], sources)
            for each, source in zip(batch, sources, strict=True):
                self.ledger.note_local(each, source)
                self.ledger.note_slices(each, self.destination(each)[None])
        self.seconds["unpack"] += time.perf_counter() - start
        for _ in self.plan.rounds:
            self._unpack(self._advance())
        self._await_events()

    def destination(self, slice_: Slice) -> Tensor:
        return slice_.needed.of_matrix(self._parameter(slice_.needed.parameter))

    def _unpack(self, parcels: list[Parcel]) -> None:
        start = time.perf_counter()
        found = [
            (parcel, block, self._rows(parcel, block))
            for parcel in parcels
            for block in parcel.places.blocks
        ]
        # A slice received in place is a block of its own.
        copied = [each for each in found if each[1].first not in each[0].outside]
        blocks = [parcel.block(block) for parcel, block, _ in copied]
        copy_all([rows for *_, rows in copied], blocks)
        for parcel, block, rows in found if self.ledger.full else ():
            for first, matrices in stacked(block, parcel.message.slices, rows):
                self.ledger.note_slices(parcel.message.slices[first], matrices)
        self.seconds["unpack"] += time.perf_counter() - start

    def _rows(self, parcel: Parcel, block: Block) -> Tensor:
        """Return the rectangle of the engine's parameter that a block is for."""
        needed = parcel.message.slices[block.first].needed
        parameter, width = self._parameter(needed.parameter), needed.shape[1]
        rows = parameter.narrow(0, block.top, block.height)
        return rows if width == parameter.shape[1] else rows.narrow(1, needed.left, width)

    def _parameter(self, name: str) -> Tensor:
        if name not in self._live:
            self._live[name] = as_matrix(self.live[name].detach())
        return self._live[name]
