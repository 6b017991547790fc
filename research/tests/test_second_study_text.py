"""The tables of the second study, and what its page concludes, recomputed from its metrics."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "research" / "docs" / "second-study.md").read_text()
RESULTS = PAGE[PAGE.index("## Results") :]
FAMILIES = {"sum": (2, 3), "corrected": (3, 4), "machine": (2, 3), "rare": (2, 3)}
MODELS = [f"{family}_{seed}" for family, seeds in FAMILIES.items() for seed in seeds]
RATES = {"4e-4": "0.0004", "8e-4": "0.0008", "1.6e-3": "0.0016"}
GSPO = ("gspo_low_0.005", "gspo_low_0.0025", "gspo_low_0.01")
NAMES = {"gspo": "GSPO, tuned", "pnpo_one_sided": "PNPO one-sided", "calibrated": "calibrated"}
PAIRS = (
    ("gspo", "positive_only"),
    ("damped_negatives", "positive_only"),
    ("balanced", "positive_only"),
    ("pnpo_one_sided", "gspo"),
    ("calibrated", "gspo"),
)
OBJECTIVES = ("balanced", "positive_only", *GSPO, "pnpo_one_sided", "damped_negatives",
              "calibrated", "grpo", "dppo_tv", "pnpo")  # fmt: skip
Runs = dict[tuple[str, str, str, str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    script = runpy.run_path(str(ROOT / "research" / "results" / "signs.py"))
    found: Runs = {}
    for rows in script["by_run"](script["read_stored"]()).values():
        first, last = rows[0], rows[-1]
        axes = [first[f"axis/{name}"] for name in ("model", "rate", "epochs", "objective")]
        rewards = [100 * row["reward/mean"] for row in rows[1:]]
        scores = [100 * row["eval/heldout/avg@16"] for row in rows
                  if row["eval/heldout/avg@16"] is not None]  # fmt: skip
        drops = [max(rewards[:n]) - rewards[n] for n in range(1, len(rewards))]
        found[*axes, first["seed"]] = {
            "score": scores[-1], "scores": scores, "drop": max(drops),
            "reward": float(np.mean(rewards)),
            "solved": 100 * last["eval/heldout/pass@16"],
            "tokens": sum(row["rollout/tokens"] for row in rows[1:]), "rewards": rewards,
            "fall": max(0.0, *drops, max(scores) - scores[-1]),
        }  # fmt: skip
    return found


def candidates(objective: str) -> tuple[str, ...]:
    return GSPO if objective == "gspo" else (objective,)


def chosen(runs: Runs, objective: str, family: str) -> tuple[str, str, float]:
    """The rate and the objective with the best mean score of run seed 1 over the family."""
    means = {
        (rate, name): np.mean([runs[f"{family}_{seed}", rate, "4", name, 1]["score"]
                               for seed in FAMILIES[family]])
        for name in candidates(objective) for rate in RATES.values()
    }  # fmt: skip
    rate, name = max(means, key=lambda key: means[key])
    return rate, name, float(means[rate, name])


def at_choice(runs: Runs, objective: str, model: str, seed: int, key: str = "score") -> float:
    rate, name, _ = chosen(runs, objective, model.partition("_")[0])
    return runs[model, rate, "4", name, seed][key]


def signed(value: float) -> str:
    return f"{value:+.1f}".replace("-0.0", "0.0")


def primary_rows(runs: Runs) -> Iterator[str]:
    """The lines of the table of contrasts."""
    differences = {
        pair: [at_choice(runs, pair[0], m, 2) - at_choice(runs, pair[1], m, 2) for m in MODELS]
        for pair in PAIRS
    }
    p = {pair: stats.ttest_1samp(values, 0).pvalue for pair, values in differences.items()}
    adjusted, largest = {}, 0.0
    for place, pair in enumerate(sorted(p, key=lambda it: p[it])):
        largest = max(largest, min(1.0, (len(p) - place) * p[pair]))
        adjusted[pair] = largest
    for (some, other), values in differences.items():
        half = stats.t.ppf(0.975, 7) * stats.sem(values)
        cells = [", ".join(map(signed, values[n : n + 2])) for n in range(0, 8, 2)]
        names = " - ".join(NAMES.get(name, f"`{name}`") for name in (some, other))
        yield (
            f"| {names} | {np.mean(values):+.1f} ± {half:.1f} "
            f"| {p[some, other]:.2f} ({adjusted[some, other]:.2f}) "
            f"| {stats.wilcoxon(values).pvalue:.2f} | {' | '.join(cells)} |"
        )


def choice_rows(runs: Runs) -> Iterator[str]:
    written = {rate: text for text, rate in RATES.items()}
    for objective in dict.fromkeys(name for pair in PAIRS for name in pair):
        cells = []
        for family in FAMILIES:
            rate, name, _ = chosen(runs, objective, family)
            bound = f", {name.rpartition('_')[2]}" if objective == "gspo" else ""
            cells.append(written[rate] + bound)
        yield f"| {NAMES.get(objective, f'`{objective}`')} | {' | '.join(cells)} |"


def against_positive_only(runs: Runs, objective: str, family: str) -> list[float]:
    models = [f"{family}_{seed}" for seed in FAMILIES[family]]
    return [runs[m, "0.0004", "4", objective, 1]["score"]
            - runs[m, "0.0004", "4", "positive_only", 1]["score"] for m in models]  # fmt: skip


def mean_by_rate(runs: Runs, objective: str) -> list[float]:
    return [float(np.mean([runs[m, rate, "4", objective, 1]["score"] for m in MODELS]))
            for rate in RATES.values()]  # fmt: skip


def falls(runs: Runs, *objectives: str) -> tuple[int, int]:
    found = [runs[model, rate, "4", name, 1]["fall"] >= 20
             for name in objectives for model in MODELS for rate in RATES.values()]  # fmt: skip
    return sum(found), len(found)


REUSED = ("positive_only", "balanced", "damped_negatives", "gspo_low_0.005", "grpo")
REUSED_MODELS = ("sum_2", "corrected_3", "machine_2", "rare_2")


def best_with(runs: Runs, model: str, objective: str, epochs: str) -> float:
    """The final score at the better of the two rates that were run with one epoch."""
    return max(runs[model, rate, epochs, objective, 1]["score"] for rate in ("0.0004", "0.0008"))


def epoch_rows(runs: Runs) -> Iterator[str]:
    for name in REUSED:
        pairs = [[best_with(runs, m, name, epochs) for epochs in "14"] for m in REUSED_MODELS]
        yield f"| `{name}` | {' | '.join('{:.1f}, {:.1f}'.format(*pair) for pair in pairs)} |"


PLATEAU = ("positive_only", "balanced", "damped_negatives", "gspo_low_0.005", "pnpo_one_sided",
           "grpo")  # fmt: skip


def plateau_rows(runs: Runs) -> Iterator[str]:
    for name in PLATEAU:
        run = runs["sum_2", "0.0004", "4_long", name, 1]
        scores = [f"{run['scores'][batches // 5]:.1f}" for batches in (5, 10, 15, 20, 30, 40, 50)]
        yield f"| `{name}` | {' | '.join(scores)} | {run['reward']:.1f} | {run['drop']:.1f} |"


def objective_rows(runs: Runs) -> Iterator[str]:
    for name in OBJECTIVES:
        cells = [", ".join(map(signed, against_positive_only(runs, name, family)))
                 for family in FAMILIES] if name != "positive_only" else [""] * 4  # fmt: skip
        means = [f"{mean:.1f}" for mean in mean_by_rate(runs, name)]
        yield f"| `{name}` | {' | '.join((*cells, *means))} | {falls(runs, name)[0]} |"


def test_tables_of_the_results_equal_a_second_computation(runs):
    tables = (primary_rows, choice_rows, epoch_rows, plateau_rows, objective_rows)
    for line in (line for rows in tables for line in rows(runs)):
        assert line in RESULTS


def test_what_the_results_say_without_a_number_is_so(runs):
    for name in ("balanced", "damped_negatives", *GSPO, "calibrated"):
        assert max(against_positive_only(runs, name, "sum")) < 0
    for name in OBJECTIVES:
        assert max(against_positive_only(runs, name, "rare")) <= 0
    lost = {
        name: [lost_at_the_largest_rate(runs, name, family) for family in FAMILIES]
        for name in OBJECTIVES
    }
    assert min(losses[2] for losses in lost.values()) > 0.35  # machine
    others = {name: max(losses[:2] + losses[3:]) for name, losses in lost.items()}
    assert f"{others['balanced']:.1f}" == "0.3"
    assert [name for name, loss in others.items() if loss < 0.35] == ["balanced"]
    assert [name for name in OBJECTIVES if not falls(runs, name)[0]] == ["balanced"]


def lost_at_the_largest_rate(runs: Runs, objective: str, family: str) -> float:
    """Points lost from the smallest to the largest rate, mean of a family's two models."""
    means = [np.mean([runs[f"{family}_{seed}", rate, "4", objective, 1]["score"]
                      for seed in FAMILIES[family]]) for rate in ("0.0004", "0.0016")]  # fmt: skip
    return float(means[0] - means[1])
