"""Running the real command on the tiny task."""

import os
import subprocess
import sys
from pathlib import Path

from megatron_rl.runs.rows import read_metrics

ROOT = Path(__file__).parents[2]
# No test may depend on which rollouts a trained model gives: any other seed must pass as well.
SEED = os.environ.get("MEGATRON_RL_TINY_SEED", "1")
TASK = ROOT / ".cache" / ("tiny_task" if SEED == "1" else f"tiny_task_of_seed_{SEED}")
PLACES = (f"model.path={TASK}/model", f"data.train={TASK}/train.parquet",
          f"eval.sets={{heldout: {TASK}/heldout.parquet}}")  # fmt: skip
CONFIG = ROOT / "examples" / "pnpo" / "quickstart.yaml"


def make_task():
    """The quickstart's data and model; made once, then found."""
    command = [sys.executable, "tools/make_tiny_task.py", "--output", str(TASK), "--seed", SEED]
    subprocess.run(command, cwd=ROOT, check=True)


def start_training(*overrides, config=CONFIG, places=PLACES):
    """`megatron-rl train` on a config, the quickstart's, as a process group of its own."""
    command = [sys.executable, "-m", "megatron_rl.cli", "train", "--config", str(config)]
    return subprocess.Popen(
        [*command, *places, *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def train(*overrides, **where):
    """Run to the end; returns the rows of metrics.jsonl of the run directory `run.dir/run.name`."""
    process = start_training(*overrides, **where)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    settings = dict(override.split("=", 1) for override in overrides)
    return read_metrics(Path(settings["run.dir"]) / settings["run.name"])
