"""What a run keeps, refuses, rewinds and repeats."""

import json
import socket
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_rl.config import ConfigError, LoggingSection, parse_config
from megatron_rl.console import Console
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.rows import read_metrics
from megatron_rl.trainer.metrics import MetricLog
from megatron_rl.trainer.saving import CheckpointKeeper
from megatron_rl.types import Prompt, Response, Rollout, Verdict


def build_config(**run):
    return parse_config({"model": {"path": "m"}, "data": {"train": "t"}, "run": run})


def build_rollout(reward=1.0):
    prompt = Prompt(3, ({"role": "user", "content": "1+1"},), (5, 6), "2", "toy")
    response = Response(3, 0, (7, 8), (-0.5, -0.25), "2", "stop", 4)
    return Rollout(prompt, response, Verdict(reward, "equal", "2"))


def record(directory, step):
    (directory.path / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")


def write_checkpoint(directory, step):
    partial = directory.checkpoints / f".step_{step:06d}.partial"
    (partial / "actor").mkdir(parents=True)
    (partial / "actor" / "weights").write_text("12345")
    directory.complete_checkpoint(partial, step)


def test_an_existing_run_is_not_overwritten(tmp_path):
    directory = RunDirectory(tmp_path / "a")
    directory.check_usable(build_config())  # nothing there yet
    directory.create(build_config())
    (directory.path / "log.txt").touch()
    directory.check_usable(build_config(name="b"))  # a start that failed before any result
    record(directory, 0)
    with pytest.raises(ConfigError, match=r"run\.resume=auto"):
        directory.check_usable(build_config())


def test_a_run_continues_only_under_its_own_settings(tmp_path):
    directory = RunDirectory(tmp_path / "a")
    directory.create(build_config())
    record(directory, 0)
    directory.check_usable(build_config(resume="auto"))
    changed = parse_config(
        build_config(resume="auto").model_dump() | {"seed": 1, "trainer": {"steps": 300}}
    )
    with pytest.raises(ConfigError) as error:
        directory.check_usable(changed)
    assert "seed: 42 -> 1" in str(error.value)
    assert "trainer.steps" not in str(error.value)  # a run may be made longer


def test_a_run_that_was_out_of_memory_continues_with_less(tmp_path):
    directory = RunDirectory(tmp_path / "a")
    directory.create(build_config())
    record(directory, 0)
    smaller = build_config(resume="auto").model_dump() | {
        "trainer": {"tokens_per_micro_batch": 4096, "recompute": "full"},
        "rollout": {"max_sequences": 32},
    }
    directory.check_usable(parse_config(smaller))


HOLD = """
import sys
from megatron_rl.runs.directory import RunDirectory
directory = RunDirectory(sys.argv[1])
directory.lock()
print(flush=True)
sys.stdin.read()
"""


def test_one_process_at_a_time_uses_a_directory(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "a")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline()
    directory = RunDirectory(tmp_path / "a")
    said = rf"a is in use by process {holder.pid} on {socket.gethostname()}; wait until"
    with pytest.raises(ConfigError, match=said):
        directory.lock()
    holder.kill()
    holder.communicate()
    directory.lock()  # nothing has to be cleaned up


def test_what_a_failed_save_left_goes_when_the_run_continues(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create(build_config())
    (directory.checkpoints / ".step_000008.partial" / "actor").mkdir(parents=True)
    keeper = CheckpointKeeper(build_config(), directory, Console(speaks=False), 0, lambda: None)
    assert keeper.restore(None) == 0  # there is nothing to load
    assert not list(directory.checkpoints.iterdir())


def test_only_complete_checkpoints_count_and_old_ones_go(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create(build_config())
    for step in (2, 4, 6):
        write_checkpoint(directory, step)
    (directory.checkpoints / ".step_000008.partial").mkdir()  # killed while writing
    directory.checkpoint_folder(9).mkdir()  # without its state: not complete
    assert directory.latest_checkpoint() == (6, directory.checkpoint_folder(6))
    directory.prune_checkpoints(keep=2)
    assert [step for step, _ in directory.complete_checkpoints()] == [4, 6]
    assert not list(directory.checkpoints.glob(".*"))


def test_a_damaged_checkpoint_is_refused_before_any_work(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create(build_config())
    write_checkpoint(directory, 3)
    config = build_config(resume="auto")
    directory.check_usable(config)
    shard = directory.checkpoint_folder(3) / "actor" / "weights"
    shard.write_text("12")
    with pytest.raises(ConfigError, match="step_000003 is damaged: actor/weights has 2 of 5 bytes"):
        directory.check_usable(config)
    shard.unlink()
    with pytest.raises(ConfigError, match="actor/weights is missing; delete the folder"):
        directory.check_usable(config)


def test_rewind_leaves_what_an_uninterrupted_run_would_have(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create(build_config())
    log = MetricLog(tmp_path, LoggingSection(tensorboard=False), config={})
    log.open(first_step=0)
    for step in range(4):
        log.append({"step": step, "loss": float("nan") if step == 1 else step})
        directory.write_rollouts(
            step, [build_rollout()], advantages=[0.5], behavior_logprobs=[np.array([-0.5, -0.2])]
        )
    with log.file.open("a") as file:
        file.write('{"step": 4, "lo')  # killed while appending
    directory.write_evaluation("held_out", 3, [build_rollout()])
    directory.rewind(2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    assert json.loads(log.file.read_text().splitlines()[1])["loss"] is None  # strict JSON
    assert len(list(directory.rollouts.iterdir())) == 3
    assert not list(directory.evaluations.iterdir())


def test_rollouts_keep_everything_a_study_needs(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create(build_config())
    directory.write_rollouts(
        7, [build_rollout()], advantages=[0.5], behavior_logprobs=[np.array([-0.5, -0.25])]
    )
    row = pq.read_table(directory.rollouts / "step_000007.parquet").to_pylist()[0]
    assert row["behavior_logprobs"] == row["rollout_logprobs"] == [-0.5, -0.25]
    assert row["token_ids"] == [7, 8]
    assert (row["reward"], row["advantage"], row["weight_version"]) == (1.0, 0.5, 4)
    assert (row["prompt"], row["response"], row["extracted"]) == ("1+1", "2", "2")
