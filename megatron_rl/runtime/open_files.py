"""Limits of this process: open files, against the sockets that a layout needs; address space.

Two ranks of a gloo group are connected by a socket in each of them. Linux counts sockets as open
files, and the usual soft limit is 1,024. Does not import torch.
"""

import resource

MOST = 1 << 20  # some programs loop over all numbers below their limit
OTHERS = 512  # files that are not sockets between ranks: CUDA, libraries, models, workers


def raise_limit() -> None:
    """Raise this process's soft limit of open files to its hard limit; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def describe_address_space() -> str | None:
    """Return a warning if the address space is limited, as by `ulimit -v`."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return (
        f"warning: processes may use {limit / 2**30:.1f} GiB of address space (ulimit -v), and "
        "torch, vLLM and CUDA map far more than they use; if the start fails, run: ulimit -v "
        "unlimited"
    )


def hard_limit() -> int:
    """Return the number of files that this process may open after `raise_limit`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)


def group_sizes(
    world_size: int,
    *,
    tensor: int,
    pipeline: int,
    context: int,
    expert: int,
    expert_tensor: int | None = None,
) -> tuple[int, ...]:
    """Return the size of each of Megatron's groups that a rank is in.

    First those of the ranks with equal dense and equal expert weights, then those of the model.
    """
    in_expert = (tensor if expert_tensor is None else expert_tensor) * expert
    stage = world_size // pipeline
    data = stage // (tensor * context)
    shards = (data * context, data, stage // in_expert)
    dense = (context, tensor * pipeline, tensor, pipeline, min(pipeline, 2), 1)
    several = (stage, tensor * data, tensor * context)
    experts = (expert, in_expert // expert, in_expert, in_expert * pipeline, in_expert * pipeline)
    sharded_weights = (1, 1)  # dense and expert weights gathered on use, which we do not use
    return (*shards, *dense, *several, *experts, *sharded_weights, world_size)


def count_sockets(world_size: int, groups: tuple[int, ...], *, on_cuda: bool) -> int:
    """Count the sockets of a rank to other ranks: on CUDA only the group of all ranks has any.

    vLLM's groups and our own for tensors on the host connect ranks when they first need it.
    """
    return world_size - 1 + (0 if on_cuda else sum(size - 1 for size in groups))


def limit_problem(world_size: int, groups: tuple[int, ...], *, on_cuda: bool) -> str | None:
    """Describe why this machine's limit of open files is too small for the layout, if it is."""
    needed = count_sockets(world_size, groups, on_cuda=on_cuda) + OTHERS
    if needed <= (limit := hard_limit()):
        return None
    return (
        f"each of the {world_size:,} processes needs up to {needed:,} open files and sockets, but "
        f"the hard limit here is {limit:,} (ulimit -Hn); raise it, for example by LimitNOFILE of "
        "slurmd or --ulimit nofile of docker"
    )
