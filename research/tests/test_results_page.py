"""Recompute the statements of docs/results.md from the raw metrics with independent code."""

import csv
import itertools
import re
import runpy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scipy import stats

from research.tests.stored_study import (
    PAGE,
    RESEARCH,
    REUSE,
    TEXT,
    TOLERANCES,
    Values,
    interval,
    read_values,
)

SEEDS = (range(1, 99), range(1, 9), range(9, 99))  # all, the first eight, those after them
RATES = {"2e-4": "0.0002", "4e-4": "0.0004", "8e-4": "0.0008"}

MEASURES = ("score", "reward")


@pytest.fixture(scope="module")
def reuse() -> Values:
    return read_values("reuse", REUSE)


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


def by_model(reuse: Values) -> Iterator[tuple[float, float]]:
    """Intervals over models, each the mean of its seeds: gspo_tight_low against GSPO."""
    for key in MEASURES:
        means = {
            i: {key: interval(runs, reuse[*point[:3], "gspo"], key)[0]}
            for i, (point, runs) in enumerate(reuse.items())
            if point[1:] == ("0.0004", "4", "gspo_tight_low")
        }
        assert len(means) == 6
        yield interval(means, {i: {key: 0.0} for i in means}, key)


def fresh_runs() -> dict[tuple[str, ...], dict[int, dict[str, Any]]]:
    """The runs of the control, by length, rate, epochs and objective."""
    runs: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    with (RESEARCH / "results" / "fresh.csv").open() as file:
        for row in csv.DictReader(file):
            point = tuple(row[axis] for axis in ("length", "rate", "epochs", "objective"))
            rewards = [float(reward) for reward in row["rewards"].split()]
            assert np.mean(rewards) == pytest.approx(float(row["reward"]), abs=0.06)
            runs.setdefault(point, {})[int(row["seed"])] = {
                "score": float(row["score"]), "reward": float(row["reward"]), "rewards": rewards
            }  # fmt: skip
    return runs


def of_the_control(reuse: Values) -> Iterator[tuple[float, float]]:
    """positive_only against gspo_tight_low: fresh seeds at 62 tokens, the study's at 38."""
    fresh = fresh_runs()
    for length, rate in (("62", "0.0004"), ("38", "0.0004"), ("38", "0.0008")):
        point = (length, rate, "4", "gspo_tight_low")
        others = fresh[point] if length == "62" else reuse[point]
        for key in MEASURES:
            yield interval(fresh[*point[:3], "positive_only"], others, key)


def test_control_on_page_equals_runs(reuse: Values) -> None:
    fresh = fresh_runs()
    assert sum(map(len, fresh.values())) == 29
    for row in table_rows("| seed | |"):
        seed, key = int(row["seed"]), row[""]
        for objective, cell in row.items():
            if objective not in ("seed", ""):
                runs = fresh["62", "0.0004", "4", objective]
                assert cell == (f"{runs[seed][key]:.1f}" if seed in runs else "")
    alone = fresh["62", "0.0004", "4", "gspo_low_alone"]
    assert alone == {301: fresh["62", "0.0004", "4", "gspo_tight_low"][301]}
    one_epoch = (fresh["62", "0.0004", "1", name] for name in ("positive_only", "pnpo"))
    some, others = (runs[301] for runs in one_epoch)
    found = [some[key] - others[key] for key in MEASURES]
    assert "{:.1f} of score and {:.1f} of reward above".format(*found) in TEXT
    (score, s), (reward, r) = list(of_the_control(reuse))[:2]
    assert f"{reward:.1f} ± {r:.1f} of reward and {score:.1f} ± {s:.1f} of score above" in TEXT


def test_runs_of_seed_start_identically(reuse: Values) -> None:
    begun: dict[tuple[str, int], set[Any]] = {}
    models: dict[str, set[str]] = {}
    for point, runs in reuse.items():
        for seed, run in runs.items():
            begun.setdefault((point[0], seed), set()).add(run["first"])
            models.setdefault(point[0], set()).add(run["model"])
    assert {len(firsts) for firsts in begun.values()} == {1}
    assert {length for length, found in models.items() if len(found) > 1} == {"38"}
    assert {model[:6] for model in models["38"]} == {"3860a4", "792c52"}


