"""Scores, runaways and paired intervals by hand."""

import math
from types import SimpleNamespace

import pytest

from megatron_rl.apps.study.state import RunState
from megatron_rl.apps.study.summary import (
    Outcome,
    find_outcome,
    has_run_away,
    macro_score,
    paired_interval,
    summarise,
)


def test_macro_is_the_mean_over_sets_not_problems():
    row = {"eval/a/avg@4": 0.5, "eval/b/avg@8": 1.0, "eval/a/response_length_mean": 9.0}
    assert macro_score(row) == 0.75
    assert macro_score({"reward/mean": 0.5}) is None


def rows(*pairs):
    return [{"step": 0}] + [
        {"step": step, "reward/mean": reward, "ratio/prefix_mean_log_std": spread}
        for step, (reward, spread) in enumerate(pairs, start=1)
    ]


@pytest.mark.parametrize(
    ("found", "ran_away"),
    [
        (rows((0.3, 0.05), (0.5, 0.3), (0.4, 0.1)), True),  # spread, then a fall of 0.1
        (rows((0.3, 0.05), (0.5, 0.2), (0.3, 0.1)), False),  # not over 0.2
        (rows((0.3, 0.05), (0.5, 0.3), (0.41, 0.1)), False),  # falls by less
        (rows((0.5, 0.3), (0.5, 0.1), (0.5, 0.1), (0.3, 0.1)), True),  # the third after it
        (rows((0.5, 0.3), (0.5, 0.1), (0.5, 0.1), (0.5, 0.1), (0.3, 0.1)), False),  # the fourth
        (rows((0.6, 0.1), (0.45, 0.3), (0.45, 0.1)), True),  # below the best before
        (rows((0.6, 0.1), (0.3, 0.1), (0.2, 0.3)), False),  # no batch after it
        (rows((0.5, None), (0.1, None)), False),
        ([], False),
    ],
)
def test_the_definition_of_a_runaway(found, ran_away):
    assert has_run_away(found) is ran_away


def test_a_paired_interval_by_hand():
    # Mean 2, standard deviation 1, 3 pairs: 4.303 / sqrt(3) = 2.484.
    found = paired_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.pairs) == (2.0, 3)
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3))
    assert paired_interval([0.5]).half_width == math.inf
    assert str(paired_interval([0.005])) == "+0.5 (one pair)"
    assert paired_interval([1.0] * 30).half_width == 0.0


def outcome(objective, seed, score, **point):
    return Outcome({**point, "objective": objective}, seed, score, score / 2, 0.1, seed == 2)


def test_the_summary_pairs_seeds_and_keeps_points_apart():
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
        "| length 62 | gspo | 4 | 61.3 | +10.0 ± 64.5 (3) | 30.6 | +5.0 ± 32.3 (3) | 0.100 | 1 |",
        "| length 62 | pnpo | 3 | 71.7 |  | 35.8 |  | 0.100 | 1 |",
        "| length 254 | gspo | 1 | 50.0 |  | 25.0 |  | 0.100 | 0 |",
    ]


def test_the_summary_says_what_was_not_judged():
    """The most of any evaluation of any run: 2% out of time and 1% failed, of one set."""
    row = {"eval/a/avg@4": 0.5, "eval/a/time_limit_fraction": 0.02, "eval/a/failed_fraction": 0.01}
    row |= {"eval/b/time_limit_fraction": 0.01, "eval/b/failed_fraction": None, "reward/mean": 0.5}
    state = RunState(SimpleNamespace(point={"objective": "pnpo"}, seed=1), "done", [row])
    text = summarise([find_outcome(state)], "objective", first="pnpo")
    assert text.splitlines()[-1].startswith("Up to 3.00% of the responses of an evaluation were")
