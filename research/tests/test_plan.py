"""Study files: which runs they ask for, with which settings, under which digests."""

import hashlib
import re
from pathlib import Path

import pytest
import yaml

from megatron_rl.config import ConfigError, dump_config, load_config
from research.results.signs import without_calibrated
from research.study.study_plan import StudyFile, config_digest, load_study, plan_study

BASE = {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"prompts_per_step": 8}}
AXES = {
    "epochs": {1: {"trainer.epochs": 1, "trainer.steps": 8}, 4: {"trainer.steps": 2}},
    "rate": {0.001: {"optimizer.learning_rate": 1e-3}},
    "objective": {
        "pnpo": {"objective": {"name": "pnpo", "constraint": {"low": 0.1, "high": 0.1}}},
        "gspo": {"objective": {"name": "gspo"}},
    },
}


def plan(tmp_path, *overrides, **changes):
    values = {"name": "s", "dir": str(tmp_path), "base": BASE, "axes": AXES, "seeds": [1, 2]}
    return plan_study(StudyFile.model_validate(values | changes), list(overrides))


FILES = sorted((Path(__file__).parents[1] / "configs").glob("study_*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_studies_of_this_repository_load(file):
    if file.stem == "study_signs":  # its calibrated bounds are gone; `without_calibrated` loads it
        with pytest.raises(ConfigError, match="no option 'reject_negative'"):
            load_study(file, [])
    else:
        assert load_study(file, []).runs


def test_plan_lists_all_points_seed_by_seed(tmp_path):
    study = plan(tmp_path)
    assert [run.name for run in study.runs] == [
        f"{epochs}-0.001-{objective}-seed{seed}"
        for seed in (1, 2) for epochs in (1, 4) for objective in ("pnpo", "gspo")
    ]  # fmt: skip
    run = study.runs[0]
    assert run.point == {"epochs": "1", "rate": "0.001", "objective": "pnpo"}
    assert (run.config.trainer.epochs, run.config.trainer.steps) == (1, 8)
    assert run.config.objective.overrides == {"constraint": {"low": 0.1, "high": 0.1}}
    assert study.runs[1].config.objective.overrides == {}  # a whole section is replaced
    assert (run.config.seed, run.config.run.name) == (1, run.name)
    assert run.folder == tmp_path / "s" / "runs" / run.name
    assert run.config.run.resume == "auto"
    assert BASE == {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rollout": {"prompts_per_step": 8},
    }


def test_base_accepts_dotted_settings_and_named_objective(tmp_path):
    dotted = {
        "model.path": "m",
        "data.train": "t",
        "rollout.prompts_per_step": 8,
        "objective": "gspo",
    }
    axes = {"low": {"a": {"objective.constraint.low": 0.1}}}
    nested = BASE | {"objective": {"name": "gspo"}}
    one, other = (plan(tmp_path, base=base, axes=axes, seeds=[1]) for base in (dotted, nested))
    assert one.runs[0].config == other.runs[0].config
    assert one.runs[0].config.objective.name == "gspo"
    with pytest.raises(ConfigError, match="objective is given as a whole, without constraint"):
        plan(
            tmp_path,
            base=nested | {"objective": {"constraint": {"low": 0.1}}},
            axes={"objective": {"gspo": {"objective": "gspo"}}},
        )


def test_cells_choose_and_order_and_never_repeat(tmp_path):
    cells = [
        {"objective": "gspo", "epochs": 4, "seeds": [5]},
        {"objective": ["pnpo", "gspo"], "epochs": 4, "rate": 0.001, "seeds": [5, 6]},
    ]
    names = [run.name for run in plan(tmp_path, cells=cells).runs]
    assert names == [f"4-0.001-{rest}" for rest in
                     ("gspo-seed5", "pnpo-seed5", "pnpo-seed6", "gspo-seed6")]  # fmt: skip


def test_rules_apply_to_their_runs_and_overrides_to_all(tmp_path):
    when = [{"objective": "gspo", "epochs": [4], "set": {"optimizer.beta2": 0.5}}]
    study = plan(tmp_path, "optimizer.beta1=0.25", when=when)
    assert {run.name: run.config.optimizer.beta2 for run in study.runs if run.seed == 1} == {
        "1-0.001-pnpo-seed1": 0.999, "1-0.001-gspo-seed1": 0.999,
        "4-0.001-pnpo-seed1": 0.999, "4-0.001-gspo-seed1": 0.5,
    }  # fmt: skip
    assert {run.config.optimizer.beta1 for run in study.runs} == {0.25}


def test_digests_tell_experiments_apart_and_nothing_else(tmp_path, monkeypatch):
    runs = plan(tmp_path).runs
    assert len({run.digest for run in runs}) == len(runs)
    moved = plan(tmp_path / "elsewhere", "logging.tensorboard=false").runs
    assert [run.digest for run in moved] == [run.digest for run in runs]
    changed = plan(tmp_path, "optimizer.beta2=0.9").runs
    assert not {run.digest for run in changed} & {run.digest for run in runs}
    # A path counts from the present folder, whether it was there when the study was read or not.
    folders = [tmp_path / "one", tmp_path / "two"]
    digests = []
    for folder in folders:
        folder.mkdir()
        monkeypatch.chdir(folder)
        digests.append(plan(tmp_path).runs[0].digest)
        (folder / "m").mkdir()
        digests.append(plan(tmp_path).runs[0].digest)
    assert len(set(digests)) == 1


def test_written_config_has_same_digest(tmp_path):
    run = plan(tmp_path).runs[0]
    (tmp_path / "c.yaml").write_text(dump_config(run.config))
    assert config_digest(load_config(tmp_path / "c.yaml")) == run.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cells": [{"objektive": "pnpo"}]}, r"cells\[0\]: objektive is no axis; there are epochs"),
        ({"cells": [{"epochs": 2}]}, r"cells\[0\]: epochs has no value 2; it has 1, 4"),
        ({"cells": [{"seeds": 3}]}, r"cells\[0\].seeds=3: must be a list"),
        ({"when": [{"epochs": 1}]}, r"when\[0\]: needs `set`"),
        ({"axes": {"a": {"x-y": {}}}}, r"axes.a.x-y: a value becomes a part"),
        ({"axes": {"a": {"x": {"trainer.stepps": 1}}}}, "run x-seed1: invalid config:\n .*steps?"),
        ({"tasks": {"t": {"task": "sums"}}}, r"tasks.t: task 'sums' is unknown; choose one of run"),
        (
            {"tasks": {"t": {"task": "running_sum", "sizes": 4}}},
            r"tasks.t: .*'sizes'; the set.*size",
        ),
        (
            {"axes": {"prompts": {"many": {"rollout": {"tensor": 1}}}}},
            r"run many-seed1: rollout is given as a whole, without prompts_per_step, set before; "
            r"give "
            r"single settings \(rollout.tensor",
        ),
    ],
)
def test_errors_name_their_place(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, **changes)


