"""Numbers of a report, recomputed from the raw files by independent code."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megatron_rl.apps.report.build import collect, write_report
from megatron_rl.apps.report.runs import (
    best_scores,
    centered_mean,
    default_threshold,
    find_runs,
    group_runs,
    progress,
    score_keys,
)
from megatron_rl.apps.report.traces import gate_by_position
from megatron_rl.runs.files import PHASES
from tests.made_runs import EPOCHS, make_run

SETS = ("AMC23", "AIME24")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Create runs of two objectives with two seeds each."""
    folder = tmp_path_factory.mktemp("study")
    for objective in ("pnpo", "gspo"):
        for seed in (1, 2):
            make_run(
                folder / f"{objective}-{seed}", objective=objective, seed=seed, sets=SETS, steps=8
            )
    return folder


@pytest.fixture(scope="module")
def data(study):
    return collect(group_runs(find_runs([study])), threshold=0.45, megabytes=4)


def raw(study, name):
    return [json.loads(line) for line in (study / name / "metrics.jsonl").read_text().splitlines()]


def run_minibatches(study, name):
    return yaml.safe_load((study / name / "config.yaml").read_text())["trainer"]["minibatches"]


def column(rows, key):
    return np.array([np.nan if row.get(key) is None else row[key] for row in rows])


def smoothed(rewards):
    """Return the centered mean of 11 from a running sum, of 9, 7, ... towards the ends."""
    there = ~np.isnan(rewards)
    sums = np.concatenate(([0.0], rewards[there].cumsum()))
    at = np.arange(sums.size - 1)
    half = np.minimum(5, np.minimum(at, at[::-1]))
    smooth = np.full(rewards.size, np.nan)
    smooth[there] = (sums[at + half + 1] - sums[at - half]) / (2 * half + 1)
    return smooth


def test_centered_mean():
    assert centered_mean([1, 2, 6], window=3) == [1, 3, 6]  # (1+2+6)/3; end values are unchanged
    assert centered_mean([None, 1, 2, None, 6], window=3) == [None, 1, 3, None, 6]
    assert centered_mean([1, 2, 6, 3, 9]) == [1, 3, 4.2, 6, 9]  # (1+2+6)/3, 21/5, (6+3+9)/3
    assert centered_mean([0, 0, 0, 0, 0, 11, 0, 0, 0, 0, 0])[5] == 1  # 11 steps
    assert centered_mean([]) == []


def test_runs_with_different_seeds_are_one_group(data):
    assert [group["label"] for group in data["groups"]] == [
        "gspo",
        "pnpo",
    ]  # labels are the differences
    names = [[data["runs"][i]["name"] for i in group["runs"]] for group in data["groups"]]
    assert names == [["gspo-1", "gspo-2"], ["pnpo-1", "pnpo-2"]]
    assert "objective.constraint.low" in data["differs"]
    low = data["settings"]["objective.constraint.low"]
    assert [low["values"][place] for place in low["of"]] == [None, None, "0.02", "0.02"]


def test_groups_without_bounds_have_reason(tmp_path):
    for name in ("pnpo", "m2po", "gspo", "tepo_prefix", "ctpo_geomean", "cppo", "oapl"):
        make_run(tmp_path / name, objective=name, steps=1, traced=0)
    groups = collect(group_runs(find_runs([tmp_path])), threshold=None, megabytes=4)["groups"]
    found = {group["label"]: group["bounds"] for group in groups}
    assert found["pnpo"]["scale"] == "sqrt(L/t)" and found["tepo_prefix"]["high"] == 0.28
    assert {name: bounds.get("missing") for name, bounds in found.items()} == {
        "pnpo": None,
        "tepo_prefix": None,
        "m2po": "every update computes its bound from a whole minibatch, which is not recorded",
        "gspo": "they limit the mean over the whole response, and this chart shows the mean up to "
        "each position",
        "ctpo_geomean": "they depend on the position t, and this chart shows t / L",
        "cppo": "its constraint sets no lower or upper bound on a weight",
        "oapl": "its loss gives tokens no weight",
    }


