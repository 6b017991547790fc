"""`megatron_rl.train`: what it takes, how a notebook's function reaches workers, how it ends."""

import subprocess
import sys

import pytest

import megatron_rl
from megatron_rl import python_api
from megatron_rl.config import ConfigError, parse_config
from megatron_rl.config.sections import RewardSection
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import MATH_ANSWER, Item
from megatron_rl.types import GradeResult

SETTINGS = {"model": {"path": "none"}, "data": {"train": "none.jsonl"}}


def module_reward(text, ground_truth, data_source):
    return 0.5


def test_importing_package_imports_no_library():
    program = (
        "import sys, megatron_rl; print(sorted({'torch', 'pydantic', 'vllm'} & {*sys.modules}))"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_wrong_settings_are_errors_of_this_process(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.stps: unknown key; did you mean"):
        megatron_rl.train(SETTINGS | {"trainer": {"stps": 3}})
    with pytest.raises(ConfigError, match=r"learning_rate=-1e-06: must be above 0"):
        megatron_rl.train(
            {"model": {"path": tmp_path}, "data": SETTINGS["data"],
             "optimizer": {"learning_rate": -1e-6}}
        )  # fmt: skip
    (tmp_path / "my.yaml").write_text("model: {path: m}\n")
    with pytest.raises(ConfigError, match=r"data\.train: missing"):
        megatron_rl.train(tmp_path / "my.yaml")
    with pytest.raises(
        TypeError, match=r"reward must be a function, got 'm:f'; .*reward\.verifier"
    ):
        megatron_rl.train(SETTINGS, reward="m:f")


def test_failed_start_raises_printed_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = parse_config(SETTINGS)
    with pytest.raises(RuntimeError, match=r"(?s)exit status 1:.*model.path: .*/none is not a f"):
        megatron_rl.train(config, overrides=["run.name=a"])
    assert "/none.jsonl does not exist" in capsys.readouterr().out


def test_copied_function_changes_its_module_with_source_and_values(tmp_path):
    def first_line(weight):
        def score(text, ground_truth, data_source):
            return weight

        python_api._name_reward(score, tmp_path)
        return (tmp_path / "reward_from_python.py").read_text().splitlines()[0]

    assert first_line(0.8) == first_line(0.8) != first_line(0.7)  # a file that a run compares


def test_module_function_is_named_and_local_function_is_copied(tmp_path, monkeypatch):
    assert python_api._name_reward(module_reward, tmp_path) == f"{__name__}:module_reward"
    from megatron_rl.rewards.math_answer import verify_math_answer

    assert python_api._name_reward(verify_math_answer, tmp_path) == MATH_ANSWER
    weights = {"length": 0.25}

    def score(text, ground_truth, data_source, row):
        return {"length": weights["length"] * len(text), "level": row["level"]}

    name = python_api._name_reward(score, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as for the processes of the run
    with VerifierPool(RewardSection(verifier=name)) as pool:
        grade_results = pool.verify_all([Item("abcd", "", "", '{"level": 2}')])
    assert grade_results == [
        GradeResult(3.0, "scored", None, rewards={"length": 1.0, "level": 2.0})
    ]


def test_interrupt_is_forwarded_once_and_run_saves(monkeypatch, capsys, tmp_path):
    """A notebook's stop button raises KeyboardInterrupt wherever this process is."""
    program = """import signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(75)))
print("ready")
signal.pause()
"""
    monkeypatch.setattr(python_api, "_PROGRAM", program)
    printed = []

    def print_and_interrupt(line, **_):
        printed.append(line)
        if line == "ready\n":
            raise KeyboardInterrupt

    monkeypatch.setattr(python_api, "print", print_and_interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        megatron_rl.train(SETTINGS, overrides=[f"run.dir={tmp_path}"])
    assert printed == ["ready\n", "saved\n"]
    monkeypatch.setattr(python_api, "_PROGRAM", "import sys; sys.exit(75)")  # ended by a signal
    with pytest.raises(RuntimeError, match=r"interrupted; train again with run\.resume=auto"):
        megatron_rl.train(SETTINGS, overrides=[f"run.dir={tmp_path}"])
