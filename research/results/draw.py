"""Draw the figures of ../docs/results.md, which lie beside this file, from reuse.parquet.

python -m research.results.draw
"""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from research.results.runs import Point, Run, read_reuse
from research.study.statistics import paired_interval

FOLDER = Path(__file__).parent

COLORS = {"pnpo": "#2f6db3", "pnpo_one_sided": "#2b9db0", "gspo": "#d9822b", "grpo": "#b3477d",
          "gspo_tight_low": "#4d7c0f"}  # fmt: skip
OTHERS = "#64748b"
PANELS = (("0.0002", "4"), ("0.0004", "4"), ("0.0008", "4"), ("0.0004", "1"), ("0.0004", "8"))
LENGTH = "38"  # of learning.png
RATE = "0.0004"
MARKERS = {"1": "^", "4": "o", "8": "s"}  # by epochs
APART = {"1": 1.0, "4": 0.93, "8": 1.07}  # so that the same reuse x rate is not on one spot
FEWEST = 3  # pairs of an interval that is drawn
COST_LENGTH = "62"  # of costs.png
STYLES = {"1": ":", "4": "-", "8": "--"}  # by epochs
ROLLOUT_COST = 2.7  # epochs of training that take as long as generating a rollout batch
LENGTHS = ("38", "62", "254", "510")  # with slips anywhere
PLACES = {"62_early": "slips early", "62": "slips anywhere", "62_late": "slips late"}


def main() -> None:
    """Draw all figures."""
    runs = read_reuse()
    draw_learning(runs)
    draw_costs(runs)
    draw_lag(runs, "38", "lag.png")
    draw_lag(runs, "62", "lag_62.png")
    draw_length(runs)
    draw_where(runs)
    draw_differences(runs)


def draw_learning(runs: dict[Point, dict[int, Run]]) -> None:
    """Mean reward over updates: means over seeds, with bands from the lowest to the highest."""
    figure, every = plt.subplots(1, len(PANELS), figsize=(2.9 * len(PANELS), 2.9), sharey=True)
    for axis, (rate, epochs) in zip(every, PANELS, strict=True):
        for objective, color in COLORS.items():
            found = runs.get((LENGTH, rate, epochs, objective), {})
            _band(axis, _rewards(found), color, objective)
        axis.set_title(f"lr {float(rate):g}, {epochs} epoch{'s' * (epochs != '1')}", fontsize=9)
        axis.set_xlabel("updates before the batch")
        axis.grid(alpha=0.3)
    every[0].set_ylabel("mean reward of a rollout batch")
    every[1].legend(fontsize=7)
    _save(figure, "learning.png")


def draw_costs(runs: dict[Point, dict[int, Run]]) -> None:
    """Mean reward over updates, generated tokens and simulated time; means over seeds.

    The time of a run is rollout batches x ROLLOUT_COST + epochs, in epochs of training.
    """
    figure, every = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True)
    for objective, color in COLORS.items():
        for epochs, style in STYLES.items():
            found = runs.get((COST_LENGTH, RATE, epochs, objective), {})
            if not found:
                continue
            rewards = _rewards(found)
            tokens = [0.0, *itertools.accumulate(_mean_tokens(found))]
            batches = range(1, len(rewards) + 1)
            places = (
                sorted(rewards),
                [tokens[batch] / 1e3 for batch in batches],
                [batch * ROLLOUT_COST + (batch - 1) * float(epochs) for batch in batches],
            )
            means = [statistics.fmean(rewards[before]) for before in sorted(rewards)]
            for axis, at in zip(every, places, strict=True):
                axis.plot(at, means, style, color=color, linewidth=1.4)
    for axis, label in zip(
        every,
        ("updates", "generated tokens (thousands)", "simulated time (epochs of training)"),
        strict=True,
    ):
        axis.set_xlabel(f"{label} before the batch" if axis is every[0] else label)
        axis.grid(alpha=0.3)
    for objective, color in COLORS.items():
        every[0].plot([], [], color=color, label=objective)
    for epochs, style in STYLES.items():
        every[0].plot([], [], style, color="black", label=f"{epochs} epoch{'s' * (epochs != '1')}")
    every[0].set_ylabel("mean reward of a rollout batch")
    every[0].legend(fontsize=7)
    _save(figure, "costs.png")


