"""Finished ranks wait while any other rank makes progress, and name the ranks that stalled."""

import time
from types import SimpleNamespace

import pytest

from megatron_rl.distributed import straggler_barrier
from megatron_rl.distributed.straggler_barrier import StragglerBarrier
from megatron_rl.runtime.failures import RankTimeoutError
from tests.ranks import run_ranks


def wait_for_a_slow_rank(rank, world_size):
    """Let rank 1 advance both ranks' clock, waiting until rank 0 has polled again."""
    work = StragglerBarrier("generating", patience=2.0)
    store = work._store
    straggler_barrier.time = SimpleNamespace(
        monotonic=lambda: float(store.add("clock", 0)), sleep=lambda _: time.sleep(0.005)
    )

    def advance(done):
        store.add("clock", 1)
        work.advance(done, 8)
        polls = store.add("polls", 0) + 2  # one of them may have started before
        while store.add("polls", 0) < polls:
            time.sleep(0.005)

    work.begin()
    if rank == 1:
        for done in (1, 2, 3, 4):  # exceeds the patience in total, but not between reports
            advance(done)
    work.finish(while_waiting=lambda: store.add("polls", 1 - rank))
    work.begin()
    if rank == 1:
        advance(3)
        store.add("clock", 3)  # no report for longer than the patience
        return None
    with pytest.raises(RankTimeoutError) as raised:
        work.finish(while_waiting=lambda: store.add("polls", 1))
    return str(raised.value)


def test_barrier_waits_for_slow_ranks_and_names_stalled_ones():
    message = run_ranks(wait_for_a_slow_rank, 2)[0]
    assert message == (
        "generating: no rank made progress for 2 s; waiting for rank 1, which has done 3 of 8"
    )


def test_barrier_of_one_process_does_not_wait():
    work = StragglerBarrier("generating", patience=1.0)
    work.begin()
    work.advance(1, 2)
    work.finish()
