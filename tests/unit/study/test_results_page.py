"""docs/results.md says what docs/study holds: recomputed here by other code."""

import itertools
import math
import re
import runpy
from collections.abc import Iterator
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

DOCS = Path(__file__).parents[3] / "docs"
SEEDS = (range(1, 99), range(1, 9), range(9, 99))  # all, the first eight, those after them
PAGE = (DOCS / "results.md").read_text().partition("## The study of reuse")[2]
RATES = {"2e-4": "0.0002", "4e-4": "0.0004", "8e-4": "0.0008"}

Values = dict[tuple[str, ...], dict[int, dict[str, float]]]  # by point and seed


def read_values(study: str, axes: tuple[str, ...]) -> Values:
    """Score, reward, largest spread, and the reward of each batch, in percent."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in pq.read_table(DOCS / "study" / f"{study}.parquet").to_pylist():
        assert row["state"] == "done"
        rows.setdefault(row["run"], []).append(row)
    values: Values = {}
    for some in rows.values():
        some.sort(key=itemgetter("step"))
        rewards = [row["reward/mean"] for row in some if row["reward/mean"] is not None]
        scores = [value for key, value in some[-1].items() if re.match("eval/.*/avg@", key)]
        spreads = [row["ratio/prefix_mean_log_std"] for row in some]
        point = tuple(some[0][f"axis/{axis}"] for axis in axes)
        values.setdefault(point, {})[some[0]["seed"]] = {
            "score": 100 * np.mean([score for score in scores if score is not None]),
            "reward": 100 * np.mean(rewards),
            "spread": max(spread for spread in spreads if spread is not None),
        } | {f"reward {batch}": 100 * reward for batch, reward in enumerate(rewards)}
    return values


@pytest.fixture(scope="module")
def reuse() -> Values:
    return read_values("reuse", ("length", "rate", "epochs", "objective"))


def table_rows(heading: str) -> Iterator[dict[str, str]]:
    """The rows of the table whose first line begins with `heading`; names may come twice."""
    lines = PAGE[PAGE.index(heading) :].partition("\n\n")[0].splitlines()
    names = [cell.strip() for cell in lines[0].strip("|").split("|")]
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        row: dict[str, str] = {}
        for name, cell in zip(names, cells, strict=True):
            row[name if name not in row else f"reward {name}"] = cell
        yield row


@lru_cache
def student(freedom: int) -> float:
    """Where Student's distribution has 97.5% on its left."""
    at = np.linspace(0, 40, 400_001)
    density = (1 + at**2 / freedom) ** (-(freedom + 1) / 2)
    whole = math.gamma(freedom / 2) * math.sqrt(freedom * math.pi) / math.gamma((freedom + 1) / 2)
    area = (np.cumsum(density) - (density[0] + density) / 2) * (at[1] - at[0]) / whole
    return float(at[np.searchsorted(area, 0.475)])


def interval(some: dict[int, Any], others: dict[int, Any], key: str) -> tuple[float, float]:
    """Mean and half-width of the paired differences."""
    pairs = np.array([some[seed][key] - others[seed][key] for seed in some.keys() & others.keys()])
    if len(pairs) < 2:
        return pairs.mean() if len(pairs) else np.nan, np.nan
    half = student(len(pairs) - 1) * pairs.std(ddof=1) / len(pairs) ** 0.5
    return pairs.mean(), half


def test_the_table_of_differences_is_that_of_the_runs(reuse: Values) -> None:
    rows = list(table_rows("| tokens | lr |"))
    points = set()
    for row in rows:
        point = (
            row["tokens"].replace(", ", "_"),
            RATES[row["lr"]],
            row["epochs"],
            row["objective"],
        )
        points.add(point)
        runs = reuse[point]
        for key in ("score", "reward"):
            mean = np.mean([run[key] for run in runs.values()])
            assert float(row[key]) == pytest.approx(mean, abs=0.051), (point, key)
            for other in ("pnpo", "gspo"):
                said = row[f"{'reward ' * (key == 'reward')}against {other}"]
                if said:
                    mean, half = interval(runs, reuse[*point[:3], other], key)
                    numbers = [float(number) for number in re.findall(r"[-+]?[\d.]+", said)]
                    expected = [mean] if np.isnan(half) else [mean, half]
                    assert numbers == pytest.approx(expected, abs=0.06), (point, key, other)
        assert float(row["spread"]) == pytest.approx(
            max(run["spread"] for run in runs.values()), abs=6e-4
        )
    assert points == set(reuse)


def test_the_table_of_tolerances_is_that_of_the_runs() -> None:
    runs = read_values("tolerances", ("length", "objective", "tolerance"))
    found = sorted(
        (p[0], p[1], round(r[101]["score"], 1), round(r[101]["reward"], 1)) for p, r in runs.items()
    )
    said = sorted((row["tokens"], row["objective"], float(row["score"]), float(row["reward"]))
                  for row in table_rows("| tokens | objective |"))  # fmt: skip
    assert len(said) == len(found)
    for one, other in zip(said, found, strict=True):
        assert one[:2] == other[:2]
        assert one[2:] == pytest.approx(other[2:], abs=0.11)


def test_every_interval_in_the_text_is_one_of_the_runs(reuse: Values) -> None:
    """Of a score, a mean reward or one batch's reward, between any two objectives of a point.

    Over all seeds that both have, or over the first eight, or over those after them.
    """
    text = "\n".join(line for line in PAGE.splitlines() if not line.startswith("|"))
    there: set[tuple[str, str]] = set()
    cells: dict[tuple[str, ...], list[dict[int, dict[str, float]]]] = {}
    for point, runs in reuse.items():
        cells.setdefault(point[:3], []).append(runs)
    for every in cells.values():
        for some, others in itertools.combinations(every, 2):
            shared = [
                key for key in next(iter(some.values())) if key in next(iter(others.values()))
            ]
            for key, seeds in itertools.product(shared, SEEDS):
                part = {seed: run for seed, run in some.items() if seed in seeds}
                mean, half = interval(part, others, key)
                there |= {(f"{abs(mean):.{digits}f}", f"{half:.{digits}f}") for digits in (0, 1)}
    said = re.findall(r"(\d+(?:\.\d+)?)\s±\s(\d+(?:\.\d+)?)", text)
    assert len(said) > 20
    assert [one for one in said if one not in there] == []


def test_the_tables_are_those_of_the_script() -> None:
    script = runpy.run_path(str(DOCS / "study" / "tables.py"))
    for name in ("tolerance_table", "difference_table"):
        assert script[name]() in PAGE
