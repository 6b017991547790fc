"""Configs: defaults, overrides, and every error at once."""

import itertools
import json
import re
from os.path import abspath
from pathlib import Path

import pytest
import yaml

from megatron_rl.config import (
    Config,
    ConfigError,
    dump_config,
    load_config,
    parse_config,
    set_dotted,
    valid_keys,
    with_absolute_paths,
)
from megatron_rl.config.combinations import FEATURES, combination_problems
from megatron_rl.config.other_trainers import answer_command, unknown_keys
from megatron_rl.config.other_trainers_keys import NONE, TRL, VERL

MINIMAL = "model: {path: m}\ndata: {train: t.parquet}\n"


def write(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


def test_defaults_are_published_configuration(tmp_path):
    config = load_config(write(tmp_path, MINIMAL))
    # Appendix C of the PNPO paper: 256 prompts x 8, minibatches of 64 groups = 4 per epoch,
    # lr 1e-6, 10 warm-up steps, weight decay 0.1, evaluation 32 samples at 0.7 / top-p 0.9.
    assert (config.rollout.prompts_per_step, config.rollout.responses_per_prompt) == (256, 8)
    assert config.trainer.minibatches == 256 // 64
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (1e-6, 10)
    assert config.optimizer.weight_decay == 0.1
    assert (config.eval.samples, config.eval.temperature, config.eval.top_p) == (32, 0.7, 0.9)
    assert config.max_model_tokens == 1024 + 15360
    assert config.updates_per_step == 16


def test_warmup_is_counted_in_rollout_batches(tmp_path):
    file = write(tmp_path, MINIMAL)
    # the paper's 10 steps: 10 x 4 epochs x 4 minibatches, and 10 x 1 x 4
    assert load_config(file).warmup_updates == 160
    assert load_config(file, ["trainer.epochs=1"]).warmup_updates == 40
    assert load_config(file, ["optimizer.warmup_steps=0.5"]).warmup_updates == 8
    assert load_config(file, ["optimizer.warmup_steps=0"]).warmup_updates == 0


def test_overrides_win_and_yaml_floats_without_point_are_numbers(tmp_path):
    file = write(tmp_path, MINIMAL + "optimizer: {learning_rate: 3e-6}\n")  # YAML 1.1: a string
    config = load_config(file, ["optimizer.weight_decay=1e-2", "parallel.context=2", "seed=7"])
    assert config.optimizer.learning_rate == 3e-6
    assert (config.optimizer.weight_decay, config.parallel.context, config.seed) == (0.01, 2, 7)


def test_all_errors_are_reported_together_with_nearest_key(tmp_path):
    text = MINIMAL + "parallel: {contxt: 2}\nseed: -1\nmodle: {path: x}\ntrainer: {epoch: 1}\n"
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, text), ["trainer.steps=abc"])
    message = str(error.value)
    assert "parallel.contxt: unknown key; did you mean parallel.context?" in message
    assert "trainer.epoch: unknown key; did you mean trainer.epochs?" in message
    assert "modle: unknown key; did you mean model?" in message
    assert "trainer.steps='abc'" in message and "seed=-1" in message


def test_line_of_file_is_not_named_for_override(tmp_path):
    file = write(tmp_path, MINIMAL + "trainer: {steps: 1}\n")
    with pytest.raises(ConfigError, match=r"trainer\.steps=0: must be at least 1$"):
        load_config(file, ["trainer.steps=0"])


def test_file_with_byte_order_mark_is_read(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_config(tmp_path / "run.yaml").model.path == "m"


def test_missing_file_or_folder_is_named_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "run").mkdir()
    for name, output in (
        ("nowhere.yaml", f"config file {tmp_path}/nowhere.yaml does not exist; give the path of"),
        ("~/a.yaml", f"config file {tmp_path}/home/a.yaml does not exist"),
        ("${NOWHERE_SET}/a.yaml", "the environment variable NOWHERE_SET is not set or empty"),
        ("run", f"config file {tmp_path}/run is a folder; give the path of a YAML file"),
    ):
        with pytest.raises(ConfigError, match=re.escape(output)):
            load_config(name)
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=re.escape(f"the run's is {tmp_path}/run/config.yaml")):
        load_config("run")


