"""Running the real command on the tiny task."""

import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from megatron_rl.apps.tasks import tiny_task
from megatron_rl.runs.files import read_metrics
from tests.functional.forked_runs import ForkedCommand

# A run spends most of its time in the engine's forward passes, one for each token of the longest
# response, and cut responses earn nothing from the task's own verifier.
CUT = ("rollout.max_response_tokens=16", "reward.verifier=tests.functional.sums:parity")
ROOT = Path(__file__).parents[2]
# No test may depend on which rollouts a trained model gives: any other seed must pass as well.
SEED = os.environ.get("MEGATRON_RL_TINY_SEED", "1")
TASK = ROOT / ".cache" / ("tiny_task" if SEED == "1" else f"tiny_task_of_seed_{SEED}")
# Some of its prompts: a run reads and tokenizes all of a file, and 4096 take longer than its steps.
PROMPTS = 128
TRAIN = TASK / f"train_{PROMPTS}.parquet"
# For runs that evaluate, but not to learn how good the model is.
QUESTIONS = 16
HELDOUT = TASK / f"heldout_{QUESTIONS}.parquet"
PLACES = (f"model.path={TASK}/model", f"data.train={TRAIN}",
          f"eval.sets={{heldout: {TASK}/heldout.parquet}}",
          "reward.verifier=tests.functional.sums:grade")  # fmt: skip
CONFIG = ROOT / "examples" / "pnpo" / "quickstart.yaml"


@functools.cache
def make_task():
    """The quickstart's data and model; made once, then found. Other processes wait.

    The model of another seed is one that supervised training makes of a random one.
    """
    make = [sys.executable, "-m", "megatron_rl.apps.tasks.tiny_task", "--output", str(TASK),
            "--seed", SEED]  # fmt: skip
    TASK.parent.mkdir(exist_ok=True)
    with TASK.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if SEED == "1":
            if not _is_made():  # else the command imports much to find that out
                subprocess.run(make, cwd=ROOT, check=True)
        elif not TRAIN.exists():
            subprocess.run([*make, "--supervised"], cwd=ROOT, check=True)
            _train_supervised(Path(f"{TASK}_run"))
        if not TRAIN.exists():
            pq.write_table(pq.read_table(TASK / "train.parquet").slice(0, PROMPTS), TRAIN)
        if not HELDOUT.exists():
            pq.write_table(pq.read_table(TASK / "heldout.parquet").slice(0, QUESTIONS), HELDOUT)


def _is_made():
    made = TASK / "made.json"
    wanted = tiny_task.compute_fingerprint(tiny_task.Settings())
    return made.exists() and json.loads(made.read_text())["fingerprint"] == wanted


def _train_supervised(run):
    places = (f"model.path={TASK}/model", f"data.train={TASK}/solutions.jsonl",
              "sft.validation={}", "eval.sets={}", f"run.dir={run}", "run.name=sft")  # fmt: skip
    arguments = training_arguments(
        f"seed={SEED}", config=CONFIG.with_name("sft.yaml"), places=places
    )
    subprocess.run([sys.executable, "-m", "megatron_rl.cli", *arguments], cwd=ROOT, check=True)
    shutil.copytree(run / "sft" / "model", TASK / "model", dirs_exist_ok=True)
    shutil.rmtree(run)


def training_arguments(*overrides, config=CONFIG, places=PLACES):
    """`megatron-rl train` on a config, the quickstart's."""
    return ["train", "--config", str(config), *places, *overrides]


def start_training(*overrides, **where):
    """The command in forked processes; `run.dir` is among the overrides."""
    folder = Path(dict(one.split("=", 1) for one in overrides)["run.dir"]) / "output"
    output = folder / f"{len(list(folder.glob('*')))}.txt"
    return ForkedCommand(training_arguments(*overrides, **where), output=output, cwd=ROOT)


def train(*overrides, **where):
    """Run to the end; returns the rows of metrics.jsonl of the run directory `run.dir/run.name`."""
    process = start_training(*overrides, **where)
    assert process.wait(timeout=600) == 0, process.read()
    settings = dict(override.split("=", 1) for override in overrides)
    return read_metrics(Path(settings["run.dir"]) / settings["run.name"])
