"""Avg@k, pass@k, maj@k against hand-worked and brute-force values; intervals of problems."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from megatron_rl.trainer.evaluation import (
    SetScores,
    intervals,
    majority,
    pass_at_k,
    powers_of_two,
    score_set,
)
from megatron_rl.types import GradeResult


def grade_results(text):
    """`7+ 3- .-`: an answer with whether it is right; a dot is no answer."""
    return [
        GradeResult(float(word[1] == "+"), "", None if word[0] == "." else word[0])
        for word in text.split()
    ]


def test_scores_of_two_problems_by_hand():
    found = score_set(grade_results("7+ 3- 7+ 5-  1- 1- 2+ .-"), samples=4)
    assert found.by_problem["avg@4"].tolist() == [0.5, 0.25]
    # 2 of 4 are right: 1 - C(2,2)/C(4,2) = 5/6; 1 of 4: 1 - C(3,2)/C(4,2) = 1/2.
    assert found.by_problem["pass@2"].tolist() == pytest.approx([5 / 6, 1 / 2])
    assert found.by_problem["pass@4"].tolist() == [1.0, 1.0]
    assert found.by_problem["maj@4"].tolist() == [1.0, 0.0]  # 7 twice; 1 twice
    assert found.mean("avg@4") == 0.375
    assert list(found.by_problem) == ["avg@4", "pass@2", "pass@4", "maj@4"]
    assert list(score_set(grade_results("7+ 3-"), samples=1).by_problem) == ["avg@1"]


def test_set_without_answers_has_no_majority_score():
    """A verifier that returns a number gives none: 16 right responses are no vote for anything."""
    sets = {
        "numbers": score_set(grade_results(".+ .+ .- .+"), samples=2),
        "answers": score_set(
            grade_results("7+ 7+ .- .-"), samples=2
        ),  # the second problem has no vote
    }
    assert [math.isnan(one.mean("maj@2")) for one in sets.values()] == [True, False]
    found = intervals(sets, "maj@2")
    assert (found["numbers"], found["macro"]) == (None, None)
    assert found["answers"].score == 0.5
    assert intervals(sets, "avg@2")["macro"].score == (0.75 + 0.5) / 2


@pytest.mark.parametrize("samples", [1, 5])
def test_pass_at_k_equals_enumeration(samples):
    for right in range(samples + 1):
        responses = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            choices = list(itertools.combinations(responses, k))
            assert pass_at_k(samples, right, k) == pytest.approx(
                sum(map(any, choices)) / len(choices)
            )


@pytest.mark.parametrize(
    ("given", "score"),
    [
        ("7+ 3- 5- 5- 7+", 0.5),  # 7 and 5 twice
        (".- .- 7+", 1.0),  # who gives no answer has no vote
        (".- .-", 0.0),
    ],
)
def test_majority_by_hand(given, score):
    assert majority(grade_results(given)) == score


def test_majority_is_that_of_breaking_ties_by_chance():
    generator = random.Random(1)
    for _ in range(20):
        given = grade_results(
            " ".join(generator.choice(["1+", "2-", "3-", ".-"]) for _ in range(6))
        )
        votes = [grade_result for grade_result in given if grade_result.extracted]
        counts = [sum(v.extracted == other.extracted for other in votes) for v in votes]
        # Drawing among the responses whose answer is given most often draws each such answer alike.
        top = [v.reward for v, count in zip(votes, counts, strict=True) if count == max(counts)]
        assert majority(given) == pytest.approx(statistics.fmean(top) if top else 0.0)


def test_rewards_beyond_0_and_1_average_as_they_are_and_are_right_from_1_on():
    found = score_set([GradeResult(2.0, "", "a"), GradeResult(0.5, "", "b")], samples=2)
    assert found.mean("avg@2") == 1.25
    assert found.mean("pass@2") == 1.0
    assert score_set([GradeResult(0.9, "", "a")] * 2, samples=2).mean("pass@2") == 0.0


def test_powers_of_two_end_with_all_samples():
    assert powers_of_two(2) == [2]
    assert powers_of_two(8) == [2, 4, 8]
    assert powers_of_two(12) == [2, 4, 8, 12]


def of(values):
    return SetScores(1, {"avg@1": np.array(values)})


def test_intervals_are_of_problems_not_responses():
    """The bootstrap of a mean has the standard error of the mean: sqrt(p (1 - p) / n)."""
    values = [1.0] * 60 + [0.0] * 140
    found = intervals({"a": of(values), "b": of([0.5] * 10)}, "avg@1")
    error = (0.3 * 0.7 / 200) ** 0.5
    assert found["a"].score == 0.3
    assert found["a"].low == pytest.approx(0.3 - 1.96 * error, abs=0.2 * error)
    assert found["a"].high == pytest.approx(0.3 + 1.96 * error, abs=0.2 * error)
    assert (found["b"].low, found["b"].high) == (0.5, 0.5)
    # Each set counts alike, however many problems it has: half the error of a.
    assert found["macro"].score == 0.4
    assert found["macro"].high - 0.4 == pytest.approx(0.98 * error, abs=0.2 * error)
    assert found == intervals({"a": of(values), "b": of([0.5] * 10)}, "avg@1")
