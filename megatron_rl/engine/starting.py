"""Construction of vLLM in the trainer's process, and restoration of the state that it changes.

vLLM expects to own its process. Constructing `LLM` seeds Python, NumPy and torch, replaces
`torch.set_num_threads` on CPU, and writes environment variables that later child processes would
inherit (`LD_PRELOAD`, `LOCAL_WORLD_SIZE`; vllm/platforms/cpu.py, vllm/v1/worker/cpu_worker.py).
Seeded sampling on CPU still draws from torch's global generator.

Models with gated delta nets: on a CPU vLLM computes the core of a gated delta net in bfloat16 only,
with the convolution's weights packed when they are loaded, which a weight sync would not repeat.
`use_own_core` replaces it, in the model's dtype with float32 states: by the rule that the actor
trains with for what is read at once, and by the recurrence itself for each token after that. The
comparison of engine and actor before the first step is then one of the rule with the recurrence.
"""

from __future__ import annotations

import copy
import json
import os
import random
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.distributed.gated_delta import torch_rule
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape, read_model_shape
from megatron_rl.runtime.processes import without_garbage_collection

# What vLLM's code for images needs of it at import, for a model that has text alone.
_OF_TORCHVISION = ("transforms", "transforms.v2", "transforms.v2.functional")


def layer_arguments(shape: ModelShape, *, on_cuda: bool) -> dict[str, Any]:
    """Return vLLM's arguments for layers with latent attention, and for gated delta nets.

    States are kept in float32, as in training. On a CPU prefix caching needs chunked prefill, with
    which vLLM rejects requests that have a seed; and with AMX it would compute latent attention
    with kernels for bfloat16 alone, from packed copies of weights, whatever the dtype is.
    """
    arguments: dict[str, Any] = {}
    if shape.latent is not None and not on_cuda:
        arguments["attention_backend"] = "CPU_MLA"
    if shape.delta is not None:
        arguments["mamba_ssm_cache_dtype"] = "float32"
        arguments |= {} if on_cuda else {"enable_prefix_caching": False}
    return arguments


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


@contextmanager
def without_preloading() -> Iterator[None]:
    """Keep vLLM from writing `LD_PRELOAD`, which it does on a CPU for worker processes.

    Engines here have none, and in a folder with a space in its name each program that is started
    meanwhile would print an error of the linker.
    """
    from vllm.platforms import cpu

    with mock.patch.object(cpu, "glob", SimpleNamespace(glob=lambda pattern: [])):
        yield


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
        beta, before = b[part].float().sigmoid(), state.transpose(1, 2).float()
        if len(v) == 1:
            out, after = take_token(q[0], k[0], v[0], g[0], beta[0], before)
        else:
            layout = SequenceLayout((len(v),), torch.ones(len(v), dtype=torch.bool))
            out, states = torch_rule(q, k, v, g, beta, before[None], layout)
            after = states[0]
        state.copy_(after.transpose(1, 2))
        core_attn_out[part] = out


def take_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to one token as it is written; returns output and state after it.

    S <- exp(g) S,  S <- S + k (beta (v - S^T k))^T,  o = S^T q / sqrt(d_k).
    q, k [K, d_k], v [H, d_v], g, beta [H], state [H, d_k, d_v].
    """
    q, k = (x.repeat_interleave(len(v) // len(x), dim=0) for x in (q, k))  # [H, d_k]
    state = state * g.exp()[:, None, None]
    read = torch.einsum("hkv,hk->hv", state, k)
    state = state + torch.einsum("hk,hv->hkv", k, beta[:, None] * (v - read))
    return torch.einsum("hkv,hk->hv", state, q) / q.shape[-1] ** 0.5, state


# vLLM reads its own switches from the environment only.
_SWITCHES = {
    # The engine core must live in this process to share its weights and process group.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Keep the trainer's thread placement: automatic binding pins all ranks to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# Defaults that a user may override.
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # Its groups include one of all ranks, which would connect every pair of them a second time.
    "TORCH_GLOO_LAZY_INIT": "1",
}


def given_variables() -> frozenset[str]:
    """Return the variables for vLLM; before it starts, since it sets some of its own."""
    return frozenset(name for name in os.environ if name.startswith("VLLM_"))


def unknown_variables(given: Iterable[str]) -> str | None:
    """Name variables that begin as vLLM's and that its release does not read."""
    from vllm import __version__, envs

    if not (unknown := set(given) - {*envs.environment_variables}):
        return None
    return (
        f"the environment has {', '.join(sorted(unknown))}: vLLM {__version__} has no such "
        "variable, so it has no effect"
    )


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch on exit."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def preserved_process_state(*, rank: int, world_size: int, local_rank: int) -> Iterator[None]:
    """Restore the process state after vLLM is imported and constructed inside this block.

    rank, world_size, local_rank: the values that vLLM's external launcher backend reads.
    """
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    affinity = os.sched_getaffinity(0)
    environment = dict(os.environ)
    ranks = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank}
    os.environ.update(_SWITCHES | {name: str(value) for name, value in ranks.items()})
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        # Each small compiled function takes seconds to compile and saves nothing on CPU.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        with preserved_generators():
            yield
    finally:
        kept = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
        os.environ.clear()
        os.environ.update(environment | kept)
        os.sched_setaffinity(0, affinity)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)


