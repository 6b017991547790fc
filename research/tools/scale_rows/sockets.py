"""Sockets that a rank opens to other ranks, and start-up under a small limit."""

from collections.abc import Iterator

from research.tools.scale_rows import Row
from tests.ranks import fork_from, run_ranks
from tools.benchmarks.group_sockets import count, create_groups, measure

TITLE = "Sockets: process groups"
TEXT = """
A gloo group connects every pair of its ranks. Counted: other ranks in the gloo groups of rank 0,
from Megatron's own `initialize_model_parallel` on groups without communication; vLLM's groups and
the one for objects connect on demand and are not in it. Measured: the most files that creating the
groups opens in any of N real gloo ranks, in addition to the first group, and gathering objects
once; a group that is NCCL's on CUDA has a backend without sockets. The soft limit is that
of `ulimit -Sn` before the start, which a run now raises to the hard one. `before`: commit 4c2004c,
where the groups on CUDA had the same sockets as those on the CPU.
"""
BASE = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1}
COUNTED = (
    (64, {"tensor": 4, "pipeline": 2, "expert": 8}, "not counted"),
    (256, {"tensor": 4, "pipeline": 2, "expert": 8}, 1013),
    (1024, {"tensor": 8, "pipeline": 4}, 2836),
    (1024, {"pipeline": 2, "context": 4, "expert": 8}, 4124),
    (1024, {"tensor": 4, "pipeline": 2, "expert": 8}, "not counted"),
    (1024, {"context": 4, "expert": 32}, "not counted"),
)
REAL = {"tensor": 2, "pipeline": 2, "expert": 2}
MEASURED = ((8, 116), (16, 142), (32, 194))
LIMITS = ((16, 100, "not in 150 s"), (32, 180, "too many open files"))  # ranks, soft limit


def _name(layout: dict[str, int]) -> str:
    short = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep"}
    return " ".join(f"{short[key]}{size}" for key, size in layout.items())


def rows() -> Iterator[Row]:
    """Yield the counted rows, then the measured ones."""
    for ranks, layout, before in COUNTED:
        now = count(create_groups(0, ranks, layout, on_cuda=True))
        yield Row("sockets of rank 0 on CUDA", _name(layout), ranks, before, now, "", "counted")
    fork_from("megatron_rl.actor.actor")
    for ranks, before in MEASURED:
        for device, on_cuda in (("CUDA", True), ("CPU", False)):
            now = max(run_ranks(measure, ranks, REAL, on_cuda, None, timeout=600))
            how = f"measured at {ranks} gloo ranks"
            what = f"files opened by the groups of {device}"
            yield Row(what, _name(REAL), ranks, before, now, "a rank", how)
    for ranks, limit, before in LIMITS:
        now = max(run_ranks(measure, ranks, REAL, False, limit, timeout=600))
        what = f"start under a soft limit of {limit}, groups of the CPU"
        how = f"measured at {ranks} gloo ranks"
        yield Row(what, _name(REAL), ranks, before, f"starts, {now} files", "", how)
