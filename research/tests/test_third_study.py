"""The third study: its file is the plan's, and its analysis, on runs made up here."""

from pathlib import Path

import pytest

from research.results import real_model as third
from research.study.storing import by_run, read_stored
from research.study.study_plan import load_study

ROOT = Path(__file__).parents[2]


def test_plan_has_the_runs_of_the_page_and_the_chosen_numbers(monkeypatch):
    monkeypatch.chdir(ROOT)
    study = load_study(ROOT / "research" / "configs" / "study_real_model.yaml", [])
    *_, one_epoch, four_epochs = third.choose(
        read_stored(third.FOLDER / "real_model_rates.parquet")
    )
    assert one_epoch == "1 epochs: 0.00002, low 0.019, high 0.026"
    assert four_epochs == "4 epochs: 0.00002, low 0.59, high 0.81"
    chosen = {"1": {"low": 0.019, "high": 0.026}, "4": {"low": 0.59, "high": 0.81}}
    assert len(study.runs) == 9 + 9 + 6 + 9 + 6
    assert [run.name for run in study.runs[:4]] == [
        "4-pnpo-seed1", "4-gspo-seed1", "4-grpo-seed1", "4-pnpo-seed2",
    ]  # fmt: skip
    for one in study.runs:
        trainer, point = one.config.trainer, one.point
        assert trainer.steps == third.BATCHES[point["epochs"]]
        assert one.config.updates_per_step * trainer.steps == 80
        assert one.config.optimizer.learning_rate == 2e-5
        both = chosen[point["epochs"]]
        expected = {"grpo": None, "balanced": {"low": both["low"]}}
        tolerances = expected.get(point["objective"], both)
        assert one.config.objective.model_dump().get("constraint") == tolerances
    points = [(one.point["objective"], one.point["epochs"], one.seed) for one in study.runs]
    for number, (first, second) in enumerate(third.PRIMARY):
        of = [
            {seed for *point, seed in points if tuple(point) == side[:2]}
            for side in (first, second)
        ]
        assert of[0] & of[1] == ({1, 2, 3, 4, 5, 6} if number < 2 else {1, 2, 3})


def run(objective, epochs, seed, rewards, scores):
    name = f"{epochs}-{objective}-seed{seed}"
    described = {"run": name, "axis/objective": objective, "axis/epochs": epochs, "seed": seed}
    evaluated = {"eval/heldout/avg@2": scores[0]}
    found = [described | {"step": 0} | evaluated]
    for number, reward in enumerate(rewards, start=1):
        row = {"step": number, "reward/mean": reward, "rollout/tokens": 1000}
        if number in scores:
            row["eval/heldout/avg@2"] = scores[number]
        found.append(described | row)
    return found


def test_a_level_is_reached_by_two_batches():
    rows = run("pnpo", "4", 1, [0.0, 0.5, 0.2, 0.5, 0.4], {0: 0.0})
    assert third.cost(rows, 0.4) == (5, 5000)  # (0.5 + 0.4) / 2; before: 0.25, 0.35, 0.35
    assert third.cost(rows, 0.25) == (2, 2000)
    assert third.cost(rows, 0.6) is None


def test_contrasts_are_paired_by_seed():
    # Scores after 10 and 40 batches; what seed 1 and seed 2 share drops out of a difference.
    runs = third.read_runs(
        [
            row
            for seed, shared in ((1, 0.0), (2, 0.1), (3, 0.3))
            for objective, epochs, level in (
                ("pnpo", "4", 0.5 + seed / 100), ("gspo", "4", 0.4), ("grpo", "4", 0.5),
                ("pnpo", "1", 0.25),
            )
            if (objective, seed) != ("grpo", 3)  # not done yet
            for row in run(objective, epochs, seed, [0.1] * third.BATCHES[epochs], {
                n: level + shared + (n - 10) / 100 for n in (0, 5, 10, 20, 30, 40)
            })
        ]
    )  # fmt: skip
    first, second, third_, fourth = third.PRIMARY
    assert third.differences(runs, *first) == pytest.approx({1: 0.11, 2: 0.12, 3: 0.13})
    assert third.differences(runs, *second) == pytest.approx({1: 0.01, 2: 0.02})
    assert third.differences(runs, *third_) == pytest.approx({1: 0.26, 2: 0.27, 3: 0.28})
    assert third.differences(runs, *fourth) == pytest.approx({1: -0.04, 2: -0.03, 3: -0.02})
    lines = third.contrast_lines(runs)
    # 2.5 points: Student's t of 2 degrees of freedom, 4.303, times 1 / sqrt(3).
    assert lines[0].startswith(
        "| pnpo, 4 x 10 - gspo, 4 x 10 | +12.0 ± 2.5 (3) | 0.0023 (0.0069) |"
    )
    assert lines[3].startswith("| pnpo, 4 x 10 - pnpo, 1 x 40 | -3.0 ± 2.5 (3) |")
    outcomes = third.outcome_lines(runs)
    # Scores after 0, 5 and 10 batches, mean of three seeds; the reward never reaches a level.
    assert outcomes[0] == (
        "| 4 | pnpo | 3 | 55.3, 60.3, 65.3 | 10.0 | never, never, never | never, never, never |"
    )


def test_choice_takes_the_best_last_batches_and_their_spread():
    def chosen(rate, rewards, spreads):
        found = run("ungated", "4", 9, rewards, {0: 0.0})
        for row, spread in zip(found[1:], spreads, strict=True):
            row["optimizer/learning_rate"] = rate
            if spread is not None:
                row["epoch_4/by_fraction/1.0/prefix_mean_log_std"] = spread
        return [row | {"run": f"{rate}", "axis/rate": f"{rate}"} for row in found]

    stored = chosen(2e-5, [0.9, 0.1, 0.1, 0.4], [0.01] * 4)
    stored += chosen(4e-5, [0.1, 0.2, 0.2, 0.3], [0.02, 0.02, None, 0.05])  # one without training
    # (0.2 + 0.2 + 0.3) / 3 is more than (0.1 + 0.1 + 0.4) / 3; 1.36 times the mean 0.03.
    assert third.choose(stored)[-1] == "4 epochs: 4e-05, low 0.03, high 0.041"


def test_stored_runs_are_paired_and_complete():
    """Runs of a seed and a kind of processor start alike, whatever the objective."""
    for name in ("real_model", "real_model_rates"):
        begun = {}
        for rows in by_run(read_stored(third.FOLDER / f"{name}.parquet")).values():
            first = rows[0]
            assert [row["step"] for row in rows] == list(range(first["steps"] + 1))
            scored = [v for key, v in first.items() if key.startswith("eval/heldout/avg@")]
            begun.setdefault((first["seed"], first["processor"]), set()).add(
                (first["model"], *scored, rows[1]["reward/mean"])  # of the same weights
            )
        assert all(len(starts) == 1 for starts in begun.values())
