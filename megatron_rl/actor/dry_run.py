"""Dry run of Megatron-core as one rank of a layout, without the other ranks.

Process groups are torch's "fake" ones: they have the right sizes and ranks but transfer no data.
Received data and value-dependent decisions are filled in: other ranks behave like this one, and
experts receive equal shares of the tokens, times a factor on this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.fusions import fused_bias_geglu, fused_bias_swiglu
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.utils import (
    local_multi_tensor_applier,
    local_multi_tensor_l2_norm,
    local_multi_tensor_scale,
)
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.actor import device as device_module
from megatron_rl.actor import dry_run_kernels, gated_delta_net, layers
from megatron_rl.actor import reference as reference_module
from megatron_rl.actor import training as training_module
from megatron_rl.distributed import context_attention, joined_attention
from megatron_rl.distributed.topology import Topology

Patch = tuple[Any, str, Any]

_LIBRARY = torch.library.Library("c10d", "IMPL")
for _name in (
    "allreduce_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_",
):
    _LIBRARY.impl(_name, lambda *_, **__: FakeWork().boxed(), "Meta")


class _Stream:
    """Replacement for a CUDA stream or event; all work on it is already complete."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("wait_stream", "wait_event", "record_event", "record", "wait", "synchronize"):
            return lambda *_, **__: self
        raise AttributeError(name)


def _nothing(*_: Any, **__: Any) -> None: ...