# YAML 1.1 would read a boolean, null, a number, a date, a comment or a mapping.
WRITTEN = ("off", "yes", "1e3", "007", "1_000", "2026-01-01", "4:00:00", "on", "n", ".inf")


def test_text_setting_keeps_what_was_written(tmp_path):
    for text in WRITTEN[:6]:
        file = write(tmp_path, MINIMAL + f"run: {{name: {text}}}\nrollout: {{stop: [{text}]}}\n")
        config = load_config(file)
        assert (config.run.name, config.rollout.stop) == (text, [text])
        assert load_config(write(tmp_path, MINIMAL), [f"run.name={text}"]).run.name == text
        assert load_config(write(tmp_path, dump_config(config))) == config
    file = write(tmp_path, MINIMAL)
    for text in (*WRITTEN, "Answer: yes #1", "[INST] x", "- a", "#", "~"):
        config = load_config(file, [f"data.columns.prompt={text}"])
        assert config.data.columns.prompt == text
    names = load_config(file, ["eval.sets={on: a.parquet, 2024: b.parquet}"]).eval.sets
    assert list(names) == ["on", "2024"]
    assert load_config(file, ["reward.weights={yes: 1}"]).reward.weights == {"yes": 1.0}


def test_numbers_of_yaml_1_1_are_not_octal_or_to_base_60(tmp_path):
    for text in ("010", "08"):  # of which YAML 1.1 makes 8 and a text
        steps = load_config(write(tmp_path, MINIMAL), [f"trainer.steps={text}"]).trainer.steps
        assert steps == int(text)
    assert load_config(write(tmp_path, MINIMAL + "seed: 0x10\n")).seed == 16


def test_null_and_quotes_in_text_settings(tmp_path):
    file = write(tmp_path, MINIMAL + "run: {name: x}\n")
    for text, name in (
        ("null", None),
        ("~", None),
        ("'off'", "off"),
        ('"null"', "null"),
    ):
        assert load_config(file, [f"run.name={text}"]).run.name == name
    assert load_config(write(tmp_path, MINIMAL + "run: {name: null}")).run.name is None
    # Other settings are YAML as before: booleans, numbers, names of scores or booleans.
    config = load_config(file, ["run.check_memory=off", "trainer.keep_best=false", "seed=1_0"])
    assert (config.run.check_memory, config.trainer.keep_best, config.seed) == (False, False, 10)


def test_home_and_variables_in_paths_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    text = "model: {path: ~/m, reference: $DATA/r}\ndata: {mix: {a: {path: '${DATA}/a.parquet'}}}\n"
    overrides = [
        "objective.kl={coefficient: 0.1}", "run.dir=~", "eval.sets={x: $DATA/x, y: {path: ~/y}}",
        "lora={path: ~/a}", "optimizer.learning_rate=1e-4",
    ]  # fmt: skip
    config = with_absolute_paths(load_config(write(tmp_path, text), overrides))
    assert (config.model.path, config.model.reference) == ("/home/me/m", "/data/r")
    assert (config.run.dir, config.lora.path) == ("/home/me", "/home/me/a")
    paths = {key: path for key, (path, _) in config.prompt_files.items()}
    assert paths == {"data.mix.a": "/data/a.parquet", "eval.sets.x": "/data/x",
                     "eval.sets.y": "/home/me/y"}  # fmt: skip
    (tmp_path / "$x").touch()  # the name of an existing file is left as it is
    given = [f"offline.rollouts={tmp_path}/$x"]
    assert load_config(write(tmp_path, MINIMAL), given).offline.rollouts == f"{tmp_path}/$x"


