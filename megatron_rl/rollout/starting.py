"""Starting vLLM in a process that belongs to the trainer."""

import secrets
from typing import Any

import torch.distributed as dist

from megatron_rl.distributed.topology import Topology
from megatron_rl.rollout.process_state import hosted_start

# An LLM that is garbage-collected tears down the default process group of the whole process
# (vllm/distributed/parallel_state.py), so one that was started stays until the process ends.
_STARTED: list[Any] = []


def start_vllm(topology: Topology, arguments: dict[str, Any]) -> Any:
    """vLLM's LLM in this process, which is otherwise left as it was; collective."""
    local_rank = topology.device.index or 0 if topology.device.type == "cuda" else topology.rank
    with hosted_start(rank=topology.rank, world_size=topology.world_size, local_rank=local_rank):
        from vllm import LLM

        from megatron_rl.rollout import inproc

        inproc.register()
        with inproc.own_shared_memory(_shared_token()):
            llm = LLM(weight_transfer_config={"backend": inproc.BACKEND}, **arguments)
    _STARTED.append(llm)
    # vLLM would tear down its groups as the interpreter exits, after the trainer's are gone.
    llm.llm_engine.engine_core._finalizer.detach()
    return llm


def _shared_token() -> str:
    """A name for this run that all ranks agree on."""
    box = [secrets.token_hex(6)]
    dist.broadcast_object_list(box)
    return box[0]
