"""The two ways to unpack the rounds of a transfer.

`Assembly` puts slices together to tensors of full shape for the engine's loaders; memory outside
the engine's own slices is never touched. `Overwriting` writes them into the engine's parameters.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.resharding.parcels import Parcel, Run, copy_all
from megatron_rl.resharding.pieces import Matrix
from megatron_rl.resharding.push_schedule import without_garbage_collection
from megatron_rl.resharding.slices import Slice
from megatron_rl.resharding.transfer import Transfer

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

    def _rows(self, run: Run) -> Tensor:
        """Return the rectangle of the engine's parameter that a run is for."""
        first, stop, _, height, width, name, top, left = run
        matrix = self._live.get(name) or self._parameter(name)
        return matrix.rectangle((stop - first) * height, width, top, left)

    def _parameter(self, name: str) -> Matrix:
        if name not in self._live:
            self._live[name] = Matrix(self.live[name].detach())
        return self._live[name]
