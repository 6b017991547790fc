"""The gloo sockets of one rank: counted for any number of ranks, or measured on real ones."""

import os
import resource
from typing import Any
from unittest import mock

import torch.distributed as dist

Groups = list[tuple[tuple[int, ...], bool]]  # members, and whether gloo connects every pair


def create_groups(rank: int, world_size: int, layout: dict[str, int], *, on_cuda: bool) -> Groups:
    """Run Megatron's own initialization without other ranks; return the groups of this rank.

    Needs a process without process groups. Groups that connect on demand are not in the list.
    """
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_rl.actor import groups

    everyone = tuple(range(world_size))
    created: Groups = [(everyone, True)]
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    new_group = dist.new_group

    def record(ranks: Any = None, *args: Any, **options: Any) -> Any:
        members = everyone if ranks is None else tuple(ranks)
        if rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        if not os.environ.get("TORCH_GLOO_LAZY_INIT"):
            created.append((members, options.get("backend") in (None, "gloo")))
        return new_group(members, *args, **{**options, "backend": "fake", "pg_options": None})

    try:
        with (
            mock.patch.object(dist, "new_group", record),
            mock.patch.object(groups, "device_backend", lambda: "nccl" if on_cuda else None),
        ):
            groups.initialise(**layout)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return created


def count(groups: Groups) -> int:
    """Count the sockets of a rank: one for each other rank of each gloo group."""
    return sum(len(members) - 1 for members, connected in groups if connected)


def measure(
    rank: int, world_size: int, layout: dict[str, int], on_cuda: bool, limit: int | None
) -> int:
    """Return the open files that the groups of a real gloo rank add to those of the first one.

    on_cuda: groups that are NCCL's on CUDA have a backend without sockets instead. Gathers objects
    over the group for objects, which connects its ranks. limit: of open files, from the start on;
    the soft limit alone, which a run raises.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend

    from megatron_rl.actor import groups
    from megatron_rl.runtime.processes import raise_limit

    if limit is not None:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        raise_limit()
    before = len(os.listdir("/proc/self/fd"))
    backend = "fake" if on_cuda else None
    with mock.patch.object(groups, "device_backend", lambda: backend):
        topology = groups.initialise(**layout)
    ranks = [0] * dist.get_world_size(topology.host_group)
    dist.all_gather_object(ranks, rank, group=topology.host_group)
    assert ranks == dist.get_process_group_ranks(topology.dp_cp_group)
    return len(os.listdir("/proc/self/fd")) - before
