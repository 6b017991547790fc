"""Old checkpoints that stay: those of keep_every, and the one with the best evaluation."""

import json
from functools import partial

import pytest

from megatron_rl.runs.directory import RunDirectory
from megatron_rl.trainer.checkpointing import retained_steps
from tests.unit.trainer.scripted import make_config


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [7, 8]),
        ({"keep_best": True}, [4, 7, 8]),  # step 3 scored more and was not saved
        ({"keep_best": "eval/held/avg@2"}, [6, 7, 8]),
        ({"keep_best": "eval_macro/maj@2"}, [1, 7, 8]),
        ({"keep_every": 3}, [6, 7, 8]),
        ({"keep_every": 2, "keep_best": True}, [2, 4, 6, 7, 8]),
    ],
)
def test_pruning_keeps_milestones_and_best(tmp_path, settings, kept):
    directory = RunDirectory(tmp_path)
    directory.checkpoints.path.mkdir()
    scores = {1: (0.1, 0.1), 3: (0.9, 0.9), 4: (0.9, 0.5), 6: (0.2, 0.8), 7: (0.6, None)}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, (a, b) in scores.items():
            row = {"step": step, "eval/a/avg@2": a, "eval/held/avg@2": b}
            row |= {"eval/a/response_length": 9, "eval_macro/maj@2": 1 / step}
            file.write(json.dumps(row) + "\n")
    for step in (1, 2, 4, 6, 7, 8):
        directory.checkpoints.begin(step)
        directory.checkpoints.complete(step, sums={}, digests=[])
    config = make_config(**settings)
    spared = partial(retained_steps, config=config, folder=tmp_path)
    directory.checkpoints.prune(keep=2, spared=spared)
    assert directory.checkpoints.steps() == kept