class Stage:
    """Simulated environment of one rank.

    device: the fake device. count_flops: called with attention's FLOPs. note_stall: called for
    each device synchronization that the simulated routing skips. selected: a stack with the number
    of tokens routed to the local experts, read by the simulation of `masked_select`. expert_share:
    tokens of this rank's experts over an equal share, with expert parallelism.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        count_flops: Callable[[int], None],
        note_stall: Callable[[], None],
        selected: list[int],
        expert_share: float = 1.0,
    ) -> None:
        self.device, self.count_flops, self.note_stall = device, count_flops, note_stall
        self.selected, self.expert_share = selected, expert_share

    @contextlib.contextmanager
    def rank(
        self,
        rank: int,
        world_size: int,
        *,
        initialise: Callable[[], Topology],
        as_default: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> Iterator[Topology]:
        """Run the block as one rank of the layout whose process groups `initialise` creates.

        as_default: context in which parameters without an explicit device are on the fake device.
        """
        if dist.is_initialized():
            raise RuntimeError("a dry run needs a process without process groups")
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in self._patches(as_default):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
            stack.callback(dist.destroy_process_group)
            new_group = dist.new_group

            def fake_group(ranks: Any = None, *args: Any, **options: Any) -> Any:
                if ranks is not None and rank not in ranks:
                    return dist.GroupMember.NON_GROUP_MEMBER
                return new_group(ranks, *args, **{**options, "backend": "fake", "pg_options": None})

            stack.enter_context(mock.patch.object(dist, "new_group", fake_group))
            stack.callback(parallel_state.destroy_model_parallel)
            yield initialise()

    def _patches(self, as_default: Callable[[], Any]) -> list[Patch]:
        build_chunks = training_module.build_chunks

        def build(*args: Any, **kwargs: Any) -> Any:
            with as_default():
                return build_chunks(*args, **kwargs)

        patches: list[Patch] = [
            (device_module, "local_device", lambda: self.device),
            (device_module, "has_cuda", lambda: self.device.type == "cuda"),
            (dist, "all_gather_object", _repeat_own),
            (training_module, "build_chunks", build),
            (training_module, "load_model", _nothing),
            (reference_module, "load_model", _nothing),
            (reference_module, "build_chunks", build),
            (token_dispatcher.MoEAlltoAllTokenDispatcher, "preprocess", self._preprocess()),
            (token_dispatcher, "permute", self._permute()),
            # The compiled kernels of apex and Transformer Engine cannot run without real data.
            (megatron_optimizer, "Adam", torch.optim.AdamW),
            (megatron_optimizer, "USING_PYTORCH_OPTIMIZER", True),
            (clip_grads, "multi_tensor_applier", local_multi_tensor_applier),
            (clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm),
            (clip_grads, "multi_tensor_scale_impl", local_multi_tensor_scale),
        ]
        if self.device.type == "cuda":
            patches += self._cuda_patches()
        return patches

    def _cuda_patches(self) -> list[Patch]:
        cuda = {
            "current_device": lambda: self.device,
            "get_device_capability": lambda *_: (9, 0),
            "device_count": lambda: 8,
            "stream": lambda stream: contextlib.nullcontext(),
            "get_rng_state": lambda *_: torch.empty(0),
            "set_rng_state": _nothing,
            **dict.fromkeys(("Stream", "Event", "current_stream", "default_stream"), _Stream),
            **dict.fromkeys(("synchronize", "empty_cache", "set_device", "manual_seed"), _nothing),
        }
        kernels = dry_run_kernels
        return [
            *((torch.cuda, name, replacement) for name, replacement in cuda.items()),
            (Tensor, "record_stream", _nothing),
            (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.empty(0)),
            (megatron_random, "_set_cuda_rng_state", _nothing),
            (megatron_random.CudaRNGStatesTracker, "fork", _no_fork),
            (context_attention, "attend_fused", kernels.attention(self.count_flops)),
            *(
                (
                    joined_attention,
                    name,
                    kernels.joined(
                        getattr(joined_attention, name), self.count_flops, products=products
                    ),
                )
                for name, products in (("attend", 2), ("attend_backward", 5))
            ),
            (layers, "rms_norm", kernels.rms_norm),
            (gated_delta_net, "find_kernel", lambda: kernels.gated_delta(self.count_flops)),
            (fused_bias_geglu, "geglu", kernels.swiglu),
            (fused_bias_geglu, "geglu_back", kernels.swiglu_back),
            *(
                (fused_bias_swiglu, name, getattr(kernels, name))
                for name in ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back")
            ),
        ]

    def _preprocess(self) -> Callable[..., Any]:
        """Run the exchange of token counts, then replace its result by the assumed shares."""
        exchange = token_dispatcher.MoEAlltoAllTokenDispatcher.preprocess

        def preprocess(dispatcher: Any, routing_map: Tensor) -> Tensor:
            exchange(dispatcher, routing_map)
            self.note_stall()
            chosen = routing_map.size(0) * dispatcher.config.moe_router_topk
            experts, local = dispatcher.num_experts, dispatcher.num_local_experts
            tp_size, ep_size = dispatcher.tp_size, dispatcher.ep_size
            shares = torch.full((experts,), chosen // experts)
            shares[: chosen % experts] += 1
            first = dispatcher.local_expert_indices[0]
            local_shares = shares[first : first + local]  # of each rank's tokens
            if ep_size > 1:  # no more than every token for each expert
                local_shares = (local_shares * self.expert_share).ceil().long()
                local_shares = local_shares.clamp(max=routing_map.size(0))
            received = local_shares.sum()
            if tp_size > 1 or ep_size > 1:
                dispatcher.input_splits = shares.reshape(ep_size, local).sum(1).numpy()
                dispatcher.output_splits = received.repeat(ep_size).numpy()
                dispatcher.output_splits_tp = (received * ep_size).repeat(tp_size).numpy()
            by_rank = local_shares.repeat(tp_size * ep_size, 1)
            if local > 1:
                dispatcher.num_global_tokens_per_local_expert = by_rank
            return by_rank.sum(0)

        return preprocess

    def _permute(self) -> Callable[..., Any]:
        permute = token_dispatcher.permute

        def count_and_permute(*args: Any, num_out_tokens: int, **kwargs: Any) -> Any:
            self.selected.append(num_out_tokens)
            try:
                return permute(*args, num_out_tokens=num_out_tokens, **kwargs)
            finally:
                self.selected.pop()

        return count_and_permute


@contextlib.contextmanager
def on_step(begin: Callable[[], object]) -> Iterator[None]:
    """Call `begin` before the optimizer's step of each update in the block."""
    take_step = training_module.take_step

    def step(*args: Any, **kwargs: Any) -> Any:
        begin()
        return take_step(*args, **kwargs)

    with mock.patch.object(training_module, "take_step", step):
        yield


def _repeat_own(objects: list[Any], own: Any, group: Any = None) -> None:
    """Simulate an all-gather in which every rank has this rank's object."""
    objects[:] = [own] * len(objects)


def _no_fork(*_: Any, **__: Any) -> Any:
    return contextlib.nullcontext()


def group_names() -> dict[str, str]:
    """Map torch's names of this rank's process groups to ours; the first match wins."""
    state = parallel_state
    groups = {
        "tp": state.get_tensor_model_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
        "dp": state.get_data_parallel_group(),
        "dp_cp": state.get_data_parallel_group(with_context_parallel=True),
        "ep": state.get_expert_model_parallel_group(),
        "expert_dp": state.get_expert_data_parallel_group(),
        "tp_ep": state.get_expert_tensor_and_model_parallel_group(),
        "expert_tp": state.get_expert_tensor_parallel_group(),
        "model": state.get_model_parallel_group(),
        "embedding": state.get_embedding_group(False),
        "all": state.get_intra_distributed_optimizer_instance_group(False),
        "world": dist.group.WORLD,
    }
    names: dict[str, str] = {}
    for name, group in groups.items():
        if group is not None and hasattr(group, "group_name"):
            names.setdefault(group.group_name, name)
    return names
