"""The stored runs of the second study: paired, recomputed, and restored as finished runs."""

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from research.study.results import write_results
from research.study.state import RunState
from research.study.study_plan import load_study
from research.study.summary import find_outcome

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "research" / "results" / "signs.py"))


@pytest.fixture(scope="module")
def stored():
    return SCRIPT["by_run"](SCRIPT["read_stored"]())


def test_stored_runs_are_restored_as_finished_ones(stored, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = load_study(SCRIPT["without_calibrated"](tmp_path), [])
    section = {"run": study.runs[0].config.run.model_copy(update={"dir": str(tmp_path / "runs")})}
    runs = [
        replace(run, config=run.config.model_copy(update=section))
        for run in study.runs
        if run.name in stored
    ]
    made = [replace(run, digest=stored[run.name][0]["digest"]) for run in runs]
    SCRIPT["restore"](replace(study, runs=made))
    (tmp_path / study.file.name).mkdir()
    here = replace(study, file=study.file.model_copy(update={"dir": str(tmp_path)}), runs=runs)
    assert [state.state for state in write_results(here)] == ["done"] * len(stored)
    found = SCRIPT["by_run"](pq.read_table(here.folder / "results.parquet").to_pylist())
    of_the_making = {"digest", "commit", "processor"}
    for name, rows in stored.items():
        for row, other in zip(rows, found[name], strict=True):
            kept = {key: value for key, value in row.items() if key not in of_the_making}
            assert {key: other.get(key) for key in kept} == kept
    with pytest.raises(SystemExit, match="was made with other settings: check out"):
        SCRIPT["restore"](replace(study, runs=[replace(run, digest="0") for run in runs]))


def test_stored_runs_are_paired_and_complete(stored):
    """Runs of a model and seed start alike, whatever the objective, and come from one commit."""
    begun = {}
    for rows in stored.values():
        first, last = rows[0], rows[-1]
        assert [row["step"] for row in rows] == list(range(first["steps"] + 1))
        assert last["updates"] == (800 if first["axis/epochs"] == "4_long" else 96)
        start = (first["model"], first["eval/heldout/avg@16"], rows[1]["reward/mean"])
        begun.setdefault((first["axis/model"], first["seed"]), set()).add(start)
    assert {len(starts) for starts in begun.values()} == {1}
    assert len({row["commit"] for rows in stored.values() for row in rows}) == 1


def test_outcomes_equal_second_computation(stored):
    for rows in stored.values():
        run = type("Run", (), {"point": {}, "seed": 1})
        found = find_outcome(RunState(run, "done", [SCRIPT["metrics"](row) for row in rows]))
        rewards = np.array([row["reward/mean"] for row in rows[1:]])
        scores = [row["eval/heldout/avg@16"] for row in rows]
        scores = np.array([score for score in scores if score is not None])
        before = np.maximum.accumulate(rewards)[:-1]
        fall = max(0.0, *(before - rewards[1:]), scores.max() - scores[-1])
        solved = rows[-1]["eval/heldout/pass@16"]
        assert (found.score, found.reward, found.fall, found.solved) == pytest.approx(
            (scores[-1], rewards.mean(), fall, solved)
        )