def test_runaways_and_falls_are_those_of_exact_tests(reuse: Values) -> None:
    away = {
        (row["objective"], int(row["ran away"]))
        for row in table_rows("| tokens | lr |")
        if (row["tokens"], row["lr"], row["epochs"]) == ("38", "8e-4", "4")
    }
    one_sided = {("gspo", 0), ("gspo_tight_low", 0), ("pnpo_one_sided", 0)}
    assert away >= {("pnpo", 4)} | one_sided
    assert {len(reuse["38", "0.0008", "4", name]) for name, _ in one_sided | {("pnpo", 4)}} == {8}
    for others, p in ((8, "0.08"), (24, "0.002")):
        found = stats.fisher_exact([[4, 4], [0, others]]).pvalue
        assert f"p = {found:.{len(p) - 2}f}" == f"p = {p}"
        assert f"p = {p}" in TEXT
    falls = {}
    for name in ("pnpo", "pnpo_one_sided", "gspo", "grpo"):
        runs = [run for point, some in reuse.items() if point[3] == name for run in some.values()]
        falls[name] = (sum(run["fall"] >= 20 for run in runs), len(runs))
    assert "PNPO {} of {} runs".format(*falls["pnpo"]) in TEXT
    rest = "the one-sided gate {} of {}, GSPO {} of {}, GRPO {} of {}"
    names = ("pnpo_one_sided", "gspo", "grpo")
    assert rest.format(*(number for name in names for number in falls[name])) in TEXT


def test_significant_differences_equal_page(reuse: Values) -> None:
    values = []
    for point, runs in reuse.items():
        for other, key in itertools.product(("pnpo", "gspo"), MEASURES):
            others = reuse.get((*point[:3], other), {})
            pairs = [runs[seed][key] - others[seed][key] for seed in runs.keys() & others]
            if point[3] not in ("pnpo", other) and len(pairs) > 1:
                values.append((stats.ttest_1samp(pairs, 0).pvalue, point[3], other))
    values.sort()
    left = list(itertools.takewhile(
        lambda one: one[1][0] * (len(values) - one[0]) < 0.05, enumerate(values)
    ))  # fmt: skip
    excluded = sum(p < 0.05 for p, _, _ in values)
    assert f"{excluded} of the large table's {len(values)} do" in TEXT
    assert f"Holm's correction leaves {len(left)}: eight" in TEXT
    kinds = [(name, other) for _, (_, name, other) in left]
    assert sum(name == "gspo_tight_low" for name, _ in kinds) == 8
    assert (kinds.count(("gspo", "pnpo")), kinds.count(("gspo_tight", "pnpo"))) == (2, 1)


def test_counts_of_pairs_and_effect_of_upper_bound_equal_page(reuse: Values) -> None:
    above: dict[tuple[str, bool], list[float]] = {}
    for point, runs in reuse.items():
        if point[2] != "1" and point[3] == "gspo_tight_low":
            gspo = reuse[*point[:3], "gspo"]
            for seed, key in itertools.product(runs, MEASURES):
                difference = runs[seed][key] - gspo[seed][key]
                above.setdefault((key, point[0] == "38"), []).append(difference)
    score, reward, short = above["score", False], above["reward", False], above["reward", True]
    ties = score.count(0.0)
    assert f"GSPO's in {sum(x > 0 for x in score)} of {len(score)} pairs ({ties} ties)" in TEXT
    assert f"the reward in {sum(x > 0 for x in reward)};" in TEXT
    every = sum(x > 0 for x in reward + short), len(reward + short)
    assert "the reward in {} of {}".format(*every) in TEXT
    rows = {}
    for length in ("62", "510", "254", "38"):
        runs = reuse[length, "0.0004", "4", "gspo"].values()
        rows[length] = (sum(run["above"] for run in runs), 6 * len(runs))
    assert "{} of {} rollout batches at 62 tokens and {} of {} at 510".format(
        *rows["62"], *rows["510"]
    ) in TEXT  # fmt: skip
    assert "({} of {} at 254, {} of {} at 38;".format(*rows["254"], *rows["38"]) in TEXT
    cell = reuse["62", "0.0004", "4", "gspo_tight_low"], reuse["62", "0.0004", "4", "gspo"]
    batches = [interval(*cell, f"reward {batch}")[0] for batch in range(1, 6)]
    assert "{:.1f}, {:.1f}, {:.1f}, {:.1f} and {:.1f} points of reward".format(*batches) in TEXT


def test_share_that_is_rejected_orders_objectives(reuse: Values) -> None:
    correlations = {}
    for length in ("62", "62_early", "62_late", "510", "254", "38"):
        columns: list[list[float]] = [[], []]
        by_seed: dict[int, list[tuple[float, float]]] = {}
        for point, runs in reuse.items():
            odd = re.search("ungated|constant|token|grpo", point[3])
            if point[:3] == (length, "0.0004", "4") and not odd:
                for seed, run in runs.items():
                    by_seed.setdefault(seed, []).append((run["below"], run["reward"]))
        for some in by_seed.values():
            for column, value in zip(columns, np.array(some).T, strict=True):
                column += list(value - value.mean())
        correlations[length] = stats.pearsonr(*columns).statistic
    wanted = (
        "is {62:.2f} at 62 tokens, {62_early:.2f} with early errors, {62_late:.2f} with late ones, "
        "{510:.2f} at 510, {254:.2f} at 254 and {38:.2f} at 38"
    )
    for name, value in correlations.items():
        wanted = wanted.replace(f"{{{name}:.2f}}", f"{value:.2f}")
    assert wanted in TEXT


