"""The head of a report: model, task, start, version and command of its runs."""

import json

from megatron_rl.apps.report.about import describe_runs
from megatron_rl.apps.report.runs import find_runs
from tests.made_runs import make_run

SETTINGS = {
    "model": {"path": "models/Qwen2.5-1.5B"},
    "data": {"train": "data/gsm8k/train.parquet"},
    "reward": {"verifier": "my_rewards:grade"},
    "eval": {"sets": {"aime": "a.parquet", "math500": "b.parquet"}},
}


def start(run, command):
    rows = [{"time": f"2026-11-2{day} 01:00 UTC", "version": f"0.1.{day}", "command": command}
            for day in (5, 6)]  # fmt: skip
    (run / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def describe(folder):
    return {one["name"]: (one["values"], one["more"]) for one in describe_runs(find_runs([folder]))}


def test_one_run_is_described_by_its_config_and_first_start(tmp_path):
    start(make_run(tmp_path / "run", steps=1, traced=0, **SETTINGS), "megatron-rl train --config a")
    task = "prompts of gsm8k/train.parquet, graded by my_rewards:grade, held-out sets aime, math500"
    assert describe(tmp_path) == {
        "Model": (["models/Qwen2.5-1.5B"], 0),
        "Task": ([task], 0),
        "Started": (["2026-11-25 01:00 UTC"], 0),
        "Version": (["megatron_rl 0.1.5"], 0),
        "Command": (["megatron-rl train --config a"], 0),
    }


def test_mixed_sets_environments_and_runs_of_earlier_releases(tmp_path):
    mixed = {"mix": {"a": {"path": "x/a.parquet"}, "b": {"path": "y/b.parquet"}}}
    settings = SETTINGS | {"data": mixed, "environment": {"name": "my:Game"}, "eval": {}}
    make_run(tmp_path / "run", steps=1, traced=0, **settings)
    found = describe(tmp_path)
    assert found["Task"] == (["prompts of x/a.parquet, y/b.parquet, played in my:Game"], 0)
    assert found["Version"] == (["megatron_rl not recorded"], 0)
    assert found["Command"][0][0].endswith("run/config.yaml") and "Last written" in found


def test_values_of_many_runs_are_listed_up_to_three(tmp_path):
    for number in range(5):
        model = {"model": {"path": f"models/m{number}"}}
        run = make_run(tmp_path / f"r{number}", steps=1, traced=0, **(SETTINGS | model))
        start(run, f"megatron-rl train --config {number}")
    found = describe(tmp_path)
    assert found["Model"] == (["models/m0", "models/m1", "models/m2"], 2)
    assert found["Started"][1] == 0 and "Command" not in found
