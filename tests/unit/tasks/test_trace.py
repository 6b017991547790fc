"""Traces: slips where they were asked for, and verdicts without mercy or superstition."""

import random

import pytest

from megatron_rl.tasks.running_sum import RunningSum, draw
from megatron_rl.tasks.trace import (
    Noise,
    Twice,
    count_decisions,
    noisy_trace,
    right_answer,
    right_trace,
    verify_trace,
)

# 4 + 8 - 3 - 9: 4, 12 -> 2, -1 -> 9, 0
PROBLEM = RunningSum(4, (("+", 8), ("-", 3), ("-", 9)))
RIGHT = "4+8=2-3=9-9=0"


def test_a_running_sum_by_hand():
    assert PROBLEM.question == "4+8=?-3=?-9=?"
    assert right_trace(PROBLEM) == RIGHT
    assert count_decisions(PROBLEM) == 3
    assert len(right_trace(draw(random.Random(1), 16))) == 4 * 16 - 3  # and the end: 62 tokens


@pytest.mark.parametrize(
    ("text", "reward", "reason"),
    [
        (RIGHT, 1.0, "right"),
        ("4+8=3~2-3=9-9=0", 1.0, "right after corrections"),
        ("4+8=3~4~2-3=9-9=0", 1.0, "right after corrections"),  # a correction of a correction
        ("4+8=2-3=9-9=1~0", 1.0, "right after corrections"),
        ("4+8=2-3=9-9=", 0.0, "stops too early"),
        ("4+8=2-3=9-9=1~", 0.0, "stops too early"),
        ("", 0.0, "stops too early"),
        ("~", 0.0, "wrong"),
        ("4+8=2~3-3=9-9=0", 0.0, "wrong"),  # corrected to something wrong
        ("4+8=3-3=0-9=1", 0.0, "wrong"),  # consistent in itself
        ("4+8=3-3=9-9=0", 0.0, "wrong"),  # the right result by a wrong step
        ("4+8=2-3=9-9=0 ", 0.0, "wrong"),
        ("4+8=2-3=9-9=00", 0.0, "wrong"),
        ("4+8=2 -3=9-9=0", 0.0, "wrong"),
        ("__import__('os')", 0.0, "wrong"),
    ],
)
def test_verdicts(text, reward, reason):
    found = verify_trace(text, RIGHT, "")
    assert found[:2] == (reward, reason)


def slips(place, corrected, count=3000):
    """Where the slips of noisy traces of 31 sums are, as thirds, and how many right traces."""
    generator = random.Random(0)
    thirds, right = [0, 0, 0], 0
    for _ in range(count):
        problem = draw(generator, 31) if not corrected else Twice(draw(generator, 31), "?")
        text = noisy_trace(problem, Noise(0.05, place, corrected), generator)
        truth = right_answer(problem)
        right += verify_trace(text, truth, "")[0] > 0
        if not corrected:
            first = next((i for i, (a, b) in enumerate(zip(text, truth, strict=True)) if a != b), 0)
            if first:
                thirds[min(3 * ((first - 4) // 4) // 30, 2)] += 1
    return thirds, right / count


@pytest.mark.parametrize(("place", "empty"), [("early", [1, 2]), ("late", [0, 1]), ("even", [])])
def test_slips_are_where_they_were_asked_for(place, empty):
    thirds, right = slips(place, 0.0)
    assert [third for third in range(3) if thirds[third] == 0] == empty
    # 30 decisions at 0.05, or 10 at 0.15: a trace is right with 0.95^30 = 0.215 or 0.85^10 = 0.197.
    assert abs(right - (0.95**30 if place == "even" else 0.85**10)) < 0.03


def test_corrected_slips_leave_the_trace_right():
    _, right = slips("even", 0.5)
    assert abs(right - 0.975**30) < 0.04  # only every other slip stays: 0.468
    assert slips("even", 1.0)[1] == 1.0


def test_a_correction_takes_no_more_room_than_none():
    twice = Twice(PROBLEM, "?")
    assert twice.question == "4+8=?~?-3=?~?-9=?~?"
    assert right_trace(twice) == "4+8=2~2-3=9~9-9=0~0" and right_answer(twice) == RIGHT
    corrected, not_corrected = (
        noisy_trace(twice, Noise(1.0, corrected=share), random.Random(3)) for share in (1.0, 0.0)
    )
    for text in (corrected, not_corrected):
        assert len(text) == len(twice.question) and "2~" not in text[:6]
    assert [text[6] for text in (corrected, not_corrected)] == ["2", not_corrected[4]]


def test_what_follows_a_slip_follows_from_it():
    text = noisy_trace(PROBLEM, Noise(1.0), random.Random(3))
    # Each sum is wrong; the next one is wrong by its own slip alone.
    total = 4
    for sign, term, given in zip("+--", "839", text[4::4], strict=True):
        assert (total + int(sign + term)) % 10 != int(given)
        total = int(given)
