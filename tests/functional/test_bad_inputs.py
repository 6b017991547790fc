"""Every invalid input gives one error with value, rule and fix, before anything is created."""

import json
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.cli import main
from megatron_rl.commands import evaluate, train
from megatron_rl.config import load_config
from megatron_rl.preflight import trials
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.trainer.build import run_training
from tests.functional.bad_inputs import CASES, VALID_REWARD, cut, make_folder, parquet
from tests.functional.tiny_runs import TASK, make_task, start_training

MAX_LINES = 12


@pytest.fixture(scope="module", autouse=True)
def tiny_task():
    make_task()


class SharedPool(VerifierPool):
    """The processes of a valid reward, which later cases try again instead of starting others."""

    def __exit__(self, *error):
        pass  # its fixture closes it


@pytest.fixture(scope="module")
def pools():
    made = {}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture
def place(tmp_path, monkeypatch, pools):
    """Create a first user's folder, and make starting a rank fail the test.

    The folder's own valid reward is loaded once; a case's own reward is, in each case.
    """

    def share_valid(reward, workers, *, echo):
        if reward.verifier != VALID_REWARD:
            return VerifierPool(reward, workers, echo=echo)
        settings = reward.model_dump_json() + workers.model_dump_json()
        if settings not in pools:
            pools[settings] = SharedPool(reward, workers, echo=echo)
        return pools[settings]

    monkeypatch.setattr(trials, "VerifierPool", share_valid)

    def start(*arguments, **where):
        raise AssertionError(
            "a rank was started although the command could have rejected the input"
        )

    for module in (train, evaluate):
        monkeypatch.setattr(module, "start_processes", start)
        monkeypatch.setattr(module, "leave", sys.exit)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "work"
    make_folder(folder, TASK / "model")
    monkeypatch.chdir(folder)
    return folder


def contents(folder):
    """Return every file with its bytes, except Python's caches of the user's modules."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def run(command, capsys):
    """Run `megatron-rl COMMAND`; returns its exit status and standard error."""
    with pytest.raises(SystemExit) as end:
        main(command)
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize("name", CASES)
def test_invalid_input_gives_one_error_and_changes_nothing(name, place, capsys):
    case = CASES[name]
    case.prepare(place)
    before = contents(place)
    status, output = run(case.command, capsys)
    missing = [part for part in case.output if part not in output]
    assert not missing, f"{missing} not in:\n{output}"
    assert status == case.status
    assert output.count("error:") == 1 and "Traceback" not in output, output
    assert len(output.splitlines()) <= MAX_LINES, output
    assert "site-packages" not in output and "megatron_rl/" not in output, output
    assert contents(place) == before


def test_valid_folder_starts(place, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(train, "start_processes", lambda *a, **b: started.append(1) or 0)
    status, output = run(["train", "--config", "run.yaml"], capsys)
    assert (status, started) == (0, [1]), output


def test_rollouts_with_token_ids_need_no_chat_template(place, capsys, monkeypatch):
    (place / "model" / "chat_template.jinja").unlink()
    parquet("mine.parquet", {
        "prompt": ["1 + 1"] * 2, "prompt_token_ids": [[1, 2]] * 2, "response": ["2"] * 2,
        "token_ids": [[3, 4]] * 2, "reward": [1.0, 0.0],
    })(place)  # fmt: skip
    monkeypatch.setattr(train, "start_processes", lambda *a, **b: 0)
    status, output = run(["train", "run.yaml", "offline.rollouts=mine.parquet"], capsys)
    assert status == 0, output


def test_base_model_with_raw_prompts_starts(place, capsys, monkeypatch):
    (place / "model" / "chat_template.jinja").unlink()
    monkeypatch.setattr(train, "start_processes", lambda *a, **b: 0)
    assert run(["train", "--config", "run.yaml", "data.template=raw"], capsys)[0] == 0


def test_all_problems_are_reported_together(place, capsys):
    (place / "empty").mkdir()
    _, output = run(
        ["train", "run.yaml", "run.dir=run.yaml", "model.path=empty", "data.train=nowhere.jsonl",
         "logging.wandb=p"], capsys,
    )  # fmt: skip
    for problem in (
        "model.path:", "config.json does not exist", "no tokenizer", "nowhere.jsonl does not exist",
        "wandb is not installed", "is not a writable folder",
    ):  # fmt: skip
        assert problem in output
    assert "hf download" not in output  # a folder is no name of the hub


def test_full_disk_is_refused(place, capsys, monkeypatch):
    usage = shutil.disk_usage(place)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    status, output = run(["train", "run.yaml"], capsys)
    assert status == 1 and "has 1000 bytes free but the run needs" in output


def test_existing_run_is_kept(place, capsys):
    """Not overwritten, and not begun again where its checkpoints are lost."""
    config = load_config(place / "run.yaml")
    directory, metrics = RunDirectory(place / "runs" / "a"), place / "runs" / "a" / "metrics.jsonl"
    directory.create(config)
    directory.record_save(config.trainer.checkpoint_every)
    steps = config.trainer.checkpoint_every + 1
    metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(steps + 1)))
    before = metrics.read_bytes()
    _, output = run(["train", "run.yaml"], capsys)
    assert "already contains a run; set run.resume=auto" in output
    _, output = run(["train", "run.yaml", "run.resume=auto"], capsys)
    assert f"recorded {steps} steps, but its newest intact checkpoint is of step 0" in output
    directory.checkpoints.folder(8).mkdir()
    _, output = run(["train", "run.yaml", "run.resume=auto"], capsys)
    assert "step_000008: trainer.json cannot be read" in output
    assert metrics.read_bytes() == before


def test_rank_checks_the_weights_itself(place):
    cut("model/model.safetensors", -100)(place)
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        run_training(load_config(place / "run.yaml"), rank=0, world_size=2)


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
