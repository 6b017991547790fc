"""Finished runs go into one file and come back as finished ones, on a machine without the runs."""

import json
import re
import shutil

import pytest
import yaml

from megatron_rl.config import ConfigError, dump_config
from research.study import storing
from research.study.__main__ import main
from research.study.results import write_results
from research.study.state import read_state
from research.study.storing import by_run, read_stored, restore_runs, store_runs
from research.tests.test_running import plan
from tests.functional.tiny_runs import ROOT


def finish(run, rows):
    (run.folder / "model").mkdir(parents=True)
    (run.folder / "config.yaml").write_text(dump_config(run.config))
    inputs = {"model.path": {"files": {"config.json and weights": "abc", "tokenizer.json": "d"}}}
    (run.folder / "inputs.json").write_text(json.dumps(inputs))
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows(reward):
    kept = {"reward/mean": reward, "epoch_4/by_fraction/1.0/prefix_mean_log_std": 0.01}
    left_out = {"epoch_4/gate/acceptance": 1.0, "by_position/8/acceptance": 1.0}
    return [{"step": 0, "eval/h/avg@4": 0.25}, *({"step": n} | kept | left_out for n in (1, 2))]


def test_stored_runs_are_finished_on_another_machine(tmp_path):
    study, file = plan(tmp_path), tmp_path / "stored.parquet"
    finish(study.runs[0], rows(0.5))
    finish(study.runs[1], rows(0.25)[:-1])  # not finished: it is not stored
    write_results(study)
    assert store_runs(study, file) == f"1 runs added: 1 of 4 in {file}"
    expected = [{k: v for k, v in row.items() if not k.startswith(("epoch_4/gate", "by_"))}
                for row in rows(0.5)]  # fmt: skip
    shutil.rmtree(tmp_path / "s")
    assert restore_runs(study, file) == f"1 of 4 runs restored from {file}"
    state = read_state(study.runs[0])
    assert (state.state, state.rows) == ("done", expected)
    assert read_state(study.runs[1]).state == "new"
    # A second machine adds its runs; what is stored, stays.
    finish(study.runs[1], rows(0.25))
    write_results(study)
    before = read_stored(file)
    assert store_runs(study, file) == f"1 runs added: 2 of 4 in {file}"
    stored = read_stored(file)
    assert stored[: len(before)] == before and len(by_run(stored)) == 2
    assert {row["model"] for row in stored} == {"abc"}
    assert all(row["commit"] and row["processor"] for row in stored)
    assert restore_runs(study, file) == f"0 of 4 runs restored from {file}"


def test_runs_are_stored_with_what_started_them(tmp_path, monkeypatch):
    study, file = plan(tmp_path), tmp_path / "stored.parquet"
    study.folder.mkdir()
    for commit in ("a", "b", "b"):  # it was continued by another commit
        monkeypatch.setattr(storing, "read_commit", lambda commit=commit: commit)
        storing.note_start(study, study.runs[0].name, processor="x")
    finish(study.runs[0], rows(0.5))
    finish(study.runs[1], rows(0.5))
    write_results(study)
    store_runs(study, file)
    made = {row["run"]: (row["commit"], row["processor"]) for row in read_stored(file)}
    assert list(made.values()) == [("a then b", "x"), ("unknown", "unknown")]


def test_commit_is_unknown_outside_a_repository(tmp_path, monkeypatch):
    if (ROOT / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}( with changes)?", storing.read_commit())
    monkeypatch.setattr(storing, "__file__", str(tmp_path / "storing.py"))
    assert storing.read_commit() == "unknown"


def test_runs_of_other_settings_are_not_restored(tmp_path):
    study, file = plan(tmp_path), tmp_path / "stored.parquet"
    finish(study.runs[0], rows(0.5))
    write_results(study)
    store_runs(study, file)
    shutil.rmtree(tmp_path / "s")
    other = plan(tmp_path, axes={"objective": {"pnpo": {"optimizer.beta2": 0.5}}})
    with pytest.raises(ConfigError, match="other settings than the study now has; use the code"):
        restore_runs(other, file)
    assert not (tmp_path / "s").exists()


def test_files_that_hold_no_runs_are_refused(tmp_path):
    study, file = plan(tmp_path), tmp_path / "stored.parquet"
    with pytest.raises(ConfigError, match="no such file; --store writes it once"):
        restore_runs(study, file)
    file.write_text("not Parquet")
    with pytest.raises(ConfigError, match="cannot be read as Parquet; give the file that"):
        restore_runs(study, file)


def test_command_stores_and_restores(tmp_path, capsys):
    study, file = plan(tmp_path), tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(study.file.model_dump()))
    for run in study.runs:
        finish(run, rows(0.5))

    def run(*options):
        with pytest.raises(SystemExit) as ended:
            main([str(file), *options])
        return ended.value.code, capsys.readouterr().out

    stored = str(tmp_path / "stored.parquet")
    assert run("--store", stored) == (0, f"4 runs added: 4 of 4 in {stored}\n")
    shutil.rmtree(tmp_path / "s")
    assert run("--restore", stored) == (0, f"4 of 4 runs restored from {stored}\n")
    code, printed = run()  # every run is finished: none starts
    assert code == 0 and "s: 4 of 4 done" in printed
