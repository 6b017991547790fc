"""Scores, falls and the table of paired differences by hand."""

from types import SimpleNamespace

import pytest

from research.study.state import RunState
from research.study.summary import (
    Outcome,
    find_outcome,
    largest_fall,
    macro_score,
    summarise,
)


def test_macro_is_mean_over_sets_not_problems():
    row = {"eval/a/avg@4": 0.5, "eval/b/avg@8": 1.0, "eval/a/response_length_mean": 9.0}
    assert macro_score(row) == 0.75
    assert macro_score({"reward/mean": 0.5}) is None
    row |= {"eval/a/pass@2": 0.6, "eval/a/pass@16": 0.9, "eval/a/pass@8": 0.7, "eval/b/pass@8": 0.5}
    assert macro_score(row, kind="pass") == pytest.approx(0.7)  # pass@16 of a, pass@8 of b


@pytest.mark.parametrize(
    ("rewards", "scores", "fall"),
    [
        ([0.3, 0.5, 0.4, 0.6], [0.3, 0.6], 0.1),  # recovered
        ([0.3, 0.7, 0.6, 0.5], [0.3, 0.6], 0.2),  # step by step, the last batch included
        ([0.3, 0.7, 0.9], [0.3, 0.8, 0.5], 0.3),  # the last score; rewards only rise
        ([0.3, 0.7], [0.9, 0.2, 0.9], 0.0),  # only the last score counts
        ([0.3], [], 0.0),
    ],
)
def test_largest_fall_of_score(rewards, scores, fall):
    assert largest_fall(rewards, scores) == pytest.approx(fall)


def test_run_that_falls_by_twenty_points_has_fallen():
    """Exactly 20 points count, although 0.7 - 0.5 is below 0.2 in floating point."""
    assert 0.7 - 0.5 < 0.2
    assert Outcome({}, 1, 0.5, 0.5, 0.7 - 0.5).has_fallen
    assert not Outcome({}, 1, 0.5, 0.5, 0.199).has_fallen


def outcome(objective, seed, score, **point):
    fall = 0.25 if seed == 2 else 0.125
    return Outcome({**point, "objective": objective}, seed, score, score / 2, fall, score)


def test_summary_pairs_seeds_and_keeps_points_apart():
    found = [
        outcome("gspo", 3, 0.7, length="62"),  # which is done first is not what counts
        outcome("pnpo", 1, 0.5, length="62"),
        outcome("pnpo", 2, 0.75, length="62"),
        outcome("pnpo", 3, 0.9, length="62"),
        outcome("gspo", 1, 0.75, length="62"),
        outcome("gspo", 2, 1.0, length="62"),
        outcome("gspo", 9, 0.0, length="62"),  # no partner
        outcome("gspo", 1, 0.5, length="254"),
    ]
    head, _, *lines = summarise(found, "objective", first="pnpo").splitlines()
    assert "to pnpo (pairs)" in head
    # 25, 25 and -20 points: 10, and 4.303 * sqrt(675) / sqrt(3) = 64.5
    assert lines == [
        "| length 62 | gspo | 4 | 61.3 | +10.0 ± 64.5 (3) | 30.6 | +5.0 ± 32.3 (3) | 61.3 "
        "| 25.0 | 1 |",
        "| length 62 | pnpo | 3 | 71.7 |  | 35.8 |  | 71.7 | 25.0 | 1 |",
        "| length 254 | gspo | 1 | 50.0 |  | 25.0 |  | 50.0 | 12.5 | 0 |",
    ]


def test_summary_reports_ungraded_responses():
    """The most of any evaluation of any run: 2% out of time and 1% failed, of one set."""
    row = {"eval/a/avg@4": 0.5, "eval/a/time_limit_fraction": 0.02, "eval/a/failed_fraction": 0.01}
    row |= {"eval/b/time_limit_fraction": 0.01, "eval/b/failed_fraction": None, "reward/mean": 0.5}
    state = RunState(SimpleNamespace(point={"objective": "pnpo"}, seed=1), "done", [row])
    text = summarise([find_outcome(state)], "objective", first="pnpo")
    assert text.splitlines()[-1].startswith("Up to 3.00% of the responses of an evaluation were")
