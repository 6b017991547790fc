"""Hostile responses cost the default verifier a reward, and nothing else.

MEGATRON_RL_HOSTILE_ANSWERS=10000 tries more of them than the few that are enough for a change.
"""

import os
import sys
from collections import Counter

import pytest

from megatron_rl.config.sections import RewardSection
from megatron_rl.rewards.math_answer import verify_math_answer
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import FAILED, TIME_LIMIT, Item
from tests.unit.rewards.hostile import EXPLOSIVE, hostile_answers

COUNT = int(os.environ.get("MEGATRON_RL_HOSTILE_ANSWERS", "200"))
TRUTHS = ("42", r"\frac{1}{2}", "x^2+1", "(1,2)", r"5 \text{ cm}")


def test_hostile_responses_neither_hang_nor_end_workers(tmp_path):
    canary, output = tmp_path / "canary", []
    answers = hostile_answers(COUNT, seed=1, canary=canary) + [
        rf"\boxed{{{one}}}" for one in EXPLOSIVE
    ]
    items = [Item(text, TRUTHS[i % 5], "fuzz") for i, text in enumerate(answers)]
    grade_results = []
    for workers in (2, 1):
        selected = items if workers == 2 else items[: COUNT // 4]
        # `end`: an exception, or a process that dies twice over an answer, would be raised.
        with VerifierPool(RewardSection(workers=workers), echo=output.append) as pool:
            grade_results.append(pool.verify_all(selected))
    assert not canary.exists()
    assert output == []
    reasons = Counter(grade_result.reason for grade_result in grade_results[0])
    print(reasons, file=sys.stderr)
    assert FAILED not in reasons
    assert reasons[TIME_LIMIT] == 0  # what would take too long is not computed
    assert all(grade_result.reward in (0.0, 1.0) for grade_result in grade_results[0])
    assert grade_results[1] == grade_results[0][: COUNT // 4]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("(" * 13 + "1" + ")" * 13, "answer too deep"),
        ("[" * 1999, "answer too deep"),
        ("9" * 2001, "answer too long"),
    ],
)
def test_expensive_expressions_are_not_parsed(answer, reason):
    assert verify_math_answer(f"Answer: {answer}", "1", "")[:2] == (0.0, reason)
    assert verify_math_answer("Answer: " + "(" * 9 + "1" + ")" * 9, "1", "")[:2] == (1.0, "equal")


def test_end_of_long_text_is_read():
    assert verify_math_answer("x" * 3_000_000 + r"\boxed{7}", "7", "")[0] == 1.0
    assert verify_math_answer(r"\boxed{7}" + "x" * 3_000_000, "7", "")[1] == "no answer"
