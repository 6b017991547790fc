"""Impossible inputs give one clear error before any long work, and a non-zero exit status."""

import json
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megatron_rl.cli import main
from megatron_rl.config import ConfigError, load_config
from megatron_rl.models.shape import read_model_shape
from megatron_rl.preflight.settings import check_settings
from megatron_rl.rollouts.prompt_sets import share_prompt_sets
from megatron_rl.trainer.build import run_training
from tests.functional.tiny_runs import CONFIG, TASK, make_task, start_training


@pytest.fixture(scope="module", autouse=True)
def tiny_task():
    make_task()


@pytest.fixture(autouse=True)
def no_wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed


def train_error(capsys, *overrides):
    """Run `megatron-rl train`, which must exit with status 1; returns its standard error."""
    with pytest.raises(SystemExit) as end:
        main(["train", "--config", str(CONFIG), *absolute(), *overrides])
    assert end.value.code == 1
    output = capsys.readouterr().err
    assert output.count("error:") == 1 and "Traceback" not in output
    return output


def absolute():
    """Return the quickstart's files as absolute paths, for any working directory."""
    settings = yaml.safe_load(CONFIG.read_text())
    assert settings["model"]["path"] == ".cache/tiny_task/model"
    return [
        f"model.path={TASK}/model",
        f"data.train={TASK}/train.parquet",
        f"eval.sets.heldout={TASK}/heldout.parquet",
    ]


@pytest.mark.parametrize(
    ("overrides", "output"),
    [
        (
            ["rollout.tensor=4"],
            "rollout.tensor=4: vLLM's tensor parallel size 4 does not divide the 2 ranks",
        ),
        (["model.path=/nowhere"], "/nowhere is not a folder"),
        (["objective.nam=gspo"], "objective 'pnpo' has no option 'nam'; did you mean 'name'?"),
        (["objective.constraint={lo: 1}"], "no option 'lo'; did you mean 'low'"),
        (["objective={name: oapl}"], "set advantage.estimator=optimal_value"),
        (["objective={name: sao}"], "sao needs ratios to the engine's log-probs"),
        (["model.reference=/nowhere"], "no effect with objective.name=pnpo without objective.kl"),
        (["model.transformer_engine=true"], "model.transformer_engine=true: needs a CUDA device"),
        (["model.fp8=tensorwise"], "model.fp8=tensorwise: needs Transformer Engine, which is not"),
        (["model.fp8=delayed"], "model.fp8='delayed'"),
        (
            ["model.fp8=blockwise", "model.transformer_engine=false", "trainer.dtype=float32"],
            "model.fp8=blockwise: needs Transformer Engine, but model.transformer_engine is false",
        ),
        (["parallel.virtual_stages=2"], "but parallel.pipeline is 1"),
        (["parallel.virtual_stages=2", "parallel.pipeline=2"], "the model's 2 layers; every chunk"),
        (["parallel.expert=2"], "the model has no experts"),
        (["parallel.expert_tensor=1"], "parallel.expert_tensor=1, but the model has no experts"),
        (["parallel.stage_layers=[1]"], "parallel.stage_layers=[1] must list the layers of 1"),
        (["parallel.tensr=2"], "did you mean parallel.tensor?"),
        (["trainer.steps=true"], "trainer.steps=true: "),
        (["run.name=.."], "run.name='..'"),
        (["parallel.tp=2"], "parallel.tp: unknown key; valid here: parallel.tensor"),
    ],
)
def test_train_rejects_impossible_settings(capsys, tmp_path, overrides, output):
    assert output in train_error(capsys, f"run.dir={tmp_path}", *overrides)
    assert not list(tmp_path.iterdir())  # nothing was created


def test_train_reports_all_problems_together(capsys, tmp_path):
    (tmp_path / "prompts").mkdir()
    output = train_error(
        capsys, f"run.dir={CONFIG}", f"model.path={tmp_path}/prompts", "data.train=/nowhere",
        "logging.wandb=p",
    )  # fmt: skip
    for problem in (
        "model.path:", "config.json does not exist", "no tokenizer", "data.train: /nowhere",
        "wandb is not installed",
    ):  # fmt: skip
        assert problem in output
    output = train_error(
        capsys, "parallel.tensr=4", "model.reference=/nowhere", "objective.name=pnpoo"
    )
    for problem in ("did you mean parallel.tensor", "did you mean 'pnpo'"):
        assert problem in output
    output = train_error(
        capsys, f"run.dir={CONFIG}", "parallel.tensor=4", "model.reference=/nowhere",
        "objective.kl={coefficient: 0.1}",
    )  # fmt: skip
    for problem in ("2 attention heads", "/nowhere/config", "is not a writable folder"):
        assert problem in output