def draw_lag(runs: dict[Point, dict[int, Run]], at_length: str, picture: str) -> None:
    """Score, its difference to pnpo and runaways, against reuse and against reuse x rate."""
    figure, every = plt.subplots(3, 2, figsize=(9, 8), sharex="col")
    for place, (objective, color) in enumerate(COLORS.items()):
        own = {(rate, epochs): found for (length, rate, epochs, name), found in runs.items()
               if length == at_length and name == objective}  # fmt: skip
        for column in (0, 1):
            points = []
            for (rate, epochs), found in own.items():
                if column or rate == RATE:
                    x = float(epochs) * (float(rate) * 1e4 if column else 1)
                    pnpo = runs.get((at_length, rate, epochs, "pnpo"), {})
                    x *= APART[epochs] if column else 1
                    points.append((x, MARKERS[epochs], found, pnpo))
            points.sort(key=lambda one: one[0])
            for x, marker, found, pnpo in points:
                at = x * 1.02 ** (place - 2)
                scores = [run.score for run in found.values()]
                _mark(every[0, column], at, scores, color, marker=marker)
                pairs = [found[seed].score - pnpo[seed].score for seed in found.keys() & pnpo]
                if objective != "pnpo":
                    _mark(every[1, column], at, pairs, color, marker=marker)
                share = statistics.fmean(run.ran_away for run in found.values())
                every[2, column].plot(at, share, marker, color=color, markersize=5)
            every[0, column].plot([], [], "o", color=color, label=objective)
    for row, label in enumerate(("score (%)", "score, against pnpo", "share that ran away")):
        every[row, 0].set_ylabel(label)
        for axis in every[row]:
            axis.grid(alpha=0.3)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
    for axis in every[0]:
        axis.set_ylim(0, 100)
    for axis in every[1]:
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_ylim(-50, 75)
    for axis in every[2]:
        axis.set_ylim(-0.05, 1.05)
    every[2, 0].set_xlabel(f"epochs of reuse, at lr {float(RATE):g}")
    every[2, 1].set_xlabel("epochs x lr / 1e-4 (triangle 1, circle 4, square 8)")
    every[0, 0].legend(fontsize=8, loc="lower center")
    _save(figure, picture)


def draw_length(runs: dict[Point, dict[int, Run]]) -> None:
    """Differences to pnpo and the largest spread of each run, against the length of a response."""
    figure, every = plt.subplots(1, 3, figsize=(11, 3.4))
    for place, (objective, color) in enumerate(COLORS.items()):
        for length in LENGTHS:
            found = runs.get((length, RATE, "4", objective), {})
            pnpo = runs.get((length, RATE, "4", "pnpo"), {})
            at = int(length) * 1.06 ** (place - 2)
            for axis, key in zip(every, ("score", "reward"), strict=False):
                pairs = [getattr(run, key) - getattr(pnpo[seed], key)
                         for seed, run in found.items() if seed in pnpo]  # fmt: skip
                if objective != "pnpo":
                    _mark(axis, at, pairs, color)
            every[2].plot([at] * len(found), [run.spread for run in found.values()], "o",
                          color=color, markersize=4)  # fmt: skip
        every[2].plot([], [], "o", color=color, label=objective)
    for axis, label in zip(
        every, ("score, against pnpo", "reward, against pnpo", "largest spread of log w_t"),
        strict=True,
    ):  # fmt: skip
        axis.set_ylabel(label)
        axis.set_xscale("log", base=2)
        axis.set_xticks([int(length) for length in LENGTHS], LENGTHS)
        axis.set_xlabel(f"tokens of a response (4 epochs, lr {float(RATE):g})")
        axis.grid(alpha=0.3)
    for axis in every[:2]:
        axis.axhline(0, color="black", linewidth=0.8)
    every[2].axhline(0.2, color="black", linewidth=0.8, linestyle="--")
    every[2].set_yscale("log")
    every[2].legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 0.0), labelspacing=0.3)
    _save(figure, "length.png")


