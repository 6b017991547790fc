"""Draw the figures of ../docs/second-study.md, which lie beside this file, from signs.parquet.

python -m research.results.draw_signs
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from research.results.signs import by_run, read_stored

FOLDER = Path(__file__).parent

FAMILIES = {"sum": (2, 3), "corrected": (3, 4), "machine": (2, 3), "rare": (2, 3)}
COLORS = {"positive_only": "#111827", "balanced": "#2f6db3", "gspo_low_0.005": "#d9822b",
          "damped_negatives": "#4d7c0f", "pnpo_one_sided": "#2b9db0", "calibrated": "#8b5cf6",
          "pnpo": "#dc2626", "grpo": "#b3477d", "dppo_tv": "#64748b"}  # fmt: skip
RATES = ("0.0004", "0.0008", "0.0016")
COST_RATE = "0.0004"
COST_MODELS = {"sum": "sum_2", "corrected": "corrected_3", "machine": "machine_2", "rare": "rare_2"}
STYLES = {"1": ":", "4": "-"}  # by epochs
ROLLOUT_COST = 2.7  # epochs of training that take as long as generating a rollout batch
SCORE = "eval/heldout/avg@16"


class Cell(NamedTuple):
    """Where a run stands in the study."""

    model: str
    rate: str
    epochs: str
    objective: str
    seed: int


def main() -> None:
    """Draw all figures."""
    runs = {
        Cell(first["axis/model"], first["axis/rate"], first["axis/epochs"],
             first["axis/objective"], first["seed"]): rows
        for rows in by_run(read_stored()).values() for first in rows[:1]
    }  # fmt: skip
    draw_rates(runs)
    draw_costs(runs)
    draw_plateau(runs)


def draw_rates(runs: Mapping[Cell, list[dict[str, Any]]]) -> None:
    """Final score against the rate, by family: means of two models, run seed 1, four epochs."""
    figure, every = plt.subplots(1, len(FAMILIES), figsize=(12, 3.3))
    for axis, (family, seeds) in zip(every, FAMILIES.items(), strict=True):
        for objective, color in COLORS.items():
            means = [
                100 * statistics.fmean(
                    runs[Cell(f"{family}_{seed}", rate, "4", objective, 1)][-1][SCORE]
                    for seed in seeds
                )
                for rate in RATES
            ]  # fmt: skip
            axis.plot([f"{float(rate):g}" for rate in RATES], means, "o-", color=color,
                      markersize=3, linewidth=1.3, label=objective)  # fmt: skip
        axis.set_title(family, fontsize=9)
        axis.set_xlabel("learning rate")
        axis.grid(alpha=0.3)
    every[0].set_ylabel("final Avg@16, percent")
    every[0].legend(fontsize=6)
    _save(figure, "signs_rates.png")


def draw_costs(runs: Mapping[Cell, list[dict[str, Any]]]) -> None:
    """Held-out score over updates, generated tokens and simulated time, one and four epochs.

    The time of a run is rollout batches x ROLLOUT_COST + epochs, in epochs of training.
    """
    figure, every = plt.subplots(len(COST_MODELS), 3, figsize=(11, 10), sharey="row")
    for line, (family, model) in zip(every, COST_MODELS.items(), strict=True):
        for objective in ("positive_only", "balanced", "gspo_low_0.005", "grpo"):
            for epochs, style in STYLES.items():
                rows = runs.get(Cell(model, COST_RATE, epochs, objective, 1), [])
                for axis, at in zip(line, _places(rows, float(epochs)), strict=False):
                    scores = [100 * row[SCORE] for row in rows if row[SCORE] is not None]
                    axis.plot(at, scores, style, color=COLORS[objective], linewidth=1.4)
        line[0].set_ylabel(f"{family}: Avg@16")
        for axis in line:
            axis.grid(alpha=0.3)
    labels = ("updates", "generated tokens (thousands)", "simulated time (epochs of training)")
    for axis, label in zip(every[-1], labels, strict=True):
        axis.set_xlabel(label)
    for objective in ("positive_only", "balanced", "gspo_low_0.005", "grpo"):
        every[0][0].plot([], [], color=COLORS[objective], label=objective)
    for epochs, style in STYLES.items():
        every[0][0].plot(
            [], [], style, color="black", label=f"{epochs} epoch{'s' * (epochs > '1')}"
        )
    every[0][0].legend(fontsize=7)
    _save(figure, "signs_costs.png")


def draw_plateau(runs: Mapping[Cell, list[dict[str, Any]]]) -> None:
    """Reward and held-out score of the long runs, over rollout batches."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.3))
    for objective, color in COLORS.items():
        rows = runs.get(Cell("sum_2", COST_RATE, "4_long", objective, 1), [])
        if rows:
            rewards = [100 * row["reward/mean"] for row in rows[1:]]
            left.plot(range(1, len(rewards) + 1), rewards, color=color, linewidth=1.2,
                      label=objective)  # fmt: skip
            points = [(row["step"], 100 * row[SCORE]) for row in rows if row[SCORE] is not None]
            right.plot(*zip(*points, strict=True), color=color, linewidth=1.2)
    left.set_ylabel("mean reward, percent")
    right.set_ylabel("held-out Avg@16, percent")
    for axis in (left, right):
        axis.set_xlabel("rollout batches")
        axis.grid(alpha=0.3)
    left.legend(fontsize=7)
    _save(figure, "signs_plateau.png")


def _places(rows: Sequence[dict[str, Any]], epochs: float) -> Iterator[list[float]]:
    """Yield updates, thousands of generated tokens and simulated time of the evaluations."""
    tokens = list(itertools.accumulate(row.get("rollout/tokens") or 0.0 for row in rows))
    evaluated = [number for number, row in enumerate(rows) if row[SCORE] is not None]
    yield [rows[number].get("updates") or 0 for number in evaluated]
    yield [tokens[number] / 1e3 for number in evaluated]
    yield [rows[number]["step"] * (ROLLOUT_COST + epochs) for number in evaluated]


def _save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(FOLDER / name, dpi=90)


if __name__ == "__main__":
    main()
