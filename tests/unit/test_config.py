"""Configs: defaults, overrides, and every error at once."""

import re

import pytest

from megatron_rl.config import (
    Config,
    ConfigError,
    dump_config,
    load_config,
    valid_keys,
    with_absolute_paths,
)

MINIMAL = "model: {path: m}\ndata: {train: t.parquet}\n"


def write(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


def test_defaults_are_the_published_configuration(tmp_path):
    config = load_config(write(tmp_path, MINIMAL))
    # Appendix C of the PNPO paper: 256 prompts x 8, minibatches of 64 groups = 4 per epoch,
    # lr 1e-6, 10 warm-up steps, weight decay 0.1, evaluation 32 samples at 0.7 / top-p 0.9.
    assert (config.rollout.prompts, config.rollout.responses_per_prompt) == (256, 8)
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


def test_overrides_win_and_yaml_floats_without_a_point_are_numbers(tmp_path):
    file = write(tmp_path, MINIMAL + "optimizer: {learning_rate: 3e-6}\n")  # YAML 1.1: a string
    config = load_config(file, ["optimizer.weight_decay=1e-2", "parallel.context=2", "seed=7"])
    assert config.optimizer.learning_rate == 3e-6
    assert (config.optimizer.weight_decay, config.parallel.context, config.seed) == (0.01, 2, 7)


def test_every_error_comes_at_once_with_the_nearest_key(tmp_path):
    text = MINIMAL + "parallel: {contxt: 2}\nseed: -1\nmodle: {path: x}\ntrainer: {epoch: 1}\n"
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, text), ["trainer.steps=abc"])
    message = str(error.value)
    assert "parallel.contxt: unknown key; did you mean parallel.context?" in message
    assert "trainer.epoch: unknown key; did you mean trainer.epochs?" in message
    assert "modle: unknown key; did you mean model?" in message
    assert "trainer.steps='abc'" in message and "seed=-1" in message


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("seed: 1\n", [], "model.path: missing"),
        (MINIMAL, ["rollout.prompts=10"], "rollout.prompts=10 cannot be split into"),
        (MINIMAL, ["optimizer.min_learning_rate=1"], "min_learning_rate is above"),
        (MINIMAL, ["rollout.top_p=0.9"], "rollout.top_p: unknown key"),
        (
            MINIMAL,
            ["advantage.estimator=leave_one_out", "advantage.std=none"],
            "advantage.std=none: advantage.estimator=leave_one_out divides by none",
        ),
        (
            MINIMAL,
            ["eval={samples: 6, sets: {a: a.parquet}}", "trainer.keep_best=eval/a/pass@3"],
            "no score of this run's evaluations; give true, or eval_macro or eval/a with "
            "/avg@6, /pass@2, /pass@4, /pass@6, /maj@6",
        ),
        (MINIMAL, ["advantage.beta=0.5"], "group_relative has no beta"),
        (MINIMAL, ["optimizer.min_learning_rate=1e-7"], "constant rate never comes down to it"),
        (MINIMAL, ["eval.sets={math/x: a.parquet}"], "eval.sets.math/x"),
        (MINIMAL, ["eval.sets={a: 3}"], "eval.sets.a=3: must be a path, or a mapping of path and"),
        (
            MINIMAL,
            ["data.template_arguments={tokenize: true}"],
            "tokenize: not of the template, the run sets it; remove it",
        ),
        (MINIMAL, ["optimizer.beta1=1.0"], "optimizer.beta1=1.0: input should be less than 1"),
        (MINIMAL, ["rollout.memory_fraction=0"], "rollout.memory_fraction=0: input should be gre"),
        (MINIMAL, ["rollout.responses_per_prompt=1"], "rollout.responses_per_prompt=1"),
        (MINIMAL, ["run.name=a/b"], "'^[A-Za-z0-9][A-Za-z0-9._-]*$'"),  # capitals as they are
        (MINIMAL, ["lag.in_flight=8"], "set behavior=engine, or cache: recompute"),
        (MINIMAL, ["lag.in_flight=0"], "lag.in_flight=0: give a number of tokens from 1"),
        (MINIMAL, ["lag.in_flight={every_tokens: 8, cache: drop}"], "or cache: recompute"),
        (
            MINIMAL,
            ["behavior=engine", "lag.in_flight=8", "lag.publish_every=2"],
            "lag.publish_every=2 and lag.in_flight both say when",
        ),
        (
            MINIMAL,
            ["behavior=engine", "lag.in_flight=8", "rollout.stop=[x]"],
            "rollout.stop: a text may begin before weights change",
        ),
        (
            MINIMAL,
            ["eval.sets={a: b}", "eval.every=5", "lag.publish_every=2"],
            "eval.every=5: the engine has the present weights every lag.publish_every=2",
        ),
        (MINIMAL, ["replay.capacity=2"], "nothing is drawn again while replay.fresh is 1"),
        (MINIMAL, ["replay={fresh: 0.001, capacity: 9}"], "is no number of groups between"),
        (MINIMAL, ["seed"], "not of the form key=value"),
        ("- a\n- b\n", [], "must hold a mapping"),
        ("a: [\n", [], "not valid YAML"),
    ],
)
def test_wrong_values_name_the_cure(tmp_path, text, overrides, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(write(tmp_path, text), overrides)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config("nowhere.yaml")


def test_the_printed_config_reads_back_to_the_same_config(tmp_path):
    config = load_config(write(tmp_path, MINIMAL), ["eval.sets.aime=a.parquet", "seed=3"])
    again = load_config(write(tmp_path, dump_config(config)))
    assert again == config


def test_a_set_is_a_path_or_a_path_with_columns(tmp_path):
    """What is written is the shorter form; columns fall back to those of all sets."""
    own = {"path": "b", "columns": {"prompt": "q", "answer": "a", "source": None}}
    given = [
        "eval.sets={a: a.parquet, b: {path: b, columns: {prompt: q, answer: a}}, c: {path: c}}"
    ]
    config = load_config(write(tmp_path, MINIMAL), given)
    assert config.model_dump()["eval"]["sets"] == {"a": "a.parquet", "b": own, "c": "c"}
    prompts = {key: columns.prompt for key, (_, columns) in config.evaluation_files.items()}
    assert prompts == {"eval.sets.a": "prompt", "eval.sets.b": "q", "eval.sets.c": "prompt"}
    assert with_absolute_paths(config).eval == config.eval


def test_the_stable_keys_exist():
    stable = {
        "parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.data",
        "rollout.tensor", "rollout.prompts", "rollout.responses_per_prompt", "objective.name",
        "trainer.steps", "trainer.epochs", "trainer.minibatches", "run.dir", "run.name", "seed",
    }  # fmt: skip
    assert stable <= set(valid_keys(Config))


def test_paths_hold_in_every_folder_from_the_start(tmp_path, monkeypatch):
    """A run is continued and converted from elsewhere; what does not exist keeps its name."""
    (tmp_path / "here").mkdir()
    (tmp_path / "t.parquet").touch()
    monkeypatch.chdir(tmp_path / "here")
    overrides = [
        "data.train=../t.parquet",
        "eval.sets={a: ../t.parquet}",
        "model.path=Qwen/Qwen3-8B",
    ]
    config = with_absolute_paths(load_config(write(tmp_path, MINIMAL), overrides))
    assert config.data.train == config.eval.sets["a"].path == str(tmp_path / "t.parquet")
    assert config.run.dir == str(tmp_path / "here" / "runs")
    assert config.model.path == "Qwen/Qwen3-8B"  # a message names it as it was given
    monkeypatch.chdir(tmp_path)
    assert with_absolute_paths(config) == config
