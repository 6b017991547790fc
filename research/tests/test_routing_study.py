"""Numbers of the page of the study of replayed routes, recomputed from its stored metrics."""

import math
import re
import runpy
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from research.study.study_plan import load_study

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "research" / "results" / "routes.py"))
PAGE = (ROOT / "research" / "docs" / "routing-study.md").read_text()
TEXT = re.sub(r"\s+", " ", PAGE[PAGE.index("## Results") :])
MODELS = [f"{size}_{number}" for size in ("small", "large") for number in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def rows():
    """Rows of every run, by model, epochs and replay; read and sorted without the script."""
    found = {}
    for row in sorted(pq.read_table(SCRIPT["STORED"]).to_pylist(), key=lambda row: row["step"]):
        axes = tuple(row[f"axis/{name}"] for name in ("model", "epochs", "replay"))
        found.setdefault(axes, []).append(row)
    return found


def score(rows, model, epochs, replay):
    return 100 * rows[model, epochs, replay][-1]["eval/heldout/avg@8"]


def test_stored_runs_are_those_of_the_plan_and_paired(rows, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = load_study(SCRIPT["FILE"], [])
    planned = {run.name for run in study.runs}  # settings that came later change the digests
    begun = {}
    for (model, epochs, _), steps in rows.items():
        assert [row["step"] for row in steps] == list(range(1 + 16 // int(epochs)))
        assert steps[0]["run"] in planned
        assert steps[0]["plan"] == study.digest
        assert all(row["ratio/first_minibatch_max_deviation"] == 0 for row in steps[1:])
        start = steps[0]["model"], steps[0]["eval/heldout/avg@8"], steps[1]["reward/mean"]
        begun.setdefault(model, set()).add(start)
    assert {len(starts) for starts in begun.values()} == {1}
    assert len({next(iter(starts))[0] for starts in begun.values()}) == len(MODELS)
    primary = {(model, "4", replay) for model in MODELS for replay in ("none", "behavior")}
    assert primary <= rows.keys()
    assert len({steps[0]["commit"] for steps in rows.values()}) == 1
    assert f"{steps[0]['commit'][:7]}" in PAGE


@pytest.mark.parametrize("epochs", ["4", "8"])
def test_tables_are_those_of_the_stored_runs(epochs):
    lines = SCRIPT["table"](epochs)
    assert lines and all(line in PAGE for line in lines)


def test_primary_contrast_equals_second_computation(rows):
    differences = [score(rows, m, "4", "behavior") - score(rows, m, "4", "none") for m in MODELS]
    mean = sum(differences) / 8
    deviation = math.sqrt(sum((x - mean) ** 2 for x in differences) / 7)
    half = 2.364624 * deviation / math.sqrt(8)  # Student's t with 7 degrees of freedom
    assert f"{mean:+.2f} ± {half:.2f} points" in TEXT
    assert -3 < mean - half < 0 < mean + half < 3


def test_share_of_variance_equals_second_computation(rows):
    name, none = "routing/log_ratio_variance_fraction", []
    for model in MODELS:
        none.append(sorted(row[name] for row in rows[model, "4", "none"][1:]))
    by_model = sorted((values[1] + values[2]) / 2 for values in none)
    assert f"is {(by_model[3] + by_model[4]) / 2:.3f} in the median of the models" in TEXT
    assert f"between {by_model[0]:.3f} and {by_model[-1]:.3f}" in TEXT
    batches = np.concatenate(none)
    above = int((batches > 0.1).sum())
    assert f"in {above} of {len(batches)} rollout batches it is above 0.1, at most" in TEXT
    assert f"at most {batches.max():.2f}" in TEXT
    changed = "epoch_4/routing/changed_fraction"
    steps = np.array([[row[changed] for row in rows[m, "4", "none"][1:]] for m in MODELS])
    first, *_, last = steps.mean(0)
    assert f"falls from {first:.2f} in the first rollout batch to {last:.2f} in the last" in TEXT


def test_more_reuse_equals_second_computation(rows):
    pairs = [m for m in MODELS if {(m, "8", "none"), (m, "8", "behavior")} <= rows.keys()]
    lower = sum(score(rows, m, "8", "behavior") < score(rows, m, "8", "none") for m in pairs)
    assert f"lower in {lower} of {len(pairs)} models" in TEXT
    differences = [score(rows, m, "8", "behavior") - score(rows, m, "8", "none") for m in pairs]
    mean, half, _ = SCRIPT["contrast"](differences)
    assert f"by {-mean:.2f} ± {half:.2f} points" in TEXT