def test_groups_of_study_are_labeled_by_its_axes(tmp_path):
    rows = []
    for place, (sides, epochs) in enumerate([("one-sided", 4), ("both", 4), ("both", 1)]):
        make_run(
            tmp_path / "runs" / f"r{place}", steps=1, traced=0,
            trainer={"epochs": epochs}, extra={"sided": sides},
        )  # fmt: skip
        rows.append({"run": f"r{place}", "axis/gate": sides, "axis/reuse": str(epochs), "seed": 1})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "results.parquet")
    labels = ["gate one-sided · reuse 4", "gate both · reuse 4", "gate both · reuse 1"]
    assert [group.label for group in group_runs(find_runs([tmp_path]))] == labels
    some = sorted((tmp_path / "runs").iterdir())[1:]  # their study is found from the path
    named = [group.label for group in group_runs(find_runs(some))]
    assert named == ["reuse 4", "reuse 1"]


def test_best_scores_follow_papers_table(study, data):
    for group in data["groups"]:
        best = np.empty((2, 2))  # [runs, sets]
        last, before = np.empty(2), np.empty(2)
        for place, index in enumerate(group["runs"]):
            rows = raw(study, data["runs"][index]["name"])
            scores = 100 * np.stack([column(rows, f"eval/{name}/avg@8") for name in SETS])
            best[place] = np.nanmax(scores, axis=1)
            before[place] = scores[:, 0].mean()  # of step 0
            last[place] = scores[:, ~np.isnan(scores[0])][:, -1].mean()
        for place, name in enumerate(SETS):
            shown = group["best"][f"eval/{name}/avg@8"]
            want = best[:, place]
            values = [shown[name] for name in ("mean", "low", "high")]
            assert values == pytest.approx([want.mean(), want.min(), want.max()])
        averages = best.mean(axis=1)  # of independently chosen peaks, unweighted
        assert group["best"]["Avg."]["mean"] == pytest.approx(averages.mean())
        assert group["best"]["Last"]["mean"] == pytest.approx(last.mean())
        assert group["best"]["Before"]["mean"] == pytest.approx(before.mean())
        of_sets = [group["best"][f"before eval/{name}/avg@8"]["mean"] for name in SETS]
        assert np.mean(of_sets) == pytest.approx(before.mean())


def test_scores_include_truncated_and_ungraded_fractions(tmp_path):
    """Fractions come from the same evaluation as the score, the best or the last."""
    for seed, (best, cut, late, failed) in {
        1: (0.5, 0.2, 0.1, 0.3),
        2: (0.7, 0.4, 0.0, 0.0),
    }.items():
        folder = make_run(tmp_path / f"r-{seed}", seed=seed, steps=2, traced=0)
        rows = [
            {"step": 0, "eval/heldout/avg@8": best, "eval/heldout/truncated_fraction": cut,
             "eval/heldout/time_limit_fraction": late, "eval/heldout/failed_fraction": failed},
            {"step": 1, "reward/mean": 0.5, "eval/heldout/avg@8": 0.1},
        ]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (group,) = group_runs(find_runs([tmp_path]))
    found = best_scores(group, ["eval/heldout/avg@8"])
    # Means of 20% and 40%, and of 10% + 30% and 0%; the last evaluation is an earlier release's.
    assert vars(found["eval/heldout/avg@8"]) == pytest.approx(
        {"mean": 60, "low": 50, "high": 70, "truncated": 30, "ungraded": 20}
    )
    assert vars(found["Avg."]) == pytest.approx(vars(found["eval/heldout/avg@8"]))
    assert (found["Last"].truncated, found["Last"].ungraded) == (None, None)
    for run in group.runs:  # without an evaluation before training
        del run.rows[0]
    assert best_scores(group, ["eval/heldout/avg@8"])["Before"] is None


def test_runs_with_sampled_rollouts_are_listed(tmp_path):
    for name, keep in (("a", "all"), ("b", 3), ("c", "sampled")):
        make_run(tmp_path / name, traced=0, steps=1, logging={"keep_rollouts": keep})
    found = collect(group_runs(find_runs([tmp_path])), threshold=None, megabytes=0)
    assert found["sampled"] == ["b", "c"]


