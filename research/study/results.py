"""Results of a study: `results.parquet`, one row per run and recorded step.

Columns, in this order:

    run            name of the run; its run directory is runs/<run> next to the file
    axis/<axis>    value of the run on each axis of the study file, as text
    seed           runs with the same seed are paired
    digest         hash of the config without `run` and `logging`; equal for equal experiments
    model          fingerprint of the model from which the run started
    state          `done`, or `begun` if the run is not finished
    steps          total number of steps (rollout batches) of the run
    updates        optimizer updates done at the end of this row's step
    step           step of the row; 0 is the evaluation before training
    <metric>       every metric of the run's metrics.jsonl (docs/metrics.md); null if missing

`results.parquet` is rewritten from the run directories after each run. It is self-contained:
read it with `pyarrow.parquet.read_table("results.parquet")` or `polars.read_parquet`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.runs.files import ROLLOUT_COST_METADATA as COST
from megatron_rl.runs.files import atomic_write
from megatron_rl.runs.inputs import WEIGHTS
from research.study.state import RunState, read_state
from research.study.study_plan import Study

RESULTS = "results.parquet"
PLAN = "plan"  # metadata of the file: digest of the study file


def build_results(states: Sequence[RunState]) -> pa.Table:
    """Build the table of these runs, in order."""
    rows = [row for state in states for row in _rows(state)]
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    columns = {name: pa.array([row.get(name) for row in rows], _kind(name)) for name in names}
    return pa.table(columns)


def write_results(study: Study) -> list[RunState]:
    """Rewrite `results.parquet` from the run directories; returns the states of the runs."""
    states = [read_state(run) for run in study.runs]
    if any(state.rows for state in states):
        with atomic_write(study.folder / RESULTS) as partial:
            table = build_results(states)
            # For the report, and to find the plan of a table that was copied.
            described = {PLAN: study.digest, COST: f"{study.file.rollout_cost:g}"}
            table = table.replace_schema_metadata(described)
            pq.write_table(table, partial, compression="zstd")
    return states


def _rows(state: RunState) -> list[dict[str, Any]]:
    run, updates, rows = state.run, 0, []
    described = {
        "run": run.name,
        **{f"axis/{axis}": value for axis, value in run.point.items()},
        "seed": run.seed,
        "digest": run.digest,
        "model": _model(run.folder),
        "state": state.state,
        "steps": run.config.trainer.steps,
    }
    for metrics in state.rows:
        every = run.config.updates_per_step if metrics["step"] else 0
        updates += int(metrics.get("train/updates", every))
        rows.append(described | {"updates": updates, "step": metrics["step"]} | metrics)
    return rows


def _kind(name: str) -> pa.DataType:
    if name in ("run", "digest", "model", "state") or name.startswith("axis/"):
        return pa.string()
    return pa.int64() if name in ("seed", "steps", "updates", "step") else pa.float64()


def _model(folder: Path) -> str | None:
    inputs, earlier = folder / "inputs.json", folder / "models.json"
    if inputs.is_file():
        model = json.loads(inputs.read_text()).get("model.path", {})
        return model.get("files", {}).get(WEIGHTS)
    # Runs of before 2026-11-26, and those that `results/signs.py` writes.
    return json.loads(earlier.read_text()).get("model.path") if earlier.is_file() else None
