"""A short form of the compressed month: accidents of all kinds but a full disk in one run."""

import json

import pytest

from tools.benchmarks import month


@pytest.mark.slow
def test_disturbed_run_equals_undisturbed_one_bit_for_bit(tmp_path):
    kinds = len(month.KINDS) - 1  # a full disk needs a file system of its own
    assert month.make(tmp_path, steps=8 * kinds + 10, every=8, only=None, compares=False) == 0
    rows = [json.loads(line) for line in (tmp_path / "accidents.jsonl").read_text().splitlines()]
    # A run may end before the last kinds: how far a step is from the next depends on the machine.
    assert len({row["kind"] for row in rows}) >= 3, rows
    assert not any(row["left"] for row in rows), rows
