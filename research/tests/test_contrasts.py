"""Primary contrasts: what a study file may declare, and tables recomputed with scipy."""

import itertools
import re

import numpy as np
import pytest
from scipy import stats

from megatron_rl.config import ConfigError
from research.study.contrast_plan import ContrastSection, plan_contrasts
from research.study.contrasts import ContrastTables
from research.study.summary import Outcome

UNITS = ("a_2", "a_3", "b_2", "b_3")
RATES = ("0.001", "0.002")
OBJECTIVES = ("pnpo", "gspo", "gspo_low", "grpo")
CONTRASTS = {
    "compare": "objective", "at": {"epochs": 4}, "units": "model", "tune": ["rate"],
    "families": {"a": ["a_2", "a_3"], "b": ["b_2", "b_3"]},
    "pooled": {"gspo_tuned": ["gspo", "gspo_low"]}, "choose": [1], "confirm": [2, 3],
    "pairs": [["pnpo", "gspo_tuned"], ["grpo", "pnpo"]], "falls": [["pnpo"], ["gspo", "grpo"]],
}  # fmt: skip
AXES = {"model": UNITS, "rate": RATES, "epochs": ("4", "1"), "objective": OBJECTIVES}
POINTS = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


def plan(contrasts=CONTRASTS, *, axes=AXES):
    """Contrasts of a study of all points that these axes have, with seeds 1 to 3."""
    points = [{axis: point[axis] for axis in axes} for point in POINTS]
    planned = {(tuple(sorted(point.items())), seed) for point in points for seed in (1, 2, 3)}
    return plan_contrasts(ContrastSection.model_validate(contrasts), axes, planned)


@pytest.fixture(scope="module")
def outcomes():
    """Outcomes of all runs, drawn; PNPO falls with a probability of 0.5."""
    generator = np.random.default_rng(7)
    found = {}
    for point, seed in itertools.product(POINTS, (1, 2, 3)):
        score, reward, chance = generator.uniform(size=3)
        fall = 0.3 if point["objective"] == "pnpo" and chance < 0.5 else 0.0
        found[*point.values(), seed] = Outcome(point, seed, score, reward, fall)
    return found


def table(text, heading):
    """Cells of the rows of the first table after a heading."""
    lines = text[text.index(heading) :].split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_tables_equal_second_computation(outcomes):
    tables = ContrastTables(plan(), list(outcomes.values()))
    text = tables.render()
    families = {"a": UNITS[:2], "b": UNITS[2:]}
    variants = {"pnpo": ["pnpo"], "gspo_tuned": ["gspo", "gspo_low"], "grpo": ["grpo"]}

    def score(unit, choice, *seeds):
        return np.mean([outcomes[unit, choice[1], "4", choice[0], seed].score for seed in seeds])

    best = {
        (family, name): max(
            itertools.product(variants[name], RATES),
            key=lambda choice: np.mean([score(u, choice, 1) for u in families[family]]),
        )
        for family in families
        for name in variants
    }
    for family, name, chosen, cells in table(text, "## Choices"):
        objective, rate = best[family, name]
        assert chosen == (f"{objective}, " if name == "gspo_tuned" else "") + f"rate {rate}"
        assert len(cells.split("; ")) == 2 * len(variants[name])
        mean = np.mean([score(unit, best[family, name], 1) for unit in families[family]])
        assert f"{chosen}: {100 * mean:.1f}" in cells
    values = []
    for first, second in (("pnpo", "gspo_tuned"), ("grpo", "pnpo")):
        values.append([
            score(unit, best[unit[0], first], 2, 3) - score(unit, best[unit[0], second], 2, 3)
            for unit in UNITS
        ])  # fmt: skip
    rows = table(text, "## Primary contrasts")
    p = [stats.ttest_1samp(some, 0).pvalue for some in values]
    small, large = sorted(p)
    corrected = {small: min(1, 2 * small), large: max(min(1, 2 * small), large)}
    for row, some, value in zip(rows, values, p, strict=True):
        half = stats.t.ppf(0.975, 3) * np.std(some, ddof=1) / 2
        assert row[1] == f"{100 * np.mean(some):+.1f} ± {100 * half:.1f} (4)"
        ranks = stats.wilcoxon(some).pvalue
        assert [float(cell.rstrip(" *")) for cell in row[2:5]] == pytest.approx(
            [value, corrected[value], ranks], abs=5.1e-4
        )
        assert row[3].endswith("*") == (corrected[value] < 0.05)
        assert [float(x) for x in re.findall(r"[+-][\d.]+", row[5])] == pytest.approx(
            [100 * one for one in some], abs=0.051
        )
    fell = [
        [outcomes[u, r, "4", o, 1].fall > 0.2 for u in UNITS for r in RATES for o in group]
        for group in (["pnpo"], ["gspo", "grpo"])
    ]
    assert [row[1] for row in table(text, "## Falls")] == [
        f"{sum(some)} of {len(some)}" for some in fell
    ]
    p = stats.fisher_exact([[sum(some), len(some) - sum(some)] for some in fell]).pvalue
    (output,) = re.findall(r"Fisher's exact test, two-sided: p = (.*)\.\n", text)
    assert float(output) == pytest.approx(p, rel=0.05)


