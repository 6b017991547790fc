"""The study of replayed routes: keep its runs in routes.parquet, and print its tables.

store    add the finished runs of runs/routes in the working directory
tables   print the results of research/docs/routing-study.md from the stored runs

Run the first in a checkout of the commit that makes the runs (its section State).
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import stats

from research.study.study_plan import load_study

STORED = Path(__file__).parent / "routes.parquet"
FILE = Path("research") / "configs" / "study_routes.yaml"
MODELS = [f"{size}_{number}" for size in ("small", "large") for number in (1, 2, 3, 4)]
# Metrics by position and of single epochs are most of the columns.
LEFT_OUT = re.compile(r"epoch_\d+/(?!routing/changed_fraction$)|by_position/|by_fraction/|time/")
Rows = list[dict[str, Any]]


def store() -> None:
    """Write the rows of all finished runs."""
    study = load_study(FILE, [])
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    rows = []
    for run in study.runs:
        if not (run.folder / "model").is_dir():
            continue
        model = json.loads((run.folder / "models.json").read_text())["model.path"]
        named = {"run": run.name, "seed": run.seed, "digest": run.digest, "model": model,
                 "commit": commit, "plan": study.digest}  # fmt: skip
        named |= {f"axis/{axis}": value for axis, value in run.point.items()}
        for line in (run.folder / "metrics.jsonl").read_text().splitlines():
            metrics = json.loads(line).items()
            rows.append(named | {key: value for key, value in metrics if not LEFT_OUT.match(key)})
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    pq.write_table(pa.table(columns), STORED, compression="zstd")
    print(f"{len({row['run'] for row in rows})} runs in {STORED}")


def read_runs() -> dict[tuple[str, str, str], Rows]:
    """Return the stored rows by model, epochs and replay, the first one from before training."""
    runs: dict[tuple[str, str, str], Rows] = {}
    for row in pq.read_table(STORED).to_pylist():
        key = row["axis/model"], row["axis/epochs"], row["axis/replay"]
        runs.setdefault(key, []).append(row)
    return runs


def measure(rows: Rows) -> dict[str, float]:
    """Return the measures of the plan for one run."""
    steps, last = rows[1:], f"epoch_{rows[0]['axis/epochs']}/routing/changed_fraction"
    return {
        "score": 100 * rows[-1]["eval/heldout/avg@8"],
        "reward": 100 * float(np.mean([row["reward/mean"] for row in steps[1:]])),
        "changed": float(np.mean([row[last] for row in steps])),
        "variance": float(np.median([row["routing/log_ratio_variance_fraction"] for row in steps])),
    }


def contrast(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, half of the 95% interval, and p of Student's t."""
    half = stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences)
    return float(np.mean(differences)), float(half), float(stats.ttest_1samp(differences, 0).pvalue)


def table(epochs: str) -> list[str]:
    """Return the rows of the table of one part: each model, both sizes, all."""
    runs = read_runs()
    found = {
        model: [measure(runs[model, epochs, replay]) for replay in ("none", "behavior")]
        for model in MODELS
        if all((model, epochs, replay) in runs for replay in ("none", "behavior"))
    }
    lines = []
    for model, (none, replayed) in found.items():
        lines.append(
            f"| {model} | {none['score']:.1f} | {replayed['score'] - none['score']:+.1f} "
            f"| {replayed['reward'] - none['reward']:+.1f} "
            f"| {none['changed']:.3f}, {replayed['changed']:.3f} "
            f"| {none['variance']:.3f}, {replayed['variance']:.3f} |"
        )
    for name in ("small", "large", ""):
        pairs = [pair for model, pair in found.items() if model.startswith(name)]
        if len(pairs) < 2:
            continue
        cells = []
        for key in ("score", "reward"):
            mean, half, p = contrast([replayed[key] - none[key] for none, replayed in pairs])
            is_primary = key == "score" and epochs == "4" and not name
            test = f", p {p:.2f}" if is_primary else ""
            cells.append(f"{mean:+.2f} ± {half:.2f}{test}")
        for key in ("changed", "variance"):
            both = zip(*([one[key] for one in pair] for pair in pairs), strict=True)
            cells.append(", ".join(f"{np.median(values):.3f}" for values in both))
        lines.append(f"| {name or 'all'} ({len(pairs)}) |  | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    if sys.argv[1] == "store":
        store()
    else:
        print("\n".join(["4 epochs", *table("4"), "8 epochs", *table("8")]))
