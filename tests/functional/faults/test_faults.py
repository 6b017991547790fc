"""Faults in a real run of two ranks end it or not, as they should; no process remains.

Every run here starts from one process that has imported everything; the faults are in
`fault_injection`. Other hangs than of a stopped rank, and self-tests that fail, are slow tests.
"""

import json
import re

import pytest

from megatron_rl.runs.checkpoints import CheckpointFolders
from megatron_rl.runs.files import read_metrics
from tests.functional.faults import runs
from tests.functional.tiny_runs import CONFIG, CUT, PLACES, make_task
from tests.ranks import start_process

# 4 updates a step.
SHORT = ("rollout.prompts_per_step=8", "rollout.responses_per_prompt=4", "trainer.epochs=1",
         "eval.sets={}", "logging.tensorboard=false", "trainer.steps=2",
         "trainer.checkpoint_every=1", "optimizer.decay=constant", *CUT)  # fmt: skip
RUNS = [
    {"fault": "compute_nonsense_and_stop", "rank": 1, "name": "stopped"},
    {"fault": "fill_the_disk", "rank": 1, "name": "stopped",
     "more": ["run.resume=auto", "trainer.steps=4", "trainer.self_test_every=1"]},
]  # fmt: skip
FURTHER_RUNS = [
    {"fault": "slow_down_training", "rank": 1, "more": [
        "parallel.context=1", "parallel.data=2", "trainer.minibatches=1", "trainer.steps=3"]},
    {"fault": "hold_the_lock", "rank": 1},
    {"fault": "kill_the_engine", "rank": 1},
    {"fault": "hang_in_a_save", "rank": 1},
    {"fault": "compute_nonsense", "rank": 1},
    {"fault": None, "rank": 0, "name": "hanging_verifier",
     "more": ["reward.verifier=tests.functional.faults.verifiers:hang", "trainer.steps=1",
              "reward.time_limit_seconds=0.2", "rollout.responses_per_prompt=2",
              "rollout.prompts_per_step=4"]},
    # One minibatch of many groups: some have rewards that differ, whatever the model answers.
    *({"fault": f"break_{name}", "rank": 1, "more": [
        "trainer.self_test_every=2", "trainer.minibatches=1", "rollout.prompts_per_step=16",
        "rollout.responses_per_prompt=8"]}
      for name in ("first_ratio", "zero_rate_weights", "zero_rate_ratios", "engine_weights")),
]  # fmt: skip


def run_all(folder, wanted):
    """The runs, one after the other; what became of each by its name, a resumed one's with `+`."""
    runs_to_start, names = [], []
    for each in wanted:
        name = each.get("name", each["fault"])
        names.append(name + "+" if name in names else name)
        arguments = ["train", "--config", str(CONFIG), *PLACES, *SHORT, f"run.dir={folder}",
                     f"run.name={name}", *each.get("more", [])]  # fmt: skip
        runs_to_start.append({"fault": each["fault"], "rank": each["rank"], "arguments": arguments})
    answer = folder / "answer.json"
    process = start_process(runs.run_all, runs_to_start, str(answer))
    process.join(timeout=300 * len(wanted))
    assert process.exitcode == 0
    return dict(zip(names, json.loads(answer.read_text()), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ended(folder):
    make_task()
    return run_all(folder, RUNS)


@pytest.fixture(scope="module")
def further_ended(folder):
    make_task()
    return run_all(folder, FURTHER_RUNS)


WAITS = "does not wait for another rank"


def test_stopped_rank_is_named_and_ends_run_for_restart(folder, ended):
    check_hang(folder / "stopped", ended["stopped"], "train", "is stopped", "in stop")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "phase", "frame"),
    [
        ("hold_the_lock", "behavior", "in spin_for_ever"),
        ("kill_the_engine", "rollout", "wait_for_a_dead_device"),
        ("hang_in_a_save", "checkpoint", "in write_for_ever"),
    ],
)
def test_hang_names_rank_and_ends_run_for_restart(folder, further_ended, name, phase, frame):
    check_hang(folder / name, further_ended[name], phase, WAITS, frame)


