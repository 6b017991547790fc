"""Studies on the disk: what is done, what is run, in which order, and what is tabled.

The runs are processes that write what a run writes; `tests/functional/test_study.py` has real ones.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import pyarrow.parquet as pq
import pytest
import yaml

from megatron_rl.config import ConfigError, dump_config
from megatron_rl.preflight.hub_names import resolve_hub_names
from megatron_rl.runs.files import try_lock
from megatron_rl.runtime.interruption import INTERRUPTED
from research.study import running
from research.study.__main__ import main
from research.study.results import build_results, write_results
from research.study.running import StudyProgress, opened, run_study, start_here
from research.study.state import RunState, read_state
from research.study.study_plan import StudyFile, plan_study
from research.study.task_making import TaskMaker
from tests.unit.preflight.test_gguf_models import model_of, write_gguf

RUN = """
import json, pathlib, sys, time
folder, score, status = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
with open(folder.parent / "order", "a") as order:
    order.write(folder.name + "\\n")
for step in (0, 1, 2):
    row = {"step": step, "eval/h/avg@4": score + step / 10}
    if step:
        row["reward/mean"] = score
    with open(folder / "metrics.jsonl", "a") as rows:
        rows.write(json.dumps(row) + "\\n")
    if status == 75:
        time.sleep(600)