def test_curves_and_first_passage(study, data):
    reached = 0
    for run in data["runs"]:
        rows = raw(study, run["name"])
        reward, smooth = column(rows, "reward/mean"), smoothed(column(rows, "reward/mean"))
        np.testing.assert_allclose(np.array(run["reward"], float), reward)
        np.testing.assert_allclose(np.array(run["smooth"], float), smooth)
        spent = {
            "batches": np.arange(len(rows)),
            "hours": np.nan_to_num(column(rows, "time/step")).cumsum() / 3600,
            "tokens": np.nan_to_num(column(rows, "rollout/tokens")).cumsum(),
            "updates": np.nan_to_num(column(rows, "train/updates")).cumsum(),
        }
        per_epoch = run_minibatches(study, run["name"])
        spent["simulated"] = 2.7 * np.arange(len(rows)) + spent["updates"] / per_epoch
        for name, want in spent.items():
            np.testing.assert_allclose(run["spent"][name], want, rtol=1e-12)
        above = np.flatnonzero(np.nan_to_num(smooth) >= 0.45)
        reached += above.size > 0
        want = {name: values[above[0]] for name, values in spent.items()} if above.size else None
        assert run["passage"] == (want and pytest.approx(want))
        for key, values in run["curves"].items():
            np.testing.assert_array_equal(np.array(values, float), column(rows, key))
        for phase in PHASES:
            assert run["seconds"][phase] == pytest.approx(np.nansum(column(rows, f"time/{phase}")))
    assert reached == 4
    lowest = min(
        np.nanmax(smoothed(column(raw(study, r["name"]), "reward/mean"))) for r in data["runs"]
    )
    assert 0 <= lowest - default_threshold(find_runs([study])) < 0.05


