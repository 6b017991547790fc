"""Every number in the results of the second study, recomputed from its stored metrics."""

import itertools
import re
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
TEXT = re.sub(r"\s+", " ", RESULTS)
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


def epoch_claims(runs: Runs) -> Iterator[str]:
    """Parts of the sentences on one epoch and four."""
    tokens = [round(runs[m, "0.0004", epochs, "balanced", 1]["tokens"] / 1e3)
              for m in REUSED_MODELS for epochs in "41"]  # fmt: skip
    assert abs(tokens[0] - tokens[6]) <= 1 and abs(tokens[1] - tokens[7]) <= 1
    yield (
        "{} thousand instead of {} in `sum` and `rare`, {} instead of {} in `corrected`, {} "
        "instead of {} in `machine`"
    ).format(*tokens[:4], tokens[4], round(tokens[5], -1))
    once = [[best_with(runs, m, name, "1") for name in REUSED] for m in REUSED_MODELS]
    yield f"the five lie within {max(max(each) - min(each) for each in once):.1f} points"
    cost = {name: [best_with(runs, m, name, "1") - best_with(runs, m, name, "4")
                   for m in REUSED_MODELS] for name in REUSED}  # fmt: skip
    yield "cost GRPO {:.1f} to {:.1f} points of score, GSPO {:.1f} to {:.1f}, and".format(
        min(cost["grpo"]), max(cost["grpo"]), *sorted(cost["gspo_low_0.005"])[:: 3]
    )  # fmt: skip
    few, many = sorted(cost["positive_only"])[::3]
    yield f"`positive_only` between {many:.1f} and {few:.1f}."
    seconds = []
    for model in REUSED_MODELS:
        for epochs in "14":
            rewards = runs[model, "0.0004", epochs, "positive_only", 1]["rewards"]
            batch = next(n for n, reward in enumerate(rewards, 1) if reward >= 75)
            seconds.append(f"{2.7 * batch + int(epochs) * (batch - 1):.1f}")
    yield (
        "after {} epochs' worth with one epoch and {} with four in `sum`, {} and {} in "
        "`corrected`, {} and {} in `machine`, {} and {} in `rare`"
    ).format(*seconds)


PLATEAU = ("positive_only", "balanced", "damped_negatives", "gspo_low_0.005", "pnpo_one_sided",
           "grpo")  # fmt: skip


def plateau_rows(runs: Runs) -> Iterator[str]:
    for name in PLATEAU:
        run = runs["sum_2", "0.0004", "4_long", name, 1]
        scores = [f"{run['scores'][batches // 5]:.1f}" for batches in (5, 10, 15, 20, 30, 40, 50)]
        yield f"| `{name}` | {' | '.join(scores)} | {run['reward']:.1f} | {run['drop']:.1f} |"


def plateau_claims(runs: Runs) -> Iterator[str]:
    """Parts of the sentences on 50 rollout batches."""
    scores = [runs["sum_2", "0.0004", "4_long", name, 1]["scores"] for name in PLATEAU]
    early, late = [each[1] for each in scores], [each[-1] for each in scores]
    yield f"lie {max(early) - min(early):.1f} points apart after 5 rollout batches and"
    yield f"{max(late) - min(late):.1f} after 50"
    assert sorted(late, reverse=True) == late
    drops = [max(a - b for a, b in itertools.pairwise(each[1:])) for each in scores]
    yield f"by {max(drops):.1f} points for `balanced` from batch 10 to 15"
    assert drops[1] == max(drops) == scores[1][2] - scores[1][3]
    assert min(drops) > 0.5


def objective_rows(runs: Runs) -> Iterator[str]:
    for name in OBJECTIVES:
        cells = [", ".join(map(signed, against_positive_only(runs, name, family)))
                 for family in FAMILIES] if name != "positive_only" else [""] * 4  # fmt: skip
        means = [f"{mean:.1f}" for mean in mean_by_rate(runs, name)]
        yield f"| `{name}` | {' | '.join((*cells, *means))} | {falls(runs, name)[0]} |"


