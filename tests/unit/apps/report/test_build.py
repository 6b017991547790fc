"""Pages of reports: the head about its runs, escaped data, and curves of conversations."""

import base64
import gzip
import json
import re
import time
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.apps.report.build import (
    CURVES,
    _curves,
    collect,
    describe_progress,
    describe_runs,
    is_finished,
    pack,
    render_page,
)
from megatron_rl.apps.report.pictures import draw_pictures
from megatron_rl.apps.report.responses import RESPONSES, SHARE, STEPS, build_responses
from megatron_rl.apps.report.runs import find_runs, group_runs
from megatron_rl.cli import main
from megatron_rl.runs.rollouts import read_rollouts
from tests.made_runs import HOSTILE, make_run

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
    found = describe(tmp_path)
    assert found.pop("Progress")[1] == 0
    assert found == {
        "Model": (["models/Qwen2.5-1.5B"], 0),
        "Task": ([task], 0),
        "Started": (["2026-11-25 01:00 UTC"], 0),
        "Version": (["megatron_rl 0.1.5"], 0),
        "Command": (["megatron-rl train --config a"], 0),
    }


def test_progress_has_the_time_left_at_the_pace_of_the_last_steps(tmp_path):
    run = make_run(tmp_path / "run", steps=12, traced=0, **(SETTINGS | {"trainer": {"steps": 20}}))
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    last = rows[-1]["step"]
    for row in rows:  # the first steps were slow; 10 of 4 s count
        row["time/step"] = 4.0 if row["step"] > last - 10 else 1000.0
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = find_runs([run])
    left = 4 * (20 - last)
    text = f"step {last} of 20 ({last / 20:.0%}), 0:00:{left:02} left at 4 s a step; last step"
    assert describe_progress(found).startswith(text) and not is_finished(found)
    found.config["trainer"]["steps"] = last
    assert describe_progress(found) == f"step {last} of {last} (100%)" and is_finished(found)
    found.config["trainer"]["steps"] = None
    assert describe_progress(found) == f"{last} steps" and not is_finished(found)


@pytest.mark.slow
def test_page_that_is_watched_is_read_again_until_the_run_is_finished(
    tmp_path, monkeypatch, capsys
):
    run = make_run(tmp_path / "run", steps=2, traced=0, **(SETTINGS | {"trainer": {"steps": 9}}))
    pages = []

    def sleep(seconds):
        pages.append((run / "report.html").read_text())
        if len(pages) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run), "--watch", "5", "--megabytes", "0"])
    assert ended.value.code == 0 and str(run / "report.html") in capsys.readouterr().out
    refresh = '<meta http-equiv="refresh" content="5">'
    assert all(refresh in page for page in pages)
    assert refresh not in (run / "report.html").read_text() and list(run.glob("*.png"))


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


def unpacked(text):
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_text_cannot_inject_markup():
    data = {"title": HOSTILE[0], "texts": list(HOSTILE)}
    text = pack(data)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", text)
    assert unpacked(text) == data
    page = render_page(data)
    assert page.count("<script") == page.count("</script>") == 2  # the data, the code
    assert "<title>&lt;/script&gt;" in page


