"""What is evaluated: a folder with sets that are named, or a run with its own settings."""

import re

import pytest

from megatron_rl.cli import main
from megatron_rl.commands.evaluate import evaluation_config
from megatron_rl.config import ConfigError, dump_config, parse_config
from megatron_rl.evaluation.scores import Interval
from megatron_rl.trainer.evaluate_model import table


def paths(config):
    return {name: one.path for name, one in config.eval.sets.items()}


def test_a_folder_takes_the_paper_s_sampling_and_the_files_it_is_given(tmp_path):
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
    assert (path, columns.prompt, columns.answer) == ("mine.jsonl", "question", "label")


def build_run(folder):
    config = parse_config({
        "seed": 7, "model": {"path": "base"}, "data": {"mix": {"x": {"path": "train.jsonl"}}},
        "parallel": {"tensor": 4, "pipeline": 2}, "rollout": {"tensor": 2},
        "trainer": {"dtype": "float32", "minibatches": 8, "steps": 3},
        "eval": {"sets": {"held": "held.jsonl",
                          "other": {"path": "other.parquet", "columns": {"prompt": "problem"}}},
                 "samples": 2, "columns": {"prompt": "q", "answer": "a"}},
    })  # fmt: skip
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "metrics.jsonl").touch()


def test_a_run_keeps_its_settings_but_not_its_layout(tmp_path):
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
        key: (path, columns.prompt) for key, (path, columns) in config.evaluation_files.items()
    }
    assert files == {
        "eval.sets.held": ("held.jsonl", "q"),
        "eval.sets.other": ("other.parquet", "problem"),
    }
    other = evaluation_config(str(tmp_path), ["new.jsonl"], [])
    assert paths(other) == {"new": "new.jsonl"}


def test_the_table_has_a_line_for_each_set_and_macro():
    found = {"avg@4": {"a": Interval(0.5, 0.4, 0.6), "macro": Interval(0.25, 0.2, 0.3)}}
    lines = [line.split() for line in table(found, {"a": 30}).splitlines()]
    assert lines == [
        ["set", "problems", "avg@4"],
        ["a", "30", "50.0", "[40.0,", "60.0]"],
        ["macro", "25.0", "[20.0,", "30.0]"],
    ]


def test_errors_name_the_options_that_were_given(tmp_path, monkeypatch, capsys):
    """Each file and the model once, by the words of the command line; nothing of `data.train`."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["eval", "--model", "Org/Model", "--data", "amc=nowhere.jsonl"])
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert "  --data amc: nowhere.jsonl does not exist" in said
    assert (
        "  --model: Org/Model is not a folder" in said and "then give --model=models/Model" in said
    )
    assert not re.search(r"data\.train|eval\.sets|model\.path", said)


def test_two_sets_of_one_name_are_refused():
    """The first one would not be evaluated, and nobody would know."""
    for data in (["a=x.parquet", "a=y.parquet"], ["x/set.parquet", "y/set.parquet"]):
        with pytest.raises(ConfigError, match=r"two sets are called (a|set); .*--data NAME=FILE"):
            evaluation_config("m", data, [])
