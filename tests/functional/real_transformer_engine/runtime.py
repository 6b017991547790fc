"""The real Python of Transformer Engine in this process, on the CPU, over `compiled.py`.

Its modules ask for a CUDA device when they are made and for CUDA tensors when they run; asked from
there, this process answers as if it had one. Not covered: kernels, their rounding and speed, the
choice of attention backend (it is made here), fp8.
"""

import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

from tests.functional.real_transformer_engine import compiled


class _Anything(ModuleType):
    """A module that is imported for exporting models to ONNX, which nothing here does."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


def use_release(transformer_engine: str) -> None:
    """Import this folder's Transformer Engine from now on; before Megatron-core is imported."""
    assert not any(name.startswith("megatron.") for name in sys.modules)
    sys.path.insert(0, transformer_engine)
    _load_transformer_engine(Path(transformer_engine))


def _load_transformer_engine(folder: Path) -> None:
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # load no shared library
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    exporting = "transformer_engine.pytorch.onnx_extensions"
    sys.modules[exporting] = _Anything(exporting)
    common = importlib.import_module("transformer_engine.common")
    module = compiled.build(folder.name.rsplit("-", 1)[1])
    for path in folder.glob("transformer_engine/pytorch/**/*.py"):
        for name in re.findall(r"\btex\.(\w+)", path.read_text()):
            getattr(module, name)  # now in its namespace, which is imported by a star

    def load(framework: str) -> None:
        sys.modules["transformer_engine_torch"] = module

    common.load_framework_extension = load
    importlib.import_module("transformer_engine.pytorch")
    _pretend_cuda()
    _choose_attention()
    _wait_once()


def _pretend_cuda() -> None:
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="H100"
    )
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.cuda.Event = mock.MagicMock
    _answer("is_cuda", lambda code: True, True)
    # Attention asserts half precision for its kernels; ours take float32, in which two
    # computations can be compared to rounding.
    _answer("dtype", lambda code: code.co_qualname.startswith("FusedAttention.forward.<locals>."),
            torch.bfloat16)  # fmt: skip
    utils = importlib.import_module("transformer_engine.pytorch.utils")
    utils._empty_tensor = torch.Tensor  # made in backward, where nothing translates for the CPU
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    made = base.TransformerEngineBaseModule.__init__

    def init(self, *args, **kwargs):
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            made(self, *args, **kwargs)

    base.TransformerEngineBaseModule.__init__ = init


def _answer(attribute: str, asks, answer) -> None:
    """Give a tensor's attribute another value where Transformer Engine's code asks for it."""
    true = getattr(torch.Tensor, attribute)

    def get(tensor):
        frame = sys._getframe(1)
        ours = frame.f_globals.get("__name__", "").startswith("transformer_engine")
        return answer if ours and asks(frame.f_code) else true.__get__(tensor)

    setattr(torch.Tensor, attribute, property(get))


def watch_comparisons() -> list[str]:
    """Places where Transformer Engine compares tensors: each would wait for the device."""
    seen, equal = [], torch.equal

    def watched(*pair):
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__", "").startswith("transformer_engine"):
            seen.append(frame.f_code.co_qualname)
        return equal(*pair)

    torch.equal = watched
    return seen


def _choose_attention() -> None:
    """cuDNN's fused attention, as on a device of compute capability 9.0."""
    utils = "transformer_engine.pytorch.attention.dot_product_attention.utils"
    fused = importlib.import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
    backend = fused.FusedAttnBackend["F16_arbitrary_seqlen"]
    chosen = (False, None, True, backend, False, [False, True, False])
    importlib.import_module(utils).get_attention_backend = lambda *_: chosen


class _Once:
    """A message that may be waited for again, as NCCL's; gloo would wait for another one."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        if self.work is not None:
            self.work.wait()
        self.work = None


def _wait_once() -> None:
    ring = importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
    )
    communicate = ring.flash_attn_p2p_communicate
    ring.flash_attn_p2p_communicate = lambda *args: [_Once(work) for work in communicate(*args)]