def test_one_epoch_against_four_equals_page(reuse: Values) -> None:
    def scores(rate: str, epochs: str, *names: str) -> list[str]:
        runs = [reuse["62", rate, epochs, name] for name in names]
        return [f"{np.mean([some[seed]['score'] for seed in (1, 2, 3)]):.1f}" for some in runs]

    four = ("grpo", "pnpo", "gspo", "gspo_tight_low")
    one = scores("0.0004", "1", *four)
    assert "{}, {}, {} and {} with one epoch".format(*one) in TEXT
    assert "{}, {}, {} and {} with four".format(*scores("0.0004", "4", *four)) in TEXT
    high, low = (scores(rate, "4", *four[1:]) for rate in ("0.0008", "0.0004"))
    assert "8e-4 gives {}, {} and {} for PNPO".format(*high) in TEXT
    assert "4e-4 gives {}, {} and {} (seeds".format(*low) in TEXT


def test_marked_bounds_equal_study() -> None:
    bounds = runpy.run_path(str(RESEARCH / "results" / "tables.py"))["_taken_bounds"]()
    assert bounds["62", "gspo"] == "0.02, 0.0272"
    marked = {(row["tokens"], row["objective"], row["low, high"].strip("*")): row["low, high"]
              for row in table_rows("| tokens | objective |")}  # fmt: skip
    for (length, objective, text), cell in marked.items():
        assert cell.startswith("**") == (bounds.get((length, objective)) == text)
    assert marked["62", "gspo", "0.01, 0.0136"] == "*0.01, 0.0136*"


def test_table_of_differences_equals_runs(reuse: Values) -> None:
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
                output = row[f"{'reward ' * (key == 'reward')}against {other}"]
                if output:
                    mean, half = interval(runs, reuse[*point[:3], other], key)
                    numbers = [float(number) for number in re.findall(r"[-+]?[\d.]+", output)]
                    expected = [mean] if np.isnan(half) else [mean, half]
                    assert numbers == pytest.approx(expected, abs=0.06), (point, key, other)
        assert float(row["spread"]) == pytest.approx(
            max(run["spread"] for run in runs.values()), abs=6e-4
        )
    assert points == set(reuse)


def test_table_of_tolerances_equals_runs() -> None:
    runs = read_values("tolerances", TOLERANCES)
    found = sorted(
        (p[0], p[1], round(r[101]["score"], 1), round(r[101]["reward"], 1)) for p, r in runs.items()
    )
    output = sorted((row["tokens"], row["objective"], float(row["score"]), float(row["reward"]))
                  for row in table_rows("| tokens | objective |"))  # fmt: skip
    assert len(output) == len(found)
    for one, other in zip(output, found, strict=True):
        assert one[:2] == other[:2]
        assert one[2:] == pytest.approx(other[2:], abs=0.11)


def test_intervals_in_text_equal_runs(reuse: Values) -> None:
    """A score, a mean reward or one batch's reward, between any two objectives of a point.

    Over all seeds that both have, or over the first eight, or over those after them.
    """
    text = "\n".join(line for line in PAGE.splitlines() if not line.startswith("|"))
    there: set[tuple[str, str]] = set()
    cells: dict[tuple[str, ...], list[dict[int, dict[str, Any]]]] = {}
    for point, runs in reuse.items():
        cells.setdefault(point[:3], []).append(runs)
    for every in cells.values():
        for some, others in itertools.combinations(every, 2):
            first, other = next(iter(some.values())), next(iter(others.values()))
            shared = [key for key in first if key in other and key.split()[0] in MEASURES]
            for key, seeds in itertools.product(shared, SEEDS):
                part = {seed: run for seed, run in some.items() if seed in seeds}
                mean, half = interval(part, others, key)
                there |= {(f"{abs(mean):.{digits}f}", f"{half:.{digits}f}") for digits in (0, 1)}
    for mean, half in (*by_model(reuse), *of_the_control(reuse)):
        there.add((f"{abs(mean):.1f}", f"{half:.1f}"))
    output = re.findall(r"(\d+(?:\.\d+)?)\s±\s(\d+(?:\.\d+)?)", text)
    assert len(output) > 20
    assert [one for one in output if one not in there] == []


def test_tables_equal_output_of_script() -> None:
    script = runpy.run_path(str(RESEARCH / "results" / "tables.py"))
    for name in ("tolerance_table", "difference_table"):
        assert script[name]() in PAGE
