"""Scores, runaways and paired intervals by hand."""

import math

import pytest

from megatron_rl.study.summary import (
    Outcome,
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
