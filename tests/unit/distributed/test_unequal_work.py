"""Ranks that are done wait as long as any other gets further, and name those that do not."""

import time
from types import SimpleNamespace

import pytest

from megatron_rl.distributed import unequal_work
from megatron_rl.distributed.agreement import RankTimeoutError
from megatron_rl.distributed.unequal_work import UnequalWork
from tests.ranks import run_ranks


def wait_for_a_slow_rank(rank, world_size):
    """Rank 1 turns the clock of both, and waits until rank 0 has looked again."""
    work = UnequalWork("generating", patience=2.0)
    store = work._store
    unequal_work.time = SimpleNamespace(
        monotonic=lambda: float(store.add("clock", 0)), sleep=lambda _: time.sleep(0.005)
    )

    def advance(done):
        store.add("clock", 1)
        work.advance(done, 8)
        looks = store.add("looks", 0) + 2  # one of them may have begun before
        while store.add("looks", 0) < looks:
            time.sleep(0.005)

    work.begin()
    if rank == 1:
        for done in (1, 2, 3, 4):  # longer than the patience in all, but never silent for so long
            advance(done)
    work.finish(while_waiting=lambda: store.add("looks", 1 - rank))
    work.begin()
    if rank == 1:
        advance(3)
        store.add("clock", 3)  # says nothing for longer than the patience
        return None
    with pytest.raises(RankTimeoutError) as raised:
        work.finish(while_waiting=lambda: store.add("looks", 1))
    return str(raised.value)


def test_the_slowest_is_waited_for_and_the_silent_one_is_named():
    said = run_ranks(wait_for_a_slow_rank, 2)[0]
    assert said == (
        "generating: no rank got further for 2 s; waiting for rank 1, which has done 3 of 8"
    )


def test_alone_there_is_nobody_to_wait_for():
    work = UnequalWork("generating", patience=1.0)
    work.begin()
    work.advance(1, 2)
    work.finish()