def draw_where(runs: dict[Point, dict[int, Run]]) -> None:
    """Spread of the ratios over a response, and the reward, by the place of the model's errors."""
    figure, every = plt.subplots(2, len(PLACES), figsize=(9, 5.4), sharey="row", sharex="row")
    for column, (length, title) in enumerate(PLACES.items()):
        for objective, color in COLORS.items():
            found = runs.get((length, RATE, "4", objective), {})
            _band(every[0, column], _spread_by_tenth(found), color, objective)
            _band(every[1, column], _rewards(found), color, objective)
        every[0, column].set_title(title, fontsize=9)
        every[0, column].set_xlabel("tenth of the response")
        every[1, column].set_xlabel("updates before the batch")
    every[0, 0].set_ylabel("spread of log w_t, first batch")
    every[0, 0].set_yscale("log")
    every[1, 0].set_ylabel("mean reward of a rollout batch")
    every[1, 1].legend(fontsize=7)
    for axis in every.flat:
        axis.grid(alpha=0.3)
    _save(figure, "where.png")


def draw_differences(runs: dict[Point, dict[int, Run]]) -> None:
    """Every paired difference to pnpo, of score and reward, with its interval."""
    pairs_of = {point: found.keys() & runs.get((*point[:3], "pnpo"), {}).keys()
                for point, found in runs.items() if point[3] != "pnpo"}  # fmt: skip
    lines = [(p, runs[p]) for p, seeds in pairs_of.items() if len(seeds) >= FEWEST]
    figure, every = plt.subplots(1, 2, figsize=(11, 1.2 + 0.21 * len(lines)), sharey=True)
    names = []
    for place, (point, found) in enumerate(lines):
        length, rate, epochs, objective = point
        pnpo = runs[(*point[:3], "pnpo")]
        seeds = pairs_of[point]
        where = f"{length.replace('_', ' ')} tokens, lr {float(rate):g}, x{epochs}"
        names.append(f"{objective}: {where} ({len(seeds)})")
        for axis, key in zip(every, ("score", "reward"), strict=True):
            pairs = [getattr(found[seed], key) - getattr(pnpo[seed], key) for seed in seeds]
            _mark(axis, place, pairs, COLORS.get(objective, OTHERS), across=True)
    for axis, key in zip(every, ("score", "reward"), strict=True):
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_xlim(-50, 50)
        axis.set_xlabel(f"{key}, against pnpo")
        axis.grid(alpha=0.3)
    every[0].set_yticks(range(len(lines)), names, fontsize=8)
    every[0].invert_yaxis()
    _save(figure, "differences.png")


def _rewards(found: dict[int, Run]) -> dict[int, list[float]]:
    """By the updates before it: the mean rewards that a rollout batch had, one of each run."""
    rewards: dict[int, list[float]] = {}
    for run in found.values():
        for row in run.rows:
            # A rollout batch was generated before its own updates.
            before = row["updates"] - row["updates"] // row["step"]
            rewards.setdefault(before, []).append(row["reward/mean"])
    return rewards


def _mean_tokens(found: dict[int, Run]) -> list[float]:
    """Generated tokens of each rollout batch, averaged over the runs."""
    tokens = ([row["rollout/tokens"] for row in run.rows] for run in found.values())
    columns = zip(*tokens, strict=True)
    return [statistics.fmean(column) for column in columns]


def _spread_by_tenth(found: dict[int, Run]) -> dict[int, list[float]]:
    """By tenth of a response: the spread of log w_t in the first rollout batch, one of each run."""
    runs = list(found.values())
    return {
        tenth: [run.rows[0][f"by_fraction/{tenth / 10}/prefix_mean_log_std"] for run in runs]
        for tenth in (range(1, 11) if runs else ())
    }


def _band(axis: Any, found: dict[int, list[float]], color: str, label: str) -> None:
    """Means, in a band from the lowest value to the highest."""
    if found:
        places, values = zip(*sorted(found.items()), strict=True)
        axis.plot(places, list(map(statistics.fmean, values)), color=color, label=label)
        axis.fill_between(places, list(map(min, values)), list(map(max, values)),
                          color=color, alpha=0.15, linewidth=0)  # fmt: skip


def _mark(
    axis: Any, x: float, values: Sequence[float], color: str, *, marker: str = "o",
    across: bool = False,
) -> None:  # fmt: skip
    """A mean with its 95% interval (Student's t), where there are enough values for one."""
    if not values:
        return
    found = paired_interval(values)
    error = None if len(values) < FEWEST else found.half_width
    at = (found.mean, x) if across else (x, found.mean)
    axis.errorbar(*at, **{"xerr" if across else "yerr": error}, fmt=marker, color=color,
                  markersize=4, capsize=2, linewidth=1.2)  # fmt: skip


def _save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(FOLDER / name, dpi=90)


if __name__ == "__main__":
    main()
