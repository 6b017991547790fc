"""Evaluation of a folder with named sets, or of a run with its own settings."""

import os
import re

import pytest

from megatron_rl.cli import main
from megatron_rl.commands.evaluate import evaluation_config
from megatron_rl.config import ConfigError, dump_config, parse_config
from megatron_rl.preflight.layout import engine_layout_problems
from megatron_rl.trainer.evaluate_model import table
from megatron_rl.trainer.evaluation import ConfidenceInterval
from tests.unit.resharding.shapes import small_shape


def paths(config):
    return {name: os.path.relpath(one.path) for name, one in config.eval.sets.items()}


def test_model_folder_uses_paper_sampling_and_given_files(tmp_path):
    config = evaluation_config(
        str(tmp_path), ["a/amc.parquet", "aime=b/x.jsonl"], ["eval.samples=4"]
    )
    assert paths(config) == {"amc": "a/amc.parquet", "aime": "b/x.jsonl"}
    assert (config.eval.temperature, config.eval.top_p, config.eval.samples) == (0.7, 0.9, 4)
    assert config.model.path == str(tmp_path)
    with pytest.raises(ConfigError, match="--data: missing"):
        evaluation_config(str(tmp_path), None, [])
    given = ["eval.sets={mine: {path: mine.jsonl, columns: {prompt: question, answer: label}}}"]
    ((path, columns),) = evaluation_config(str(tmp_path), None, given).evaluation_files.values()
    assert (path, columns.prompt, columns.answer) == (
        os.path.abspath("mine.jsonl"),
        "question",
        "label",
    )


def build_run(folder, **sections):
    config = parse_config({
        "seed": 7, "model": {"path": "base"}, "data": {"mix": {"x": {"path": "train.jsonl"}},
                                                       "columns": {"prompt": "q", "answer": "a"}},
        "parallel": {"tensor": 4, "pipeline": 2}, "rollout": {"tensor": 2},
        "trainer": {"dtype": "float32", "minibatches": 8, "steps": 3},
        "eval": {"sets": {"held": "held.jsonl",
                          "other": {"path": "other.parquet", "columns": {"prompt": "problem"}}},
                 "samples": 2},
    } | sections)  # fmt: skip
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "metrics.jsonl").touch()


@pytest.mark.parametrize(
    "sections",
    [
        {"replay": {"fresh": 0.5, "capacity": 4}},
        {"lag": {"sync_weights_every": 4}, "eval": {"every": 8}},
        {"lag": {"partial_rollouts": 32}, "behavior": "engine"},
        {"offline": {"rollouts": "somewhere"}, "eval": {}},
        {"objective": {"kl": {"coefficient": 0.1}}, "model": {"path": "base", "reference": "r"}},
        {"trainer": {"keep_best": "eval/held/avg@2", "minibatches": 8}},
        {"trainer": {"stall_seconds": 3600}, "reward": {"time_limit_seconds": 900}},
    ],
    ids=str,
)  # fmt: skip
def test_training_rules_do_not_reject_evaluation(tmp_path, sections):
    build_run(tmp_path, **sections)
    (tmp_path / "model").mkdir()
    config = evaluation_config(str(tmp_path), ["new.jsonl"], ["eval.samples=3"])
    assert (paths(config), config.eval.samples) == ({"new": "new.jsonl"}, 3)


def test_unused_setting_is_rejected(tmp_path):
    with pytest.raises(
        ConfigError, match=r"trainer\.epochs: an evaluation does not use this setting .*"
    ):
        evaluation_config(str(tmp_path), ["new.jsonl"], ["trainer.epochs=2"])