@pytest.mark.parametrize(
    ("path", "output"),
    [
        ("${NOWHERE_SET}/m", "the environment variable NOWHERE_SET is not set or empty; export it"),
        ("${A:-/data}/m", "${A:-/data} is not replaced in paths, only $NAME and ${NAME}"),
        ("~nobody_here/m", "there is no home folder of ~nobody_here; give the path in full"),
    ],
)
def test_path_that_cannot_be_expanded_is_refused(tmp_path, path, output):
    for key in ("model.path", "eval.sets.a", "run.dir", "data.mix.a.path"):
        with pytest.raises(ConfigError, match=re.escape(output)) as error:
            load_config(write(tmp_path, MINIMAL), [f"{key}={path}"])
        assert f"{key.removesuffix('.path')}" in str(error.value)


def test_set_is_path_or_path_with_columns(tmp_path):
    """The shorter form is written; columns fall back to those of all sets."""
    columns = {"prompt": "q", "answer": "a", "source": None, "tools": None}
    columns |= {"completion": "completion"}
    own = {"path": "b", "columns": columns}
    given = [
        "eval.sets={a: a.parquet, b: {path: b, columns: {prompt: q, answer: a}}, c: {path: c}}"
    ]
    config = load_config(write(tmp_path, MINIMAL), given)
    assert config.model_dump()["eval"]["sets"] == {"a": "a.parquet", "b": own, "c": "c"}
    prompts = {key: columns.prompt for key, (_, columns) in config.evaluation_files.items()}
    assert prompts == {"eval.sets.a": "prompt", "eval.sets.b": "q", "eval.sets.c": "prompt"}
    sets = with_absolute_paths(config).model_dump()["eval"]["sets"]
    assert sets == {"a": abspath("a.parquet"), "b": own | {"path": abspath("b")}, "c": abspath("c")}


def test_stable_keys_exist():
    stable = {
        "parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.data",
        "rollout.tensor", "rollout.prompts_per_step", "rollout.responses_per_prompt",
        "objective.name",
        "trainer.steps", "trainer.epochs", "trainer.minibatches", "run.dir", "run.name", "seed",
    }  # fmt: skip
    assert stable <= set(valid_keys(Config))


def test_paths_are_absolute_from_start(tmp_path, monkeypatch):
    """A run is continued and converted from elsewhere; a model's name on the hub stays."""
    (tmp_path / "here").mkdir()
    (tmp_path / "t.parquet").touch()
    monkeypatch.chdir(tmp_path / "here")
    overrides = [
        "data.train=../t.parquet",
        "eval.sets={a: ../t.parquet}",
        "model.path=Qwen/Qwen3-8B",
        "offline.rollouts=nowhere/rollouts",
    ]
    del overrides[1]  # nothing is evaluated offline
    config = with_absolute_paths(load_config(write(tmp_path, MINIMAL), overrides))
    assert config.offline.rollouts == str(tmp_path / "here" / "nowhere" / "rollouts")
    overrides = [*overrides[:2], "eval.sets={a: ../t.parquet}"]
    config = with_absolute_paths(load_config(write(tmp_path, MINIMAL), overrides))
    assert config.data.train == config.eval.sets["a"].path == str(tmp_path / "t.parquet")
    assert config.run.dir == str(tmp_path / "here" / "runs")
    assert config.model.path == "Qwen/Qwen3-8B"  # a message names it as it was given
    monkeypatch.chdir(tmp_path)
    assert with_absolute_paths(config) == config


def test_user_defined_names_keep_dots(tmp_path):
    sets = load_config(write(tmp_path, MINIMAL + "eval: {sets: {aime.24: a.parquet}}\n")).eval.sets
    assert list(sets) == ["aime.24"]


