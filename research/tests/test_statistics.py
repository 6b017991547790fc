"""Tests and intervals: by hand, by enumeration, and against scipy."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from research.study.statistics import (
    fisher_p,
    holm,
    paired_interval,
    student_p,
    wilcoxon_p,
)


def test_paired_interval_by_hand():
    # Mean 2, standard deviation 1, 3 pairs: 4.3027 / sqrt(3) = 2.484.
    found = paired_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.pairs) == (2.0, 3)
    assert found.half_width == pytest.approx(4.3026527 / math.sqrt(3))
    assert paired_interval([0.5]).half_width == math.inf
    assert str(paired_interval([0.005])) == "+0.5 (one pair)"
    assert paired_interval([1.0] * 30).half_width == 0.0


def test_interval_equals_scipy_and_excludes_zero_if_significant():
    values = [0.3, -0.1, 0.4, 0.2, 0.15, 0.05, 0.35, -0.02]
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = paired_interval(values)
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(
        (low, high)
    )
    assert (low > 0) == (student_p(values) < 0.05)
    # Two pairs have one degree of freedom, where t is Cauchy: t = 3 / 1, p = 1 - 2 atan(3) / pi.
    assert student_p([1.0, 2.0]) == pytest.approx(1 - 2 * math.atan(3) / math.pi)
    assert (student_p([0.0, 0.0]), student_p([0.1, 0.1])) == (1.0, 0.0)


def test_wilcoxon_equals_enumeration_of_signs():
    values = [1.0, -2.0, 3.0, 4.0, 5.0]  # ranks 1 to 5: the positive ones add up to 13
    sums = [sum(rank for rank, sign in enumerate(signs, 1) if sign)
            for signs in itertools.product((0, 1), repeat=5)]  # fmt: skip
    share = 2 * sum(total >= 13 for total in sums) / 2**5
    assert wilcoxon_p(values) == pytest.approx(share) == 0.1875
    assert wilcoxon_p([0.5] * 8) == pytest.approx(2 / 2**8)  # the smallest p of eight units
    assert wilcoxon_p([0.0, 0.0]) == 1.0


def test_fisher_equals_sum_over_tables():
    # 4 of 8 against 0 of 24: of C(32, 4) ways to place four events, C(8, 4) are as far out.
    assert fisher_p((4, 8), (0, 24)) == pytest.approx(math.comb(8, 4) / math.comb(32, 4))
    # 4 of 8 against 0 of 8 is one of two tables of this probability.
    assert fisher_p((4, 8), (0, 8)) == pytest.approx(2 * math.comb(8, 4) / math.comb(16, 4))
    assert fisher_p((0, 5), (0, 9)) == 1.0


def test_holm_by_hand_and_by_its_definition():
    # Sorted 0.01, 0.02, 0.03, 0.2 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.2.
    assert holm([0.02, 0.2, 0.01, 0.03]) == pytest.approx([0.06, 0.2, 0.04, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
    values = np.random.default_rng(0).uniform(size=6)
    # The closed testing procedure of Bonferroni's tests, over all subsets that contain the value.
    closed = [
        max(
            min(1.0, size * min(subset))
            for size in range(1, 7)
            for subset in itertools.combinations(values, size)
            if value in subset
        )
        for value in values
    ]
    assert holm(list(values)) == pytest.approx(closed)