@pytest.mark.parametrize(
    ("override", "words"),
    [("rollout.temperature=0.1", "does not use this setting; set eval.temperature"),
     ("rollout={temperature: 0.1}", "rollout.temperature: an evaluation does not use"),
     ("rollout.top_k=8", "rollout.top_k: an evaluation does not use this setting; remove it"),
     ("data.train=nowhere.jsonl", "data.train: an evaluation does not use this setting; set --d"),
     ("eval.every=7", "eval.every: an evaluation does not use"),
     ("parallel.stage_layers=[9]", "parallel.stage_layers: an evaluation does not use"),
     ("eval.sets={c: new.jsonl}", "--data and eval.sets are both given"),
     ("eval={sets: {c: new.jsonl}}", "--data and eval.sets are both given")],
)  # fmt: skip
def test_settings_of_generation_in_training_are_rejected(tmp_path, override, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        evaluation_config(str(tmp_path), ["new.jsonl"], [override])


@pytest.mark.parametrize("kind", [{"sft": {}}, {"critic": {}}])
def test_run_with_one_response_to_each_prompt_is_evaluated(tmp_path, kind):
    columns = {"prompt": "q"} | ({"completion": "reply"} if "sft" in kind else {})
    whole = {"parallel": {}, "trainer": {"steps": 3}, "rollout": {"responses_per_prompt": 1},
             "data": {"train": "t.jsonl", "columns": columns}}  # fmt: skip
    build_run(tmp_path, **whole, **kind)
    (tmp_path / "model").mkdir()
    given = evaluation_config(str(tmp_path), ["new.jsonl"], ["data.columns={prompt: p}"])
    assert given.data.columns.prompt == "p"
    # A mapping leaves out what the run's whole config has: that sets nothing.
    sets = "eval={samples: 3, sets: {held: held.jsonl, other: other.jsonl}}"
    assert evaluation_config(str(tmp_path), None, [sets]).eval.samples == 3


def test_evaluation_allows_more_processes_than_responses():
    config = evaluation_config("m", ["new.jsonl"], [])
    assert config.rollout.responses_per_prompt == 8
    assert not engine_layout_problems(config, small_shape(), 16)


def test_run_keeps_its_settings_but_not_its_layout(tmp_path):
    build_run(tmp_path)
    with pytest.raises(ConfigError, match="no trained model yet; evaluate a checkpoint by"):
        evaluation_config(str(tmp_path), None, [])
    (tmp_path / "model").mkdir()
    config = evaluation_config(str(tmp_path), None, ["parallel.data=4"])
    assert config.model.path == str(tmp_path / "model")
    assert (config.seed, config.eval.samples, config.rollout.tensor) == (7, 2, 2)
    assert (config.parallel.model_size, config.parallel.data) == (1, 4)
    assert config.trainer.dtype == "float32"
    files = {
        key: (os.path.relpath(path), columns.prompt)
        for key, (path, columns) in config.evaluation_files.items()
    }
    assert files == {
        "eval.sets.held": ("held.jsonl", "q"),
        "eval.sets.other": ("other.parquet", "problem"),
    }
    other = evaluation_config(str(tmp_path), ["new.jsonl"], [])
    assert paths(other) == {"new": "new.jsonl"}


def test_run_keeps_its_environment_and_what_its_processes_see(tmp_path):
    run = {
        "environment": {"name": "my.tools:Calculator", "max_context_tokens": 20000},
        "workers": {"variables": ["KEY"]},
    }
    build_run(tmp_path, **run)
    (tmp_path / "model").mkdir()
    config = evaluation_config(str(tmp_path), None, ["environment.max_turns=3"])
    assert (config.environment.name, config.environment.max_turns) == ("my.tools:Calculator", 3)
    assert config.workers.variables == ["KEY"]


def test_table_has_one_row_per_set_and_macro():
    found = {
        "avg@4": {
            "a": ConfidenceInterval(0.5, 0.4, 0.6),
            "macro": ConfidenceInterval(0.25, 0.2, 0.3),
        },
        "maj@4": {"a": None, "macro": None},
    }
    shares = {"time_limit_fraction": 0.25, "failed_fraction": 0.0, "truncated_fraction": 0.125}
    lines = [line.split() for line in table(found, {"a": 30}, {"a": shares}).splitlines()]
    assert lines == [
        ["set", "problems", "avg@4", "maj@4", "time", "limit", "failed", "truncated"],
        ["a", "30", "50.0%", "[40.0,", "60.0]", "-", "25.0%", "0.0%", "12.5%"],
        ["macro", "25.0%", "[20.0,", "30.0]", "-"],
    ]


def test_errors_name_options_that_were_given(tmp_path, monkeypatch, capsys):
    """Each file and the model once, by the words of the command line; nothing of `data.train`."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["eval", "--model", "Org/Model", "--data", "amc=nowhere.jsonl"])
    output = capsys.readouterr().err
    assert ended.value.code == 1
    assert f"  --data amc: {tmp_path}/nowhere.jsonl does not exist" in output
    assert f"  --model: {tmp_path}/Org/Model is not a folder" in output
    assert "run: hf download Org/Model" in output
    assert not re.search(r"data\.train|eval\.sets|model\.path", output)


def test_missing_model_is_named_before_missing_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, output in (
        ("nothing", "nothing is not a folder\n"),
        (
            "runs/nothing",
            "nothing is not a folder; as a name on the Hugging Face hub it needs --data",
        ),
        ("empty", "empty is neither a run directory nor a model folder (it has no config.json)"),
    ):
        with pytest.raises(ConfigError) as error:
            evaluation_config(name, None, [])
        text = str(error.value)
        assert f"--model: {tmp_path}/" in text and output in text and "--data: missing" in text
    with pytest.raises(ConfigError, match="--model: the environment variable NOWHERE_SET is not"):
        evaluation_config("$NOWHERE_SET/m", None, [])


def test_duplicate_set_names_are_rejected():
    """The first one would not be evaluated, and nobody would know."""
    for data in (["a=x.parquet", "a=y.parquet"], ["x/set.parquet", "y/set.parquet"]):
        with pytest.raises(ConfigError, match=r"two sets are called (a|set); .*--data NAME=FILE"):
            evaluation_config("m", data, [])
