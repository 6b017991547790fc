"""Summary of a study: scores, diverged runs, and paired differences with confidence intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.apps.study.state import RunState

SPREAD = "ratio/prefix_mean_log_std"
# A run has diverged if, in some step, the spread of log w_t exceeds 0.2 and the mean reward of one
# of the next three rollout batches is at least 0.1 below the best up to that step.
RUNAWAY_SPREAD = 0.2
RUNAWAY_FALL = 0.1
RUNAWAY_STEPS = 3
# 97.5% quantiles of Student's distribution with 1 to 20 degrees of freedom.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Result of a finished run."""

    point: dict[str, str]
    seed: int
    score: float  # macro mean of avg@k at the end
    reward: float  # mean over all rollout batches: the area under the learning curve
    spread: float  # maximum over steps
    ran_away: bool
    unjudged: float = 0.0  # maximum fraction of an evaluation that was not graded (counts as wrong)


@dataclass(frozen=True)
class PairedInterval:
    """Mean of paired differences with its 95% confidence interval (Student's t)."""

    mean: float
    half_width: float
    pairs: int

    def __str__(self) -> str:
        if self.pairs == 1:
            return f"{100 * self.mean:+.1f} (one pair)"
        return f"{100 * self.mean:+.1f} ± {100 * self.half_width:.1f} ({self.pairs})"


def macro_score(row: dict[str, Any]) -> float | None:
    """Return the unweighted mean of avg@k over the evaluation sets of a row; None without any."""
    scores = [
        value for key, value in row.items()
        if key.startswith("eval/") and "/avg@" in key and value is not None
    ]  # fmt: skip
    return statistics.fmean(scores) if scores else None


def has_run_away(rows: Sequence[dict[str, Any]]) -> bool:
    """Return True if the run has diverged, as defined at the top of this file."""
    trained = [row for row in rows if row.get("reward/mean") is not None]
    best = -math.inf
    for index, row in enumerate(trained):
        best = max(best, row["reward/mean"])
        after = trained[index + 1 : index + 1 + RUNAWAY_STEPS]
        if (row.get(SPREAD) or 0.0) > RUNAWAY_SPREAD and any(
            later["reward/mean"] <= best - RUNAWAY_FALL for later in after
        ):
            return True
    return False


def find_outcome(state: RunState) -> Outcome | None:
    """Return the outcome of a run; None until it is done."""
    if state.state != "done":
        return None
    scores = [score for row in state.rows if (score := macro_score(row)) is not None]
    rewards = [row["reward/mean"] for row in state.rows if row.get("reward/mean") is not None]
    if not scores or not rewards:
        return None
    spread = max((row.get(SPREAD) or 0.0 for row in state.rows), default=0.0)
    return Outcome(
        state.run.point,
        state.run.seed,
        scores[-1],
        statistics.fmean(rewards),
        spread,
        has_run_away(state.rows),
        max(map(_unjudged, state.rows), default=0.0),
    )


def _unjudged(row: dict[str, Any]) -> float:
    """Return the maximum over sets of the fraction of responses that were not graded."""
    ends = ("/time_limit_fraction", "/failed_fraction")
    by_set: dict[str, float] = {}
    for key, value in row.items():
        if key.startswith("eval/") and key.endswith(ends) and value is not None:
            name = key.rpartition("/")[0]
            by_set[name] = by_set.get(name, 0.0) + value
    return max(by_set.values(), default=0.0)


def paired_interval(differences: Sequence[float]) -> PairedInterval:
    """Return mean and 95% half-width; the latter is infinite for fewer than two pairs."""
    count = len(differences)
    mean = statistics.fmean(differences)
    if count < 2:
        return PairedInterval(mean, math.inf, count)
    error = statistics.stdev(differences) / math.sqrt(count)
    return PairedInterval(mean, _student_t(count - 1) * error, count)


def summarise(outcomes: Sequence[Outcome], axis: str, *, first: str) -> str:
    """Return a Markdown table that compares each value of `axis` with its value `first`.

    Differences are paired: only seeds present for both values count.
    """
    if not outcomes:
        return "No run is done yet.\n"
    lines = [
        f"| point | {axis} | runs | score | to {first} (pairs) | reward | to {first} (pairs) "
        "| spread | ran away |",
        "|---|---|---|---|---|---|---|---|---|",
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
                f"| {max(run.spread for run in runs.values()):.3f} "
                f"| {sum(run.ran_away for run in runs.values())} |"
            )
    lost = max((outcome.unjudged for outcome in outcomes), default=0.0)
    if lost:
        lines += ["", f"Up to {lost:.2%} of the responses of an evaluation were not judged, by the "
                  "time limit or because the verifier failed: they count as wrong."]  # fmt: skip
    return "\n".join(lines) + "\n"


def _against(differences: Sequence[float]) -> str:
    return str(paired_interval(differences)) if differences else ""


def _percent(scores: Sequence[float]) -> str:
    return f"{100 * statistics.fmean(scores):.1f}"


def _student_t(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t distribution."""
    return T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.96 + 2.5 / freedom
