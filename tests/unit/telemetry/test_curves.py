"""Learning curves of a run, drawn from partial metrics, and errors for missing ones."""

import json

import pytest

from megatron_rl.telemetry import curves
from megatron_rl.telemetry.curves import draw_curves, label_of

BEFORE = {"step": 0, "eval/heldout/avg@8": 0.3}
STEP = {
    "step": 1,
    "reward/mean": 0.4,
    "reward_by_source/easy": 0.5,
    "reward_by_source/hard": 0.3,
    "policy/entropy": 0.8,
    "epoch_1/gate/acceptance": 0.9,
    "epoch_2/gate/acceptance": 0.8,
    "grad/norm": 0.2,
    "response/truncated_fraction": 0.1,
    "advantage/zero_groups_fraction": 0.5,
    "ratio/prefix_mean_log_std": 0.02,
    "response/length_mean": 38.0,
    "time/rollout": 1.0,
    "time/train": 4.0,
    "time/step": 5.0,
}


def write(folder, *rows, end=""):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)


@pytest.mark.parametrize(
    ("rows", "end"),
    [
        ([BEFORE, STEP, STEP | {"step": 2, "eval/heldout/avg@8": 0.7}], ""),
        ([STEP], ""),  # no held-out set
        ([BEFORE, STEP | {"reward/mean": None}], ""),  # a non-finite value
        ([BEFORE, STEP], '{"step": 2, "rew'),  # killed while writing
        (
            [{f"eval/set{n}/avg@8": 0.1 for n in range(9)} | {"step": 0}],
            "",
        ),  # more sets than colors
    ],
)
def test_draw_curves_accepts_partial_metrics(tmp_path, rows, end):
    write(tmp_path, *rows, end=end)
    picture = draw_curves(tmp_path)
    assert picture == tmp_path / "curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_curves_of_a_long_run_have_every_nth_step_and_all_scores(tmp_path, monkeypatch):
    drawn, draw = {}, curves._draw

    def spy(axis, rows, keys, *, title, **how):
        drawn[title] = [row["step"] for row in rows if any(key in row for key in keys)]
        draw(axis, rows, keys, title=title, **how)

    monkeypatch.setattr(curves, "_draw", spy)
    monkeypatch.setattr(curves, "MOST_POINTS", 5)
    scores = {7: {"eval/heldout/avg@8": 0.7}}
    write(tmp_path, BEFORE, *(STEP | {"step": n} | scores.get(n, {}) for n in range(1, 20)))
    draw_curves(tmp_path)
    assert drawn["Held-out score (%)"] == [0, 7]
    assert drawn["Gradient norm"] == [4, 8, 12, 16]


def test_draw_curves_raises_without_metrics(tmp_path):
    with pytest.raises(ValueError, match="no metrics"):
        draw_curves(tmp_path)
    write(tmp_path)
    with pytest.raises(ValueError, match="no metrics"):
        draw_curves(tmp_path)


def test_draw_curves_names_damaged_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(BEFORE) + "\n{oops\n" + json.dumps(STEP))
    with pytest.raises(ValueError, match="line 2 is damaged"):
        draw_curves(tmp_path)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("epoch_12/gate/acceptance", "epoch 12"),
        ("eval/heldout/avg@8", "heldout/avg@8"),
        ("rollout/entropy", "all tokens, estimated from those sampled"),
    ],
)
def test_label_of_key(key, words):
    assert label_of(key) == words