def test_study_file_of_documentation_is_complete(tmp_path):
    page = (Path(__file__).parents[2] / "research" / "docs" / "studies.md").read_text()
    file = tmp_path / "study.yaml"
    file.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    study = load_study(file, [])
    assert len(study.runs) == 6
    assert {run.config.objective.name for run in study.runs} == {"gspo", "pnpo"}


def test_second_study_matches_its_page(tmp_path):
    root = Path(__file__).parents[2]
    study = load_study(without_calibrated(tmp_path), [])
    rows = (root / "research" / "docs" / "second-study.md").read_text().splitlines()
    planned = [int(row.split("|")[-2]) for row in rows if row.count("|") == 8 and "---" not in row
               and "run seeds" not in row]  # fmt: skip
    assert planned[0] == 144 and sum(planned) == len(study.runs)
    first = [run.point for run in study.runs[:144]]
    assert {point["epochs"] for point in first} == {"4"}
    sizes = {axis: len({point[axis] for point in first}) for axis in first[0]}
    assert sizes == {"model": 8, "rate": 2, "epochs": 1, "objective": 9}
    assert {run.seed for run in study.runs[:144]} == {1}
    updates = {
        point["epochs"]: run.config.trainer.steps * run.config.updates_per_step
        for run in study.runs
        for point in [run.point]
    }
    assert updates == {"4": 96, "1": 96, "4_long": 800}
    # The page was committed before any run; the file repeats its table of contrasts.
    page, contrasts = "\n".join(rows), study.contrasts
    names = {"GSPO with its lower bound tuned": "gspo_tuned", "PNPO one-sided": "pnpo_one_sided"}
    pairs = re.findall(r"^\| \d \| (.+?) - (.+?) \|", page, re.MULTILINE)
    assert [tuple(names.get(name, name.strip("`")) for name in pair) for pair in pairs] == (
        contrasts.section.pairs
    )
    candidates = {name: len(choices) for (_, name), choices in contrasts.choices.items()}
    assert candidates == dict.fromkeys(contrasts.contenders, 3) | {"gspo_tuned": 9}
    assert (contrasts.section.choose, contrasts.section.confirm) == ([1], [2])
    assert [len(units) for units in contrasts.families.values()] == [2] * 4


def test_contrasts_are_strict_and_digest_covers_file_bytes(tmp_path):
    section = {"pairs": [["gspo", "pnpo"]], "at": {"epochs": 4}, "choose": [1], "confirm": [2]}
    content = {"name": "s", "base": BASE, "axes": AXES, "seeds": [1, 2], "contrasts": section}
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    study = load_study(file, ["optimizer.beta2=0.9"])
    assert study.contrasts.families == {"all": []}
    assert study.digest == hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    assert study.overrides == ("optimizer.beta2=0.9",)
    section["confirmed"] = [3]
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    with pytest.raises(ConfigError, match=r"contrasts\.confirmed.*confirm"):
        load_study(file, [])
