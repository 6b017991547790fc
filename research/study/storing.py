"""Finished runs of a study in one Parquet file, so that any machine can continue the study.

The file has the rows of `results.parquet` without most metrics by position or epoch, and for each
run the commits and the kinds of processors that made it, which `started.jsonl` of the study has.
"""

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.config import ConfigError, dump_config
from megatron_rl.runs.files import append_row, atomic_write, read_rows
from megatron_rl.runs.inputs import WEIGHTS
from research.study.results import RESULTS
from research.study.study_plan import Study

STARTED = "started.jsonl"
DESCRIBED = ("run", "seed", "digest", "model", "state", "steps", "updates", "commit", "processor")
LEFT_OUT = re.compile(r"by_position/|epoch_\d+/(?!by_fraction/1\.0/)|by_fraction/")
Rows = list[dict[str, Any]]


def note_start(study: Study, name: str, *, processor: str = "") -> None:
    """Record what starts a run: the commit, with a note of changes in it, and the processor.

    processor: of a run elsewhere; "": this machine's.
    """
    made = {"commit": read_commit(), "processor": processor or read_processor()}
    append_row(study.folder / STARTED, {"run": name} | made)


def _made(name: str, starts: Rows) -> dict[str, str]:
    """Return what made a run, several in order; "unknown" if its start was not noted."""
    own = [start for start in starts if start["run"] == name]
    return {
        key: " then ".join(dict.fromkeys(start[key] for start in own)) or "unknown"
        for key in ("commit", "processor")
    }


def store_runs(study: Study, file: Path) -> str:
    """Add the finished runs of the study's folder to a file; a run that it has stays as it is.

    Returns a line of the runs added and stored.
    """
    rows = read_stored(file)
    there = set(by_run(rows))
    starts = read_rows(study.folder / STARTED)
    results = study.folder / RESULTS
    for row in pq.read_table(results).to_pylist() if results.is_file() else []:
        if row["state"] == "done" and row["run"] not in there:
            kept = {k: v for k, v in row.items() if v is not None and not LEFT_OUT.match(k)}
            rows.append(kept | _made(row["run"], starts))
    runs = by_run(rows)
    if rows:
        names = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        with atomic_write(file) as partial:
            pq.write_table(table, partial, compression="zstd")
    return f"{len(runs) - len(there)} runs added: {len(runs)} of {len(study.runs)} in {file}"


def restore_runs(study: Study, file: Path) -> str:
    """Write a finished run directory of every stored run that has none; returns a line about it.

    Raises ConfigError without a file, or if a run was made with other settings than the study has.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; --store writes it once a run has finished")
    planned, written = {run.name: run for run in study.runs}, 0
    for name, rows in by_run(read_stored(file)).items():
        run = planned.get(name)
        if run is None or rows[0]["digest"] != run.digest:
            raise ConfigError(
                f"{file}: {name} was made with other settings than the study now has; use the code "
                f"that made it: git checkout {rows[0]['commit'].split()[0]}"
            )
        if run.folder.exists():
            continue
        written += 1
        (run.folder / "model").mkdir(parents=True)  # empty: it marks the run as finished
        (run.folder / "config.yaml").write_text(dump_config(run.config))
        inputs = {"model.path": {"files": {WEIGHTS: rows[0].get("model")}}}
        (run.folder / "inputs.json").write_text(json.dumps(inputs))
        lines = (json.dumps(metrics_of(row)) + "\n" for row in rows)
        (run.folder / "metrics.jsonl").write_text("".join(lines))
    return f"{written} of {len(study.runs)} runs restored from {file}"


def read_stored(file: Path) -> Rows:
    """Return the rows of all stored runs, without empty cells; none without a file.

    Raises ConfigError for a file that is not Parquet.
    """
    try:
        rows = pq.read_table(file).to_pylist() if file.is_file() else []
    except pa.ArrowInvalid:
        raise ConfigError(
            f"{file} cannot be read as Parquet; give the file that --store has written"
        ) from None
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def by_run(rows: Sequence[dict[str, Any]]) -> dict[str, Rows]:
    """Return the rows of each run, in order."""
    runs: dict[str, Rows] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row)
    return runs


def metrics_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of metrics.jsonl from which a stored row came, as far as it is kept."""
    return {k: v for k, v in row.items() if k not in DESCRIBED and not k.startswith("axis/")}


def read_processor() -> str:
    """Return this machine's kind of processor: a run repeats bit for bit on one kind."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    lines = dict(re.findall(r"^(.*?)\s*:\s*(.*)$", first, flags=re.MULTILINE))
    return ", ".join(f"{name} {lines.get(name)}" for name in ("model name", "cpu family", "model"))


def read_commit() -> str:
    """Return the commit of this code, with a note of changes; "unknown" without a repository."""
    try:
        changes = _git("status", "--porcelain", "--untracked-files=no")
        return _git("rev-parse", "HEAD") + (" with changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or an unpacked archive
        return "unknown"


def _git(*arguments: str) -> str:
    git = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
