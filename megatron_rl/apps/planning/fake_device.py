"""Fake device whose tensors are torch `meta` tensors, and the meter that counts its operations.

Meta tensors have no values. Python code sees tensors on the fake device. Reads by the host return a
fixed value (1 for a scalar, nan for a float tensor, 0 for an integer tensor) and are counted as
stalls, because the host would wait for a real device.

The meter is a dispatch mode that intercepts every tensor that torch creates, real or `meta`, and
every collective. It does not count allocations inside a kernel.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

PACKAGE = str(Path(__file__).parents[2]) + os.sep
# Allocations in these files are attributed to their callers.
FAKES = tuple(
    os.path.join(PACKAGE, *path) for path in (("apps", "planning", ""), ("actor", "dry_run"))
)
MEGATRON_CORE = os.path.join("", "megatron", "core", "")
INSIDE_A_COLLECTIVE = "inside a collective"  # used as a source line
HOST_CATEGORY = "host"  # the category of page-locked host memory
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
    attention_flops: int = 0  # part of `flops`
    kernels: int = 0  # operations that compute or copy
    moved: int = 0  # bytes that they read and write
    kept: int | None = None  # activations when the backward pass begins
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
        """Add the FLOPs of an attention kernel, which the dispatch mode does not intercept."""
        self.phase.flops += flops
        self.phase.attention_flops += flops

    @property
    def live_bytes(self) -> Mapping[str, int]:
        """Current bytes by category."""
        return {name: size for name, size in self._live.items() if size and name != HOST_CATEGORY}

    @property
    def live_bytes_on_host(self) -> int:
        """Current bytes of page-locked host memory."""
        return self._live[HOST_CATEGORY]

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
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and count it."""
        if self.phase.kept is None and torch._C._current_graph_task_id() >= 0:
            self.phase.kept = self._live["activations"]
        result = self.run(func, args, kwargs)
        if func.namespace == "c10d":
            self._count_message(func, args)
        else:
            self._count_kernel(func, args, result)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and self.counts(tensor):
                self._track(tensor)
        return result

    def _count_kernel(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Count an operation's FLOPs and the bytes that it reads and writes; views have none.

        A new tensor without values stands for a fused kernel's output.
        """
        if _is_view(func):
            return
        phase = self.phase
        phase.kernels += 1
        if flops := _flops(func.overloadpacket, args):  # products read while they compute
            phase.flops += flops
            if func.overloadpacket in _ATTENTION:
                phase.attention_flops += flops
        else:
            phase.moved += sum(map(_size, filter(self.counts, _tensors((args, result)))))

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
        if owner[0] == HOST_CATEGORY:
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


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operation's arguments, which are nested lists at most."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensors: Any) -> int:
    return sum(map(_size, _tensors(tensors)))


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


_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


@cache
def _is_view(func: Any) -> bool:
    """Return whether an operation returns a part of its input without computing anything."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


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


META, HOST = torch.device("meta"), torch.device("cpu")
# A CPU with an index stands for the fake device; tensors without it are the host's own.
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu", 0)
_GET_DEVICE = Tensor.device.__get__
_GET_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
# Saved originals: Megatron-core replaces some of these names when it runs without CUDA.
_TYPE, _CUDA, _TO, _PIN = Tensor.type, Tensor.cuda, Tensor.to, Tensor.pin_memory
_TENSOR, _PARAMETERS = torch.tensor, (torch.empty, torch.zeros, torch.ones)
_MAPPED = {_GET_DEVICE, _GET_IS_CUDA, _TYPE, _CUDA, _TO, _PIN, _TENSOR}


class FakeDevice(TorchFunctionMode):
    """Function mode that maps `device` to meta tensors and back."""

    def __init__(self, device: torch.device, meter: FakeDeviceMeter) -> None:
        super().__init__()
        self.device, self.meter = device, meter
        self.is_default = False  # whether factories without a device argument use this one

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not kwargs and not self.is_default and func not in _MAPPED and func is not Tensor.type:
            return func(*args)
        kwargs = kwargs or {}
        if func == _GET_DEVICE:
            actual = func(*args)
            return self.device if actual.type == "meta" else actual
        if func == _GET_IS_CUDA:
            return args[0].is_meta and self.device.type == "cuda"
        if func in (_TYPE, Tensor.type) and len(args) == 1 and not kwargs:
            kind = "torch.cuda." if self.device.type == "cuda" else "torch."
            return _TYPE(*args).replace("torch.meta.", kind)
        if func is _CUDA:
            return args[0].to(META)
        if func is _PIN:
            return args[0]
        if func is _TO:
            args = tuple(META if self._is_this_device(each) else each for each in args)
        if func is _TENSOR:
            args = (self._with_values(args[0]), *args[1:])
        requested = kwargs.get("device")
        if self._is_this_device(requested) or (
            self.is_default and func in _PARAMETERS and (requested is None or _is_host(requested))
        ):
            kwargs = {**kwargs, "device": META}
        if kwargs.get("pin_memory"):
            return self._pinned(func, args, {**kwargs, "device": META, "pin_memory": False})
        return func(*args, **kwargs)

    def _pinned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Create page-locked host memory as a meta tensor, so that nothing is allocated."""
        category, self.meter.category = self.meter.category, HOST_CATEGORY
        try:
            return func(*args, **kwargs)
        finally:
            self.meter.category = category

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Create parameters on this device where no device is given."""
        self.is_default = True
        try:
            yield
        finally:
            self.is_default = False

    def _is_this_device(self, requested: Any) -> bool:
        if isinstance(requested, str) and ("cuda" in requested or requested == "cpu:0"):
            requested = torch.device(requested)
        if not isinstance(requested, torch.device):
            return False
        return requested == self.device or requested.type == self.device.type == "cuda"

    def _with_values(self, data: Any) -> Any:
        """Replace device scalars in nested lists by values, counting one stall for each."""
        leaves, nest = tree_flatten(data)
        if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            return data
        return tree_unflatten([self._value(leaf) for leaf in leaves], nest)

    def _value(self, leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.is_meta):
            return leaf
        self.meter.note_stall()
        return 1.0 if leaf.dtype.is_floating_point else 1


def _is_host(requested: Any) -> bool:
    return requested == "cpu" or requested == HOST


# Arguments whose values a result may depend on.
_PLAIN = (
    int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class _Results:
    """Results of operations on meta tensors, made again for arguments of the same kind.

    Torch finds them in Python, where a dry run would spend most of its time: it repeats the same
    operations in each layer, pack and phase, and so do further dry runs.
    """

    LIMIT = 100_000  # number of kinds, of about a KiB each

    def __init__(self) -> None:
        # Size, stride and dtype; empty: the first argument; None: neither
        self._known: dict[Any, tuple[Any, ...] | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, or return a tensor like that of an earlier one."""
        is_in_place = _is_in_place(func)
        if not (is_in_place or _is_functional(func)):
            return func(*args, **kwargs)
        try:
            key = (func, torch.get_default_dtype(), _kinds(args), _kinds(kwargs.items()))
        except TypeError:  # its result depends on more
            return func(*args, **kwargs)
        if known := self._known.get(key):
            size, stride, dtype = known
            return torch.empty_strided(size, stride, dtype=dtype, device=META)
        if known is not None:
            return args[0]
        result = func(*args, **kwargs)
        if len(self._known) >= self.LIMIT:
            self._known.clear()
        if is_in_place:
            self._known[key] = () if result is args[0] else None
        elif key not in self._known:
            self._known[key] = _describe(result, (args, *kwargs.values()))
        return result


def _kinds(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return what a result on meta tensors depends on; raises TypeError for other arguments."""
    kinds: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_meta:
                raise TypeError("a tensor with values")
            kinds += value.dtype, value.shape, value.stride()
        elif isinstance(value, (tuple, list)):
            kinds.append(_kinds(value))
        elif isinstance(value, _PLAIN):
            kinds += type(value), value
        else:
            raise TypeError(f"{type(value)}")
    return tuple(kinds)


def _describe(result: Any, given: Any) -> tuple[Any, ...] | None:
    """Return size, stride and dtype of a tensor with memory of its own, all of which it uses."""
    if not (isinstance(result, Tensor) and result.is_meta):
        return None
    storage = result.untyped_storage()
    like = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=META)
    is_whole = storage.nbytes() == like.untyped_storage().nbytes()
    others = {each.untyped_storage()._cdata for each in _tensors(given)}
    if not is_whole or result.storage_offset() or storage._cdata in others:
        return None
    return result.shape, result.stride(), result.dtype


@cache
def _is_functional(func: Any) -> bool:
    """Return whether an operation changes none of its arguments, and returns no part of them."""
    schema = func._schema
    return all(each.alias_info is None for each in (*schema.arguments, *schema.returns))


@cache
def _is_in_place(func: Any) -> bool:
    """Return whether an operation only changes the values of its first argument, and returns it."""
    infos = [each.alias_info for each in (*func._schema.arguments, *func._schema.returns)]
    writes = [number for number, info in enumerate(infos) if info is not None and info.is_write]
    is_first = writes == [0, len(infos) - 1] and len(func._schema.returns) == 1
    return is_first and torch.Tag.inplace_view not in func.tags


_RESULTS = _Results()


class FakeDeviceMeter(Meter):
    """Meter of the fake device's tensors, which also returns values for reads by the host."""

    def __init__(self, device: torch.device) -> None:
        # On CPU, host and device share memory; CUDA's allocator rounds sizes up.
        on_cuda = device.type == "cuda"
        super().__init__(
            counts=(lambda tensor: tensor.is_meta) if on_cuda else (lambda tensor: True),
            granularity=512 if on_cuda else 1,
        )
        self.selected: list[int] = []  # number of elements that a masked selection returns

    def note_stall(self) -> None:
        """Count a wait of the host for the device at the current source line."""
        self.phase.stalls[source_line()] += 1

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and count it."""
        with torch._C.DisableTorchFunction():  # show meta tensors below Python
            return super().dispatch(func, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation on meta tensors, or return a fixed value for a read by the host."""
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            self.note_stall()
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is aten._to_copy.default and args[0].is_meta and _is_host(kwargs.get("device")):
            self.note_stall()
            dtype = kwargs.get("dtype") or args[0].dtype
            unknown = float("nan") if dtype.is_floating_point else 0
            return torch.full(args[0].shape, unknown, dtype=dtype)
        if func is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            if not kwargs.get("non_blocking") and not (len(args) > 2 and args[2]):
                self.note_stall()
            return args[0]
        if func is aten.masked_select.default and args[0].is_meta:
            return args[0].new_empty(self.selected[-1])
        return _RESULTS.run(func, args, kwargs)


@contextmanager
def fake_device(device: torch.device) -> Iterator[tuple[FakeDevice, FakeDeviceMeter]]:
    """Run the block as if `device` (`CUDA` or `CPU` of this module) were present."""
    meter = FakeDeviceMeter(device)
    mode = FakeDevice(device, meter)
    # Otherwise torch disables function modes during a backward pass.
    in_backward = mock.patch.object(torch.autograd, "has_torch_function", lambda *_: False)
    eager = torch.compiler.set_stance("force_eager")  # meta tensors need no compiled code
    with eager, warnings.catch_warnings(), in_backward, meter.watching(), mode:
        # All calls pass through this file, so torch attributes other code's warnings to it.
        warnings.filterwarnings("ignore", category=UserWarning, module=re.escape(__name__))
        yield mode, meter
