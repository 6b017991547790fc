"""Start of all ranks: the store of rank 0, Megatron-core's process groups and random generators.

A gloo group connects every pair of its ranks, and Megatron has about twenty groups. On CUDA only
the group of all ranks has gloo in addition to NCCL, for objects and tensors on the host. Megatron's
groups have NCCL alone. On the CPU all groups are gloo groups, and groups of the same ranks are one
group.
"""

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random

from megatron_rl.actor import device
from megatron_rl.actor.cpu_adaptation import megatron_runtime
from megatron_rl.distributed.link import Link
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.runtime.joining import notify
from megatron_rl.runtime.processes import LAUNCHER

MESSAGE_AFTER = timedelta(seconds=10)  # before the first message
LAUNCHED_MESSAGE_AFTER = timedelta(seconds=60)  # of ranks that this node's launcher started
REPEAT = timedelta(seconds=60)  # between two messages
NAMED_RANKS = 8  # most missing ranks that a message lists


def join_ranks(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store, rank and world size of torch's `env://` variables when all ranks are here.

    After ten seconds and then every minute, rank 0 prints which ranks are missing, and a rank that
    cannot connect prints the address. Raises UserError after `timeout`.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = LAUNCHED_MESSAGE_AFTER if LAUNCHER in os.environ else MESSAGE_AFTER
    # torchrun's agent has a store of its own, which serves rank 0, too.
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    message = (
        f"rank {rank} of {world_size} waits for rank 0 at {host}:{port} (MASTER_ADDR, "
        "MASTER_PORT): it has not started, or this node cannot reach it"
    )
    timer = threading.Timer(patience.total_seconds(), notify, (message,))
    timer.daemon = True
    timer.start()
    try:
        store = dist.TCPStore(
            host, port, world_size, is_host, timeout, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"rank {rank} of {world_size} cannot use {host}:{port} as the meeting point of all "
            f"ranks ({first}); set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free "
            "port of it, or unset RANK and WORLD_SIZE if they are left over"
        ) from error
    finally:
        timer.cancel()
    _wait_for_all(store, rank, world_size, f"{host}:{port}", patience=patience, timeout=timeout)
    return store, rank, world_size


def _wait_for_all(
    store: dist.Store,
    rank: int,
    world_size: int,
    address: str,
    *,
    patience: timedelta,
    timeout: timedelta,
) -> None:
    """Return when every rank has called this."""
    store.set(f"present/{rank}", "")
    if store.add("present", 1) >= world_size:  # more after a restart by torchrun
        store.set("complete", "")
    deadline, pause = time.monotonic() + timeout.total_seconds(), patience
    while True:
        try:
            store.wait(["complete"], pause)
            return
        except dist.DistStoreError:
            missing = [r for r in range(world_size) if not store.check([f"present/{r}"])]
        text = (
            f"rank {rank} waits at {address} for {len(missing)} of {world_size} ranks: "
            f"{', '.join(map(str, missing[:NAMED_RANKS]))}"
            f"{', ...' if len(missing) > NAMED_RANKS else ''} have not started"
        )
        if time.monotonic() > deadline:
            raise UserError(f"{text} within {timeout.total_seconds():.0f} s; look at their output")
        if rank == 0 and missing:
            left_over = "; if WORLD_SIZE is left over, press Ctrl-C and unset RANK WORLD_SIZE"
            notify(text + ("" if LAUNCHER in os.environ else left_over))
        pause = REPEAT


def join_sides(*, engine_ranks: int, timeout: timedelta, patience: float) -> Link:
    """Split the ranks into two worlds, the last `engine_ranks` ranks and the rest, and link both.

    Returns the link, once all ranks are here. Afterwards torch's default group is that of this
    rank's side. patience: see `Link`.
    """
    store, rank, world_size = join_ranks(timeout)
    trainers = world_size - engine_ranks
    if device.has_cuda():
        torch.cuda.set_device(device.local_device())
    link = Link(rank, trainers, engine_ranks, dist.PrefixStore("link", store), timeout, patience)
    side, first, size = ("engines", trainers, engine_ranks) if link.is_engine else (
        "trainers", 0, trainers)  # fmt: skip
    _create_default_group(dist.PrefixStore(side, store), rank - first, size, timeout)
    return link


def _init_process_group(timeout: timedelta) -> None:
    """Join the process group described by torchrun's environment, or create one of size 1."""
    if dist.is_initialized():
        if device.has_cuda():
            torch.cuda.set_device(device.local_device())
        return
    if "RANK" in os.environ:
        store, rank, world_size = join_ranks(timeout)
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    _create_default_group(store, rank, world_size, timeout)


def _create_default_group(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> None:
    if device.has_cuda():
        torch.cuda.set_device(device.local_device())
    backend = "cpu:gloo,cuda:nccl" if device.has_cuda() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def device_backend() -> str | None:
    """Return the backend of Megatron's groups; None: that of the default group."""
    return "nccl" if device.has_cuda() else None


@contextlib.contextmanager
def _groups_of(backend: str | None) -> Iterator[None]:
    """Let Megatron create its groups with this backend where it names none.

    None: gloo, whose groups have threads and connections of their own. There those of the same
    ranks are one group: all ranks call its collectives in one order, as Megatron is written.
    """
    create = parallel_state.create_group
    created: dict[tuple[int, ...], Any] = {}  # also of other ranks: torch numbers groups on all

    def create_group(ranks: list[int], *args: Any, **options: Any) -> Any:
        options["backend"] = options.get("backend") or backend
        if options["backend"] is not None:
            return create(ranks, *args, **options)
        if (members := tuple(ranks)) not in created:
            created[members] = create(ranks, *args, **options)
        return created[members]

    with mock.patch.object(parallel_state, "create_group", create_group):
        yield


def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks for objects and tensors on the host; collective over it.

    Two ranks are connected when they first exchange something: few are, since gathering goes round
    a ring.
    """
    if device_backend() is None:
        return group
    with mock.patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="1"):
        ranks = dist.get_process_group_ranks(group)
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def initialise(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    virtual_stages: int = 1,
    stage_layers: Sequence[int] | None = None,
    seed: int = 0,
    timeout: timedelta = timedelta(minutes=30),
) -> Topology:
    """Create the process groups of one layout and seed all generators. Collective.

    The data-parallel size is the number of processes / (tensor * pipeline * context); raises
    ValueError if that is not an integer.
    expert_tensor: tensor parallel size of the experts; None: `tensor`. stage_layers: the number of
    layers of every model chunk; None: automatic.
    """
    _init_process_group(timeout)
    world_size, model_size = dist.get_world_size(), tensor * pipeline * context
    if world_size % model_size:
        raise UserError(
            f"tensor {tensor} * pipeline {pipeline} * context {context} = {model_size} does not "
            f"divide the {world_size} processes; start a multiple of {model_size} processes"
        )
    with megatron_runtime(), _groups_of(device_backend()):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
        )
        seed_everything(seed)
    shards = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return replace(topology_now(virtual_stages, stage_layers), host_group=_host_group(shards))


def seed_everything(seed: int) -> None:
    """Seed Python, torch and Megatron's generators; the same on every rank."""
    random.seed(seed)
    torch.manual_seed(seed)
    if device.has_cuda():
        megatron_random.model_parallel_cuda_manual_seed(seed)
    else:
        megatron_random.initialize_rng_tracker()


def topology_now(virtual_stages: int = 1, stage_layers: Sequence[int] | None = None) -> Topology:
    """Return this process's rank and groups in the initialized process groups."""
    state = parallel_state
    return Topology(
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        device=device.local_device(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        tp_rank=state.get_tensor_model_parallel_rank(),
        tp_group=state.get_tensor_model_parallel_group(),
        cp_size=state.get_context_parallel_world_size(),
        cp_rank=state.get_context_parallel_rank(),
        cp_group=state.get_context_parallel_group(),
        pp_size=state.get_pipeline_model_parallel_world_size(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        pp_group=state.get_pipeline_model_parallel_group(),
        dp_size=state.get_data_parallel_world_size(),
        dp_rank=state.get_data_parallel_rank(),
        dp_group=state.get_data_parallel_group(),
        dp_cp_group=state.get_data_parallel_group(with_context_parallel=True),
        expert_dp_group=state.get_expert_data_parallel_group(),
        ep_size=state.get_expert_model_parallel_world_size(),
        ep_rank=state.get_expert_model_parallel_rank(),
        expert_tp_size=state.get_expert_tensor_parallel_world_size(),
        virtual_stages=virtual_stages,
        stage_layers=None if stage_layers is None else tuple(stage_layers),
    )
