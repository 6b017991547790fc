"""The tool example from its model to its rollouts, with fewer steps."""

import fcntl
import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from tests.functional.tiny_runs import ROOT, SEED, train

TASKS = ROOT / ".cache" / f"tool_tasks_of_seed_{SEED}"
SMALL = ("trainer.steps=2", "trainer.epochs=2", "trainer.minibatches=2", "eval.every=2",
         "eval.samples=2", "rollout.prompts_per_step=16", "logging.keep_rollouts=all")  # fmt: skip


@pytest.fixture(scope="module")
def tasks():
    """The tasks with a model that learned the form only; made once."""
    command = [
        *(sys.executable, "tools/make_tool_tasks.py", "--output", str(TASKS), "--seed", SEED),
        *("--updates", "100", "--noisy-updates", "1", "--train", "64", "--heldout", "8"),
    ]
    TASKS.parent.mkdir(exist_ok=True)
    with TASKS.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, cwd=ROOT, check=True)
    return TASKS


@pytest.mark.parametrize(
    ("name", "task", "role"), [("tools", "lookup", "tool"), ("ask", "ask", "user")]
)
def test_a_run_trains_on_what_its_environment_rewards(tasks, tmp_path, name, task, role):
    places = (f"model.path={tasks}/model", f"data.train={tasks}/{task}/train.jsonl",
              f"eval.sets={{heldout: {tasks}/{task}/heldout.jsonl}}")  # fmt: skip
    config = ROOT / "examples" / "pnpo" / f"{name}.yaml"
    metrics = train(*SMALL, f"run.dir={tmp_path}", "run.name=agent", config=config, places=places)
    assert [row["step"] for row in metrics] == [0, 1, 2]
    observed = 0
    for step in (1, 2):
        (file,) = (tmp_path / "agent" / "rollouts").glob(f"*{step}.parquet")
        for row in pq.read_table(file).to_pylist():
            messages = json.loads(row["messages"])
            assert messages[0]["role"] == "assistant"
            others = [one for one in messages if one["role"] != "assistant"]
            assert {one["role"] for one in others} <= {role}
            observed += len(others)
            right = (
                row["finish_reason"] == "stop" and messages[-1]["content"] == row["ground_truth"]
            )
            assert row["reward"] == float(right)
            # What the environment wrote is in the tokens, and not in the log-probs.
            seen = sum(span["end"] - span["first"] for span in row["observed"] or ())
            assert len(row["token_ids"]) == len(row["behavior_logprobs"]) + seen
    assert observed
