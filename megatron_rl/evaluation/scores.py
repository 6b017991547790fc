"""Avg@k, pass@k and maj@k of one evaluation set, and bootstrap intervals over problems.

With n responses to a problem, of which c are right:

    Avg@n   the mean reward
    pass@k  1 - C(n - c, k) / C(n, k): the chance that k of the n, drawn without putting back, hold
            a right one; unbiased (Chen et al., arXiv 2107.03374, equation 1)
    maj@n   the reward of the answer that most responses give (Wang et al., arXiv 2203.11171);
            where several are given equally often, the mean over them; 0 where none gives one

A response is right where its reward is at least 1. Answers are compared as the texts that the
verifier extracted. The score of a set is the mean over its problems; macro is the mean over sets,
each counting alike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import Verdict

RESAMPLES = 2000
SEED = 20260101  # of the resampling: the same responses have the same interval
COVERAGE = 0.95


@dataclass(frozen=True)
class Interval:
    """A score in [0, 1] with its interval."""

    score: float
    low: float
    high: float


@dataclass(frozen=True)
class SetScores:
    """One evaluation set: for each score its value at every problem."""

    samples: int
    by_problem: dict[str, np.ndarray]  # name, as avg@8: [problems]

    def mean(self, name: str) -> float:
        """The score of the set."""
        values = self.by_problem[name].tolist()
        return sum(values) / len(values)


def score_set(verdicts: Sequence[Verdict], *, samples: int) -> SetScores:
    """The scores of verdicts that come `samples` for each problem, problem after problem."""
    assert len(verdicts) % samples == 0, f"{len(verdicts)} verdicts of {samples} to each problem"
    groups = [verdicts[start : start + samples] for start in range(0, len(verdicts), samples)]
    rights = [sum(verdict.reward >= 1 for verdict in group) for group in groups]
    values = {f"avg@{samples}": [_mean([verdict.reward for verdict in g]) for g in groups]}
    if samples > 1:
        for k in powers_of_two(samples):
            values[f"pass@{k}"] = [pass_at_k(samples, right, k) for right in rights]
        values[f"maj@{samples}"] = [majority(group) for group in groups]
    return SetScores(samples, {name: np.array(column) for name, column in values.items()})


def powers_of_two(samples: int) -> list[int]:
    """2, 4, 8, ... up to the number of samples, which is the last; pass@1 is the mean of rights."""
    below = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    return [*below, samples]


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that k of `samples` responses hold one of the `right` ones."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(verdicts: Sequence[Verdict]) -> float:
    """The reward of the answer that is given most often."""
    rewards: dict[str, list[float]] = {}
    for verdict in verdicts:
        if verdict.extracted is not None:
            rewards.setdefault(verdict.extracted, []).append(verdict.reward)
    most = max(map(len, rewards.values()), default=0)
    return _mean([_mean(given) for given in rewards.values() if len(given) == most])


def intervals(sets: Mapping[str, SetScores], name: str) -> dict[str, Interval]:
    """The score `name` of each set and of `macro`, with intervals by resampling problems.

    The percentile bootstrap: problems are drawn with putting back, each set on its own.
    """
    generator = np.random.Generator(np.random.PCG64(SEED))
    means: dict[str, float] = {}
    draws: dict[str, np.ndarray] = {}
    for one, scores in sets.items():
        values = scores.by_problem[name]
        means[one] = scores.mean(name)
        draws[one] = np.array([
            values[generator.integers(len(values), size=len(values))].mean()
            for _ in range(RESAMPLES)
        ])  # fmt: skip
    means["macro"] = _mean(list(means.values()))
    draws["macro"] = np.mean(list(draws.values()), axis=0)
    tail = 50 * (1 - COVERAGE)
    return {
        one: Interval(means[one], *np.percentile(drawn, [tail, 100 - tail]).tolist())
        for one, drawn in draws.items()
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
