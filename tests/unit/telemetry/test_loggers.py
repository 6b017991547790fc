"""Loggers that raise, hang or come back, and the real ones where they are installed."""

import json
import struct
import subprocess
import sys
import threading

import pytest

from megatron_rl.config import parse_config
from megatron_rl.telemetry import loggers
from megatron_rl.telemetry.loggers import LoggerThread
from megatron_rl.telemetry.metrics import MetricLog


class Failing:
    """A logger whose listed calls fail; `log` is a call for each step."""

    def __init__(self, *failing):
        self.failing, self.calls, self.rows = list(failing), [], []

    def _call(self, name):
        self.calls.append(name)
        if name in self.failing:
            self.failing.remove(name)
            raise OSError(f"{name} failed\nin two lines")

    def start(self, first_step):
        self._call(f"start {first_step}")

    def log(self, step, numbers, sample):
        self._call(f"log {step}")
        self.rows.append((step, numbers, sample))

    def close(self):
        self._call("close")


def run(tmp_path, logger, steps, *, first_step=0, seconds=60.0):
    """Log steps as a run does; returns the lines that it prints."""
    lines = []
    thread = LoggerThread("W&B", lambda: logger, metrics=tmp_path / "metrics.jsonl",
                          echo=lines.append)  # fmt: skip
    thread.open(first_step=first_step)
    for step in steps:
        row = {"step": step, "loss": step / 4, "bad": None}
        with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        thread.append(row, {"text": "a"} if step == 2 else None)
    thread.close(seconds=seconds)
    return lines


FAILED = "warning: W&B failed (OSError: {} failed): training continues; the rows are in " \
         "metrics.jsonl and are sent when it works again"  # fmt: skip
RECEIVED = "W&B has received the {} steps that were missing"
MISSING = "warning: W&B still fails: {} steps from {} on are missing there; metrics.jsonl " \
          "contains them, and a resumed run sends them"  # fmt: skip


@pytest.mark.parametrize(
    ("failing", "calls", "lines"),
    [
        ([], ["start 0", "log 0", "log 1", "log 2", "close"], []),
        # A try for each row would wait for the 30 s between two tries; the end does not.
        (["start 0"], ["start 0", "start 0", "log 0", "log 1", "log 2", "close"],
         [FAILED.format("start 0"), RECEIVED.format(3)]),
        (["log 1"], ["start 0", "log 0", "log 1", "start 1", "log 1", "log 2", "close"],
         [FAILED.format("log 1"), RECEIVED.format(2)]),
        (["log 1", "start 1"], ["start 0", "log 0", "log 1", "start 1"],
         [FAILED.format("log 1"), MISSING.format(2, 1)]),
        (["close"], ["start 0", "log 0", "log 1", "log 2", "close"], [FAILED.format("close")]),
    ],
)  # fmt: skip
def test_failing_calls_are_reported_once_and_their_rows_sent_again(tmp_path, failing, calls, lines):
    logger = Failing(*failing)
    assert run(tmp_path, logger, range(3)) == lines
    assert logger.calls == calls
    expected = [] if "start 1" in failing and "log 1" in failing else [1, 2]
    assert [step for step, *_ in logger.rows] == [0, *expected]
    assert logger.rows[0] == (0, {"loss": 0.0}, None)


def test_resumed_run_sends_rows_that_are_missing(tmp_path):
    run(tmp_path, Failing("log 1", "log 1"), range(3))
    resumed = Failing()
    lines = run(tmp_path, resumed, [3], first_step=3)
    assert resumed.calls == ["start 1", "log 1", "log 2", "log 3", "close"]
    assert lines == [RECEIVED.format(3)]
    assert not [*tmp_path.glob("*_is_behind")]


def unusable():
    raise SystemExit(1)


def test_resumed_run_sends_the_rows_of_a_logger_that_could_not_be_used(tmp_path):
    lines = []
    thread = LoggerThread("W&B", unusable, metrics=tmp_path / "metrics.jsonl", echo=lines.append)
    thread.open(first_step=0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 0.5}\n')
    thread.close()
    assert lines == ["warning: W&B cannot be used (SystemExit: 1): training continues without it"]
    assert run(tmp_path, resumed := Failing(), [1], first_step=1) == [RECEIVED.format(2)]
    assert resumed.calls == ["start 0", "log 0", "log 1", "close"]


def test_record_of_missing_rows_that_a_full_disk_cut_off_names_all(tmp_path):
    run(tmp_path, Failing("log 1", "log 1"), range(2))
    (behind,) = tmp_path.glob("*_is_behind")
    behind.write_text("")
    assert run(tmp_path, Failing(), [2], first_step=2) == [RECEIVED.format(3)]


