"""Every impossible input gives one clear error before any long work, and a non-zero exit code."""

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
from megatron_rl.trainer.build import run_training
from megatron_rl.trainer.prompt_sets import read_prompt_sets
from tests.functional.tiny_runs import CONFIG, TASK, make_task, start_training_anew


@pytest.fixture(scope="module", autouse=True)
def tiny_task():
    make_task()


@pytest.fixture(autouse=True)
def no_wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed


def refusal(capsys, *overrides):
    """What `megatron-rl train` says on standard error when it refuses; it must exit with 1."""
    with pytest.raises(SystemExit) as end:
        main(["train", "--config", str(CONFIG), *absolute(), *overrides])
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and "Traceback" not in said
    return said


def absolute():
    """The quickstart's files, wherever the test is started."""
    settings = yaml.safe_load(CONFIG.read_text())
    assert settings["model"]["path"] == ".cache/tiny_task/model"
    return [
        f"model.path={TASK}/model",
        f"data.train={TASK}/train.parquet",
        f"eval.sets.heldout={TASK}/heldout.parquet",
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.tensor=4"], "parallel.tensor=4 does not divide the model's 2 attention heads"),
        (["parallel.pipeline=3"], "parallel.pipeline=3 does not divide the model's 2 layers"),
        (
            ["rollout.tensor=4"],
            "rollout.tensor=4: vLLM's tensor parallel size 4 does not divide 2 ranks",
        ),
        (["rollout.max_response_tokens=4000"], "exceed the model's"),
        (["model.path=/nowhere"], "/nowhere is not a folder"),
        (["data.train=/nowhere.parquet"], "/nowhere.parquet does not exist"),
        (["objective.name=pnpoo"], "did you mean 'pnpo'"),
        (["objective.nam=gspo"], "objective 'pnpo' has no option 'nam'; did you mean 'name'?"),
        (["objective.constraint={lo: 1}"], "no option 'lo'; did you mean 'low'"),
        (["objective={name: oapl}"], "set advantage.estimator=optimal_value"),
        (["objective={name: sao}"], "sao takes its ratio to the engine's log-probs"),
        (["model.reference=/nowhere"], "the objective has no KL term"),
        (
            ["model.reference=/nowhere", "objective.kl={coefficient: 0.1}"],
            "model.reference: /nowhere/config.json does not exist",
        ),
        (["model.transformer_engine=true"], "model.transformer_engine=true: needs a CUDA device"),
        (["model.fp8=tensorwise"], "model.fp8=tensorwise: needs Transformer Engine, which is not"),
        (["model.fp8=delayed"], "model.fp8='delayed'"),
        (
            ["model.fp8=blockwise", "model.transformer_engine=false", "trainer.dtype=float32"],
            "model.fp8=blockwise: needs Transformer Engine, and model.transformer_engine is false",
        ),
        (["parallel.virtual_stages=2"], "but parallel.pipeline is 1"),
        (["parallel.virtual_stages=2", "parallel.pipeline=2"], "the model's 2 layers; every chunk"),
        (["parallel.expert=2"], "the model has no experts"),
        (["reward.verifier=my_rewards"], "reward.verifier=my_rewards: name it as module:function"),
        (["reward.verifier=my_rewards:score"], "there is no module my_rewards here or on the"),
        (["logging.wandb={project: p}"], "logging.wandb is set but wandb is not installed"),
        (["parallel.tensr=2"], "did you mean parallel.tensor?"),
        (["trainer.minibatches=7"], "cannot be split into trainer.minibatches=7"),
        (["trainer.steps=true"], "trainer.steps=True: "),
        (["optimizer.learning_rate=.inf"], "optimizer.learning_rate=inf"),
        (["run.name=.."], "run.name='..'"),
        (["parallel.tp=2"], "parallel.tp: unknown key; valid here: parallel.tensor"),
        ([f"run.dir={CONFIG}"], "is not a folder that can be written"),
    ],
)
def test_impossible_settings(capsys, tmp_path, overrides, said):
    assert said in refusal(capsys, f"run.dir={tmp_path}", *overrides)
    assert not list(tmp_path.iterdir())  # nothing was begun


def test_all_problems_come_at_once(capsys, tmp_path):
    (tmp_path / "prompts").mkdir()
    said = refusal(
        capsys, f"run.dir={CONFIG}", f"model.path={tmp_path}/prompts", "data.train=/nowhere",
        "logging.wandb={project: p}",
    )  # fmt: skip
    for problem in (
        "model.path:", "config.json does not exist", "no tokenizer", "data.train: /nowhere",
        "wandb is not installed",
    ):  # fmt: skip
        assert problem in said
    said = refusal(capsys, "parallel.tensr=4", "model.reference=/nowhere", "objective.name=pnpoo")
    for problem in ("did you mean parallel.tensor", "did you mean 'pnpo'"):
        assert problem in said
    said = refusal(
        capsys, f"run.dir={CONFIG}", "parallel.tensor=4", "model.reference=/nowhere",
        "objective.kl={coefficient: 0.1}",
    )  # fmt: skip
    for problem in ("2 attention heads", "/nowhere/config", "is not a folder that can be written"):
        assert problem in said