(folder / "model").mkdir()
sys.exit(status)
"""


def plan(tmp_path, **changes):
    values = {
        "name": "s", "dir": str(tmp_path), "seeds": [1, 2],
        "base": {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"prompts_per_step": 8},
                 "trainer": {"steps": 2}},
        "axes": {"objective": {"pnpo": {}, "gspo": {"objective": {"name": "gspo"}}}},
    }  # fmt: skip
    return plan_study(StudyFile.model_validate(values | changes), [])


class Pretended:
    """A process that leaves what a run leaves."""

    statuses: ClassVar[dict[str, int]] = {}

    def __init__(self, study, run):
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "config.yaml").write_text(dump_config(run.config))
        score = {"pnpo": 0.5, "gspo": 0.25}[run.point["objective"]]
        status = self.statuses.get(run.name, 0)
        self.log_file = run.folder / "log.txt"
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(run.folder), str(score), str(status)]
        )

    def status(self):
        return self._process.poll()

    def end(self):
        self._process.kill()
        return True


def run_all(study, output, start=Pretended):
    with opened(study):
        return run_study(
            study, start=start, echo=output.append, on_end=lambda: write_results(study)
        )


def test_finished_runs_are_skipped_and_failures_stop_no_other(tmp_path, monkeypatch):
    study, output = plan(tmp_path), []
    monkeypatch.setattr(Pretended, "statuses", {"gspo-seed1": 3})
    assert run_all(study, output) == 1
    names = ["pnpo-seed1", "gspo-seed1", "pnpo-seed2", "gspo-seed2"]
    order = study.folder / "runs" / "order"
    assert order.read_text().split() == names
    assert any("gspo-seed1 failed with status 3" in line for line in output)
    assert "3 of 4 done, 1 failed" in output[-2]
    # Again, now that it would work: its model is there, so that it is taken for done. Without it:
    (study.folder / "runs" / "gspo-seed1" / "model").rmdir()
    monkeypatch.setattr(Pretended, "statuses", {})
    assert run_all(study, output) == 0
    assert order.read_text().split() == [*names, "gspo-seed1"]
    assert "4 of 4 done" in output[-1]


class Refused(Pretended):
    """A run that cannot start, as on a full disk."""

    def status(self):
        self._process.kill()
        return self._process.wait() and 2

    def __init__(self, study, run):
        self.log_file = run.folder / "log.txt"
        self._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_no_further_run_starts_after_three_that_made_no_step(tmp_path):
    study, output, started = plan(tmp_path, seeds=[1, 2, 3]), [], []

    def start(study, run, *, refused=("pnpo-seed1", "pnpo-seed2", "gspo-seed2", "pnpo-seed3")):
        started.append(run.name)
        return (Refused if run.name in refused else Pretended)(study, run)

    assert run_all(study, output, start) == 1
    assert started == [run.name for run in study.runs][:5]  # gspo-seed1 is done: counted anew
    assert any(line.startswith("3 runs in a row failed before their first step") for line in output)
    assert "1 of 6 done, 4 failed" in " ".join(output)
    started.clear()
    assert run_all(study, output, lambda study, run: start(study, run, refused=())) == 0


def test_parallel_runs_end_on_signal(tmp_path, monkeypatch):
    study, output = plan(tmp_path, side_by_side=2), []
    monkeypatch.setattr(Pretended, "statuses", dict.fromkeys(("pnpo-seed1", "gspo-seed1"), 75))
    started = []

    def start(study, run):
        started.append(run.name)
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return Pretended(study, run)

    earlier = signal.getsignal(signal.SIGTERM)
    try:
        assert run_all(study, output, start) == INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert started == ["pnpo-seed1", "gspo-seed1"]  # both at once, and no third


@pytest.mark.parametrize(
    ("early", "starts", "status", "output"),
    [
        (2, 3, 0, "4 of 4 done"),
        (9, 4, INTERRUPTED, "  not finished: pnpo-seed1; start the study again to continue"),
    ],
)
def test_run_that_ends_early_is_restarted_at_most_few_times(
    tmp_path, early, starts, status, output
):
    """As after a hang: its status is 75, and nobody asked the study to end."""
    study, lines, started = plan(tmp_path), [], []

    class EndsEarly(Pretended):
        def __init__(self, study, run):
            self.log_file = tmp_path
            started.append(run.name)
            self.early = run.name == "pnpo-seed1" and started.count(run.name) <= early
            if not self.early:
                super().__init__(study, run)

        def status(self):
            return INTERRUPTED if self.early else super().status()

    assert run_all(study, lines, EndsEarly) == status
    assert started.count("pnpo-seed1") == starts and len(started) == starts + 3
    assert output in lines[-1]


def test_remaining_time_counts_steps(tmp_path, monkeypatch):
    """One of 4 runs of 2 steps is done, one has 1 step and one 2: 5 in 10 minutes, 3 to do."""
    study = plan(tmp_path)
    steps = dict(zip([run.name for run in study.runs], (2, 1, 2, 0), strict=True))
    monkeypatch.setattr(running, "_last_step", lambda run: steps[run.name])
    monkeypatch.setattr(running.time, "monotonic", lambda: 1600.0)
    progress = StudyProgress(
        study, print, done=1, begun=1000.0, steps_before=dict.fromkeys(steps, 0),
        steps_made=2,
    )  # fmt: skip
    output = progress.line(study.runs[1:3])
    assert (
        output == "s: 1 of 4 done, gspo-seed1 1/2, pnpo-seed2 2/2 (exporting), 10 min, about 6 left"
    )
    steps |= dict.fromkeys(steps, 2)
    assert "left" not in progress.line(study.runs[1:4])


def test_run_in_progress_elsewhere_is_deferred(tmp_path):
    study = plan(tmp_path)
    folder = study.runs[0].folder
    folder.mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; f = open(sys.argv[1], 'a'); "
         "fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()",
         str(folder / ".lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout.readline() == b"held\n"
    assert start_here(study, study.runs[0]) is None
    holder.communicate()
    with (folder / ".lock").open("a") as lock:
        assert try_lock(lock)


def test_two_studies_do_not_share_folder(tmp_path):
    study = plan(tmp_path)
    program = (
        "import sys\nfrom research.tests.test_running import plan, opened\n"
        "with opened(plan(sys.argv[1])): pass\n"
    )
    with opened(study):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True,
            cwd=Path(__file__).parents[2], check=False,
        )  # fmt: skip
    assert done.returncode == 1 and "is in use by another `python -m research.study`" in done.stderr


def test_run_of_other_settings_is_refused(tmp_path):
    study = plan(tmp_path)
    Pretended(study, study.runs[0])._process.wait()
    assert read_state(study.runs[0]).state == "done"
    other = plan(tmp_path, axes={"objective": {"pnpo": {"optimizer.beta2": 0.5}}})
    with pytest.raises(ConfigError, match="was run with other settings than the study now has"):
        read_state(other.runs[0])


def test_run_that_names_the_folder_of_a_gguf_file_is_the_planned_one(tmp_path):
    write_gguf(file := tmp_path / "model.gguf", model_of("llama"))
    base = {"model": {"path": str(file)}, "data": {"train": "t"}, "trainer": {"steps": 2}}
    study = plan(tmp_path, base=base)
    Pretended(study, study.runs[0])._process.wait()
    recorded = resolve_hub_names(study.runs[0].config)[0]
    assert recorded.model.path != str(file)
    (study.runs[0].folder / "config.yaml").write_text(dump_config(recorded))
    assert read_state(study.runs[0]).state == "done"


def test_results_hold_every_row_with_its_point_seed_and_digest(tmp_path):
    study = plan(tmp_path)
    for run in study.runs[:3]:
        Pretended(study, run)._process.wait()
    (study.runs[2].folder / "model").rmdir()
    (study.runs[2].folder / "models.json").write_text(json.dumps({"model.path": "abc"}))
    states = write_results(study)
    assert [state.state for state in states] == ["done", "done", "begun", "new"]
    rows = pq.read_table(study.folder / "results.parquet").to_pylist()
    assert len(rows) == 9
    # 4 epochs x 4 minibatches a step by default.
    assert rows[5] == {
        "run": "gspo-seed1", "axis/objective": "gspo", "seed": 1,
        "digest": study.runs[1].digest, "model": None, "state": "done", "steps": 2,
        "updates": 32, "step": 2, "eval/h/avg@4": 0.45, "reward/mean": 0.25,
    }  # fmt: skip
    assert rows[6]["model"] == "abc" and rows[6]["state"] == "begun"
    assert rows[3]["reward/mean"] is None  # step 0


def maker(study, messages, python=sys.executable, stop_requested=None):
    stop_requested = stop_requested or threading.Event()
    return TaskMaker(study, python, echo=messages.append, stop_requested=stop_requested)


def test_task_that_cannot_be_made_is_tried_once(tmp_path):
    base = {"model": {"path": f"{tmp_path}/sum/model"}, "data": {"train": "t"}}
    tasks = {f"{tmp_path}/sum": {"task": "running_sum"}}
    study, messages = plan(tmp_path, base=base, tasks=tasks), []
    maker_of_none = maker(study, messages, python="/bin/false")
    assert [maker_of_none.make(run) for run in study.runs[:2]] == [False, False]
    failed = f"tasks.{tmp_path}/sum could not be made"
    reasons = [text.partition(" failed: ")[2] for text in messages]
    assert reasons == ["", failed, f"{failed} (above)"]


def test_request_to_stop_ends_the_making_of_a_task(tmp_path):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexec sleep 600\n")
    program.chmod(0o755)
    base = {"model": {"path": f"{tmp_path}/sum/model"}, "data": {"train": "t"}}
    tasks = {f"{tmp_path}/sum": {"task": "running_sum"}}
    study, messages, stop = plan(tmp_path, base=base, tasks=tasks), [], threading.Event()
    made = maker(study, messages, str(program), stop)

    def request():
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        stop.set()

    threading.Thread(target=request).start()
    assert made.make(study.runs[0]) is False
    assert made.failed == set()  # the next start of the study continues it
    assert messages == [f"making {tmp_path}/sum"]


def test_task_made_with_other_settings_is_refused(tmp_path):
    made = {"task": "running_sum", "size": 16, "noise": "even", "longest_warm_up": 3000}
    (tmp_path / "sum").mkdir()
    (tmp_path / "sum" / "made.json").write_text(json.dumps({"settings": made}))
    base = {"model": {"path": f"{tmp_path}/sum/model"}, "data": {"train": "t"}}
    for wanted, output in (
        ({"size": 16, "longest_warm_up": 6000, "hidden": 64}, []),
        ({"noise": "late"}, ["pnpo-seed1 failed: .*/sum was made with noise=even, not late: rem"]),
        ({"experts": 8}, ["pnpo-seed1 failed: .*/sum was made with experts=0, not 8: remove it"]),
    ):
        tasks = {f"{tmp_path}/sum": {"task": "running_sum"} | wanted}
        study, messages = plan(tmp_path, base=base, tasks=tasks), []
        assert maker(study, messages).make(study.runs[0]) is (not output)
        assert len(messages) == len(output)
        assert all(re.match(pattern, text) for pattern, text in zip(output, messages, strict=True))


def test_status_shows_progress_of_study(tmp_path, capsys):
    study = plan(tmp_path)
    for run in study.runs[:3]:
        Pretended(study, run)._process.wait()
    (study.runs[0].folder / "model").rmdir()
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(study.file.model_dump()))
    with pytest.raises(SystemExit) as ended:
        main([str(file), "--status"])
    messages, head, *_ = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert messages == "s: 2 of 4 done; begun: pnpo-seed1 (step 2)"
    assert head.startswith("| point | objective |")


def test_status_of_empty_study_prints_message(tmp_path, capsys):
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(plan(tmp_path).file.model_dump()))
    with pytest.raises(SystemExit) as ended:
        main([str(file), "--status"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("s: 0 of 4 done; begun: none\nNo run is done yet.\n")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    assert output.endswith(f"\nPlan: SHA-256 {digest} of the study file; 0 of 4 runs are done.\n")


def test_updates_are_those_that_were_made(tmp_path):
    """Early stopping ended one reuse, and one update was skipped."""
    study = plan(tmp_path)
    metrics = [{"step": 0}, {"step": 1, "train/updates": 5.0}, {"step": 2, "train/updates": 15.0}]
    state = RunState(study.runs[0], "done", metrics)
    assert build_results([state])["updates"].to_pylist() == [0, 5, 20]
