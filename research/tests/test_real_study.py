"""A study of real runs: killed, started again, tabled."""

import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import yaml

from megatron_rl.runs.files import read_metrics
from tests.functional.tiny_runs import ROOT, TASK, TRAIN, make_task

STUDY = {
    "name": "s",
    "base": {
        "model": {"path": f"{TASK}/model"},
        "data": {"train": str(TRAIN), "max_prompt_tokens": 48},
        "rollout": {"prompts_per_step": 8, "max_response_tokens": 56, "kv_cache_mib": 64},
        "optimizer": {"learning_rate": 1e-4, "warmup_steps": 0},
        "trainer": {"steps": 2, "epochs": 1, "minibatches": 2, "checkpoint_every": 1,
                    "tokens_per_micro_batch": 8192},
        "logging": {"tensorboard": False},
    },
    "axes": {"objective": {"gspo": {"objective": {"name": "gspo"}}}},
    "seeds": [1],
}  # fmt: skip


def test_killed_study_resumes_its_run(tmp_path):
    """The run outlives the study's kill just long enough to save; then the same command ends it."""
    make_task()
    file, folder = tmp_path / "study.yaml", tmp_path / "s" / "runs" / "gspo-seed1"
    file.write_text(yaml.safe_dump(STUDY | {"dir": str(tmp_path)}))
    command = [sys.executable, "-m", "research.study", str(file)]
    study = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while len(read_metrics(folder)) < 1:  # it has begun
        assert study.poll() is None and time.monotonic() < deadline, study.stdout.read()
        time.sleep(0.02)
    study.send_signal(signal.SIGKILL)
    study.communicate()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "s: 1 of 1 done" in again.stdout
    rows = pq.read_table(tmp_path / "s" / "results.parquet").to_pylist()
    assert [(row["step"], row["state"]) for row in rows] == [(0, "done"), (1, "done"), (2, "done")]
    assert rows[0]["updates"] == 0 and rows[2]["updates"] == 4
    log = (folder / "log.txt").read_text()
    assert "checkpoint saved at step" in log or read_metrics(folder)[-1]["step"] == 2, log
