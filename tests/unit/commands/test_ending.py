"""Error reporting and exit status of commands."""

import errno
import os
import shutil
from collections import namedtuple

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from megatron_rl.advantages import leave_one_out_advantages
from megatron_rl.commands import ending
from megatron_rl.commands.ending import fail, how_to_continue, is_full_disk
from megatron_rl.config import ConfigError, parse_config
from megatron_rl.errors import UserError
from megatron_rl.objectives.statistics import Band
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.failures import Cause, OtherRankError, RankTimeoutError
from megatron_rl.runtime.joining import ProcessPlace


def test_is_full_disk_recognizes_local_and_remote_errors():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rollouts/step_000001.parquet")
    assert is_full_disk(full)
    # The form in which `sync_errors_across_ranks` sends it to other ranks.
    assert is_full_disk(RuntimeError(f"recording step 1: rank 0: OSError: {full}"))
    try:
        try:
            raise full
        except OSError as cause:
            raise RuntimeError("saving") from cause
    except RuntimeError as error:
        assert is_full_disk(error)
    assert not is_full_disk(OSError(errno.EACCES, "denied"))
    assert not is_full_disk(RuntimeError("something else"))


@pytest.mark.parametrize(
    ("name", "cure"),
    [("vllm", "pip install 'megatron_rl[cpu]' --extra-index-url"),
     ("megatron", "pip install --no-deps --ignore-requires-python 'megatron-core>=0.19"),
     ("torch", "call .venv/bin/megatron-rl")],
)  # fmt: skip
def test_missing_library_is_one_line_with_its_installation(name, cure, capsys):
    assert fail(ModuleNotFoundError(f"no {name}", name=name), None) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"has no {name}" in line and cure in line


@pytest.fixture
def run(tmp_path):
    """Config of a run that has a checkpoint of step 3."""
    config = parse_config({
        "model": {"path": "m"}, "data": {"train": "t"},
        "run": {"name": "a", "dir": str(tmp_path)},
    })  # fmt: skip
    directory = RunDirectory.of(config)
    directory.create(config)
    directory.checkpoints.begin(3)
    directory.checkpoints.complete(3, sums={}, digests=[])
    return config


RANK = ProcessPlace(1, 2, 1)


def describe(error, config, monkeypatch):
    monkeypatch.setattr(ending, "_is_training", lambda: True)
    return ending._describe(error, RANK, config)


@pytest.mark.parametrize(
    ("error", "cause", "text"),
    [
        (KeyError("q"), Cause.OWN, "rank 1: KeyError: 'q'"),
        (FloatingPointError("too many"), Cause.OWN, "rank 1: too many"),
        (OtherRankError("saving: rank 0: bad"), Cause.OTHER_RANK, "rank 1: saving: rank 0: bad"),
        (RankTimeoutError("saving: ended"), Cause.LOST_RANK, "rank 1: saving: ended"),
        (
            RuntimeError("[x/pair.cc:553] Connection closed by peer\nGLHF"),
            Cause.LOST_RANK, "rank 1: RuntimeError: [x/pair.cc:553] Connection closed by peer",
        ),
    ],
)  # fmt: skip
def test_describe_failure_while_training_names_log_and_command(
    run, monkeypatch, error, cause, text
):
    failure = describe(error, run, monkeypatch)
    log = RunDirectory.of(run).log_file
    assert failure.cause is cause and failure.in_training
    assert failure.lines(to_continue=how_to_continue(run)).splitlines() == [
        f"megatron-rl: error: {text}", f"  stack traces: {log}",
        "megatron-rl: resume from the checkpoint of step 3 with",
        f"  megatron-rl train --config {log.parent}/config.yaml run.resume=auto",
    ]  # fmt: skip
    assert f"{type(error).__name__}: {str(error).splitlines()[0]}" in log.read_text()


def test_describe_full_disk_names_path(run, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/a/rollouts/step_000001.parquet")
    assert "on the disk of /runs/a/rollouts/step_000001.parquet: free some; all saved data" in (
        describe(full, run, monkeypatch).text
    )
    folder = RunDirectory.of(run).path
    usage = namedtuple("usage", "free total")
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage(0 if path == str(folder) else 9, 10)
    )
    quota = OSError(errno.EDQUOT, "writing")  # as of pyarrow, without a file
    assert f"the disk of {folder}: free some" in describe(quota, run, monkeypatch).text


def test_describe_read_only_disk_names_path_and_what_to_do(run, monkeypatch):
    error = OSError(errno.EROFS, os.strerror(errno.EROFS), "/runs/a/log.txt")
    text = "has become read-only, as after an error of the device or its server: make it writable"
    assert f"the disk of /runs/a/log.txt {text}" in describe(error, run, monkeypatch).text
    sent = RuntimeError(f"recording step 1: rank 0: OSError: {error}")
    assert f"the disk of the run {text}" in describe(sent, run, monkeypatch).text


def test_describe_config_error_omits_resume_command(run, monkeypatch):
    failure = describe(ConfigError("model.path: bad"), run, monkeypatch)
    assert failure.lines(to_continue="x") == "megatron-rl: error: model.path: bad\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("size=0: give 1 or more"), "size=0: give 1 or more"),
        (PermissionError(13, "Permission denied", "/a"), "[Errno 13] Permission denied: '/a'"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            "no space left on the disk: free some, then run the same command again",
        ),
    ],
)
def test_fail_with_user_error_prints_its_message(capsys, error, message):
    assert fail(error, None) == 1
    assert capsys.readouterr().err == f"megatron-rl: error: {message}\n"


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (lambda: Band(torch.zeros(3), torch.zeros(1)), r"zip\(\)"),  # raised by Python
        (lambda: leave_one_out_advantages(torch.ones(1, 1)), "leave-one-out needs"),  # by our check
    ],
)
def test_fail_with_internal_error_raises_it_again(cause, message):
    with pytest.raises(ValueError, match=message) as caught:
        cause()
    with pytest.raises(ValueError, match=message):
        fail(caught.value, None)


def test_describe_internal_error_includes_traceback():
    try:
        Band(torch.zeros(3), torch.zeros(1))
    except ValueError as error:
        failure = ending._describe(error, RANK, None)
    assert failure.text.startswith("rank 1: ValueError: zip()")
    assert failure.details.startswith("Traceback") and "statistics.py" in failure.details


def test_error_of_arguments_says_what_is_wrong_with_them():
    """As vLLM's config raises it; its first line only counts the errors."""
    with pytest.raises(ValidationError) as error:
        TypeAdapter(dict[str, int]).validate_python({"runner": "new"})
    failure = ending._describe(error.value, RANK, None)
    assert failure.text.startswith("rank 1: ValidationError: Input should be a valid integer")
