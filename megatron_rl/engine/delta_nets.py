"""Models with gated delta nets in vLLM: arguments, its core on a CPU, and imports of images.

On a CPU vLLM computes the core of a gated delta net in bfloat16 only, with the convolution's
weights packed when they are loaded, which a weight sync would not repeat. `use_own_core` replaces
it by the rule that the actor trains with, in the model's dtype with float32 states.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.distributed.gated_delta import torch_rule
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.models.shape import ModelShape

# What vLLM's code for images needs of it at import, for a model that has text alone.
_OF_TORCHVISION = ("transforms", "transforms.v2", "transforms.v2.functional")


def delta_arguments(shape: ModelShape, *, on_cuda: bool) -> dict[str, Any]:
    """Return vLLM's arguments for a model's gated delta nets; none if it has no such nets.

    States are kept in float32, as in training. On a CPU prefix caching needs chunked prefill, with
    which vLLM rejects requests that have a seed.
    """
    if shape.delta is None:
        return {}
    states = {"mamba_ssm_cache_dtype": "float32"}
    return states if on_cuda else {**states, "enable_prefix_caching": False}


@contextmanager
def without_torchvision(shape: ModelShape) -> Iterator[None]:
    """Let vLLM import Qwen3.5's classes, text alone, where torchvision is not installed."""
    is_missing = sys.modules.get("torchvision", ...) is None or find_spec("torchvision") is None
    if "torchvision" not in shape.traits.engine_imports or not is_missing:
        yield
        return
    names = ["torchvision", *(f"torchvision.{name}" for name in _OF_TORCHVISION)]
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    hidden = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules |= modules
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules |= hidden


def use_own_core() -> None:
    """Replace vLLM's core on a CPU; before it constructs a model."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType

    # vLLM infers the operation's schema from these types when it constructs the first layer.
    own = (Tensor, Tensor, Tensor, Tensor, LayerNameType, None)
    names = ("mixed_qkv", "b", "a", "core_attn_out", "layer_name", "return")
    _core.__annotations__ = dict(zip(names, own, strict=True))
    gdn_attention.cpu_gdn_attention_core = _core
    if hasattr(_custom_ops, "causal_conv1d_weight_pack"):  # otherwise weights stay as they are
        del _custom_ops.causal_conv1d_weight_pack


def _core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: str) -> None:
    """Convolve and apply the rule to all requests of a step; updates their states in place.

    mixed_qkv [t, D], b, a [t, H] -> core_attn_out [t, H, d_v]. Each request is computed by itself,
    so that its log-probs do not depend on the others.
    """
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # the run that measures memory
        return
    step = context.attn_metadata[layer.prefix]
    taps = layer.conv1d.weight.squeeze(1)
    starts = step.non_spec_query_start_loc.tolist()
    slots = step.non_spec_state_indices_tensor.tolist()
    known = step.has_initial_state
    for request in range(step.num_decodes + step.num_prefills):
        part, slot = slice(starts[request], starts[request + 1]), slots[request]
        past, state = layer.kv_cache[0][slot], layer.kv_cache[1][slot]  # [H, d_v, d_k]
        past = past if past.shape[0] == taps.shape[1] - 1 else past.T  # [taps - 1, D]
        if request >= step.num_decodes and not (known is not None and known[request]):
            past.zero_()
            state.zero_()
        x = torch.cat((past, mixed_qkv[part]))
        past.copy_(x[len(x) - len(past) :])
        mixed = F.silu(F.conv1d(x.T[None].float(), taps[:, None].float(), groups=len(taps))[0].T)
        q, k, v = (y[0] for y in layer.rearrange_mixed_qkv(mixed))  # [t, K or H, size]
        q, k = (y * y.pow(2).sum(-1, keepdim=True).add(1e-6).rsqrt() for y in (q, k))
        g = -layer.A_log.float().exp() * F.softplus(a[part].float() + layer.dt_bias.float())
        layout = SequenceLayout((len(v),), torch.ones(len(v), dtype=torch.bool))
        before = state.transpose(1, 2).float()[None]
        out, after = torch_rule(q, k, v, g, b[part].float().sigmoid(), before, layout)
        state.copy_(after[0].transpose(1, 2))
        core_attn_out[part] = out
