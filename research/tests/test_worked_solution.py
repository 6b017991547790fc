"""Worked solutions: positions of errors, corrections and verification."""

import random

import pytest

from research.tasks.running_sum import RunningSum, draw
from research.tasks.worked_solution import (
    Noise,
    SelfCorrection,
    correct_answer,
    correct_solution,
    count_decisions,
    noisy_solution,
    verify_trace,
)

# 4 + 8 - 3 - 9: 4, 12 -> 2, -1 -> 9, 0
PROBLEM = RunningSum(4, (("+", 8), ("-", 3), ("-", 9)))
CORRECT = "4+8=2-3=9-9=0"


def test_running_sum_solution():
    assert PROBLEM.question == "4+8=?-3=?-9=?"
    assert correct_solution(PROBLEM) == CORRECT
    assert count_decisions(PROBLEM) == 3
    assert (
        len(correct_solution(draw(random.Random(1), 16))) == 4 * 16 - 3
    )  # 62 tokens with the end token


@pytest.mark.parametrize(
    ("text", "reward", "reason"),
    [
        (CORRECT, 1.0, "right"),
        ("4+8=3~2-3=9-9=0", 1.0, "right after corrections"),
        ("4+8=3~4~2-3=9-9=0", 1.0, "right after corrections"),  # a correction of a correction
        ("4+8=2-3=9-9=1~0", 1.0, "right after corrections"),
        ("4+8=2-3=9-9=", 0.0, "stops too early"),
        ("4+8=2-3=9-9=1~", 0.0, "stops too early"),
        ("", 0.0, "stops too early"),
        ("~", 0.0, "wrong"),
        ("4+8=2~3-3=9-9=0", 0.0, "wrong"),  # corrected to something wrong
        ("4+8=3-3=0-9=1", 0.0, "wrong"),  # self-consistent
        ("4+8=3-3=9-9=0", 0.0, "wrong"),  # the correct result after a wrong step
        ("4+8=2-3=9-9=0 ", 0.0, "wrong"),
        ("4+8=2-3=9-9=00", 0.0, "wrong"),
        ("4+8=2 -3=9-9=0", 0.0, "wrong"),
        ("__import__('os')", 0.0, "wrong"),
    ],
)
def test_verify_trace(text, reward, reason):
    result = verify_trace(text, CORRECT, "")
    assert result[:2] == (reward, reason)


def count_errors(place, corrected, count=3000):
    """Count errors in each third of noisy solutions of 31 sums, and the fraction correct."""
    generator = random.Random(0)
    thirds, correct = [0, 0, 0], 0
    for _ in range(count):
        problem = draw(generator, 31) if not corrected else SelfCorrection(draw(generator, 31), "?")
        text = noisy_solution(problem, Noise(0.05, place, corrected), generator)
        truth = correct_answer(problem)
        correct += verify_trace(text, truth, "")[0] > 0
        if not corrected:
            first = next((i for i, (a, b) in enumerate(zip(text, truth, strict=True)) if a != b), 0)
            if first:
                thirds[min(3 * ((first - 4) // 4) // 30, 2)] += 1
    return thirds, correct / count


@pytest.mark.parametrize(("place", "empty"), [("early", [1, 2]), ("late", [0, 1]), ("even", [])])
def test_errors_are_in_configured_thirds(place, empty):
    thirds, correct = count_errors(place, 0.0)
    assert [third for third in range(3) if thirds[third] == 0] == empty
    # Probability correct: 30 decisions at 0.05, 0.95^30 = 0.215; 10 at 0.15, 0.85^10 = 0.197.
    assert abs(correct - (0.95**30 if place == "even" else 0.85**10)) < 0.03


def test_corrected_errors_leave_solution_correct():
    _, correct = count_errors("even", 0.5)
    assert abs(correct - 0.975**30) < 0.04  # half of the errors remain: 0.468
    assert count_errors("even", 1.0)[1] == 1.0


def test_corrections_do_not_change_length():
    twice = SelfCorrection(PROBLEM, "?")
    assert twice.question == "4+8=?~?-3=?~?-9=?~?"
    assert correct_solution(twice) == "4+8=2~2-3=9~9-9=0~0" and correct_answer(twice) == CORRECT
    corrected, not_corrected = (
        noisy_solution(twice, Noise(1.0, corrected=share), random.Random(3)) for share in (1.0, 0.0)
    )
    for text in (corrected, not_corrected):
        assert len(text) == len(twice.question) and "2~" not in text[:6]
    assert [text[6] for text in (corrected, not_corrected)] == ["2", not_corrected[4]]


def test_later_steps_follow_from_error():
    text = noisy_solution(PROBLEM, Noise(1.0), random.Random(3))
    # Each sum has its own error and is computed from the previous, wrong sum.
    total = 4
    for sign, term, given in zip("+--", "839", text[4::4], strict=True):
        assert (total + int(sign + term)) % 10 != int(given)
        total = int(given)
