"""Judging while others are generated: begun at once, in any order, and an error ends it early."""

import threading
import time

import numpy as np
import pytest

from megatron_rl.distributed.topology import Topology
from megatron_rl.rewards.grading import GradingSession
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import Item, VerifierError
from megatron_rl.rollouts.grading import Grader
from megatron_rl.types import GradeResult, Prompt, Response

MISBEHAVING = "tests.unit.rewards.misbehaving_verifiers:verify_scripted"


class Pool:
    """Grade a number by its value; waits for `free` first."""

    def __init__(self):
        self.free, self.calls = threading.Event(), []
        self.num_graded = 0

    def verify_all(self, items, *, more):
        self.calls.append(len(items))
        assert self.free.wait(10)
        items = [*items, *more()]
        if -1 in items:
            raise VerifierError("broken on purpose")
        return [GradeResult(float(item), "", None) for item in items]


def wait_until(true):
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_first_response_is_graded_before_last_is_submitted():
    pool = Pool()
    judging = GradingSession(pool)
    judging.submit(2, 7)
    wait_until(lambda: pool.calls)  # the workers have it, alone
    judging.submit(0, 8)
    judging.submit(1, 9)
    pool.free.set()
    assert {place: grade_result.reward for place, grade_result in judging.finish().items()} == {
        2: 7.0,
        0: 8.0,
        1: 9.0,
    }
    assert pool.calls[0] == 1  # the others joined it, or came after it


def test_error_comes_back_while_generating_and_at_end():
    pool = Pool()
    judging = GradingSession(pool)
    pool.free.set()
    judging.submit(0, -1)
    wait_until(lambda: not judging._thread.is_alive())
    with pytest.raises(VerifierError, match="on purpose"):
        judging.submit(1, 1)
    with pytest.raises(VerifierError, match="on purpose"):
        judging.finish()


def test_later_response_is_graded_while_earlier_one_runs(tmp_path):
    """Real workers: the first item ends when the second one, submitted later, has been graded."""
    with VerifierPool(workers=2, time_limit=60.0, verifier=MISBEHAVING) as pool:
        pool.start()
        judging = GradingSession(pool)
        judging.submit(1, Item(f"wait-for {tmp_path}/mark", "truth", "source"))
        wait_until(lambda: any(worker.places for worker in pool._workers))
        judging.submit(0, Item(f"touch {tmp_path}/mark", "truth", "source"))
        assert {grade_result.reason for grade_result in judging.finish().values()} == {"source"}


def test_long_call_within_its_limit_is_progress(tmp_path):
    """The call ends once progress was counted twice meanwhile: a watchdog sees no hang."""
    counted = []

    def count():
        counted.append(grader.pool.num_graded)
        if counted.count(0) == 2:
            (tmp_path / "mark").touch()

    prompt = Prompt(0, (), (1,), "truth", "source")
    text = f"wait-for {tmp_path}/mark"
    response = Response(0, 0, np.zeros(1), np.zeros(1), text, "stop", 0)
    with VerifierPool(workers=1, time_limit=60.0, verifier=MISBEHAVING) as pool:
        pool.start()
        assert not pool.is_within_limits  # nobody judges
        grader = Grader(pool, Topology.single(), count)
        grader.begin([prompt], samples=1)(0, response)
        (rollout,) = grader.finish([prompt], [response])
    assert rollout.grade_result.reason == "source" and counted.count(0) >= 2


def test_call_beyond_its_limit_is_no_progress():
    with VerifierPool(workers=1, time_limit=60.0, verifier=MISBEHAVING) as pool:
        (worker,) = pool._workers
        worker.places, worker.deadline = [0], time.monotonic() + 60
        assert pool.is_within_limits
        worker.deadline = time.monotonic() - 1  # as where the pool's thread hangs
        assert not pool.is_within_limits
        worker.places = []


def test_empty_batch_has_no_grades():
    pool = Pool()
    pool.free.set()
    assert GradingSession(pool).finish() == {}
