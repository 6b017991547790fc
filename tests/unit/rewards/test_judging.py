"""Judging while others are generated: begun at once, in any order, and an error ends it early."""

import threading
import time

import pytest

from megatron_rl.rewards.judging import Judging
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import Item, VerifierError
from megatron_rl.types import Verdict

MISBEHAVING = "tests.unit.rewards.misbehaving_verifiers:verify_as_told"


class Pool:
    """Judges a number as itself; waits for `free` first."""

    def __init__(self):
        self.free, self.calls = threading.Event(), []
        self.judged = 0

    def verify_all(self, items, *, more):
        self.calls.append(len(items))
        assert self.free.wait(10)
        items = [*items, *more()]
        if -1 in items:
            raise VerifierError("broken on purpose")
        return [Verdict(float(item), "", None) for item in items]


def wait_until(true):
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_first_is_judged_before_the_last_is_submitted():
    pool = Pool()
    judging = Judging(pool)
    judging.submit(2, 7)
    wait_until(lambda: pool.calls)  # the workers have it, alone
    judging.submit(0, 8)
    judging.submit(1, 9)
    pool.free.set()
    assert {place: verdict.reward for place, verdict in judging.finish().items()} == {
        2: 7.0,
        0: 8.0,
        1: 9.0,
    }
    assert pool.calls[0] == 1  # the others joined it, or came after it


def test_an_error_comes_back_while_generating_and_at_the_end():
    pool = Pool()
    judging = Judging(pool)
    pool.free.set()
    judging.submit(0, -1)
    wait_until(lambda: not judging._thread.is_alive())
    with pytest.raises(VerifierError, match="on purpose"):
        judging.submit(1, 1)
    with pytest.raises(VerifierError, match="on purpose"):
        judging.finish()


def test_what_joins_is_judged_while_another_is_not_done(tmp_path):
    """Real workers: the first item ends when the second one, submitted later, has been judged."""
    with VerifierPool(workers=2, time_limit=60.0, verifier=MISBEHAVING) as pool:
        pool.start()
        judging = Judging(pool)
        judging.submit(1, Item(f"wait-for {tmp_path}/mark", "truth", "source"))
        wait_until(lambda: any(worker.places for worker in pool._workers))
        judging.submit(0, Item(f"touch {tmp_path}/mark", "truth", "source"))
        assert {verdict.reason for verdict in judging.finish().values()} == {"source"}


def test_nothing_to_judge_is_no_verdict():
    pool = Pool()
    pool.free.set()
    assert Judging(pool).finish() == {}
