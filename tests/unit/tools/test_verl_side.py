"""verl's side of the comparison: its command, its log, and reasons why it cannot run."""

import json
import subprocess
import sys

import psutil
import pytest

from tools.benchmarks import against_trl, verl_side

METRICS = {
    "timing_s/step": 9.0, "timing_s/gen": 4.0, "timing_s/old_log_prob": 1.0,
    "timing_s/update_actor": 3.0, "critic/score/mean": 0.5, "response_length/mean": 30.0,
}  # fmt: skip
# Instead of verl's Python: keeps its arguments and writes a log as verl's FileLogger does.
PROGRAM = """#!/bin/bash
printf '%s\\n' "$@" > {arguments}
printf '%s\\n' '{lines}' > "$VERL_FILE_LOGGER_PATH"
"""


def test_run_passes_sizes_and_reads_log(tmp_path, monkeypatch):
    monkeypatch.setattr(verl_side, "VERL", tmp_path)
    assert verl_side.missing(on_cuda=False) == "verl needs CUDA"
    assert "verl_side.py install" in verl_side.missing(on_cuda=True)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    log = [{"step": 0, "data": {"val/score": 1.0}}, {"step": 1, "data": METRICS}]
    lines = "\n".join(map(json.dumps, log))
    python.write_text(PROGRAM.format(arguments=tmp_path / "arguments", lines=lines))
    python.chmod(0o755)
    assert verl_side.missing(on_cuda=True) is None

    settings = against_trl.peer_settings("1.5b", 3)
    result = verl_side.run(tmp_path / "task", settings)
    assert result["rows"] == [
        {"seconds": 9.0, "generate": 4.0, "logprobs": 1.0, "train": 3.0, "reward": 0.5,
         "tokens": 30.0}
    ]  # fmt: skip
    given = (tmp_path / "arguments").read_text().splitlines()
    assert given[:2] == ["-m", "verl.trainer.main_ppo"]
    values = dict(one.split("=", 1) for one in given[2:])
    assert values["data.train_batch_size"] == "32" and values["trainer.total_training_steps"] == "3"
    assert values["actor_rollout_ref.actor.ppo_mini_batch_size"] == "8"  # 32 prompts, 4 minibatches
    assert values["actor_rollout_ref.actor.ppo_epochs"] == "4"
    assert values["actor_rollout_ref.rollout.n"] == "8"
    assert values["reward.custom_reward_function.name"] == "parity"


def test_rewards_equal_those_of_other_systems():
    for text in ("", "odd", "even"):
        assert verl_side.parity("x", text, "1") == against_trl.score(text, "1", "x")
    assert verl_side.is_right("x", "so \\boxed{7}", "7") == 1.0
    assert verl_side.is_right("x", "so 7", "7") == 0.0


def test_unsupported_python_is_named(monkeypatch):
    monkeypatch.setattr(verl_side, "PYTHONS", ((3, 10), (3, 11)))
    with pytest.raises(verl_side.CannotInstallError, match=r"needs a Python from 3\.10 to 3\.12"):
        verl_side.install()


def test_memory_counts_descendants_and_nothing_that_has_exited():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    parent = psutil.Process(process.pid)
    while not (children := parent.children()):
        assert process.poll() is None
    own = parent.memory_full_info().pss
    assert against_trl.memory_of_tree(parent) > own > 0
    process.communicate(b"\n")
    assert not psutil.pid_exists(children[0].pid)
    assert against_trl.memory_of_tree(parent) == 0
