"""Recorded lags; drawn ones and those by length are used by the tests of the schedule."""

import json
import re

import pytest

from megatron_rl.types import PromptSlot
from research.lag_policies import TraceLag, UniformLag


def trace(file, steps=1):
    return TraceLag(seed=0, steps=steps, file=str(file))


def test_trace_repeats_the_lags_of_new_groups_by_slot(tmp_path):
    drawn = UniformLag(seed=3, steps=6, low=0, high=2)
    slots = [[PromptSlot(step, group) for group in range(4)] for step in range(1, 7)]
    rows = [{"step": row[0].step, "slot": [list(slot) for slot in row], "replays": [0] * 4,
             "lag": [drawn.lag(slot) for slot in row]} for row in slots]  # fmt: skip
    rows[1] = {  # another order, with a group of the first step
        "step": 2, "slot": [[2, 3], [1, 1], [2, 0], [2, 2], [2, 1]], "replays": [0, 1, 0, 0, 0],
        "lag": [drawn.lag(PromptSlot(2, 3)), 9, *(drawn.lag(PromptSlot(2, g)) for g in (0, 2, 1))],
    }  # fmt: skip
    file = tmp_path / "schedule.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = trace(file, steps=6)
    assert all(policy.lag(slot) == drawn.lag(slot) for row in slots for slot in row)
    assert policy.most() <= 2


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("", "has 0 steps, and the run 1"),
        ('{"step": 2, "slot": [[2, 0]], "lag": [0], "replays": [0]}', "step 2 stands in line 1"),
        ('{"step": 1, "lag": [0]}', "is no record of lags (KeyError('slot'))"),
        ("[", "is no record of lags"),
    ],
)
def test_file_that_is_no_trace_of_the_run_is_refused(tmp_path, text, output):
    file = tmp_path / "schedule.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(output)):
        trace(file)
