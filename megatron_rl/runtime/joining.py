"""Join the processes that torchrun, srun or `start_processes` started, by their environment.

Each rank gets its share of the node's CPU cores, whether its launcher bound it to cores or not.
"""

import os
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.runtime.interruption import end_with_parent
from megatron_rl.runtime.processes import LAUNCHER, has_cuda, use_downloaded_files

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
    own: cores that the rank may use; all_ranks: cores of every rank of the node, this rank
    included.
    """
    sharing = dict.fromkeys(own, 0)
    for core in (core for cores in all_ranks for core in cores):
        if core in sharing:
            sharing[core] += 1
    return max(1, int(sum(Fraction(1, max(1, ranks)) for ranks in sharing.values())))


def cores_before_joining(ranks: int) -> int:
    """Return this rank's cores before it can ask the `ranks` of its node for theirs.

    SLURM lists the cores of every task that it has bound. Without a list, a task that has no more
    cores than it requested (`--cpus-per-task`) has them alone, and other tasks share.
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


_ALONE = "to start all processes of this node instead, run: unset"
ALONE = f"{_ALONE} RANK WORLD_SIZE"

# of the step, or of its job in releases that do not set it
_NODE_COUNTS = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")


@dataclass(frozen=True)
class ProcessPlace:
    """Ranks and world size of this process."""

    rank: int
    world_size: int
    local_rank: int


def join_processes() -> ProcessPlace | None:
    """Return this process's ranks if torchrun or srun started it, else None.

    Under srun, sets the variables of torch's `env://` rendezvous from SLURM's variables. Raises
    UserError if the variables are incomplete or contradict each other: they are often left over.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_ID"):
        if os.environ.get(name) == "":  # as some schedulers leave them
            del os.environ[name]
    _check_interfaces()
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        place = _place()
        if LAUNCHER in os.environ:
            end_with_parent(int(os.environ[LAUNCHER]))
        elif "TORCHELASTIC_RUN_ID" not in os.environ and place.local_rank == 0:
            notify(
                f"rank {place.rank} of {place.world_size}, by RANK and WORLD_SIZE of the "
                f"environment ({ALONE})"
            )
    elif _is_parallel_step():
        _set_variables_from_slurm()
        place = _place()
    else:
        return None
    use_downloaded_files()
    share_cores(_number("LOCAL_WORLD_SIZE", 1, start=1))
    return place


def _check_interfaces() -> None:
    """Raise UserError if a variable names no network interface of this machine.

    gloo takes names in a list; NCCL the beginnings of names, after = whole names, and none after ^.
    """
    here = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")[: 1 + has_cuda()]:
        given = os.environ.get(variable, "")
        is_whole = variable.startswith("GLOO") or given.startswith("=")
        names = [name.partition(":")[0].strip() for name in given.lstrip("=").split(",")]
        found = [one for one in here for name in names
                 if (one == name if is_whole else one.startswith(name))]  # fmt: skip
        if given and not given.startswith("^") and not found:
            raise UserError(
                f"the environment has {variable}={given!r}: this machine has the network "
                f"interfaces {', '.join(here)}; name one of these, or unset {variable}"
            )


def _place() -> ProcessPlace:
    """Read the ranks of this process from the environment; UserError if they are not possible."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            given = {one: os.environ[one] for one in ("RANK", "WORLD_SIZE") if one in os.environ}
            text = " and ".join(f"{one}={value!r}" for one, value in given.items())
            raise UserError(
                f"the environment has {text}, but no {name}: ranks need RANK, WORLD_SIZE, "
                f"MASTER_ADDR and MASTER_PORT (torchrun and srun set them); {ALONE}"
            )
    world_size = _number("WORLD_SIZE", 1, start=1)
    _number("MASTER_PORT", 0, start=1, end=2**16)
    rank = _number("RANK", 0, end=world_size, of="WORLD_SIZE")
    return ProcessPlace(rank, world_size, _number("LOCAL_RANK", 0))


def _number(name: str, default: int, *, start: int = 0, end: int = 2**31, of: str = "") -> int:
    """Read a whole number in [start, end) from the environment; empty counts as unset."""
    text = os.environ.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or not start <= int(text) < end:
        limit = f" and below {of or ''}{'=' if of else ''}{end}" if end < 2**31 else ""
        raise UserError(
            f"the environment has {name}={text!r}: it must be a whole number from {start}{limit}; "
            + (f"{_ALONE} SLURM_STEP_ID" if name.startswith("SLURM") else ALONE)
        )
    return int(text)


def _is_parallel_step() -> bool:
    """Return True if srun started this process as one of several tasks.

    An interactive shell (`srun --pty bash`) has the same variables, and the one of its terminal.
    """
    if "SLURM_STEP_ID" not in os.environ or "SLURM_PTY_PORT" in os.environ:
        return False
    return _number("SLURM_STEP_NUM_TASKS", 1, start=1) > 1


def _set_variables_from_slurm() -> None:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID")
    if missing := [name for name in names if not os.environ.get(name)]:
        raise UserError(
            "the environment has SLURM_STEP_ID and "
            f"SLURM_STEP_NUM_TASKS={os.environ['SLURM_STEP_NUM_TASKS']}, as for a task of srun, "
            f"but no {', '.join(missing)}; start by srun, or unset SLURM_STEP_ID if the variables "
            "are left over"
        )
    world_size, job = int(os.environ["SLURM_STEP_NUM_TASKS"]), _number("SLURM_JOB_ID", 0)
    known = [name for name in _NODE_COUNTS if os.environ.get(name)]
    nodes = _number(known[0], 1, start=1) if known else 1
    rank = _number("SLURM_PROCID", 0, end=world_size, of="SLURM_STEP_NUM_TASKS")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(_number("SLURM_LOCALID", 0)),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(max(world_size // nodes, 1)),
    )
    os.environ.setdefault("MASTER_ADDR", first_host(os.environ["SLURM_STEP_NODELIST"]))
    os.environ.setdefault("MASTER_PORT", str(20000 + job % 20000))


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's list, such as `gpu[007-012,020],x1`.

    `scontrol show hostnames` would expand all of it, but containers lack that program.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def share_cores(ranks: int) -> None:
    """Set each rank's number of threads to its share of the cores; on CUDA to 1.

    Called before NumPy is imported. An existing value is kept (torchrun sets 1).
    """
    cores = 1 if has_cuda() else cores_before_joining(ranks)
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list if nested
    if not given.isdigit() or int(given) == 0:
        if given and os.environ.get("RANK", "0") == "0":
            notify(f"OMP_NUM_THREADS={given} is no number of threads; {cores} are used")
        os.environ["OMP_NUM_THREADS"] = given = str(cores)
    threads, torch = int(given), sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:  # a launcher has imported it
        torch.set_num_threads(threads)


def notify(text: str) -> None:
    """Write a line of the command to standard error."""
    sys.stderr.write(f"megatron-rl: {text}\n")
    sys.stderr.flush()
