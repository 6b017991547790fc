"""Numbers over a run: smoothed rewards, the cost so far, the best score, the first passage."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.report.runs import Group, Run

WINDOW = 11  # steps, as in the paper
# What progress is measured in, and the metric that adds up to it.
COSTS = {
    "hours": ("time/step", 1 / 3600),
    "tokens": ("rollout/tokens", 1.0),
    "updates": ("train/updates", 1.0),
}


def centered_mean(values: Sequence[float | None], *, window: int = WINDOW) -> list[float | None]:
    """The mean of the window around each value; towards the ends of the longest that is centered.

    None is no value: it is left out, and stays.
    """
    there = [place for place, value in enumerate(values) if value is not None]
    known = [value for value in values if value is not None]
    smooth: list[float | None] = [None] * len(values)
    for at, place in enumerate(there):
        half = min(window // 2, at, len(known) - 1 - at)
        smooth[place] = statistics.fmean(known[at - half : at + half + 1])
    return smooth


def progress(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """What had been spent after each row: rollout batches, hours, generated tokens, updates."""
    spent: dict[str, list[float]] = {"batches": [row["step"] for row in rows]}
    for name, (key, unit) in COSTS.items():
        total, column = 0.0, []
        for row in rows:
            total += (row.get(key) or 0.0) * unit
            column.append(total)
        spent[name] = column
    return spent


def first_passage(run: Run, threshold: float) -> dict[str, float] | None:
    """What had been spent when the smoothed reward first reached the threshold; None: never."""
    smooth = centered_mean([row["reward/mean"] for row in run.steps])
    spent = progress(run.steps)
    for place, value in enumerate(smooth):
        if value is not None and value >= threshold:
            return {name: column[place] for name, column in spent.items()}
    return None


def default_threshold(runs: Sequence[Run]) -> float | None:
    """The highest multiple of 0.05 that the smoothed reward reaches in nine runs of ten.

    Of fewer than ten in each. Runs without a step do not count. None where there is none.
    """
    tops = []
    for run in runs:
        smooth = centered_mean([row["reward/mean"] for row in run.steps])
        if run.steps:
            tops.append(max((value for value in smooth if value is not None), default=0.0))
    if not tops:
        return None
    threshold = int(sorted(tops)[len(tops) // 10] / 0.05 + 1e-9) * 0.05
    return round(threshold, 2) if threshold > 0 else None


def score_keys(runs: Sequence[Run]) -> list[str]:
    """The held-out scores of any of the runs, as `eval/<set>/avg@<k>`."""
    keys = {key: None for run in runs for row in run.rows for key in row}
    return [key for key in keys if re.fullmatch(r"eval/.+/avg@\d+", key)]


@dataclass(frozen=True)
class Score:
    """A score in percent over a group's runs: their mean, the lowest and the highest."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Score | None":
        """None of nothing."""
        shown = [100 * value for value in values]
        return cls(statistics.fmean(shown), min(shown), max(shown)) if shown else None


def best_scores(group: Group, keys: Sequence[str]) -> dict[str, Score | None]:
    """The paper's first table: each set's best observed score, chosen for each set and run alone.

    `Avg.` is the unweighted mean of a run's best scores, `Last` that of its last evaluation; both
    only of runs that have every set.
    """
    best: dict[str, list[float]] = {key: [] for key in keys}
    averages, last = [], []
    for run in group.runs:
        seen = {key: [r[key] for r in run.rows if r.get(key) is not None] for key in keys}
        for key, values in seen.items():
            if values:
                best[key].append(max(values))
        if keys and all(seen.values()):
            averages.append(statistics.fmean(max(values) for values in seen.values()))
            last.append(statistics.fmean(values[-1] for values in seen.values()))
    table = {key: Score.of(values) for key, values in best.items()}
    return table | {"Avg.": Score.of(averages), "Last": Score.of(last)}
