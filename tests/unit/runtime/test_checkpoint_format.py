"""Checkpoint folders name their format and releases; one of a later format is refused."""

import json

import pytest

from megatron_rl import __version__
from megatron_rl.actor.checkpoint_contents import COMPLETE, STATE, read_state
from megatron_rl.errors import UserError
from megatron_rl.runs.checkpoints import MANIFEST
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.versions import FORMAT, check_format, stamp
from tests.unit.runs.test_directory import build_config, write_checkpoint


def write_actor(folder, state):
    folder.mkdir()
    (folder / STATE).write_text(json.dumps(state))
    (folder / COMPLETE).touch()
    (folder / ".metadata").write_bytes(b"\x80\x04N.")  # a pickle of None


def test_own_and_older_formats_are_read():
    assert stamp(megatron_core="1.2") == {
        "format": FORMAT, "megatron_rl": __version__, "megatron_core": "1.2",
    }  # fmt: skip
    check_format("folder", stamp())
    check_format("folder", {"updates": 3})  # of a release that wrote no format


def test_weights_of_later_format_are_refused(tmp_path):
    write_actor(tmp_path / "now", stamp() | {"updates": 3})
    assert read_state(tmp_path / "now")["updates"] == 3
    write_actor(tmp_path / "old", {"updates": 3, "optimizer": False})
    assert read_state(tmp_path / "old")["optimizer"] is False
    write_actor(tmp_path / "new", {"format": FORMAT + 1, "megatron_rl": "7.0"})
    with pytest.raises(UserError, match=f"format {FORMAT + 1}, written by megatron_rl 7.0, and"):
        read_state(tmp_path / "new")


def test_run_with_checkpoint_of_later_format_is_refused_and_kept(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create(build_config())
    for step in (3, 6):
        write_checkpoint(directory, step)
    manifest = directory.checkpoints.folder(6) / MANIFEST
    state = json.loads(manifest.read_text())
    assert state["format"] == FORMAT and state["megatron_rl"] == __version__
    manifest.write_text(json.dumps(state | {"format": FORMAT + 1}))
    with pytest.raises(UserError, match=rf"step_000006 has checkpoint format {FORMAT + 1}"):
        directory.check_usable(build_config(resume="auto"))
    assert directory.checkpoints.steps() == [3, 6]
    del state["format"]
    manifest.write_text(json.dumps(state))
    directory.check_usable(build_config(resume="auto"))
