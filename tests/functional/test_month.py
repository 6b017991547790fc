"""A short form of the compressed month (`tools/benchmarks/soak.py`): each kind of accident once."""

import json
import os
import subprocess
import sys

import pytest

from tests.functional.tiny_runs import ROOT

pytestmark = pytest.mark.slow
STEPS, EVERY = 70, 10


def test_a_run_with_an_accident_every_ten_steps_equals_an_undisturbed_one(tmp_path):
    """A file system of its own, which can be full, needs root."""
    runs = tmp_path / "troubled.runs"
    runs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300M", "month", str(runs)]
    is_mounted = not os.getuid() and not subprocess.run(mount, check=False).returncode
    command = [sys.executable, "-m", "tools.benchmarks.soak", "--month", str(tmp_path),
               "--steps", str(STEPS), "--every", str(EVERY)]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=1200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        rows = [json.loads(line) for line in (tmp_path / "accidents.jsonl").open()]
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(runs)], check=True)
    assert f"{STEPS + 1} steps in both runs; metrics that differ: none" in done.stdout, done.stdout
    assert "in both; weights or moments differ: none" in done.stdout, done.stdout
    assert len({row["kind"] for row in rows}) == 5 + is_mounted, rows
    assert any(row["status"] is not None for row in rows)
