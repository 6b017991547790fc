"""Fake device whose tensors are torch `meta` tensors, which have no values.

Python code sees tensors on the fake device. Reads by the host return a fixed value (1 for a scalar,
nan for a float tensor, 0 for an integer tensor) and are counted as stalls, because the host would
wait for a real device.
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

from megatron_rl.apps.planning.meter import HOST as ON_HOST
from megatron_rl.apps.planning.meter import Meter, source_line

META, HOST = torch.device("meta"), torch.device("cpu")
# A CPU with an index stands for the fake device; tensors without it are the host's own.
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu", 0)
_GET_DEVICE = Tensor.device.__get__
_GET_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
# Saved originals: Megatron-core replaces some of these names when it runs without CUDA.
_TYPE, _CUDA, _TO, _PIN = Tensor.type, Tensor.cuda, Tensor.to, Tensor.pin_memory
_TENSOR, _PARAMETERS = torch.tensor, (torch.empty, torch.zeros, torch.ones)


class FakeDevice(TorchFunctionMode):
    """Function mode that maps `device` to meta tensors and back."""

    def __init__(self, device: torch.device, meter: FakeDeviceMeter) -> None:
        super().__init__()
        self.device, self.meter = device, meter
        self.is_default = False  # whether factories without a device argument use this one

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
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
        category, self.meter.category = self.meter.category, ON_HOST
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # show meta tensors below Python
            return super().__torch_dispatch__(func, types, args, kwargs)

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
        return func(*args, **kwargs)


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
