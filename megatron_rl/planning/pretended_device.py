"""A device that is not there: its tensors are torch's `meta` tensors, which have no values.

Python sees tensors on the pretended device. What the host reads from it is answered (a number
with 1, a tensor of floats with nan, of integers with 0) and noted, for on a real device the host
would wait there.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_rl.planning.meter import HOST as ON_HOST
from megatron_rl.planning.meter import Meter, source_line

META, HOST = torch.device("meta"), torch.device("cpu")
# A CPU with an index stands for the pretended one; tensors without it are the host's own.
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu", 0)
_GET_DEVICE = Tensor.device.__get__
_GET_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
# Kept: while Megatron-core runs without CUDA some of these names mean something else.
_TYPE, _CUDA, _TO, _PIN = Tensor.type, Tensor.cuda, Tensor.to, Tensor.pin_memory
_TENSOR, _PARAMETERS = torch.tensor, (torch.empty, torch.zeros, torch.ones)


class PretendedDevice(TorchFunctionMode):
    """Translates between what Python asks of `device` and meta tensors."""

    def __init__(self, device: torch.device, meter: PretendedMeter) -> None:
        super().__init__()
        self.device, self.meter = device, meter
        self.is_default = False  # whether factories that name no device mean this one

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _GET_DEVICE:
            found = func(*args)
            return self.device if found.type == "meta" else found
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
            args = tuple(META if self._means_this(each) else each for each in args)
        if func is _TENSOR:
            args = (self._with_values(args[0]), *args[1:])
        asked = kwargs.get("device")
        if self._means_this(asked) or (
            self.is_default and func in _PARAMETERS and (asked is None or _is_host(asked))
        ):
            kwargs = {**kwargs, "device": META}
        if kwargs.get("pin_memory"):
            return self._pinned(func, args, {**kwargs, "device": META, "pin_memory": False})
        return func(*args, **kwargs)

    def _pinned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Page-locked memory has no values either, or it would be real."""
        category, self.meter.category = self.meter.category, ON_HOST
        try:
            return func(*args, **kwargs)
        finally:
            self.meter.category = category

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Parameters that are made without a device are made on this one."""
        self.is_default = True
        try:
            yield
        finally:
            self.is_default = False

    def _means_this(self, asked: Any) -> bool:
        if isinstance(asked, str) and ("cuda" in asked or asked == "cpu:0"):
            asked = torch.device(asked)
        if not isinstance(asked, torch.device):
            return False
        return asked == self.device or asked.type == self.device.type == "cuda"

    def _with_values(self, data: Any) -> Any:
        """Nested lists whose device scalars are read, one wait for each."""
        leaves, nest = tree_flatten(data)
        if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            return data
        return tree_unflatten([self._value(leaf) for leaf in leaves], nest)

    def _value(self, leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.is_meta):
            return leaf
        self.meter.note_stall()
        return 1.0 if leaf.dtype.is_floating_point else 1


def _is_host(asked: Any) -> bool:
    return asked == "cpu" or asked == HOST


class PretendedMeter(Meter):
    """Counts the pretended device's tensors, and answers what the host reads from them."""

    def __init__(self, device: torch.device) -> None:
        # On a CPU host and device are the same memory; CUDA's allocator rounds.
        on_cuda = device.type == "cuda"
        super().__init__(
            counts=(lambda tensor: tensor.is_meta) if on_cuda else (lambda tensor: True),
            granularity=512 if on_cuda else 1,
        )
        self.selected: list[int] = []  # how many a masked selection will find

    def note_stall(self) -> None:
        """The host waits for the device here."""
        self.phase.stalls[source_line()] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # below Python tensors are what they are
            return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation on meta tensors, or the answer to what it reads."""
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
        return func(*args, **kwargs)


@contextmanager
def pretended(device: torch.device) -> Iterator[tuple[PretendedDevice, PretendedMeter]]:
    """Run what is inside as if `device` (`CUDA` or `CPU` of this module) were there."""
    meter = PretendedMeter(device)
    mode = PretendedDevice(device, meter)
    # Else torch takes function modes away for the length of a backward pass.
    in_backward = mock.patch.object(torch.autograd, "has_torch_function", lambda *_: False)
    eager = torch.compiler.set_stance("force_eager")  # nothing is compiled for what has no values
    with eager, warnings.catch_warnings(), in_backward, meter.watching(), mode:
        # What others warn of would be told of this file, through which all calls go.
        warnings.filterwarnings("ignore", category=UserWarning, module=re.escape(__name__))
        yield mode, meter
