"""Keep the second study's finished runs in signs.parquet, so that any machine can go on.

store     add the finished runs of runs/signs in the working directory
restore   write the stored runs to runs/signs there, where `python -m research.study` skips them
tables    print the primary contrasts as far as runs are stored

Run the first two in a checkout of the commit that makes the runs (research/docs/second-study.md).
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.config import dump_config
from research.study.study_plan import Study, load_study

STORED = Path(__file__).parent / "signs.parquet"
FILE = Path("research") / "configs" / "study_signs.yaml"
BOUNDS = ", constraint: {reject_negative: 0.5, reject_positive: 0}"
# Metrics by position or by epoch of reuse are most of the columns.
LEFT_OUT = re.compile(r"epoch_|by_position/|by_fraction/(?!.*/prefix_mean_log_std)")
DESCRIBED = ("run", "seed", "digest", "model", "state", "steps", "updates", "commit", "processor")


def main() -> None:
    """Run the command."""
    if sys.argv[1] != "tables":
        {"store": store, "restore": restore}[sys.argv[1]](load_study(FILE, []))
        return
    with tempfile.TemporaryDirectory() as folder:
        study = load_study(without_calibrated(Path(folder)), [])
    print_tables(replace(study, digest=hashlib.sha256(FILE.read_bytes()).hexdigest()[:12]))


def without_calibrated(folder: Path) -> Path:
    """Write the study's file without the bounds of `calibrated`, which later releases lack."""
    text = (Path(__file__).parents[2] / FILE).read_text()
    assert text.count(BOUNDS) == 1
    (folder / "study.yaml").write_text(text.replace(BOUNDS, ""))
    return folder / "study.yaml"


def store(study: Study) -> None:
    """Add the finished runs of the study's folder; a run that is stored stays as it is."""
    kept = read_stored()
    there = {row["run"] for row in kept}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    added = {"commit": commit.stdout.strip(), "processor": processor()}
    for row in pq.read_table(study.folder / "results.parquet").to_pylist():
        if row["state"] == "done" and row["run"] not in there:
            kept.append({k: v for k, v in row.items() if not LEFT_OUT.match(k)} | added)
    names = dict.fromkeys(name for row in kept for name in row)
    columns = {name: [row.get(name) for row in kept] for name in names}
    pq.write_table(pa.table(columns), STORED, compression="zstd")
    print(f"{len({row['run'] for row in kept})} runs in {STORED}")


def restore(study: Study) -> None:
    """Write a run directory with config and metrics for every stored run that has none."""
    planned = {run.name: run for run in study.runs}
    for name, rows in by_run(read_stored()).items():
        run = planned[name]
        if rows[0]["digest"] != run.digest:
            raise SystemExit(f"{name} was made with other settings: check out {rows[0]['commit']}")
        if not run.folder.exists():
            (run.folder / "model").mkdir(parents=True)  # empty: it marks the run as finished
            (run.folder / "config.yaml").write_text(dump_config(run.config))
            (run.folder / "models.json").write_text(json.dumps({"model.path": rows[0]["model"]}))
            lines = (json.dumps(metrics(row)) + "\n" for row in rows)
            (run.folder / "metrics.jsonl").write_text("".join(lines))


def print_tables(study: Study) -> None:
    """Print choices, primary contrasts and falls, and the plan's digest."""
    # Imported here, because the commit that makes the runs is older than the first of these.
    from research.study.contrasts import ContrastTables
    from research.study.state import RunState
    from research.study.summary import find_outcome

    planned = {run.name: run for run in study.runs}
    states = [RunState(planned[name], "done", [metrics(row) for row in rows])
              for name, rows in by_run(read_stored()).items()]  # fmt: skip
    outcomes = [outcome for state in states if (outcome := find_outcome(state))]
    assert study.contrasts is not None
    print(ContrastTables(study.contrasts, outcomes).render())
    print(f"Plan: SHA-256 {study.digest}; {len(outcomes)} of {len(study.runs)} runs are done.")


def read_stored() -> list[dict[str, Any]]:
    """Rows of all stored runs."""
    return pq.read_table(STORED).to_pylist() if STORED.is_file() else []


def by_run(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by run."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row)
    return runs


def metrics(row: dict[str, Any]) -> dict[str, Any]:
    """The row of metrics.jsonl from which a stored row came, as far as it is kept."""
    return {
        key: value
        for key, value in row.items()
        if value is not None and key not in DESCRIBED and not key.startswith("axis/")
    }


def processor() -> str:
    """This machine's kind of processor: numbers repeat bit for bit on one kind."""
    lines = dict(line.split("\t", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0]
                 .replace("\t\t", "\t").splitlines() if "\t" in line)  # fmt: skip
    names = ("model name", "cpu family", "model")
    return ", ".join(f"{name} {lines[name].lstrip(': ')}" for name in names)


if __name__ == "__main__":
    main()