def test_the_number_of_processes_must_be_the_layouts(tmp_path):
    config = load_config(CONFIG, [*absolute(), f"run.dir={tmp_path}", "run.name=a"])
    with pytest.raises(ValueError, match="3 processes cannot hold tensor 1"):
        check_settings(config, world_size=3)


def test_an_unsupported_architecture_is_named(capsys, tmp_path):
    shutil.copytree(TASK / "model", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"architectures": ["MambaForCausalLM"]})
    )
    said = refusal(capsys, f"model.path={tmp_path}/model")
    assert "architecture MambaForCausalLM is not supported" in said


def test_no_free_disk(capsys, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    said = refusal(capsys, f"run.dir={tmp_path}")
    # 110,400 parameters x 16 bytes x 3 = 5.1 MiB, x 4 = 431 KiB
    assert "has 1000 bytes free but the run needs" in said
    assert "5.1 MiB for 2 + 1 checkpoints" in said and "431.2 KiB for the model" in said


def test_an_existing_run_is_kept(capsys, tmp_path):
    (tmp_path / "a").mkdir()
    config = load_config(CONFIG, [*absolute(), "run.name=a"])
    from megatron_rl.runs.directory import RunDirectory

    RunDirectory(tmp_path / "a").create(config)
    (tmp_path / "a" / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n")
    said = refusal(capsys, f"run.dir={tmp_path}", "run.name=a")
    assert "already holds a run; set run.resume=auto" in said


def refused_by_a_rank(*overrides):
    """The error of what a rank checks before it meets the others."""
    config = load_config(CONFIG, [*absolute(), "run.name=a", *overrides])
    with pytest.raises(ValueError) as error:
        run_training(config, rank=0, world_size=2)
    return str(error.value)


def refused_prompts(*overrides):
    """The error of the rank that reads the prompts."""
    config = load_config(CONFIG, [*absolute(), *overrides])
    with pytest.raises(ConfigError) as error:
        read_prompt_sets(config, read_model_shape(config.model.path))
    return str(error.value)


def test_bad_prompts(capsys, tmp_path):
    pq.write_table(pa.table({"question": ["1+1"]}), tmp_path / "columns.parquet")
    # The launcher says so, before any rank is started.
    said = refusal(capsys, f"data.train={tmp_path}/columns.parquet", f"run.dir={tmp_path}/runs")
    assert "data.train: " in said and "has no column prompt, reward_model.ground_truth; it" in said
    assert "more than data.max_prompt_tokens=10" in refused_prompts("data.max_prompt_tokens=10")
    said = refused_prompts("rollout.prompts=8000")
    assert "8000 prompts cannot be drawn from a set of 4096" in said


def test_a_name_of_the_hub_is_answered_by_the_command_that_downloads_it(capsys, tmp_path):
    said = refusal(capsys, f"run.dir={tmp_path}", "model.path=Qwen/Qwen3-8B")
    assert "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B" in said
    said = refusal(capsys, f"run.dir={tmp_path}", f"model.path={tmp_path}/a/b")
    assert "hf download" not in said


def test_weights_cut_short(tmp_path):
    shutil.copytree(TASK / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    said = refused_by_a_rank(f"run.dir={tmp_path}", f"model.path={tmp_path}/model")
    assert "model.safetensors is no complete safetensors file" in said


def test_a_lost_checkpoint_is_not_answered_by_starting_again(capsys, tmp_path):
    from megatron_rl.runs.directory import RunDirectory

    config = load_config(CONFIG, [*absolute(), "run.name=a"])
    directory = RunDirectory(tmp_path / "a")
    directory.create(config)
    steps = config.trainer.checkpoint_every + 1
    rows = "".join(json.dumps({"step": step}) + "\n" for step in range(steps + 1))
    (tmp_path / "a" / "metrics.jsonl").write_text(rows)
    arguments = (f"run.dir={tmp_path}", "run.name=a", "run.resume=auto")
    assert f"recorded {steps} steps, but its newest sound checkpoint is of step 0" in refusal(
        capsys, *arguments
    )
    directory.checkpoints.folder(8).mkdir()
    assert "step_000008: trainer.json cannot be read" in refusal(capsys, *arguments)
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == rows  # nothing was lost


def test_a_tokenizer_without_a_chat_template(capsys, tmp_path):
    shutil.copytree(TASK / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert "no chat template" in refused_prompts(f"model.path={tmp_path}/model")
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    said = refusal(capsys, f"run.dir={tmp_path}", f"model.path={tmp_path}/model")
    assert "model has no tokenizer (no tokenizer.json" in said


def test_every_process_ends_and_one_of_them_speaks(tmp_path):
    process = start_training_anew(f"run.dir={tmp_path}", "run.name=a", "data.max_prompt_tokens=10")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert output.count("error:") == 1 and "Traceback" not in output, output
    assert "more than data.max_prompt_tokens=10" in output