@pytest.mark.parametrize(
    "text",
    [
        "model: {path: m}\ndata: {train: t}\noptimizer.learning_rate: 3e-6\n",
        "model.path: m\ndata: {train: t, columns.prompt: q}\noptimizer: {learning_rate: 3e-6}",
    ],
)
def test_dotted_keys_in_file_equal_overrides(tmp_path, text):
    config = load_config(write(tmp_path, text))
    assert (config.model.path, config.data.train) == ("m", "t")
    assert config.optimizer.learning_rate == 3e-6
    override = load_config(write(tmp_path, text), ["model.path=other"])
    assert override.model.path == "other"


@pytest.mark.parametrize("space", ["", "\u00a0"])
def test_space_that_is_missing_after_a_colon_is_named(tmp_path, space):
    text = MINIMAL + f"optimizer:{space}{{learning_rate: 1.0e-5}}\n"
    with pytest.raises(ConfigError, match="unknown key; write an ordinary space after the colon"):
        load_config(write(tmp_path, text))


def test_texts_with_commands_of_latex_end_responses(tmp_path):
    config = load_config(write(tmp_path, MINIMAL), [r"rollout.stop=['\ne', '\text', \quad, '\']"])
    assert config.rollout.stop == [r"\ne", r"\text", r"\quad", "\\"]


def test_merge_keys_of_yaml_still_work(tmp_path):
    text = MINIMAL + "objective: &o {name: gspo}\nadvantage: {<<: {std: none}, std: population}\n"
    assert load_config(write(tmp_path, text)).advantage.std == "population"


def test_objective_is_name_or_mapping(tmp_path):
    file = write(tmp_path, MINIMAL + "objective: gspo\n")
    assert load_config(file).objective.name == "gspo"
    changed = load_config(file, ["objective.constraint.low=1.0e-2"]).objective
    assert (changed.name, changed.overrides) == ("gspo", {"constraint": {"low": 0.01}})
    both = write(tmp_path, MINIMAL + "objective: gspo\nobjective.constraint.low: 1.0e-2\n")
    assert load_config(both).objective == changed
    assert load_config(write(tmp_path, dump_config(load_config(file)))) == load_config(file)


def test_error_messages_contain_no_python_types():
    """Also settings that take a number or a mapping, a name or a mapping: one line, plain words."""
    for key, bad in itertools.product(
        valid_keys(Config), ([{"x": [1]}], "a b", True, -1e30, {"zzz": {"y": 1}})
    ):
        values = {"model": {"path": "m"}, "data": {"train": "t"}}
        set_dotted(values, key, bad)
        try:
            parse_config(values)
        except ConfigError as error:
            output = str(error)
        else:
            continue
        assert not re.search(r"[Ii]nput should|Section|dict\[|<class|valid \w+ or", output), output
        if not isinstance(bad, dict):
            lines = [line.strip() for line in output.splitlines()]
            assert sum(line.startswith(f"{key}=") for line in lines) <= 1, output


PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
FOLDER = Path(__file__).parent / "other_trainers"  # by tools/other_trainers_keys.py
RELEASED = {  # settings with their defaults as JSON
    name: dict(line.split(" ", 1) for line in (FOLDER / f"{name}.txt").read_text().splitlines())
    for name in ("verl-0.9.1", "trl-1.16.0")
}


@pytest.mark.parametrize(("title", "table"), [("verl", VERL), ("TRL", TRL)])
def test_page_has_the_settings_that_errors_name(title, table):
    """Each row: their key and its default, our setting, and the present default of ours."""
    text = PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip().replace("`", "") for cell in row] for row in rows]
    ours = {key: here for key, _, here, _, _ in cells}
    known = {key: "none" if here.startswith(NONE) else here for key, here in table.items()}
    assert len(ours) > 10 and ours.items() <= known.items()  # those that differ
    values = parse_config({"model": {"path": "m"}, "data": {"train": "t"}, "lora": {},
                           "optimizer": {"learning_rate": 1e-4}}).model_dump()  # fmt: skip
    values["optimizer"]["learning_rate"] = 1e-6  # the default; with lora it has to be changed
    released = next(one for name, one in RELEASED.items() if name.startswith(title.lower()))
    for key, theirs, here, default, _ in cells:
        if theirs:
            recorded = json.loads(released[key])
            assert yaml.safe_load(theirs.partition(":")[0]) == recorded, key
        if here in valid_keys(Config) and re.fullmatch(r"[\d.e-]+|[a-z_]+", default):
            value = values
            for part in here.split("."):
                value = value[part]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            assert (float(default) == value) if is_number else (default == str(value).lower()), key


