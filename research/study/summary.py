"""Summary of a study: scores, falls, and paired differences with confidence intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from research.study.state import RunState
from research.study.statistics import paired_interval

# A run has fallen if the mean reward of a rollout batch is 20 points or more below the best one
# before it, or the last score 20 points or more below an earlier one. This uses no objective's
# weight, and the last batch counts.
FALL = 0.2
ROUNDING = 1e-9  # of differences of fractions


@dataclass(frozen=True)
class Outcome:
    """Result of a finished run."""

    point: dict[str, str]
    seed: int
    score: float  # macro mean of avg@k at the end
    reward: float  # mean over all rollout batches: the area under the learning curve
    fall: float  # largest, of the reward at any time or of the score at the end; 0 if none
    solved: float | None = None  # macro mean of pass@k at the end
    ungraded: float = 0.0  # maximum fraction of an evaluation that was not graded (counts as wrong)

    @property
    def has_fallen(self) -> bool:
        """True if the score fell by FALL or more."""
        return self.fall >= FALL - ROUNDING


def macro_score(row: dict[str, Any], *, kind: str = "avg") -> float | None:
    """Return the unweighted mean over sets of avg@k (or pass@k); None without any.

    k: the largest one that a set has.
    """
    scores: dict[str, tuple[int, float]] = {}
    for key, value in row.items():
        name, _, metric = key.rpartition("/")
        found, _, k = metric.partition("@")
        if key.startswith("eval/") and found == kind and value is not None:
            scores[name] = max(scores.get(name, (0, 0.0)), (int(k), value))
    return statistics.fmean(value for _, value in scores.values()) if scores else None


def largest_fall(rewards: Sequence[float], scores: Sequence[float]) -> float:
    """Return the largest fall of a batch's reward below the best before, or of the last score."""
    best, fall = -math.inf, 0.0
    for reward in rewards:
        fall, best = max(fall, best - reward), max(best, reward)
    return max(fall, max(scores, default=0.0) - scores[-1] if scores else 0.0)


def find_outcome(state: RunState) -> Outcome | None:
    """Return the outcome of a run; None until it is done."""
    if state.state != "done":
        return None
    scores = [score for row in state.rows if (score := macro_score(row)) is not None]
    rewards = [row["reward/mean"] for row in state.rows if row.get("reward/mean") is not None]
    if not scores or not rewards:
        return None
    last = next(row for row in reversed(state.rows) if macro_score(row) is not None)
    return Outcome(
        state.run.point,
        state.run.seed,
        scores[-1],
        statistics.fmean(rewards),
        largest_fall(rewards, scores),
        macro_score(last, kind="pass"),
        max(map(_ungraded, state.rows), default=0.0),
    )


def _ungraded(row: dict[str, Any]) -> float:
    """Return the maximum over sets of the fraction of responses that were not graded."""
    ends = ("/time_limit_fraction", "/failed_fraction")
    by_set: dict[str, float] = {}
    for key, value in row.items():
        if key.startswith("eval/") and key.endswith(ends) and value is not None:
            name = key.rpartition("/")[0]
            by_set[name] = by_set.get(name, 0.0) + value
    return max(by_set.values(), default=0.0)


def summarise(outcomes: Sequence[Outcome], axis: str, *, first: str) -> str:
    """Return a Markdown table that compares each value of `axis` with its value `first`.

    Differences are paired: only seeds present for both values count.
    """
    if not outcomes:
        return "No run is done yet.\n"
    lines = [
        f"| point | {axis} | runs | score | to {first} (pairs) | reward | to {first} (pairs) "
        "| pass@k | largest fall | fell |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    points: dict[tuple[str, ...], dict[str, dict[int, Outcome]]] = {}
    for outcome in outcomes:
        others = tuple(f"{key} {value}" for key, value in outcome.point.items() if key != axis)
        values = points.setdefault(others, {})
        values.setdefault(outcome.point[axis], {})[outcome.seed] = outcome
    for others, values in points.items():
        base = values.get(first, {})
        for value, runs in values.items():
            pairs = [] if value == first else [
                (runs[seed], base[seed]) for seed in sorted(base.keys() & runs.keys())
            ]  # fmt: skip
            lines.append(
                f"| {', '.join(others)} | {value} | {len(runs)} "
                f"| {_percent([run.score for run in runs.values()])} "
                f"| {_against([run.score - other.score for run, other in pairs])} "
                f"| {_percent([run.reward for run in runs.values()])} "
                f"| {_against([run.reward - other.reward for run, other in pairs])} "
                f"| {_percent([run.solved for run in runs.values() if run.solved is not None])} "
                f"| {100 * max(run.fall for run in runs.values()):.1f} "
                f"| {sum(run.has_fallen for run in runs.values())} |"
            )
    lost = max((outcome.ungraded for outcome in outcomes), default=0.0)
    if lost:
        lines += ["", f"Up to {lost:.2%} of the responses of an evaluation were not graded, by the "
                  "time limit or because the verifier failed: they count as wrong."]  # fmt: skip
    return "\n".join(lines) + "\n"


def _against(differences: Sequence[float]) -> str:
    return str(paired_interval(differences)) if differences else ""


def _percent(scores: Sequence[float]) -> str:
    return f"{100 * statistics.fmean(scores):.1f}" if scores else ""
