"""Series over a run: smoothed rewards, cumulative cost, best scores and time to a reward."""

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.apps.report.runs import Run, RunGroup

WINDOW = 11  # steps, as in the paper
# Units of cost, and the metric that is summed.
COSTS = {
    "hours": ("time/step", 1 / 3600),
    "tokens": ("rollout/tokens", 1.0),
    "updates": ("train/updates", 1.0),
}


def centered_mean(values: Sequence[float | None], *, window: int = WINDOW) -> list[float | None]:
    """Return the mean of a centered window around each value; windows shrink towards the ends.

    Missing values (None) are skipped and stay None.
    """
    indices = [index for index, value in enumerate(values) if value is not None]
    known = [value for value in values if value is not None]
    smooth: list[float | None] = [None] * len(values)
    for at, index in enumerate(indices):
        half = min(window // 2, at, len(known) - 1 - at)
        smooth[index] = statistics.fmean(known[at - half : at + half + 1])
    return smooth


def progress(run: Run, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the cost up to each row: rollout batches, hours, tokens, updates and simulated time.

    Simulated time is in epochs of training: the study's cost of each rollout batch, plus the
    epochs. Unlike hours it does not depend on how busy the machine was.
    """
    spent: dict[str, list[float]] = {"batches": [row["step"] for row in rows]}
    for name, (key, unit) in COSTS.items():
        total, column = 0.0, []
        for row in rows:
            total += (row.get(key) or 0.0) * unit
            column.append(total)
        spent[name] = column
    per_epoch = run.config.get("trainer", {}).get("minibatches", 1)
    batches = itertools.accumulate(bool(row.get("rollout/tokens")) for row in rows)
    spent["simulated"] = [
        run.rollout_cost * batch + updates / per_epoch
        for batch, updates in zip(batches, spent["updates"], strict=True)
    ]
    return spent


def first_passage(run: Run, threshold: float) -> dict[str, float] | None:
    """Return the cost when the smoothed reward first reached the threshold; None if never."""
    smooth = centered_mean([row["reward/mean"] for row in run.steps])
    spent = progress(run, run.steps)
    for index, value in enumerate(smooth):
        if value is not None and value >= threshold:
            return {name: column[index] for name, column in spent.items()}
    return None


def default_threshold(runs: Sequence[Run]) -> float | None:
    """Return the highest multiple of 0.05 that the smoothed reward reaches in 90% of the runs.

    With fewer than ten runs, all must reach it. For rewards below 0.05 it is a multiple of 0.005,
    0.0005 and so on. Runs without a step do not count. Returns None if no such reward is above 0.
    """
    tops = []
    for run in runs:
        smooth = centered_mean([row["reward/mean"] for row in run.steps])
        if run.steps:
            tops.append(max((value for value in smooth if value is not None), default=0.0))
    reached = sorted(tops)[len(tops) // 10] if tops else 0.0
    if reached <= 0:
        return None
    digits = 2 if reached >= 0.05 else 1 - math.floor(math.log10(reached))
    unit = 5 * 10.0**-digits
    return round(int(reached / unit + 1e-9) * unit, digits)


def score_keys(runs: Sequence[Run]) -> list[str]:
    """Return the keys of all held-out scores, `eval/<set>/avg@<k>`."""
    keys = {key: None for run in runs for row in run.rows for key in row}
    return [key for key in keys if re.fullmatch(r"eval/.+/avg@\d+", key)]


@dataclass(frozen=True)
class Score:
    """Mean, minimum and maximum of a score over a group's runs, in percent.

    Also the mean percentages of truncated responses, and of ungraded ones, which count as wrong;
    None if the metrics do not contain them.
    """

    mean: float
    low: float
    high: float
    truncated: float | None = None
    ungraded: float | None = None

    @classmethod
    def of(cls, evaluations: Sequence["_Evaluation"]) -> "Score | None":
        """Summarize the scores of several runs; None if there are none."""
        values = [100 * evaluation.value for evaluation in evaluations]
        if not values:
            return None
        fractions = (
            _percent([evaluation.truncated for evaluation in evaluations]),
            _percent([evaluation.ungraded for evaluation in evaluations]),
        )
        return cls(statistics.fmean(values), min(values), max(values), *fractions)


@dataclass(frozen=True)
class _Evaluation:
    """Score of one evaluation, in [0, 1], and its fractions of truncated and ungraded responses."""

    value: float
    truncated: float | None
    ungraded: float | None

    @classmethod
    def of_row(cls, row: Mapping[str, Any], key: str) -> "_Evaluation":
        """Read the evaluation of `eval/<set>/avg@<k>` from a row of metrics."""
        prefix = key.rpartition("/")[0]
        ungraded = [row.get(f"{prefix}/{kind}_fraction") for kind in ("time_limit", "failed")]
        known = [value for value in ungraded if value is not None]
        return cls(row[key], row.get(f"{prefix}/truncated_fraction"), sum(known) if known else None)

    @classmethod
    def mean_of(cls, several: Sequence["_Evaluation"]) -> "_Evaluation":
        """Return the unweighted mean over sets."""
        columns = zip(*((e.value, e.truncated, e.ungraded) for e in several), strict=True)
        value, truncated, ungraded = map(_mean, columns)
        assert value is not None, "every set has a score"
        return cls(value, truncated, ungraded)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _percent(values: Iterable[float | None]) -> float | None:
    mean = _mean(values)
    return None if mean is None else 100 * mean


def best_scores(group: RunGroup, keys: Sequence[str]) -> dict[str, Score | None]:
    """Return each set's best observed score, selected per set and run, as in the paper's table.

    `Before` is the unweighted mean over sets of the evaluation before training, `Avg.` that of a
    run's best scores, `Last` that of its last evaluation; they include only runs with every set.
    `before <key>` is one set's score before training.
    """
    best: dict[str, list[_Evaluation]] = {key: [] for key in keys}
    before: dict[str, list[_Evaluation]] = {key: [] for key in keys}
    averages, last, first = [], [], []
    for run in group.runs:
        evaluations = {
            key: [_Evaluation.of_row(row, key) for row in run.rows if row.get(key) is not None]
            for key in keys
        }
        tops = {k: max(es, key=lambda e: e.value) for k, es in evaluations.items() if es}
        start = [row for row in run.rows[:1] if row["step"] == 0]
        for key, top in tops.items():
            best[key].append(top)
            before[key] += [
                _Evaluation.of_row(row, key) for row in start if row.get(key) is not None
            ]
        if keys and start and all(start[0].get(key) is not None for key in keys):
            first.append(_Evaluation.mean_of([_Evaluation.of_row(start[0], key) for key in keys]))
        if keys and all(evaluations.values()):
            averages.append(_Evaluation.mean_of(list(tops.values())))
            last.append(_Evaluation.mean_of([es[-1] for es in evaluations.values()]))
    table = {key: Score.of(evaluations) for key, evaluations in best.items()}
    table |= {f"before {key}": Score.of(evaluations) for key, evaluations in before.items()}
    return table | {
        "Before": Score.of(first), "Avg.": Score.of(averages), "Last": Score.of(last)
    }  # fmt: skip