def sleeping_bytes() -> int:
    """Return the bytes that this process's vLLM engine has released while it sleeps."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return int(CuMemAllocator.get_instance().get_current_usage())


# A garbage-collected LLM destroys the default process group of the whole process
# (vllm/distributed/parallel_state.py), so started ones are kept until the process exits.
_STARTED: list[Any] = []


def fixed_arguments(max_model_len: int, *, on_cuda: bool, partial: bool) -> dict[str, Any]:
    """Return the arguments of vLLM that do not depend on the config."""
    arguments: dict[str, Any] = {
        "max_model_len": max_model_len,
        "load_format": "dummy",
        "config_format": "hf",  # "auto" would prefer a params.json, which the actor does not read
        "distributed_executor_backend": "external_launcher",
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": on_cuda,
        "enforce_eager": not on_cuda,
        "max_num_batched_tokens": max(max_model_len, 8192 if on_cuda else 2048),
    }
    if not on_cuda:
        arguments |= {"block_size": 32, "enable_chunked_prefill": False}
    if partial:  # rollouts
        # A cached prefix would be of older weights; each step must return its own tokens.
        arguments |= {"enable_prefix_caching": False, "async_scheduling": False}
    return arguments


def check_expert_parallel(requested: bool, *, on_cuda: bool) -> bool:
    """Return `requested`; raise ValueError if expert parallelism is requested on CPU."""
    if requested and not on_cuda:
        raise UserError(
            "an expert parallel engine (rollout.expert_parallel) needs CUDA: vLLM's kernel for "
            "experts on CPU takes a slice of every expert; set it to false"
        )
    return requested


def start_vllm(topology: Topology, arguments: dict[str, Any], *, tokenizer: Any = None) -> Any:
    """Construct vLLM's LLM and restore the process state; collective.

    tokenizer: finds stop strings in what it decodes; None: vLLM decodes nothing.
    """
    local_rank = topology.device.index or 0 if topology.device.type == "cuda" else topology.rank
    with preserved_process_state(
        rank=topology.rank, world_size=topology.world_size, local_rank=local_rank
    ):
        with without_garbage_collection():
            from vllm import LLM

            from megatron_rl.engine import inproc

        inproc.register()
        shape = read_model_shape(arguments["model"])
        with without_torchvision(shape):
            _register_model(shape.architecture)
        if shape.delta is not None and topology.device.type == "cpu":
            use_own_core()
        arguments = (
            arguments | _tokenizer_arguments(tokenizer) | _text_arguments(arguments["model"], shape)
        )
        with (
            inproc.own_shared_memory(_shared_token()),
            _inspection_in_this_process(topology),
            without_preloading() if topology.device.type == "cpu" else nullcontext(),
        ):
            llm = LLM(weight_transfer_config={"backend": inproc.BACKEND}, **arguments)
    _STARTED.append(llm)
    # Later releases would destroy groups at interpreter exit, after the trainer's.
    if finalizer := getattr(llm.llm_engine.engine_core, "_finalizer", None):
        finalizer.detach()
    return llm


def _text_arguments(folder: str, shape: ModelShape) -> dict[str, Any]:
    """Let vLLM construct the text model alone of a model that also has a vision tower.

    Also where config.json names no class: vLLM would take the one without an output layer.
    """
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if shape.wrapper is None and config.get("architectures"):
        return {}

    def text_config(config: Any) -> Any:
        config = config.get_text_config()
        config.architectures = [shape.architecture]
        config.tie_word_embeddings = shape.tied_embeddings
        return config

    return {"hf_overrides": text_config}


def _register_model(architecture: str) -> None:
    """Register the model's class, which is imported here in any case.

    To inspect a class that is not registered, vLLM imports itself again in another process, unless
    a file in its cache describes the class.
    """
    from vllm import ModelRegistry

    if (model := ModelRegistry.models.get(architecture)) is not None:
        ModelRegistry.register_model(architecture, model.load_model_cls())


class GivenTokenizer:
    """vLLM's way to load a tokenizer: returns the trainer's.

    vLLM would choose a class by itself, whose texts may lack the spaces of a stop string.
    """

    given: ClassVar[Any] = None

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        from vllm.tokenizers.hf import get_cached_tokenizer

        return get_cached_tokenizer(copy.copy(cls.given))


def _tokenizer_arguments(tokenizer: Any) -> dict[str, Any]:
    if tokenizer is None:
        return {"skip_tokenizer_init": True}
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    GivenTokenizer.given = tokenizer
    mode = f"megatron_rl_{len(_STARTED)}"  # vLLM caches tokenizers by mode and folder
    TokenizerRegistry.register(mode, __name__, GivenTokenizer.__name__)
    RENDERER_REGISTRY.register(mode, "vllm.renderers.hf", "HfRenderer")
    return {"skip_tokenizer_init": False, "tokenizer_mode": mode}


@contextmanager
def _inspection_in_this_process(topology: Topology) -> Iterator[None]:
    """On CPU, let vLLM inspect the model's class here and not in a new interpreter.

    vLLM starts one so that CUDA is not initialized here. It imports everything again, also what
    `hide_unloadable_builds` hides in this process.
    """
    if topology.device.type == "cuda":
        yield
        return
    from vllm.model_executor.models import registry

    with mock.patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()):
        yield


def _shared_token() -> str:
    """Return a name for this run that is the same on all ranks."""
    box = [secrets.token_hex(6)]
    dist.broadcast_object_list(box)
    return box[0]