def test_choice_and_test_wait_for_all_runs(outcomes):
    early = [it for it in outcomes.values() if (it.seed, it.point["rate"]) != (1, "0.002")]
    text = ContrastTables(plan(), early).render()
    for _, _, chosen, cells in table(text, "## Choices"):
        assert chosen == "not all runs are done" and "rate 0.002: - (0 of 2)" in cells
    assert [row[1:5] for row in table(text, "## Primary contrasts")] == [
        ["0 of 4 units are done", "", "", ""]
    ] * 2
    assert "(8 are planned)" in text and "Fisher" not in text
    # One candidate's run is missing: its family has no choice, the other one has.
    lost = [it for key, it in outcomes.items() if key != ("a_2", "0.002", "4", "grpo", 1)]
    cells = table(ContrastTables(plan(), lost).render(), "## Choices")
    assert [row[:2] for row in cells if row[2] == "not all runs are done"] == [["a", "grpo"]]
    # One run of a choice is missing: no p, and no correction of the other contrast either.
    contrasts = ContrastTables(plan(), list(outcomes.values())).contrasts()
    assert all(contrast.p is not None for contrast in contrasts)
    lost = [it for key, it in outcomes.items()
            if (key[0], key[3], key[4]) != ("b_3", "grpo", 3)]  # fmt: skip
    tables = ContrastTables(plan(), lost)
    assert [contrast.p is None for contrast in tables.contrasts()] == [False, True]
    rows = table(tables.render(), "## Primary contrasts")
    assert rows[0][2] and rows[1][1] == "3 of 4 units are done"
    assert [row[3] for row in rows] == ["", ""]


def test_seeds_are_units_by_default():
    section = {"choose": [1], "confirm": [2, 3], "pairs": [["gspo", "pnpo"]]}
    outcomes = [
        Outcome({"objective": name}, seed, {"gspo": 0.25 * seed, "pnpo": 0.5}[name], 0.0, 0.0)
        for name in ("gspo", "pnpo") for seed in (1, 2, 3)
    ]  # fmt: skip
    contrasts = plan(section, axes={"objective": OBJECTIVES})
    (contrast,) = ContrastTables(contrasts, outcomes).contrasts()
    assert contrast.differences == {"seed 2": 0.0, "seed 3": 0.25}
    assert contrast.p == pytest.approx(stats.ttest_1samp([0, 0.25], 0).pvalue)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compare": "objektive"}, "contrasts.compare: objektive is no axis; there are model, ra"),
        ({"tune": []}, "contrasts: rate has 2 values; fix it in `at`, or add it to `tune`"),
        ({"tune": ["rate", "epochs"]}, "epochs is named 2 times; give it in one of compare, units"),
        ({"at": {"epochs": 2}}, "contrasts.at.epochs: epochs has no value 2; it has 4, 1"),
        ({"pairs": [["pnpo", "gspo_best"]]}, "contrasts.pairs: objective has no value gspo_best"),
        ({"pairs": [["pnpo", "pnpo"]]}, "contrasts.pairs: pnpo is compared with itself"),
        ({"pooled": {"gspo_tuned": ["gsbo"]}}, "contrasts.pooled.gspo_tuned: objective has no val"),
        ({"pooled": {"gspo": ["gspo_low"]}}, "contrasts.pooled.gspo: objective has a value of thi"),
        ({"falls": [["pnpo"], ["ppo"]]}, "contrasts.falls: objective has no value ppo"),
        ({"families": {"a": ["a_2", "a_3", "b_2"]}}, "contrasts.families: b_3 is in no family"),
        ({"families": {"a": [*UNITS], "b": ["a_2"]}}, "families: a_2 is in more than one family"),
        ({"families": {"a": ["c_1"]}}, "contrasts.families: a_2 is in no family; add it to one"),
        ({"confirm": [1, 2]}, "contrasts.confirm: seed 1 is also in choose; what was chosen on"),
        ({"choose": [4]}, "no run of pnpo in a is planned for every unit and every seed of choos"),
        ({"confirm": [4]}, "rate 0.001, epochs 4, objective pnpo may be chosen in a, and not eve"),
        ({"units": "seed"}, "contrasts: model has 4 values; fix it in `at`, or add it to `tune`"),
        (
            {"units": "seed", "at": {"epochs": 4, "model": "a_2"}},
            "contrasts.families: needs `units`, the axis whose values it groups",
        ),
    ],
)
def test_invalid_declaration_is_refused_with_suggestion(change, message):
    with pytest.raises(ConfigError) as refused:
        plan(CONTRASTS | change)
    assert message in str(refused.value)
