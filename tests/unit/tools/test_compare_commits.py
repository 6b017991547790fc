"""Comparison of two runs: equal, or with the names of what differs."""

import json

import pytest

from tools.compare_commits import compare, overrides

ROW = {"step": 1, "reward/mean": 0.5, "grad/norm": 2.0, "time/step": 1.0, "ratio/max": float("nan")}


def _run(folder, row, weights):
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_bytes(weights)
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.mark.parametrize(
    ("changes", "weights", "text"),
    [
        ({"time/step": 9.0}, b"1", "4 metrics equal; largest gradient norm 2; weights equal"),
        (
            {"reward/mean": 0.6, "new": 1.0}, b"1",
            "3 metrics equal; largest gradient norm 2; DIFFERENT: reward/mean; "
            "only in one: new; weights equal",
        ),
        ({}, b"2", "4 metrics equal; largest gradient norm 2; weights DIFFERENT"),
    ],
)  # fmt: skip
def test_runs_differ_in_metrics_that_are_not_times(tmp_path, changes, weights, text):
    before = _run(tmp_path / "before", ROW, b"1")
    found = compare(before, _run(tmp_path / "now", ROW | changes, weights))
    assert found == ("DIFFERENT" not in text, text)


def test_layouts_have_settings_of_their_section(tmp_path):
    settings = list(overrides("tp2, engines of 2", tmp_path))
    # None names a module that another commit may lack.
    last = dict(setting.split("=", 1) for setting in settings)
    assert not any("tests." in value for value in last.values())
    assert settings[-2:] == ["parallel.tensor=2", "rollout.tensor=2"]
