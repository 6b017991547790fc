"""Ranks that are done wait as long as any other gets further, and name those that do not."""

import time

import pytest

from megatron_rl.distributed.agreement import RankTimeoutError
from megatron_rl.distributed.unequal_work import UnequalWork
from tests.ranks import run_ranks


def wait_for_a_slow_rank(rank, world_size):
    work = UnequalWork("generating", patience=2.0)
    work.begin()
    if rank == 1:
        for done in range(4):  # longer than the patience in all, but never silent for so long
            time.sleep(0.7)
            work._told = (0.0, work._told[1])  # as if a second had passed
            work.advance(done, 8)
    looks = []
    work.finish(while_waiting=lambda: looks.append(1))
    assert bool(looks) == (rank == 0)
    work.begin()
    if rank == 1:
        work._told = (0.0, 0)
        work.advance(3, 8)
        time.sleep(3.5)  # says nothing for longer than the patience
        return None
    with pytest.raises(RankTimeoutError) as raised:
        work.finish()
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
