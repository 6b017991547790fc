"""CPU cores of each rank of a node, whether its launcher bound the ranks to cores or not."""

import os
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

_MACHINE = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine


def own_cores() -> frozenset[int]:
    """Return the cores that this process may use: its affinity."""
    return frozenset(os.sched_getaffinity(0))


def machine() -> str:
    """Return a name of this machine that no other one has."""
    return _MACHINE.read_text(encoding="ascii") if _MACHINE.exists() else os.uname().nodename


def share_of_cores(own: frozenset[int], all_ranks: Sequence[Iterable[int]]) -> int:
    """Return the whole number of cores of a rank, at least 1.

    A core that several ranks may use is divided equally among them.
    own: cores that the rank may use; all_ranks: those of every rank of the node, its own included.
    """
    sharing = dict.fromkeys(own, 0)
    for core in (core for cores in all_ranks for core in cores):
        if core in sharing:
            sharing[core] += 1
    return max(1, int(sum(Fraction(1, max(1, ranks)) for ranks in sharing.values())))


def cores_before_joining(ranks: int) -> int:
    """Return this rank's cores before it can ask the `ranks` of its node for theirs.

    SLURM lists the cores of every task that it has bound. Without a list, a task that has no more
    cores than it requested (`--cpus-per-task`) has them alone, and others share.
    """
    own = own_cores()
    bound = [cores for cores in _bound_by_slurm() if cores]
    if len(bound) == ranks and any(own <= cores for cores in bound):
        return share_of_cores(own, bound)
    requested = os.environ.get("SLURM_CPUS_PER_TASK", "")
    is_alone = requested.isdecimal() and len(own) <= int(requested)
    return share_of_cores(own, [own] * (1 if is_alone else ranks))


def _bound_by_slurm() -> list[frozenset[int]]:
    """Cores of the tasks of this node, as `srun` passes them: masks in hexadecimal."""
    if not os.environ.get("SLURM_CPU_BIND_TYPE", "").startswith("mask_cpu"):
        return []
    try:
        masks = [int(text, 16) for text in os.environ["SLURM_CPU_BIND_LIST"].split(",")]
    except (KeyError, ValueError):
        return []
    return [frozenset(bit for bit in range(mask.bit_length()) if mask >> bit & 1) for mask in masks]
