"""Memory, messages and FLOPs of a rank, counted operation by operation.

A dispatch mode intercepts every tensor that torch creates, real or `meta`, and every collective. It
does not count allocations inside a kernel.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PACKAGE = str(Path(__file__).parents[2]) + os.sep
# Allocations in these files are attributed to their callers.
FAKES = tuple(
    os.path.join(PACKAGE, *path) for path in (("apps", "planning", ""), ("actor", "dry_run"))
)
MEGATRON_CORE = os.path.join("", "megatron", "core", "")
INSIDE_A_COLLECTIVE = "inside a collective"  # used as a source line
HOST = "host"  # the category of page-locked host memory
_NO_MESSAGE = ("barrier", "monitored_barrier_")


@dataclass(frozen=True)
class Collective:
    """All calls of one collective in one group during one phase, with their total input bytes."""

    operation: str
    group: str
    ranks: int
    count: int
    bytes: int


@dataclass
class PhaseCount:
    """Counts of one phase."""

    peak: int = 0
    by_category: dict[str, int] = field(default_factory=dict)  # at the peak
    by_line: dict[tuple[str, str], int] = field(default_factory=dict)  # (category, source line)
    flops: int = 0
    messages: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    message_bytes: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    stalls: Counter[str] = field(default_factory=Counter)  # source line: reads by the host

    @property
    def collectives(self) -> list[Collective]:
        """Collectives, sorted by operation, group and group size."""
        return [Collective(*k, n, self.message_bytes[k]) for k, n in sorted(self.messages.items())]


class Meter(TorchDispatchMode):
    """Dispatch mode that counts tensors for which `counts` is true.

    Sizes are rounded up to `granularity` bytes. New tensors belong to the current `category`.
    group_names: readable names of process groups, by torch's name.
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
        """Start phase `name`, or continue it."""
        self.phase = self.phases.setdefault(name, PhaseCount())
        self._note_peak()

    def add_flops(self, flops: int) -> None:
        """Add FLOPs of operations that the dispatch mode does not intercept."""
        self.phase.flops += flops

    @property
    def live_bytes(self) -> Mapping[str, int]:
        """Current bytes by category."""
        return {name: size for name, size in self._live.items() if size and name != HOST}

    @property
    def live_bytes_on_host(self) -> int:
        """Current bytes of page-locked host memory."""
        return self._live[HOST]

    def relabel(self, tensor: Tensor, category: str) -> None:
        """Move a tensor's memory to another category."""
        key = tensor.untyped_storage()._cdata
        if key in self._known:
            reference, size, (old, line) = self._known[key]
            self._add(-size, (old, line))
            self._add(size, (category, line))
            self._known[key] = (reference, size, (category, line))

    @contextmanager
    def watching(self) -> Iterator[Meter]:
        """Count within the block, including storages that are resized."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (key := storage._cdata) in self._known:
                reference, before, owner = self._known[key]
                rounded = self._round(size)
                self._known[key] = (reference, rounded, owner)
                self._add(rounded - before, owner)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized), self:
            yield self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = self.run(func, args, kwargs or {})
        if func.namespace == "c10d":
            self._count_message(func, args)
        else:
            self.phase.flops += _flops(func.overloadpacket, args)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and self.counts(tensor):
                self._track(tensor)
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation; subclasses may replace its result."""
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
        size, owner = self._round(storage.nbytes()), (self.category, line)
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._known[key] = (reference, size, owner)
        self._add(size, owner)

    def _forget(self, key: int) -> None:
        _, size, owner = self._known.pop(key)
        self._add(-size, owner)

    def _add(self, size: int, owner: tuple[str, str]) -> None:
        self._live[owner[0]] += size
        if owner[0] == HOST:
            return
        self.total += size
        self._lines[owner] = self._lines.get(owner, 0) + size
        self._note_peak()

    def _note_peak(self) -> None:
        if self.total > self.phase.peak:
            self.phase.peak = self.total
            self.phase.by_category = dict(self.live_bytes)
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
    """Return the FLOPs of a matrix product or of CPU attention; a multiply-add counts as 2."""
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


_SOURCES: dict[CodeType, str | None] = {}


def source_line() -> str:
    """Return the innermost line of this project or of Megatron-core that is being executed."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code not in _SOURCES:
            _SOURCES[code] = _source(code.co_filename)
        if (source := _SOURCES[code]) is not None:
            return source if source == INSIDE_A_COLLECTIVE else f"{source}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def _source(file: str) -> str | None:
    if file.startswith(PACKAGE):
        return None if file.startswith(FAKES) else "megatron_rl/" + file.removeprefix(PACKAGE)
    if file == dist.distributed_c10d.__file__:
        return INSIDE_A_COLLECTIVE
    _, matched, rest = file.rpartition(MEGATRON_CORE)
    return "megatron/core/" + rest if matched else None