@pytest.mark.parametrize("name", RELEASED)
def test_each_setting_of_released_configs_is_answered(name):
    """Alone and as nested sections: by its own row, or by the nearest section above it.

    Sections with a row do not hide the rows of their settings.
    """
    table, nested = (VERL if name.startswith("verl") else TRL), {}
    for key in RELEASED[name]:
        if key in valid_keys(Config):  # the same there, such as seed
            continue
        above = [row for row in table if f"{key}.".startswith(f"{row}.")]
        assert above, key
        row = max(above, key=len)
        assert (
            f" {row} " in unknown_keys(key, 1)[0]
            and table[row].removeprefix(NONE) in (unknown_keys(key, 1)[0])
        )
        set_dotted(nested, key, 1)
        nested.setdefault("rows of", {})[row] = None
    rows = nested.pop("rows of")
    found = [line for root, value in nested.items() for line in unknown_keys(root, value)]
    assert all(any(f"'s {row} " in line for line in found) for row in rows)


def test_command_of_another_trainer_is_answered():
    """As it is pasted: verl's words with Hydra's signs, TRL's options with and without `=`."""
    words = [
        "a.yaml",
        "++actor_rollout_ref.actor.megatron.context_parallel_size=2",
        "trainer.steps=3",
    ]
    assert [line.partition(" (")[0].split()[-1] for line in answer_command(words)] == [
        "parallel.context"
    ]
    words = ["--num_iterations", "2", "--max_steps=4", "--num_iterations", "2"]
    assert [line.partition(" (")[0].split()[-1] for line in answer_command(words)] == [
        "trainer.epochs", "trainer.steps",
    ]  # fmt: skip


def test_settings_named_for_others_exist():
    free = ("objective.", "rollout.engine.", "data.mix", "eval.sets",
            "data.template_arguments.")  # fmt: skip
    for theirs, ours in [*VERL.items(), *TRL.items()]:
        for key in re.findall(
            r"\b[a-z]+\.[a-z_0-9.]+[a-z_0-9]", re.sub(r"\S+\.(md|jsonl)\b", "", ours)
        ):
            is_theirs = key in VERL  # in a formula
            assert key in valid_keys(Config) or key.startswith(free) or is_theirs, (theirs, key)


PAIRS = [(name, other) for name, one in FEATURES.items() for other in one.refuses]


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_features_that_exclude_each_other_are_refused(tmp_path, name, other):
    """One error names both settings and the reason; each of the two alone is accepted."""
    file, refused = write(tmp_path, MINIMAL), FEATURES[name].refuses[other]
    both = [*FEATURES[name].example, *FEATURES[other].example]
    with pytest.raises(ConfigError) as error:
        load_config(file, both)
    keys = (FEATURES[name].key.split(".")[0], FEATURES[other].key.split(".")[0])
    assert any(
        refused in line and "unset one of them" in line and all(key in line for key in keys)
        for line in str(error.value).splitlines()
    )


@pytest.mark.parametrize("name", FEATURES)
def test_feature_alone_is_on_and_no_other_is_in_its_way(tmp_path, name):
    assert not FEATURES[name].setting(load_config(write(tmp_path, MINIMAL)))
    config = load_config(write(tmp_path, MINIMAL), FEATURES[name].example)
    assert FEATURES[name].key.split(".")[0] in FEATURES[name].setting(config)
    assert not combination_problems(config)
