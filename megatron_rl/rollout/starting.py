"""Starting vLLM in the trainer's process, which is otherwise left as it was."""

import secrets
from typing import Any

import torch.distributed as dist

from megatron_rl.distributed.topology import Topology
from megatron_rl.processes import without_garbage_collection
from megatron_rl.rollout.process_state import hosted_start

# An LLM that is garbage-collected tears down the default process group of the whole process
# (vllm/distributed/parallel_state.py), so one that was started stays until the process ends.
_STARTED: list[Any] = []


def fixed_arguments(max_model_len: int, *, on_cuda: bool, in_flight: bool) -> dict[str, Any]:
    """What vLLM is always told, by the device, and by whether weights change under generations."""
    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "distributed_executor_backend": "external_launcher",
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": on_cuda,
        "enforce_eager": not on_cuda,
        "max_num_batched_tokens": max(max_model_len, 8192 if on_cuda else 2048),
    }
    if not on_cuda:
        arguments |= {"block_size": 32, "enable_chunked_prefill": False}
    if in_flight:  # a cached prefix would be of older weights; a step's tokens are known at its end
        arguments |= {"enable_prefix_caching": False, "async_scheduling": False}
    return arguments


def check_expert_parallel(asked: bool, *, on_cuda: bool) -> None:
    """ValueError where whole experts are asked of a CPU."""
    if asked and not on_cuda:
        raise ValueError(
            "an expert parallel engine (rollout.expert_parallel) needs CUDA: vLLM's kernel for "
            "experts on CPU takes a slice of every expert; set it to false"
        )


def start_vllm(topology: Topology, arguments: dict[str, Any]) -> Any:
    """vLLM's LLM in this process, which is otherwise left as it was; collective."""
    local_rank = topology.device.index or 0 if topology.device.type == "cuda" else topology.rank
    with hosted_start(rank=topology.rank, world_size=topology.world_size, local_rank=local_rank):
        with without_garbage_collection():
            from vllm import LLM

            from megatron_rl.rollout import inproc

        inproc.register()
        with inproc.own_shared_memory(_shared_token()):
            llm = LLM(weight_transfer_config={"backend": inproc.BACKEND}, **arguments)
    _STARTED.append(llm)
    # Later releases would tear down groups as the interpreter exits, after the trainer's.
    if finalizer := getattr(llm.llm_engine.engine_core, "_finalizer", None):
        finalizer.detach()
    return llm


def _shared_token() -> str:
    """A name for this run that all ranks agree on."""
    box = [secrets.token_hex(6)]
    dist.broadcast_object_list(box)
    return box[0]