def test_page_policy_allows_no_network_and_no_other_script():
    page = render_page({"title": "t"})
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src &#x27;none&#x27;; script-src &#x27;sha256-")
    assert "unsafe" not in policy and "http" not in policy
    code = page.replace("https://github.com/leeoniya/uPlot", "")  # its license's comment
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|\beval\(", code)


def test_non_finite_numbers_become_null():
    numbers = {"a": [float("nan"), float("inf"), 1.23456789, 0.0]}
    assert unpacked(pack(numbers)) == {"a": [None, None, 1.2346, 0.0]}


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Create a study of 12 settings and 13 runs; the last started after its table was written."""
    study, rows = tmp_path_factory.mktemp("grid"), []
    rates = {f"{rate}": rate for rate in (1e-3, 2e-3, 1e-2)}
    points = [(r, o, 1) for r in rates for o in ("pnpo", "gspo", "grpo", "dapo")]
    for rate, objective, seed in [*points, ("0.01", "dapo", 2)]:
        name = f"{rate}-{objective}-seed{seed}"
        make_run(
            study / "runs" / name, objective=objective, seed=seed, steps=2,
            traced=2 if rate == "0.01" else 0, optimizer={"learning_rate": rates[rate]},
        )  # fmt: skip
        rows.append({"run": name, "axis/rate": rate, "axis/objective": objective, "seed": seed})
    pq.write_table(pa.Table.from_pylist(rows[:-1]), study / "results.parquet")
    return study


def test_initially_shown_groups_are_readable_subset(grid, tmp_path):
    groups = group_runs(find_runs([grid]))
    names = [f"{name} · rate 0.01" for name in ("dapo", "grpo", "gspo", "pnpo")]
    assert [group.label for group in groups][-4:] == names
    assert [run.name for run in groups[-4].runs] == ["0.01-dapo-seed1", "0.01-dapo-seed2"]
    data = collect(groups, threshold=None, megabytes=4)
    assert data["naming"] == ["objective", "rate"]
    assert data["first"] == [8, 9, 10, 11]  # where most runs are
    rate = data["settings"]["optimizer.learning_rate"]
    assert rate["values"] == ["0.001", "0.002", "0.01"]
    assert rate["of"] == 4 * [0] + 4 * [1] + 5 * [2]
    assert data["settings"]["trainer.epochs"] == {"values": ["4"], "of": []}
    drawn = draw_pictures(data, tmp_path)  # a warning of matplotlib would be an error
    assert len(drawn) == 7


def test_traces_fit_in_size_limit(grid):
    groups = group_runs(find_runs([grid]))
    sizes = {}
    for megabytes in (0.0, 0.001, 0.03, 4.0):
        data = collect(groups, threshold=None, megabytes=megabytes)
        assert data["traced"] == 5
        sizes[megabytes] = [data["runs"][life["run"]]["name"] for life in data["life"]]
    assert sizes[0.0] == [] and len(sizes[0.001]) == 1 and len(sizes[4.0]) == 5
    assert 1 < len(sizes[0.03]) < 5
    assert "0.01-dapo-seed2" not in sizes[0.03]  # one run of each setting comes first


def test_curves_have_rewards_by_turns_of_all_runs():
    rows = [{"conversation/turns_mean": 2.0, "reward_by_turns/10": 0.0, "reward_by_turns/2": 1.0}]
    runs = [SimpleNamespace(rows=rows), SimpleNamespace(rows=[{"reward_by_turns/1": 0.5}])]
    assert _curves([SimpleNamespace(rows=[{"reward/mean": 1.0}])]) == CURVES
    assert list(_curves(runs))[len(CURVES) :] == [
        "conversation/turns_mean", "reward_by_turns/1", "reward_by_turns/2",
    ]  # fmt: skip
    critic = {"critic/loss": 1.0, "critic/explained_variance": 0.5, "critic/value_mean": 0.1}
    assert list(_curves([SimpleNamespace(rows=[critic])]))[len(CURVES) :] == [
        "critic/explained_variance", "critic/value_mean", "critic/loss",
    ]  # fmt: skip
    assert _curves(runs)["reward_by_turns/1"] == "Reward of conversations of 1 turn"
    assert _curves(runs)["reward_by_turns/2"] == "Reward of conversations of 2 turns"


def test_responses_of_first_and_last_steps_are_in_the_page_within_its_limit(grid, tmp_path):
    run = make_run(tmp_path / "run", steps=5, traced=2, turns=3)
    runs = find_runs([run])
    (shown,) = build_responses(runs, megabytes=4.0, order=[0])
    assert [one["step"] for one in shown["steps"]] == [1, 2, 3, 4, 5]
    rows = read_rollouts(run, 5)
    last = shown["steps"][-1]["rows"]
    assert [row["reward"] for row in last] == sorted(row["reward"] for row in rows)[:RESPONSES]
    assert last[0]["response"].startswith("assistant: ")  # every message of a conversation
    size = len(json.dumps(last).encode())
    (few,) = build_responses(runs, megabytes=2.5 * size / SHARE / 1e6, order=[0])
    assert [one["step"] for one in few["steps"]][:: len(few["steps"]) - 1] == [1, 5]
    assert build_responses(runs, megabytes=0.0, order=[0]) == []
    many = find_runs([grid])  # runs share the steps that are read
    of_many = build_responses(many, megabytes=4.0, order=range(len(many)))
    assert len(of_many) == 5 and sum(len(one["steps"]) for one in of_many) <= STEPS
