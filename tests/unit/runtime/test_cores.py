"""Cores of a rank: those that it is bound to, or its part of those that several may use."""

import os

import pytest

from megatron_rl.runtime.cores import cores_before_joining, share_of_cores


@pytest.mark.parametrize(
    ("own", "all_ranks", "share"),
    [
        # 8 ranks bound to 12 cores each have 12, not 12 / 8
        (range(12), [range(12 * rank, 12 * rank + 12) for rank in range(8)], 12),
        (range(96), [range(96)] * 8, 12),  # not bound: the same 96 for all
        (range(16), [range(16)] * 3, 5),  # 16 / 3
        (range(2), [range(2)] * 4, 1),  # never none
        (range(6), [range(6)], 6),
        # two sockets of 24 cores, four ranks bound to each: 24 / 4
        (range(24), [range(24)] * 4 + [range(24, 48)] * 4, 6),
        # bound to 0..7, and another rank may use all of 0..15: 8 halves
        (range(8), [range(8), range(16)], 4),
        (range(16), [range(8), range(16)], 12),  # 8 halves and 8 of its own
    ],
)
def test_core_is_divided_among_ranks_that_may_use_it(own, all_ranks, share):
    assert share_of_cores(frozenset(own), all_ranks) == share


@pytest.mark.parametrize(
    ("cores", "ranks", "slurm", "share"),
    [
        (range(12), 8, {}, 1),  # possibly shared: 12 / 8
        (range(96), 8, {}, 12),
        (range(12), 8, {"CPUS_PER_TASK": "12"}, 12),
        (range(96), 8, {"CPUS_PER_TASK": "12"}, 12),  # requested and not bound
        (range(12, 24), 2, {"CPU_BIND_TYPE": "mask_cpu:", "CPU_BIND_LIST": "0xFFF,0xFFF000"}, 12),
        (range(12), 2, {"CPU_BIND_TYPE": "mask_cpu:", "CPU_BIND_LIST": "0xFFF,0xFFF"}, 6),
        # a list of another number of tasks, or of none, is not used
        (range(12), 3, {"CPU_BIND_TYPE": "mask_cpu:", "CPU_BIND_LIST": "0xFFF,0xFFF000"}, 4),
        (range(12), 3, {"CPU_BIND_TYPE": "none", "CPU_BIND_LIST": "0xF,0xF0,0xF00"}, 4),
        (range(12), 3, {"CPU_BIND_TYPE": "mask_cpu:", "CPU_BIND_LIST": "?"}, 4),
    ],
)  # fmt: skip
def test_cores_under_slurm_before_ranks_can_ask_each_other(monkeypatch, cores, ranks, slurm, share):
    for name in ("CPUS_PER_TASK", "CPU_BIND_TYPE", "CPU_BIND_LIST"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cores))
    assert cores_before_joining(ranks) == share