def test_check_settings_process_count_must_match_layout(tmp_path):
    config = load_config(CONFIG, [*absolute(), f"run.dir={tmp_path}", "run.name=a"])
    with pytest.raises(ValueError, match="3 processes do not fit tensor 1"):
        check_settings(config, world_size=3)


def test_train_rejects_full_disk(capsys, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    output = train_error(capsys, f"run.dir={tmp_path}")
    # (110,400 parameters x 16 bytes + one rollout batch of 84 KiB) x 3 = 5.3 MiB, x 4 = 431 KiB
    assert "has 1000 bytes free but the run needs" in output
    assert "5.3 MiB for 2 + 1 checkpoints" in output, output
    assert "431.2 KiB for the model" in output, output


def test_train_missing_file_names_working_directory(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = train_error(capsys, f"run.dir={tmp_path}", "data.train=nowhere.parquet")
    assert f"data.train: {tmp_path}/" in output
    assert "(relative paths start at the folder of the command)" in output


def test_train_keeps_existing_run(capsys, tmp_path):
    (tmp_path / "a").mkdir()
    config = load_config(CONFIG, [*absolute(), "run.name=a"])
    from megatron_rl.runs.directory import RunDirectory

    RunDirectory(tmp_path / "a").create(config)
    (tmp_path / "a" / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n")
    output = train_error(capsys, f"run.dir={tmp_path}", "run.name=a")
    assert "already contains a run; set run.resume=auto" in output


def rank_error(*overrides):
    """Return the error of the checks that a rank makes on its own."""
    config = load_config(CONFIG, [*absolute(), "run.name=a", *overrides])
    with pytest.raises(ValueError) as error:
        run_training(config, rank=0, world_size=2)
    return str(error.value)


def prompt_error(folder, *overrides):
    """Return the error of reading the prompts."""
    config = load_config(CONFIG, [*absolute(), *overrides])
    shape = read_model_shape(config.model.path)
    with (
        pytest.raises(ConfigError) as error,
        share_prompt_sets(config, shape, folder / "prompts", echo=print),
    ):
        pass
    assert not (folder / "prompts").exists()
    return str(error.value)


def test_rank_rejects_invalid_prompts(tmp_path):
    assert "more than data.max_prompt_tokens=10" in prompt_error(
        tmp_path, "data.max_prompt_tokens=10"
    )
    output = prompt_error(tmp_path, "rollout.prompts_per_step=8000")
    assert "8000 prompts cannot be drawn from a set of 4096" in output


def test_missing_folder_gives_no_download_command(capsys, tmp_path):
    output = train_error(capsys, f"run.dir={tmp_path}", f"model.path={tmp_path}/a/b")
    assert "hf download" not in output


def test_train_rejects_truncated_weights(tmp_path):
    shutil.copytree(TASK / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    output = rank_error(f"run.dir={tmp_path}", f"model.path={tmp_path}/model")
    assert "model.safetensors is not a complete safetensors file" in output


def test_train_with_lost_checkpoint_does_not_start_again(capsys, tmp_path):
    from megatron_rl.runs.directory import RunDirectory

    config = load_config(CONFIG, [*absolute(), "run.name=a"])
    directory = RunDirectory(tmp_path / "a")
    directory.create(config)
    steps = config.trainer.checkpoint_every + 1
    rows = "".join(json.dumps({"step": step}) + "\n" for step in range(steps + 1))
    (tmp_path / "a" / "metrics.jsonl").write_text(rows)
    arguments = (f"run.dir={tmp_path}", "run.name=a", "run.resume=auto")
    assert f"recorded {steps} steps, but its newest intact checkpoint is of step 0" in train_error(
        capsys, *arguments
    )
    directory.checkpoints.folder(8).mkdir()
    assert "step_000008: trainer.json cannot be read" in train_error(capsys, *arguments)
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == rows  # nothing was lost


def test_rank_rejects_missing_chat_template(tmp_path):
    shutil.copytree(TASK / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert "no chat template" in prompt_error(tmp_path, f"model.path={tmp_path}/model")


def test_invalid_late_row_ends_all_ranks_with_one_error(tmp_path):
    """The command reads only the first thousand rows, so that a rank finds the error."""
    rows = pq.read_table(TASK / "train.parquet").to_pylist()
    rows[2000]["prompt"][0]["content"] += " 1 + 1" * 50
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "late.parquet")
    process = start_training(
        f"run.dir={tmp_path}", "run.name=a", f"data.train={tmp_path}/late.parquet"
    )
    assert process.wait(timeout=300) == 1
    output = process.read()
    assert output.count("error:") == 1 and "Traceback" not in output, output
    assert "row 2000: the prompt has" in output and "more than data.max_prompt_tokens=48" in output