def test_long_runs_keep_sums_and_scores_of_all_rows(study, monkeypatch):
    """And every third row whole: figures of positions are of those."""
    from megatron_rl.apps.report import runs as module

    whole = find_runs([study])
    monkeypatch.setattr(module, "WHOLE_ROWS", -(-len(whole[0].rows) // 3))
    thinned = find_runs([study])
    assert {run.every for run in thinned} == {3}
    for one, other in zip(whole, thinned, strict=True):
        assert progress(one, one.rows) == progress(other, other.rows)
        assert one.rows[::3] == other.rows[::3] != one.rows
        assert sum(map(len, other.rows)) < sum(map(len, one.rows))
    assert score_keys(whole) == score_keys(thinned)
    (group, *_) = group_runs(thinned)
    assert gate_by_position(group, most_steps=2) is not None


def test_default_threshold_is_reached_by_90_percent_of_runs(tmp_path):
    """Ten of twelve runs reach 0.62 or more, one never learns, and one has not started."""
    assert default_threshold([]) is None
    for place in range(11):
        (tmp_path / str(place)).mkdir()
        reward = 0.1 if place == 3 else 0.62 + 0.01 * place
        rows = [{"step": 0, "eval/a/avg@1": 0.1}, {"step": 1, "reward/mean": reward}]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / str(place) / "metrics.jsonl").write_text(text)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text('{"step": 0, "eval/a/avg@1": 0.1}\n')
    assert default_threshold(find_runs([tmp_path])) == 0.6
    assert default_threshold(find_runs([tmp_path / "3", tmp_path / "4"])) == 0.1


@pytest.mark.parametrize(
    ("reward", "threshold"),
    [(0.0145, 0.01), (0.0, None), (3.33, 3.3)],
)
def test_default_threshold_of_small_rewards(tmp_path, reward, threshold):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": reward}) + "\n")
    assert default_threshold(find_runs([tmp_path])) == threshold


def test_log_ratios_by_position_match_parquet_files(study, data):
    """One position per bin; population standard deviation; interpolated quantiles."""
    for group in data["groups"]:
        found = {name: [[[] for _ in range(40)] for _ in range(EPOCHS)] for name in
                 ("local", "cumulative", "sequence", "prefix")}  # fmt: skip
        for index in group["runs"]:
            folder = study / data["runs"][index]["name"]
            for file in sorted((folder / "traces").iterdir()):
                traces = pq.read_table(file).to_pylist()
                rollouts = pq.read_table(folder / "rollouts" / file.name).to_pylist()
                for trace in traces:
                    before = rollouts[trace["rollout"]]["behavior_logprobs"]
                    for epoch, now in enumerate(trace["policy_logprobs"]):
                        total, whole = 0.0, sum(a - b for a, b in zip(now, before, strict=True))
                        for t, (a, b) in enumerate(zip(now, before, strict=True)):
                            total += a - b
                            found["local"][epoch][t].append(a - b)
                            found["cumulative"][epoch][t].append(total)
                            found["sequence"][epoch][t].append(whole / len(now))
                            found["prefix"][epoch][t].append(total / (t + 1))
        ratios = group["ratios"]
        assert ratios["responses"] == 2 * 8 * 4
        places = [int(position) - 1 for position in ratios["positions"]]
        assert places == [t for t in range(40) if len(found["local"][0][t]) >= 8]
        for name, scale in ratios["scales"].items():
            for epoch in range(EPOCHS):
                cells = [np.array(found[name][epoch][t]) for t in places]
                np.testing.assert_allclose(
                    scale["std"][epoch], [c.std() for c in cells], atol=1e-12
                )
                for key, share in (("q05", 5), ("median", 50), ("q95", 95)):
                    want = [np.percentile(cell, share) for cell in cells]
                    np.testing.assert_allclose(scale[key][epoch], want, atol=1e-12)


def test_gate_by_position_matches_metrics(study, data):
    for group in data["groups"]:
        rows = [row for i in group["runs"] for row in raw(study, data["runs"][i]["name"])[1:]]
        gate = group["gate"]
        assert gate["steps"] == list(range(1, 9))
        for name in ("acceptance", "prefix_mean_log_std", "prefix_mean_log_q95"):
            for epoch in range(EPOCHS):
                for tenth in range(10):
                    key = f"epoch_{epoch + 1}/by_fraction/{(tenth + 1) / 10:.1f}/{name}"
                    assert gate["all"][name][epoch][tenth] == pytest.approx(
                        column(rows, key).mean()
                    )
                    for place, step in enumerate(gate["steps"]):
                        own = np.mean([row[key] for row in rows if row["step"] == step])
                        assert gate["each"][place][name][epoch][tenth] == pytest.approx(own)


def test_simulated_time_uses_cost_from_study(tmp_path):
    make_run(tmp_path / "runs" / "pnpo-seed1", steps=3)
    make_run(tmp_path / "other", steps=3)
    row = pa.table({"run": ["pnpo-seed1"], "axis/objective": ["pnpo"]})
    row = row.replace_schema_metadata({"rollout_cost": "10"})
    pq.write_table(row, tmp_path / "results.parquet")
    for folder, cost in (("runs", 10), ("other", 2.7)):
        (run,) = collect(group_runs(find_runs([tmp_path / folder])), threshold=None, megabytes=0)[
            "runs"
        ]
        # Four epochs per rollout batch, and none for the evaluation before training.
        expected = [step * (cost + EPOCHS) for step in range(4)]
        assert run["spent"]["simulated"] == pytest.approx(expected)


def test_write_report_writes_to_output_folder(study, tmp_path):
    written = write_report([study / "pnpo-1"], bundle=True)
    assert {path.parent for path in written} == {study / "pnpo-1"}
    assert {path.name for path in written} == {
        "report.html", "learning.png", "costs.png", "time_to_reward.png", "log_ratios.png",
        "gate.png", "seconds.png", "timeline.png", "report.zip",
    }  # fmt: skip
    import zipfile

    with zipfile.ZipFile(study / "pnpo-1" / "report.zip") as bundle:
        names = bundle.namelist()
        assert {
            "report.html",
            "gate.png",
            "runs/pnpo-1/metrics.jsonl",
            "runs/pnpo-1/config.yaml",
        } <= set(names)
        assert bundle.read("report.html") == (study / "pnpo-1" / "report.html").read_bytes()
    with pytest.raises(ValueError, match="--output"):
        write_report([study / "pnpo-1", study / "gspo-1"])
    with pytest.raises(ValueError, match="contains no run"):
        write_report([tmp_path])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="nothing is recorded"):
        write_report([tmp_path])


def test_write_report_errors_name_cause_and_cure(tmp_path):
    make_run(tmp_path / "run", steps=2)
    (tmp_path / "file").write_text("")
    for options, output in (
        ({"output": tmp_path / "file"}, "--output .*file cannot be created"),
        ({"megabytes": -1}, "--megabytes -1: give 0"),
    ):
        with pytest.raises(ValueError, match=output):
            write_report([tmp_path / "run"], **options)
    for name in ("traces/step_000002.parquet", "rollouts/step_000001.parquet", "config.yaml"):
        (tmp_path / "run" / name).write_text("a: [")
        with pytest.raises(ValueError, match=rf"(?s){name} is damaged: .*(remove|repair) it"):
            write_report([tmp_path / "run"])
        (tmp_path / "run" / name).unlink()
