"""The runs of reuse.parquet and tolerances.parquet, and what is compared of each."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from research.study.summary import macro_score

FOLDER = Path(__file__).parent

# Names under which the runs were made and stored, and what they are called since.
RENAMED = {"gspo_lopsided": "gspo_tight_low", "lopsided": "pnpo_tight_low"}

# This study's definition of a runaway (results.md, Method): the spread of log w_t exceeds 0.2 in
# some step, and the mean reward of one of the next three batches is 0.1 or more below the best.
SPREAD = "ratio/prefix_mean_log_std"
RUNAWAY_SPREAD = 0.2
RUNAWAY_FALL = 0.1
RUNAWAY_STEPS = 3

Point = tuple[
    str, ...
]  # length, rate, epochs, objective; of a tolerance: length, objective, tolerance


class Run:
    """One run that is done: its rows, and what is compared, in percent."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = [row for row in rows if row["reward/mean"] is not None]
        scores = [score for row in rows if (score := macro_score(row)) is not None]
        self.score = 100 * scores[-1]
        self.reward = 100 * statistics.fmean(row["reward/mean"] for row in self.rows)
        self.spread = max(row[SPREAD] for row in self.rows)
        self.ran_away = has_run_away(self.rows)


def has_run_away(rows: Sequence[dict[str, Any]]) -> bool:
    """True if the run has diverged, as defined at the top of this file."""
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


def read_runs(study: str, axes: Sequence[str]) -> dict[Point, dict[int, Run]]:
    """Every run of `<study>.parquet` that is done, by its values on `axes` and its seed."""
    rows: dict[tuple[Point, int], list[dict[str, Any]]] = {}
    for row in pq.read_table(FOLDER / f"{study}.parquet").to_pylist():
        if row["state"] == "done":
            values = (row[f"axis/{axis}"] for axis in axes)
            point = tuple(RENAMED.get(value, value) for value in values)
            rows.setdefault((point, row["seed"]), []).append(row)
    runs: dict[Point, dict[int, Run]] = {}
    for (point, seed), some in sorted(rows.items(), key=lambda one: one[0][1]):
        runs.setdefault(point, {})[seed] = Run(some)
    return runs


def read_reuse() -> dict[Point, dict[int, Run]]:
    """The runs of study_reuse.yaml."""
    return read_runs("reuse", ("length", "rate", "epochs", "objective"))


def read_tolerances() -> dict[Point, Run]:
    """The runs of study_tolerances.yaml, one of each point."""
    found = read_runs("tolerances", ("length", "objective", "tolerance"))
    return {point: next(iter(runs.values())) for point, runs in found.items()}