@pytest.mark.slow
def test_rank_that_is_slow_in_training_alone_is_named_in_the_third_step(further_ended):
    run = further_ended["slow_down_training"]
    assert run["status"] == 0, run["output"]
    (line,) = [line for line in run["output"].splitlines() if "warning: rank" in line]
    assert "warning: rank 1 needed" in line and "s to train, the others" in line, line


def check_hang(path, run, phase, sign, frame):
    assert run["status"] == 75, run["output"]
    assert f" s in {phase}: rank 1 {sign}" in run["output"], run["output"]
    assert "restart it with run.resume=auto" in run["output"]
    (report,) = (path / "stalls").glob("*.txt")
    text = report.read_text()
    assert str(report) in run["output"]
    assert frame in text.split("ranks 1:")[1].split("ranks 0:")[0], text
    assert run["left"] == []
    # Of use with `pytest -s`, for docs/measurements.md.
    print(
        path.name,
        f"{run['ended_at'] - report.stat().st_mtime:.1f} s from report to end:",
        text[:200],
    )


def test_run_resumes_after_hang_and_full_disk_skips_only_checkpoints(folder, ended):
    run, path = ended["stopped+"], folder / "stopped"
    assert run["status"] == 0 and run["left"] == [], run["output"]
    assert "continuing stopped after step 1" in run["output"]
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]
    assert all(f"step {step}: self-tests passed" in run["output"] for step in (2, 3, 4)), run[
        "output"
    ]
    for step in (2, 3):  # while Megatron writes, and after it
        assert f"step {step} is not saved: " in run["output"], run["output"]
    end = (
        r"No space left on device; the disk of \S+ has [\d,]+ of [\d,]+ bytes free; training "
        "continues, and the last checkpoint is of step 1"
    )
    assert len(re.findall(end, run["output"])) == 2, run["output"]
    assert "step 2 is not saved: rank 0: " in run["output"]
    names = {one.name for one in (path / "checkpoints").iterdir()}
    assert names == {"step_000001", "step_000004"}


def test_updates_that_are_not_finite_on_one_rank_are_skipped_on_both(ended):
    output = ended["stopped"]["output"]
    assert "step 1, update 2 is skipped" in output, output
    assert "step 1, update 4 is skipped: the gradient norm" in output, output


@pytest.mark.slow
def test_weight_that_is_not_finite_on_one_rank_is_neither_saved_nor_pushed(folder, further_ended):
    run, path = further_ended["compute_nonsense"], folder / "compute_nonsense"
    assert run["status"] == 1 and run["left"] == [], run["output"]
    assert "parameters are not finite" in run["output"] and "rank 1" in run["output"], run["output"]
    assert [row["step"] for row in read_metrics(path)] == [0, 1]
    assert CheckpointFolders(path / "checkpoints").intact_steps() == [1]


@pytest.mark.slow
def test_verifier_that_always_hangs_ends_run_and_its_workers(further_ended):
    run = further_ended["hanging_verifier"]
    assert run["status"] == 1 and run["left"] == [], run["output"]
    assert "none of 8 responses was graded within reward.time_limit_seconds=0.2" in run["output"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("first_ratio", "a ratio deviates from 1 by 0.00"),
        ("zero_rate_weights", "weights of 1 ranks changed"),
        ("zero_rate_ratios", "the ratios deviated from 1 by 0 and then by "),
        ("engine_weights", "after the weight push the log-probs of engine 1 differ"),
    ],
)
def test_failed_self_test_ends_run_and_is_named(folder, further_ended, name, what):
    """A contract broken by one rank ends the run in the first step that checks it."""
    run = further_ended[f"break_{name}"]
    assert run["status"] == 1 and run["left"] == [], run["output"]
    assert f"self-test {name} failed in step 2: {what}" in run["output"], run["output"]
    assert [row["step"] for row in read_metrics(folder / f"break_{name}")] == [0, 1]
