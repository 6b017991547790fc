"""What a study found: scores, runaways, and paired differences with intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.study.state import RunState

SPREAD = "ratio/prefix_mean_log_std"
# A run has run away where, in some step, the spread of log w_t exceeds 0.2 and the mean reward of
# one of the three rollout batches after it lies 0.1 or more below the best up to that step.
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
    """One run that is done."""

    point: dict[str, str]
    seed: int
    score: float  # the macro mean of Avg@k at the end
    reward: float  # the mean over all rollout batches: the area under the learning curve
    spread: float  # the largest of any step
    ran_away: bool


@dataclass(frozen=True)
class Interval:
    """A mean of differences with its 95% interval (Student's t over pairs)."""

    mean: float
    half_width: float
    pairs: int

    def __str__(self) -> str:
        return f"{100 * self.mean:+.1f} ± {100 * self.half_width:.1f} ({self.pairs})"


def macro_score(row: dict[str, Any]) -> float | None:
    """The unweighted mean of Avg@k over the evaluation sets of a row; None if it has none."""
    scores = [
        value for key, value in row.items()
        if key.startswith("eval/") and "/avg@" in key and value is not None
    ]  # fmt: skip
    return statistics.fmean(scores) if scores else None


def has_run_away(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the run meets the definition at the head of this file."""
    trained = [row for row in rows if row.get("reward/mean") is not None]
    best = -math.inf
    for place, row in enumerate(trained):
        best = max(best, row["reward/mean"])
        after = trained[place + 1 : place + 1 + RUNAWAY_STEPS]
        if (row.get(SPREAD) or 0.0) > RUNAWAY_SPREAD and any(
            later["reward/mean"] <= best - RUNAWAY_FALL for later in after
        ):
            return True
    return False


def find_outcome(state: RunState) -> Outcome | None:
    """What a run found; None until it is done."""
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
    )


def paired_interval(differences: Sequence[float]) -> Interval:
    """Mean and 95% half-width; infinite for fewer than two pairs."""
    count = len(differences)
    mean = statistics.fmean(differences)
    if count < 2:
        return Interval(mean, math.inf, count)
    error = statistics.stdev(differences) / math.sqrt(count)
    return Interval(mean, _student_t(count - 1) * error, count)


def summarise(outcomes: Sequence[Outcome], axis: str, *, first: str) -> str:
    """A markdown table: each value of `axis` at each other point, against its value `first`.

    Differences are paired: only seeds that both have count.
    """
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
    return "\n".join(lines) + "\n"


def _against(differences: Sequence[float]) -> str:
    return str(paired_interval(differences)) if differences else ""


def _percent(scores: Sequence[float]) -> str:
    return f"{100 * statistics.fmean(scores):.1f}"


def _student_t(freedom: int) -> float:
    """The 97.5% quantile of Student's distribution."""
    return T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.96 + 2.5 / freedom
