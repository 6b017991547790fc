"""`megatron-rl train` before it starts a process."""

import json
import subprocess
import sys

import pytest
import yaml

from megatron_rl.config import dump_config, load_config, with_absolute_paths

RUN = """
import sys
sys.modules["torch"] = None  # importing it would be an error
from megatron_rl.cli import main
main(sys.argv[1:])
"""


@pytest.fixture
def config(tmp_path):
    """The config of a run of two steps that has ended, in a folder of its own."""
    values = {
        "model": {"path": "model"}, "data": {"train": "train.parquet"}, "trainer": {"steps": 2},
        "run": {"name": "a", "dir": str(tmp_path / "runs")},
    }  # fmt: skip
    file, run = tmp_path / "run.yaml", tmp_path / "runs" / "a"
    file.write_text(yaml.safe_dump(values))
    (run / "model").mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(with_absolute_paths(load_config(file, []))))
    rows = [{"step": step} for step in (0, 1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def train(config, *overrides, program=RUN):
    command = [sys.executable, "-c", program, "train", "--config", str(config), *overrides]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_finished_run_is_not_restarted(config):
    """Without torch, whose import takes seconds, and without a process."""
    done = train(config, "run.resume=auto")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "a is finished: all 2 steps are done, and the trained model is in"
    )
    assert done.stdout.endswith("runs/a/model; set trainer.steps above 2 to continue training\n")


def test_finished_run_rejects_another_experiment(config):
    program = "import sys; from megatron_rl.cli import main; main(sys.argv[1:])"
    done = train(config, "run.resume=auto", "objective.name=gspo", program=program)
    assert done.returncode == 1 and "objective.name: 'pnpo' -> 'gspo'" in done.stderr
