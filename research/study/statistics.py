"""Intervals and tests of a study: scipy's, and Holm's correction."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

LEVEL = 0.05


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences, with its 95% confidence interval (Student's t)."""

    mean: float
    half_width: float
    pairs: int

    def __str__(self) -> str:
        if self.pairs == 1:
            return f"{100 * self.mean:+.1f} (one pair)"
        return f"{100 * self.mean:+.1f} ± {100 * self.half_width:.1f} ({self.pairs})"


def paired_interval(differences: Sequence[float]) -> Interval:
    """Return mean and 95% half-width; the latter is infinite for fewer than two pairs."""
    count = len(differences)
    mean = statistics.fmean(differences)
    if count < 2:
        return Interval(mean, math.inf, count)
    error = statistics.stdev(differences) / math.sqrt(count)
    return Interval(mean, float(stats.t.ppf(1 - LEVEL / 2, count - 1)) * error, count)


def student_p(differences: Sequence[float]) -> float:
    """Return the two-sided p of a mean of 0 (Student's t)."""
    if len(set(differences)) == 1:  # no variance: scipy would divide by 0
        return float(differences[0] == 0)
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def wilcoxon_p(differences: Sequence[float]) -> float:
    """Return the two-sided p of Wilcoxon's signed ranks, exact for small samples."""
    if not any(differences):
        return 1.0
    return float(stats.wilcoxon(differences).pvalue)


def fisher_p(some: tuple[int, int], others: tuple[int, int]) -> float:
    """Return the two-sided p of Fisher's exact test on (events, trials) of two groups."""
    table = [[events, trials - events] for events, trials in (some, others)]
    return float(stats.fisher_exact(table).pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's method, in the given order.

    The k-th smallest of n, from k = 0, times n - k, and at least the adjusted one before it.
    """
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = largest
    return adjusted