def test_logger_that_hangs_delays_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "BLOCKED_SECONDS", 0.0)
    logger, end = Failing(), threading.Event()
    monkeypatch.setattr(logger, "start", lambda first_step: end.wait())
    lines = run(tmp_path, logger, range(3), seconds=0.1)
    end.set()
    assert lines[-1] == (
        "warning: W&B has not answered for 0.1 s: 3 steps from 0 on are missing there; "
        "metrics.jsonl contains them, and a resumed run sends them"
    )
    assert len(lines) <= 2  # the first is printed once a row comes while the call has not returned


def log_twice(tmp_path, name, settings):
    """Log to one real library, as a run that is resumed after step 2; returns warnings."""
    lines = []
    values = {"tensorboard": False, name: settings}
    config = parse_config({"model": {"path": "m"}, "data": {"train": "t"}, "logging": values})
    for steps in ([1, 2], [3]):
        log = MetricLog(tmp_path, config, echo=lines.append)
        log.open(first_step=0 if steps[0] == 1 else steps[0])
        for step in steps:
            log.append({"step": step, "eval/held/avg@4": step / 4, "by_position/2^03/weight": 1.0})
        log.close()
    return lines


def test_mlflow_has_one_run_with_all_steps(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the only store of mlflow-skinny
    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert log_twice(tmp_path, "mlflow", "e") == []
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
    assert run.data.params["trainer.epochs"] == "4"
    history = client.get_metric_history(run.info.run_id, "eval/held/avg_4")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.data.metrics["by_position/2_03/weight"] == 1.0


def test_trackio_has_one_run_with_all_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    assert log_twice(tmp_path, "trackio", "p") == []
    (run,) = trackio.Api().runs("p")
    assert run.name.startswith(f"{tmp_path.name}-")
    history = [json.loads(one) if isinstance(one, str) else one
               for one in trackio.sqlite_storage.SQLiteStorage.get_logs("p", run.name)]  # fmt: skip
    assert [(one["step"], one["eval/held/avg@4"]) for one in history] == [
        (1, 0.25), (2, 0.5), (3, 0.75)]  # fmt: skip


PROGRAM = """
import sys
from pathlib import Path
from megatron_rl.config import parse_config
from megatron_rl.telemetry.metrics import MetricLog
wandb = {"logging": {"tensorboard": False, "wandb": "p"}}
config = parse_config({"model": {"path": "m"}, "data": {"train": "t"}} | wandb)
log = MetricLog(Path(sys.argv[1]), config)
log.open(first_step=0)
for step in map(int, sys.argv[2:]):
    sample = {"response": f"response {step}", "reward": 1.0} if step == 3 else None
    log.append({"step": step, "reward/mean": step / 8}, sample=sample)
log.close()
"""


def wandb_history(folder):
    """The rows that W&B has kept in its file: (step, reward); and the run's id.

    Its format: a header of 7 bytes, then, in blocks of 32 KiB, records of a checksum (4 bytes), a
    length (2), a kind (1: whole; 2, 3, 4: first, middle, last part) and a protobuf message.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    data, at, rows, message, run = file.read_bytes(), 7, [], b"", None
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:
            at += -at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):
            continue
        record, message = Record.FromString(message), b""
        if record.HasField("run"):
            run = record.run.run_id
        if record.HasField("history"):
            items = {(i.key or ".".join(i.nested_key)): i.value_json for i in record.history.item}
            rows.append((json.loads(items["step"]), json.loads(items["reward/mean"])))
    return rows, run


def test_repeated_steps_after_rewind_keep_run_id(tmp_path):
    pytest.importorskip("wandb")
    folder = tmp_path / "a-common-name"
    folder.mkdir()
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    for steps in (("1", "2", "3", "2"), ("2", "3")):  # the second start is a resumed one
        command = [sys.executable, "-c", PROGRAM, str(folder), *steps]
        paths = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}
        subprocess.run(command, env=environment | paths, check=True, timeout=120)
    runs = [wandb_history(one) for one in sorted((folder / "wandb").glob("offline-run-*"))]
    assert sorted(rows for rows, _ in runs) == [
        [(1, 0.125), (2, 0.25), (3, 0.375), (2, 0.25)],
        [(2, 0.25), (3, 0.375)],
    ]
    (own,) = {run for _, run in runs}
    assert own == (folder / "wandb_id").read_text() and own != folder.name
    for run in (folder / "wandb").glob("offline-run-*"):
        (table,) = (run / "files" / "media" / "table").glob("sample_*.table.json")
        shown = json.loads(table.read_text())
        assert shown["columns"] == ["step", "response", "reward"]
        assert shown["data"] == [[3, "response 3", 1.0]]
