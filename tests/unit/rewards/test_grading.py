"""Judging while others are generated: begun at once, in any order, and an error ends it early."""

import time

import numpy as np
import pytest

from megatron_rl.config.sections import RewardSection
from megatron_rl.distributed.topology import Topology
from megatron_rl.rewards.pool import ALIVE_SECONDS, VerifierPool
from megatron_rl.rewards.verifier import Item, VerifierError
from megatron_rl.rollouts.grading import Grader
from megatron_rl.types import Prompt, Response

MISBEHAVING = "tests.unit.rewards.misbehaving_verifiers:verify_scripted"


@pytest.fixture(scope="module")
def pool():
    settings = RewardSection(verifier=MISBEHAVING, workers=2, time_limit_seconds=60.0)
    with VerifierPool(settings) as pool:
        pool.start()
        yield pool


def test_error_comes_back_while_generating_and_at_end(pool):
    session = pool.begin()
    deadline = time.monotonic() + 60
    with pytest.raises(VerifierError, match="on purpose"):
        session.submit(0, Item("raise", "truth", "source"))  # may already receive the error
        while time.monotonic() < deadline:
            session.submit(1, Item("sleep 0.01", "truth", "source"))
    session = pool.begin()
    session.submit_all([(0, Item("raise", "truth", "source"))])
    with pytest.raises(VerifierError, match="on purpose"):
        session.finish()
    assert pool.verify_all([Item("ab", "truth", "source")])[0].reward == 2.0


def test_later_response_is_graded_while_earlier_one_runs(pool, tmp_path):
    """The first item ends when the second one, submitted later, has been graded."""
    session = pool.begin()
    session.submit(1, Item(f"wait-for {tmp_path}/mark", "truth", "source"))
    session.submit(0, Item(f"touch {tmp_path}/mark", "truth", "source"))
    assert {grade_result.reason for grade_result in session.finish().values()} == {"source"}


def test_long_call_within_its_limit_is_progress(pool, tmp_path):
    """The call ends once progress was counted twice meanwhile: a watchdog sees no hang."""
    counted = []

    def count():
        counted.append(pool.num_graded)
        if counted.count(before) == 2:
            (tmp_path / "mark").touch()

    prompt = Prompt(0, (), (1,), "truth", "source")
    text = f"wait-for {tmp_path}/mark"
    response = Response(0, 0, np.zeros(1), np.zeros(1), text, "stop", 0)
    assert not pool.is_within_limits  # nothing is graded
    before = pool.num_graded
    grader = Grader(pool, Topology.single(), count)
    grader.begin([prompt], samples=1)(0, response)
    assert pool.is_within_limits
    (rollout,) = grader.finish([prompt], [response])
    assert rollout.grade_result.reason == "source" and counted.count(before) >= 2


def test_calls_without_sign_of_life_are_no_progress(pool, tmp_path):
    session = pool.begin()
    session.submit(0, Item(f"wait-for {tmp_path}/mark", "truth", "source"))
    assert pool.is_within_limits
    pool.last_message_at -= ALIVE_SECONDS  # as where this process or the manager hangs
    assert not pool.is_within_limits
    (tmp_path / "mark").touch()
    session.finish()