def claims(runs: Runs) -> Iterator[str]:
    """Parts of the sentences, with their numbers."""
    means = {name: np.mean(mean_by_rate(runs, name)) for name in OBJECTIVES}
    yield (
        f"its score is {means['balanced']:.1f} on average (run seed 1), `positive_only`'s "
        f"{means['positive_only']:.1f}, GSPO's at most {max(means[n] for n in GSPO):.1f}, PNPO's "
        f"{means['pnpo']:.1f}"
    )
    one_sided = (*GSPO, "pnpo_one_sided", "balanced", "calibrated", "grpo", "dppo_tv")
    two, one = falls(runs, "pnpo"), falls(runs, *one_sided)
    p = stats.fisher_exact([[two[0], two[1] - two[0]], [one[0], one[1] - one[0]]]).pvalue
    counts = (*two, *one)
    yield "{} of {} runs against {} of {} with one-sided gates, ".format(*counts) + f"p = {p:.3f}"
    yield "fell by 20 points in {} of {} runs".format(*falls(runs, "calibrated"))
    ahead = [gain for name in ("balanced", "damped_negatives", *GSPO, "calibrated")
             for gain in against_positive_only(runs, name, "corrected")]  # fmt: skip
    assert min(ahead) > 0
    yield f"by {min(ahead):.1f} to {max(ahead):.1f} points, and above all of them"
    below = [chosen(runs, "gspo", f)[2] - chosen(runs, "pnpo_one_sided", f)[2] for f in FAMILIES]
    assert min(below) > 0
    yield f"in every family, by {min(below):.1f} to {max(below):.1f} points"
    lost = {name: np.mean([at_choice(runs, name, m, 1) - at_choice(runs, name, m, 2)
                           for m in MODELS]) for name in dict.fromkeys(sum(PAIRS, ()))}  # fmt: skip
    yield (
        "by {positive_only:.1f} points for `positive_only`, {balanced:.1f} for `balanced`, "
        "{damped_negatives:.1f} for `damped_negatives`, {gspo:.1f} for GSPO, "
        "{pnpo_one_sided:.1f} for one-sided PNPO and {calibrated:.1f} for calibrated"
    ).format(**lost)
    worst = [f"{at_choice(runs, name, model, seed):.1f}" for name, model in (
        ("calibrated", "corrected_4"), ("pnpo_one_sided", "corrected_3"), ("gspo", "sum_3"))
        for seed in (1, 2)]  # fmt: skip
    yield (
        "calibrated on `corrected_4` scored {} and then {}, one-sided PNPO on `corrected_3` {} and "
        "{}, GSPO on `sum_3` {} and {}"
    ).format(*worst)
    ends = [np.mean([runs[f"{family}_{seed}", "0.0016", "4", name, 1]["score"] for seed in (2, 3)])
            for family, name in (("sum", "dppo_tv"), ("sum", "pnpo"))]  # fmt: skip
    yield "end at 0 in `rare` and at {:.1f} and {:.1f} in `sum`".format(*ends)
    rare = {name: against_positive_only(runs, name, "rare") for name in OBJECTIVES}
    small = [-gain for name in ("balanced", "damped_negatives") for gain in rare[name]]
    large = [-gain for name in (*GSPO, "pnpo", "pnpo_one_sided") for gain in rare[name]]
    yield (
        f"by {abs(min(small)):.1f} to {max(small):.1f} points above `balanced` and "
        f"`damped_negatives` and by {min(large):.1f} or more above GSPO and PNPO"
    )
    gspo = [at_choice(runs, "gspo", m, 1) - at_choice(runs, "gspo", m, 2) for m in MODELS[:2]]
    yield "lost {:.1f} and {:.1f} points from one run seed to the next".format(*gspo)
    solved = {
        (family, name): np.mean([runs[f"{family}_{seed}", "0.0004", "4", name, 1]["solved"]
                                 for seed in FAMILIES[family]])
        for family in FAMILIES for name in OBJECTIVES
    }  # fmt: skip
    others = min(value for (family, _), value in solved.items() if family != "machine")
    machine = [value for (family, _), value in solved.items() if family == "machine"]
    yield (
        f"it ends at {others:.0f} or more everywhere but in `machine`, where the objectives lie "
        f"between {min(machine):.1f} and {max(machine):.1f}"
    )


def test_tables_of_the_results_equal_a_second_computation(runs):
    tables = (primary_rows, choice_rows, epoch_rows, plateau_rows, objective_rows)
    for line in (line for rows in tables for line in rows(runs)):
        assert line in RESULTS


def test_sentences_of_the_results_equal_a_second_computation(runs):
    for claim in (*claims(runs), *epoch_claims(runs), *plateau_claims(runs)):
        assert claim in TEXT


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
