"""The first study's page, and its stored raw metrics, read by code of its own."""

import re
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from scipy import stats

RESEARCH = Path(__file__).parents[1]
PAGE = (RESEARCH / "docs" / "results.md").read_text().partition("## The study of reuse")[2]
TEXT = " ".join(PAGE.split())
# As the runs were stored.
NAMES = {"gspo_lopsided": "gspo_tight_low", "lopsided": "pnpo_tight_low"}
REUSE = ("length", "rate", "epochs", "objective")
TOLERANCES = ("length", "objective", "tolerance")

Rows = list[dict[str, Any]]
Values = dict[tuple[str, ...], dict[int, dict[str, Any]]]  # by point and seed


@cache
def read_rows(study: str, axes: tuple[str, ...]) -> dict[tuple[str, ...], dict[int, Rows]]:
    """Rows of every run by point and seed, in the order of steps."""
    by_run: dict[str, Rows] = {}
    for row in pq.read_table(RESEARCH / "results" / f"{study}.parquet").to_pylist():
        assert row["state"] == "done"
        by_run.setdefault(row["run"], []).append(row)
    found: dict[tuple[str, ...], dict[int, Rows]] = {}
    for rows in by_run.values():
        rows.sort(key=itemgetter("step"))
        point = tuple(NAMES.get(v, v) for v in (rows[0][f"axis/{axis}"] for axis in axes))
        found.setdefault(point, {})[rows[0]["seed"]] = rows
    return found


@cache
def read_values(study: str, axes: tuple[str, ...]) -> Values:
    """Score, reward, largest spread, and the reward of each batch, in percent."""
    values: Values = {}
    for point, runs in read_rows(study, axes).items():
        for seed, some in runs.items():
            rewards = [row["reward/mean"] for row in some if row["reward/mean"] is not None]
            scores = [value for key, value in some[-1].items() if re.match("eval/.*/avg@", key)]
            spreads = [row["ratio/prefix_mean_log_std"] for row in some]
            below = column(some, "gate/rejected_below_negative")
            values.setdefault(point, {})[seed] = {
                "score": 100 * np.mean([score for score in scores if score is not None]),
                "reward": 100 * np.mean(rewards),
                "spread": max(spread for spread in spreads if spread is not None),
                "first": (
                    *(some[0][k] for k in some[0] if re.match("eval/.*/avg@", k)),
                    rewards[0],
                    some[1]["policy/entropy"],
                ),
                "model": some[0]["model"],
                "below": np.mean(below),
                "below first": below[0],
                "above": sum(column(some, "gate/rejected_above_positive") > 0),
                "above first": column(some, "gate/rejected_above_positive")[0],
                "lost": max(column(some, "gate/rejected_below_positive")),
                "fall": 100 * max(np.maximum.accumulate(rewards) - rewards),
                "drop": -100 * min(np.diff(rewards)),
            } | {f"reward {batch}": 100 * reward for batch, reward in enumerate(rewards)}
    return values


def column(rows: Rows, key: str) -> np.ndarray:
    """Values of a metric over the rollout batches."""
    return np.array([row[key] for row in rows if row["step"]])


def interval(some: dict[int, Any], others: dict[int, Any], key: str) -> tuple[float, float]:
    """Mean and half-width of the paired differences."""
    pairs = np.array([some[seed][key] - others[seed][key] for seed in some.keys() & others.keys()])
    if len(pairs) < 2:
        return pairs.mean() if len(pairs) else np.nan, np.nan
    half = stats.t.ppf(0.975, len(pairs) - 1) * pairs.std(ddof=1) / len(pairs) ** 0.5
    return pairs.mean(), half
