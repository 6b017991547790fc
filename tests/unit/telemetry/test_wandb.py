"""Real W&B, offline: one id for a run, rows of steps that it has seen before, samples as tables."""

import json
import struct
import subprocess
import sys

import pytest

pytest.importorskip("wandb")

PROGRAM = """
import sys
from pathlib import Path
from megatron_rl.config import parse_config
from megatron_rl.telemetry.metrics import MetricLog
wandb = {"logging": {"tensorboard": False, "wandb": {"project": "p"}}}
config = parse_config({"model": {"path": "m"}, "data": {"train": "t"}} | wandb)
log = MetricLog(Path(sys.argv[1]), config)
log.open(first_step=0)
for step in map(int, sys.argv[2:]):
    sample = {"response": f"response {step}", "reward": 1.0} if step == 3 else None
    log.append({"step": step, "reward/mean": step / 8}, sample=sample)
log.close()
"""


def history(folder):
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
    folder = tmp_path / "a-common-name"
    folder.mkdir()
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    for steps in (("1", "2", "3", "2"), ("2", "3")):  # the second start is a resumed one
        command = [sys.executable, "-c", PROGRAM, str(folder), *steps]
        paths = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}
        subprocess.run(command, env=environment | paths, check=True, timeout=120)
    runs = [history(one) for one in sorted((folder / "wandb").glob("offline-run-*"))]
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
