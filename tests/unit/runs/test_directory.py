"""Run directories: kept files, refusals, rewinding and repeating."""

import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_rl import __version__
from megatron_rl.config import ConfigError, parse_config
from megatron_rl.config.sections import ColumnsSection
from megatron_rl.data.rows import parse_row, read_rows
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.rewards.worker import read_grade
from megatron_rl.runs.checkpoints import MANIFEST, file_names, sum_files
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.files import LOCK, read_metrics
from megatron_rl.telemetry.metrics import MetricLog
from megatron_rl.types import GradeResult, Prompt, Response, Rollout
from tests.ranks import run_ranks
from tests.unit.trainer.scripted import make_keeper


def build_config(**run):
    return parse_config({"model": {"path": "m"}, "data": {"train": "t"}, "run": run})


def build_rollout(reward=1.0):
    prompt = Prompt(3, ({"role": "user", "content": "1+1"},), (5, 6), "2", "toy")
    response = Response(3, 0, (7, 8), (-0.5, -0.25), "2", "stop", 4)
    return Rollout(prompt, response, GradeResult(reward, "equal", "2"))


def record(directory, step):
    (directory.path / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")


def write_checkpoint(directory, step, models=("actor",)):
    partial = directory.checkpoints.begin(step)
    for model in models:
        (partial / model).mkdir()
        (partial / model / "weights").write_text("12345")
    sums = sum_files(partial, file_names(partial))
    directory.checkpoints.complete(step, sums=sums, digests=[])


def test_existing_run_is_not_overwritten(tmp_path):
    directory = RunDirectory(tmp_path / "a")
    directory.check_usable(build_config())  # nothing there yet
    directory.create(build_config())
    (directory.path / "log.txt").touch()
    directory.check_usable(build_config(name="b"))  # a start that failed before any result
    record(directory, 0)
    with pytest.raises(ConfigError, match=r"run\.resume=auto"):
        directory.check_usable(build_config())


def test_run_continues_only_under_its_own_settings(tmp_path):
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


def test_skipped_updates_of_a_critic_have_a_cure(tmp_path):
    values = build_config(resume="auto").model_dump() | {"objective": "ppo"}
    directory = RunDirectory(tmp_path)
    directory.create(parse_config(values | {"critic": {"learning_rate": 1e-3}}))
    record(directory, 0)
    directory.check_usable(parse_config(values | {"critic": {"learning_rate": 1e-4}}))


@pytest.mark.parametrize("is_saved", [False, True])
def test_run_keeps_the_critic_that_it_began_with(tmp_path, is_saved):
    without = build_config(resume="auto")
    with_critic = parse_config(without.model_dump() | {"critic": {}, "objective": "ppo"})
    began = {"without": without, "with": with_critic}
    for name, config in began.items():
        directory = RunDirectory(tmp_path / name)
        directory.create(config)
        record(directory, 0)
        if is_saved:
            write_checkpoint(directory, 5, models=("actor", "critic")[: 1 + (name == "with")])
        directory.check_usable(config)
        where = directory.checkpoints.folder(5) if is_saved else directory.path
        with pytest.raises(ConfigError) as error:
            directory.check_usable(began["without" if name == "with" else "with"])
        message = str(error.value)
        assert message.startswith(f"{where} was {'saved' if is_saved else 'started'} {name} a crit")
        assert "choose another run.name" in message and message.count("\n") == 0
    # Also if somebody has edited the run's own config.
    directory = RunDirectory(tmp_path / "without")
    (directory.path / "config.yaml").write_text((tmp_path / "with" / "config.yaml").read_text())
    if is_saved:
        with pytest.raises(ConfigError, match="without a critic, but critic is set"):
            directory.check_usable(with_critic)


def test_experts_stay_on_one_rank_or_on_several(tmp_path):
    directory = RunDirectory(tmp_path / "a")
    directory.create(build_config())
    record(directory, 0)
    spread = build_config(resume="auto").model_dump() | {"parallel": {"expert": 2}}
    with pytest.raises(ConfigError, match=r"parallel\.expert: 1 -> 2"):
        directory.check_usable(parse_config(spread))
    directory.create(parse_config(spread))
    wider = spread | {"parallel": {"expert": 4, "tensor": 2}}
    directory.check_usable(parse_config(wider))


def test_resume_accepts_settings_with_less_memory(tmp_path):
    directory = RunDirectory(tmp_path / "a")
    directory.create(build_config())
    record(directory, 0)
    smaller = build_config(resume="auto").model_dump() | {
        "trainer": {"tokens_per_micro_batch": 4096, "recompute": "full"},
        "rollout": {"max_num_seqs": 32},
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


def test_directory_is_locked_by_one_process(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "a")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline()
    directory = RunDirectory(tmp_path / "a")
    output = rf"a is in use by process {holder.pid} on {socket.gethostname()}; wait for"
    with pytest.raises(ConfigError, match=output):
        directory.lock()
    holder.kill()
    holder.communicate()
    directory.lock()  # nothing has to be cleaned up


@pytest.mark.parametrize("is_lost", [False, True])
def test_earlier_of_two_starts_records_nothing_more(tmp_path, monkeypatch, is_lost):
    """As on file systems without locks, simulated by two objects of one process; by no clock."""
    earlier, later = RunDirectory(tmp_path), RunDirectory(tmp_path)

    def lose(*_):  # what NFS answers once a lock is lost
        raise OSError(errno.EIO, "lost")

    earlier.check_owner()  # has no lock yet
    earlier.lock()
    if is_lost:
        monkeypatch.setattr(os, "pread", lose)
    earlier.check_owner()  # a lost lease that nobody has taken is taken again
    earlier.check_owner()
    later.lock()
    later.check_owner()
    with pytest.raises(UserError, match=rf"was taken over by process {os.getpid()} on \S+; this"):
        earlier.check_owner()
    later.check_owner()


def test_removed_lock_is_written_again_or_lost_to_a_later_start(tmp_path):
    """Somebody tidies the directory up: the next start must still see this one."""
    earlier, later = RunDirectory(tmp_path), RunDirectory(tmp_path)
    earlier.lock()
    (tmp_path / LOCK).unlink()
    earlier.check_owner()
    assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    (tmp_path / LOCK).unlink()
    later.lock()
    with pytest.raises(UserError, match="was taken over by process"):
        earlier.check_owner()
    later.check_owner()


def test_resume_removes_remains_of_failed_save(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create(build_config())
    (directory.checkpoints.partial(8) / "actor").mkdir(parents=True)
    assert restore(directory, LoadingActor()) == 0  # there is nothing to load
    assert not list(directory.checkpoints.path.iterdir())


class LoadingActor:
    """Loads and keeps the content of any checkpoint."""

    topology = Topology.single()

    def load(self, folder):
        self.held = (folder / "weights").read_text()

    def digest(self):
        return {"layout": "one", "sum": self.held}


def restore(directory, actor):
    keeper = make_keeper(build_config(), directory, rank=actor.topology.rank)
    keeper.restore(actor)
    return keeper.done


def test_damaged_checkpoint_is_quarantined_and_previous_one_loads(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create(build_config())
    for step in (3, 6):
        write_checkpoint(directory, step)
    (directory.checkpoints.folder(6) / "actor" / "weights").write_text("12346")  # of equal size
    directory.check_usable(build_config(resume="auto"))
    actor = LoadingActor()
    assert restore(directory, actor) == 3
    assert actor.held == "12345"
    (quarantined,) = directory.checkpoints.damaged()
    assert "SHA-256 differs" in (quarantined / "damage.txt").read_text()


def test_checkpoint_with_wrong_digest_is_quarantined(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create(build_config())
    for step in (3, 6):
        write_checkpoint(directory, step)
        manifest = directory.checkpoints.folder(step) / MANIFEST
        state = json.loads(manifest.read_text())
        state["digests"] = [{"layout": "one", "sum": "12345" if step == 3 else "54321"}]
        manifest.write_text(json.dumps(state))
    assert restore(directory, LoadingActor()) == 3
    (quarantined,) = directory.checkpoints.damaged()
    assert "has the sum 12345, the saved 54321" in (quarantined / "damage.txt").read_text()


def test_run_without_intact_checkpoint_does_not_restart(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create(build_config())
    write_checkpoint(directory, 3)
    (directory.checkpoints.folder(3) / "actor" / "weights").write_text("12346")
    with pytest.raises(ConfigError, match="no intact checkpoint left") as error:
        restore(directory, LoadingActor())
    assert "step 3: rank 0: actor/weights was modified" in str(error.value)
    # And it is refused before any work from then on.
    with pytest.raises(ConfigError, match=r"damaged: .*step_000003\.damaged"):
        directory.check_usable(build_config(resume="auto"))


def see_damage_alone(rank, world_size, path):
    from pathlib import Path

    directory = RunDirectory(Path(path))
    if rank == 1:  # as a file system that shows one node a file that it lost
        problem = directory.checkpoints.problem
        directory.checkpoints.problem = lambda step, **share: (
            "weights is missing" if step == 6 else problem(step, **share)
        )
    actor = LoadingActor()
    actor.topology = Topology(world_size=world_size, rank=rank, dp_size=world_size)
    return restore(directory, actor)


def test_damage_seen_by_one_rank_makes_all_ranks_use_previous_checkpoint(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create(build_config())
    for step in (3, 6):
        write_checkpoint(directory, step)
    assert run_ranks(see_damage_alone, 2, str(tmp_path)) == [3, 3]
    (quarantined,) = directory.checkpoints.damaged()
    assert (quarantined / "damage.txt").read_text() == "rank 1: weights is missing\n"


def make_model(folder, weights):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)


def test_moved_model_is_accepted_and_another_one_refused(tmp_path):
    for name, weights in (("m", b"1"), ("moved", b"1"), ("other", b"2")):
        make_model(tmp_path / name, weights)

    def config(name):
        values = build_config(resume="auto").model_dump()
        return parse_config(values | {"model": {"path": str(tmp_path / name)}})

    directory = RunDirectory(tmp_path / "a")
    directory.create(config("m"))
    record(directory, 0)
    directory.check_usable(config("moved"))
    with pytest.raises(ConfigError, match=r"model\.path"):
        directory.check_usable(config("other"))


def test_changed_settings_of_resumed_run_are_recorded(tmp_path):
    directory = RunDirectory(tmp_path / "a")
    directory.create(build_config())
    record(directory, 7)
    write_checkpoint(directory, 6)
    changed = build_config(resume="auto").model_dump()
    changed |= {
        "optimizer": {"learning_rate": 5e-7, "max_grad_norm": 0.5},
        "trainer": {"steps": 900},
        "reward": {"time_limit_seconds": 20},
        "rollout": {"stall_seconds": 99},
    }
    directory.check_usable(parse_config(changed))
    directory.create(parse_config(changed))
    lines = (tmp_path / "a" / "changes.jsonl").read_text().splitlines()
    rows = {row["key"]: row for row in map(json.loads, lines)}
    assert rows.keys() == {"optimizer.learning_rate", "optimizer.max_grad_norm", "trainer.steps",
                           "reward.time_limit_seconds", "rollout.stall_seconds"}  # fmt: skip
    assert rows["optimizer.learning_rate"]["to"] == 5e-7
    assert rows["trainer.steps"]["after_step"] == 6


def test_every_start_is_recorded(tmp_path):
    for _ in range(2):
        directory = RunDirectory(tmp_path / "a")
        directory.create(build_config())
    rows = [json.loads(line) for line in (tmp_path / "a" / "starts.jsonl").read_text().splitlines()]
    assert [row["after_step"] for row in rows] == [0, 0]
    assert rows[0]["version"] == __version__ and rows[0]["command"].split()[0] == "megatron-rl"


def test_rewind_equals_uninterrupted_run(tmp_path):
    directory = RunDirectory(tmp_path)
    config = build_config()
    directory.create(config)
    log = MetricLog(
        tmp_path, parse_config(config.model_dump() | {"logging": {"tensorboard": False}})
    )
    log.open(first_step=0)
    for step in range(4):
        log.append({"step": step, "loss": float("nan") if step == 1 else step})
        directory.write_rollouts(step, [build_rollout()], advantages=[0.5])
    with log.file.open("a") as file:
        file.write('{"step": 4, "lo')  # killed while appending
    directory.write_evaluation("held_out", 3, [build_rollout()])
    directory.rewind(2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    assert json.loads(log.file.read_text().splitlines()[1])["loss"] is None  # strict JSON
    assert len(list(directory.rollouts.iterdir())) == 3
    assert not list(directory.evaluations.iterdir())


def test_rollouts_contain_everything_studies_need(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create(build_config())
    rollout = build_rollout()
    response = dataclasses.replace(rollout.response, behavior_logprobs=np.array([-0.5, -0.25]))
    directory.write_rollouts(7, [dataclasses.replace(rollout, response=response)], advantages=[0.5])
    row = pq.read_table(directory.rollouts / "step_000007.parquet").to_pylist()[0]
    assert "rewards" not in row
    assert row["behavior_logprobs"] == row["rollout_logprobs"] == [-0.5, -0.25]
    assert row["token_ids"] == [7, 8]
    assert (row["reward"], row["advantage"], row["weight_version"]) == (1.0, 0.5, 4)
    assert (row["prompt"], row["response"], row["extracted"]) == ("1+1", "2", "2")


def test_named_rewards_are_stored_with_their_sum(tmp_path):
    directory = RunDirectory(tmp_path)
    rollout = build_rollout()
    named = {"format": 0.1, "correct": 1.0}
    grade_results = [dataclasses.replace(rollout.grade_result, rewards=one) for one in (named, {})]
    directory.write_rollouts(
        1,
        [dataclasses.replace(rollout, grade_result=grade_result) for grade_result in grade_results],
        advantages=[0.5, 0.5],
    )
    table = pq.read_table(directory.rollouts / "step_000001.parquet")
    assert table["rewards"].to_pylist() == [named, None]  # the second was not graded


def test_odd_characters_do_not_break_recording(tmp_path):
    """The whole path: what enters by a verdict or a row can be written."""
    (tmp_path / "set.jsonl").write_text(
        '{"q": "cut \\ud83d", "a": "7\\ude00", "data_source": "\\ud83d", "more": ["\\ud83d"]}\n'
    )
    columns = ColumnsSection(prompt="q", answer="a")
    ((number, plain),) = read_rows(tmp_path / "set.jsonl", columns)
    row = parse_row(plain, columns, path=tmp_path, number=number)
    reward, reason, answer = read_grade((1, "\ud83d", "x\udc00"), name="r:f")
    prompt = Prompt(0, row.messages, (5,), row.ground_truth, row.data_source, json.dumps(plain))
    response = Response(0, 0, (7, 8), (-0.5, -0.25), "2", "stop", 4)
    rollout = Rollout(prompt, response, GradeResult(reward, reason, answer))
    directory = RunDirectory(tmp_path / "run")
    directory.create(build_config())
    directory.write_rollouts(1, [rollout], advantages=[0.5])
    directory.write_evaluation("held", 1, [rollout])
    (kept,) = pq.read_table(directory.rollouts / "step_000001.parquet").to_pylist()
    assert (kept["prompt"], kept["ground_truth"], kept["data_source"]) == ("cut ?", "7?", "?")
    assert (kept["reason"], kept["extracted"]) == ("?", "x?")
    assert json.loads(prompt.row)["more"] == ["?"]


def test_steps_whose_checkpoints_were_not_saved_are_repeated_and_named(tmp_path):
    """A disk that was full for a while loses nothing; a checkpoint that was saved and is gone is.

    Also without the records of what failed, for which the disk may have had no room.
    """
    config = build_config()
    config = parse_config(config.model_dump() | {"trainer": {"checkpoint_every": 1}})
    directory = RunDirectory(tmp_path / "a")
    directory.create(config)
    write_checkpoint(directory, 2)
    record(directory, 4)
    with pytest.raises(ConfigError, match="later ones are lost"):
        directory.check_checkpoints(config)
    directory.record_save(2)
    directory.check_checkpoints(config)
    for step in (3, 4):
        directory.record_save(step, error="no space left")
    directory.check_checkpoints(config)
    expected = "steps 3 to 4 had no checkpoint and will be trained again; step 4 was not saved: no "
    assert directory.describe_unsaved(2) == expected + "space left"
    assert directory.describe_unsaved(4) is None
    directory.record_save(4)
    with pytest.raises(ConfigError, match="later ones are lost"):
        directory.check_checkpoints(config)


def test_other_releases_than_at_the_last_start_are_named(tmp_path):
    directory = RunDirectory(tmp_path / "a")
    assert directory.describe_releases() is None
    directory.create(build_config())
    assert directory.describe_releases() is None
    starts = directory.path / "starts.jsonl"
    row = json.loads(starts.read_text())
    names = {"megatron_rl", "python", "torch", "vllm", "megatron-core", "transformers"}
    assert set(row["releases"]) == names
    row["releases"]["torch"] = "1.0"
    starts.write_text(json.dumps(row) + "\n")
    assert "torch 1.0 -> " in directory.describe_releases()
