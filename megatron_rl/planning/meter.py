"""What a rank holds, sends and multiplies, counted operation by operation.

A dispatch mode sees every tensor that torch makes, on a device or on none (`meta`), and every
collective. It knows nothing of what a kernel allocates inside.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Stand-ins: what they make belongs to the line that asked for it.
STAND_INS = tuple(
    os.path.join(PACKAGE, *part) for part in (("planning", ""), ("actor", "rehearsal"))
)
MEGATRON_CORE = os.path.join("", "megatron", "core", "")
INSIDE_A_COLLECTIVE = "inside a collective"  # in place of a source line
HOST = "host"  # the category of page-locked memory, which is not the device's
_NO_MESSAGE = ("barrier", "monitored_barrier_")


@dataclass(frozen=True)
class Collective:
    """All calls of one collective in one group during one phase; bytes of what each was handed."""

    operation: str
    group: str
    ranks: int
    count: int
    bytes: int


@dataclass
class PhaseCount:
    """What the meter saw in one phase."""

    peak: int = 0
    by_category: dict[str, int] = field(default_factory=dict)  # at the peak
    by_line: dict[tuple[str, str], int] = field(default_factory=dict)  # (category, source line)
    flops: int = 0
    messages: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    message_bytes: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    stalls: Counter[str] = field(default_factory=Counter)  # source line: reads by the host

    @property
    def collectives(self) -> list[Collective]:
        """By operation, group and its size."""
        return [Collective(*k, n, self.message_bytes[k]) for k, n in sorted(self.messages.items())]


class Meter(TorchDispatchMode):
    """Counts tensors for which `counts` holds; sizes are rounded up to `granularity` bytes.

    New tensors belong to the present `category`. group_names: what process groups are called, by
    torch's name of them.
    """

    def __init__(
        self, *, counts: Callable[[Tensor], bool] = lambda tensor: True, granularity: int = 1
    ) -> None:
        super().__init__()
        self.counts, self.granularity = counts, granularity
        self.category, self.group_names = "weights", {}  # type: ignore[var-annotated]
        self.total, self.phases = 0, {"start": PhaseCount()}
        self.phase = self.phases["start"]
        self._live: Counter[str] = Counter()
        self._lines: dict[tuple[str, str], int] = {}
        self._known: dict[int, tuple[Any, int, tuple[str, str]]] = {}  # by storage

    def begin(self, name: str) -> None:
        """What follows belongs to phase `name`."""
        self.phase = self.phases.setdefault(name, PhaseCount())
        self._note_peak()

    def add_flops(self, flops: int) -> None:
        """Count what no operation shows."""
        self.phase.flops += flops

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes now, by category."""
        return {name: size for name, size in self._live.items() if size and name != HOST}

    @property
    def held_on_host(self) -> int:
        """Bytes of page-locked memory now."""
        return self._live[HOST]

    def relabel(self, tensor: Tensor, category: str) -> None:
        """Let a tensor's memory belong to another category."""
        key = tensor.untyped_storage()._cdata
        if key in self._known:
            reference, size, (old, line) = self._known[key]
            self._add(-size, (old, line))
            self._add(size, (category, line))
            self._known[key] = (reference, size, (category, line))

    @contextmanager
    def watching(self) -> Iterator[Meter]:
        """Count what happens inside; storages that are emptied and filled again are followed."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (key := storage._cdata) in self._known:
                reference, before, place = self._known[key]
                rounded = self._round(size)
                self._known[key] = (reference, rounded, place)
                self._add(rounded - before, place)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized), self:
            yield self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = self.run(func, args, kwargs or {})
        if func.namespace == "c10d":
            self._count_message(func, args)
        else:
            self.phase.flops += _flops(func.overloadpacket, args)
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor) and self.counts(tensor):
                self._track(tensor)
        return made

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation itself."""
        return func(*args, **kwargs)

    def _round(self, size: int) -> int:
        return -(-size // self.granularity) * self.granularity

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        line = source_line()
        if line == INSIDE_A_COLLECTIVE:  # gloo's reduce-scatter copies its input; NCCL's does not
            return
        size, place = self._round(storage.nbytes()), (self.category, line)
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._known[key] = (reference, size, place)
        self._add(size, place)

    def _forget(self, key: int) -> None:
        _, size, place = self._known.pop(key)
        self._add(-size, place)

    def _add(self, size: int, place: tuple[str, str]) -> None:
        self._live[place[0]] += size
        if place[0] == HOST:
            return
        self.total += size
        self._lines[place] = self._lines.get(place, 0) + size
        self._note_peak()

    def _note_peak(self) -> None:
        if self.total > self.phase.peak:
            self.phase.peak = self.total
            self.phase.by_category = dict(self.held)
            self.phase.by_line = self._lines.copy()

    def _count_message(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._opname
        if name in _NO_MESSAGE:
            return
        boxed = next(x for x in args if isinstance(x, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
        key = (name, self.group_names.get(group.group_name, group.group_name), group.size())
        self.phase.messages[key] += 1
        self.phase.message_bytes[key] += max(_bytes(part) for part in args[:2])


def _bytes(tensors: Any) -> int:
    leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def _flops(operation: Any, args: tuple[Any, ...]) -> int:
    """Of a matrix product or the CPU's attention; an addition and a multiplication count as 2."""
    aten = torch.ops.aten
    if operation is aten.mm or operation is aten.bmm:
        return 2 * args[0].numel() * args[1].shape[-1]
    if operation is aten.addmm or operation is aten.addmm_ or operation is aten.baddbmm:
        return 2 * args[1].numel() * args[2].shape[-1]
    if operation is aten._scaled_dot_product_flash_attention_for_cpu:
        return 4 * args[0].numel() * args[1].shape[2]
    if operation is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return 10 * args[1].numel() * args[2].shape[2]
    return 0


_PLACES: dict[CodeType, str | None] = {}


def source_line() -> str:
    """The innermost line of this project or of Megatron-core that is being executed."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code not in _PLACES:
            _PLACES[code] = _place(code.co_filename)
        if (place := _PLACES[code]) is not None:
            return place if place == INSIDE_A_COLLECTIVE else f"{place}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def _place(file: str) -> str | None:
    if file.startswith(PACKAGE):
        return None if file.startswith(STAND_INS) else "megatron_rl/" + file.removeprefix(PACKAGE)
    if file == dist.distributed_c10d.__file__:
        return INSIDE_A_COLLECTIVE
    _, found, rest = file.rpartition(MEGATRON_CORE)
    return "megatron/core/" + rest if found else None
