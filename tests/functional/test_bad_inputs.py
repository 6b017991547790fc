"""Every invalid input gives one error with value, rule and fix, before anything is created."""

import sys

import pytest

from megatron_rl.cli import main
from megatron_rl.commands import evaluate, train
from tests.functional.bad_inputs import CASES, make_folder, parquet
from tests.functional.tiny_runs import TASK, make_task

MAX_LINES = 12


@pytest.fixture(scope="module", autouse=True)
def tiny_task():
    make_task()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Create a first user's folder, and make starting a rank fail the test."""

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
