"""Contents of a run's inputs: what belongs to them, and what a resumed run does with changes."""

import json
import shutil

import pytest

from megatron_rl.config import ConfigError, parse_config
from megatron_rl.errors import UserError
from megatron_rl.runs import inputs
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.inputs import module_files, read_inputs


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Return a function that builds the config of a run with inputs of every kind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n' * 4)
    (tmp_path / "held.jsonl").write_text('{"prompt": "b"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "my_parts").mkdir()
    (tmp_path / "my_parts" / "__init__.py").write_text("")
    (tmp_path / "my_parts" / "weights.py").write_text("HALF = 0.5\n")
    (tmp_path / "my_rewards.py").write_text("import json\nfrom my_parts import weights\n")
    (tmp_path / "my_agent.py").write_text("")
    (tmp_path / "my_losses.py").write_text("")

    def build(**run):
        return parse_config(
            {
                "model": {"path": str(tmp_path / "model")},
                "data": {"train": str(tmp_path / "data.jsonl")},
                "eval": {"sets": {"held": str(tmp_path / "held.jsonl")}},
                "reward": {"verifier": "my_rewards:score"},
                "environment": {"name": "my_agent:Game", "max_context_tokens": 20000},
                "objective": {"function": "my_losses:loss"},
                "run": {"name": "a", "dir": str(tmp_path / "runs"), "resume": "auto"} | run,
            }
        )

    return build


def start(config):
    """Start a run that has recorded a step."""
    directory = RunDirectory.of(config)
    directory.create(config)
    (directory.path / "metrics.jsonl").write_text('{"step": 0}\n')
    return directory


def test_everything_from_outside_is_an_input(build):
    found = read_inputs(build())
    assert {key: sorted(one.files) for key, one in found.items()} == {
        "data.train": ["data.jsonl"],
        "eval.sets.held": ["held.jsonl"],
        "model.path": ["chat_template.jinja", "config.json and weights"],
        "reward.verifier": ["my_parts", "my_parts.weights", "my_rewards"],
        "environment.name": ["my_agent"],
        "objective.function": ["my_losses"],
    }
    assert (found["data.train"].rows, found["data.train"].bytes) == (4, 64)


@pytest.mark.parametrize(
    ("file", "key", "message"),
    [
        ("data.jsonl", "data.train", r"4 rows, 64 bytes -> 0 rows, 2 bytes; SHA-256 data\.jsonl"),
        ("my_parts/weights.py", "reward.verifier", r"my_rewards:score: .*my_parts\.weights \("),
        ("my_agent.py", "environment.name", r"my_agent:Game: 0 bytes -> 2 bytes"),
        ("model/chat_template.jinja", "model.path", r"chat_template\.jinja \("),
        ("model/config.json", "model.path", r"config\.json and weights \("),
    ],
)
def test_changed_input_is_refused_by_name_or_accepted_and_recorded(
    build, tmp_path, file, key, message
):
    directory = start(build())
    assert directory.check_inputs(build()) == []
    (tmp_path / file).write_text("\n\n")
    with pytest.raises(ConfigError, match=rf"accept_changes=\[{key}\]:\n    {key}=.*{message}"):
        directory.check_inputs(build())
    accepting = build(accept_changes=[key])
    (line,) = directory.check_inputs(accepting)
    assert line.startswith(f"changed since the last start, accepted: {key}=")
    directory.create(accepting)
    (change,) = map(json.loads, (directory.path / "changes.jsonl").read_text().splitlines())
    assert (change["key"], change["after_step"]) == (key, 0) and change["content"] in line
    assert directory.check_inputs(build()) == []  # the new content is that of the last start


def test_names_that_are_no_inputs_are_refused(build):
    for before in (RunDirectory.of, start):  # also where none can change yet
        directory = before(build())
        with pytest.raises(ConfigError, match=r"data\.mix is no input of this run; it has data"):
            directory.check_inputs(build(accept_changes=["data.mix"]))


def test_run_without_results_or_without_record_is_not_compared(build, tmp_path):
    config = build()
    directory = RunDirectory.of(config)
    directory.create(config)  # a start that failed
    (tmp_path / "data.jsonl").write_text("")
    assert directory.check_inputs(config) == []
    directory = start(build())
    directory.inputs_file.unlink()  # by an earlier release
    assert directory.check_inputs(config) == []


def test_moved_prompts_of_same_content_are_accepted(build, tmp_path):
    directory = start(build())
    shutil.copy(tmp_path / "data.jsonl", tmp_path / "moved.jsonl")
    (tmp_path / "other.jsonl").write_text("")

    def moved(name):
        return parse_config(build().model_dump() | {"data": {"train": str(tmp_path / name)}})

    directory.check_usable(moved("data.jsonl"))
    with pytest.raises(ConfigError, match=r"data\.train: "):
        directory.check_usable(moved("other.jsonl"))
    directory.check_usable(moved("moved.jsonl"))
    (line,) = directory.check_inputs(moved("moved.jsonl"))
    assert "data.jsonl is now called moved.jsonl" in line and "are of moved from now on" in line


def test_content_is_in_the_order_of_names_and_a_function_is_part_of_its_name():
    def made(name, *files):
        return inputs.Input(name, dict(files), 2)

    shards = made("/d", ("a.parquet", "1"), ("b.parquet", "2"))
    assert made("/e", ("x.parquet", "1"), ("y.parquet", "2")).has_content_of(shards)
    assert not made("/e", ("a.parquet", "2"), ("b.parquet", "1")).has_content_of(shards)
    code = made("mine:score", ("helpers", "1"), ("mine", "2"))
    assert made("a:score", ("a", "2"), ("helpers", "1")).has_content_of(code)
    assert not made("mine:other", ("helpers", "1"), ("mine", "2")).has_content_of(code)


def test_damaged_records_are_named(build):
    directory = start(build())
    directory.inputs_file.write_text(directory.inputs_file.read_text()[:100])
    with pytest.raises(UserError, match=r"inputs\.json is damaged"):
        directory.check_inputs(build())
    directory.config_file.write_text("")
    with pytest.raises(ConfigError, match=r"config\.yaml, which has the settings .* is empty"):
        directory.check_usable(build())


def test_code_of_packages_and_of_this_one_is_not_followed(build, tmp_path):
    (tmp_path / "my_rewards.py").write_text("import numpy, json, megatron_rl.texts\nx = (")
    assert list(module_files("my_rewards")) == ["my_rewards"]
    (tmp_path / "my_parts" / "score.py").write_text("from . import weights\nfrom .weights import *")
    assert sorted(module_files("my_parts.score")) == [
        "my_parts", "my_parts.score", "my_parts.weights",
    ]  # fmt: skip
    assert module_files("megatron_rl.rewards.math_answer") == {}
    assert list(module_files("numpy")) == ["numpy"]
    assert module_files("nowhere.at_all") == {}


def test_code_in_folders_without_init_is_found(build, tmp_path):
    inner = tmp_path / "my_folder" / "inner"
    inner.mkdir(parents=True)
    (inner / "score.py").write_text("from my_folder.inner import weights\n")
    (inner / "weights.py").write_text("")
    assert sorted(module_files("my_folder.inner.score")) == [
        "my_folder.inner.score", "my_folder.inner.weights",
    ]  # fmt: skip


def test_folder_is_read_without_caches(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("data-0.arrow", "state.json", "cache-1.arrow", ".lock"):
        (folder / name).write_text(name)
    assert sorted(inputs.read_path(str(folder)).files) == ["data-0.arrow", "state.json"]
