"""Examination of a run directory: every kind of damage is found, and nothing is changed."""

import hashlib
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.commands.doctor import print_run
from megatron_rl.config import ConfigError, parse_config
from megatron_rl.runs.directory import RunDirectory, examine_run


@pytest.fixture
def run(tmp_path):
    """Four steps, the second and the fourth saved, the first with a skipped update."""
    config = parse_config(
        {"model": {"path": "m"}, "data": {"train": "t"}, "trainer": {"checkpoint_every": 2}}
    )
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.create(config)
    rows = [{"step": s, "eval/a/avg@4": 0.1 * s, "eval/b/avg@4": 0.2 * s} for s in range(5)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in range(1, 5):
        pq.write_table(pa.table({"x": [1, 2, 3]}), run.rollouts / f"step_{step:06d}.parquet")
    for step in (2, 4):
        folder = run.checkpoints.begin(step)
        (folder / "weights").write_bytes(b"w" * 1000)
        sums = {"weights": hashlib.sha256(b"w" * 1000).hexdigest()}
        run.checkpoints.complete(step, sums=sums, digests=[])
    run.skipped_updates.mkdir()
    fault = {"step": 1, "update": 3, "reason": "the gradient norm is inf"}
    (run.skipped_updates / "skipped_updates.jsonl").write_text(json.dumps(fault) + "\n")
    return run


def problems(run):
    return {part.name: part.problem for part in examine_run(run.path) if part.problem}


def test_intact_run_has_no_findings(run, capsys):
    found = {part.name: part.found for part in examine_run(run.path)}
    # 0.6 = (0.4 + 0.8) / 2 at step 4
    assert found["metrics"] == "steps 0 to 4, best evaluation 60.0 at step 4"
    assert found["rollouts"] == "12 of 4 steps"
    assert (
        found["skipped_updates"]
        == "1 updates skipped, the last in step 1, the gradient norm is inf"
    )
    assert found["resuming"] == "after step 4"
    assert not problems(run)
    assert print_run(str(run.path)) == 0
    assert "Run is intact." in capsys.readouterr().out


def test_sampled_steps_are_counted(run):
    for step in (1, 2):
        table = pa.table({"x": [1, 2, 3], "sampled": [False, True, True]})
        pq.write_table(table, run.rollouts / f"step_{step:06d}.parquet")
    run.thin_rollouts([1, 2, 3])
    found = {part.name: part.found for part in examine_run(run.path)}
    assert found["rollouts"] == "10 of 4 steps, of 2 a sample (logging.keep_rollouts)"
    assert not problems(run)


def test_examine_run_reports_damage_without_changing_it(run, capsys):
    weights = run.checkpoints.folder(4) / "weights"
    weights.write_bytes(b"w" * 999 + b"v")  # the same size: only its sum differs
    (run.rollouts / "step_000002.parquet").write_bytes(b"PAR1")
    (run.rollouts / "step_000003.parquet").unlink()
    (run.checkpoints.path / ".step_000005.partial").mkdir()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9}\n')
    run.stalls.mkdir()
    (run.stalls / "20260101-000000-host.txt").write_text("host: no progress for 600 s\n\nrank\n")
    run.model.mkdir()
    (run.model / "model.safetensors").write_bytes(b"nonsense")
    before = sorted(run.path.rglob("*"))
    wrong = problems(run)
    assert "SHA-256 differs" in wrong.pop("checkpoint 4")
    assert wrong.pop("rollouts") == "cannot be read: step 2; missing: step 3, 9"
    assert wrong.pop("metrics") == "rows are missing or duplicated from step 9 on"
    assert "model.safetensors" in wrong.pop("model")
    assert "its newest intact checkpoint is of step 4" in wrong.pop("resuming")
    assert not wrong
    found = {part.name: part.found for part in examine_run(run.path)}
    assert found["stall"] == "20260101-000000-host.txt: host: no progress for 600 s"
    assert found[".step_000005.partial"] == "incomplete; the next start removes it"
    assert print_run(str(run.path)) == 1
    assert "Corrupted: metrics, rollouts, checkpoint 4, model" in capsys.readouterr().out
    assert sorted(run.path.rglob("*")) == before


def test_steps_without_rollouts_are_ranges_and_an_unfinished_row_is_ignored(run):
    """A kill leaves the beginning of a row at most, in each file of rows."""
    (run.path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(5000)))
    (run.rollouts / "step_000003.parquet").unlink()
    expected = {"rollouts": "missing: step 3, 5 to 4999"}
    assert {k: v for k, v in problems(run).items() if k != "resuming"} == expected
    for file in (run.path / "metrics.jsonl", run.skipped_updates / "skipped_updates.jsonl"):
        with file.open("a") as rows:
            rows.write('{"step": 5')
    assert {k: v for k, v in problems(run).items() if k != "resuming"} == expected


def test_folder_without_run_is_refused(tmp_path, run):
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no config.yaml"):
        examine_run(tmp_path)
    run.config_file.write_text("trainer: {steps: many}")
    assert "trainer.steps" in problems(run)["settings"]
    shutil.rmtree(run.checkpoints.path)
    run.path.joinpath("metrics.jsonl").write_text("{\n{}\n")
    assert "line 1 is damaged" in problems(run)["metrics"]
    run.path.joinpath("metrics.jsonl").write_text('{"step": 0}\n{"loss": 1}\n{"step": 2}\n')
    assert "a row has no step" in problems(run)["metrics"]
