"""Complete checkpoints, damaged ones, and the remains of a kill."""

import json
import shutil

import pytest

from megatron_rl.runs import checkpoints as module
from megatron_rl.runs.checkpoints import MANIFEST, CheckpointFolders, file_names, sum_files


def write(folders, step, content=b"12345"):
    partial = folders.begin(step)
    (partial / "actor").mkdir()
    (partial / "actor" / "weights").write_bytes(content)
    sums = sum_files(partial, file_names(partial))
    folders.complete(step, sums=sums, digests=[{"layout": "one", "sum": "0"}])


def test_only_complete_checkpoints_count_and_old_ones_are_removed(tmp_path):
    folders = CheckpointFolders(tmp_path)
    for step in (2, 4, 6):
        write(folders, step)
    folders.partial(8).mkdir()  # killed while writing
    folders.folder(9).mkdir()  # without its manifest
    assert folders.intact_steps() == [2, 4, 6]
    folders.prune(keep=2)
    assert folders.steps() == [4, 6, 9]  # what is damaged is for a person to delete
    assert not list(tmp_path.glob(".*"))


def test_kill_while_pruning_leaves_no_partial_checkpoint(tmp_path, monkeypatch):
    """The first deletion of a file is the kill: what is half deleted has another name by then."""
    folders = CheckpointFolders(tmp_path)
    for step in (1, 2):
        write(folders, step)

    def killed(path):
        (path / "actor" / "weights").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(module.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        folders.prune(keep=1)
    monkeypatch.undo()
    assert folders.steps() == folders.intact_steps() == [2]
    folders.clean()
    assert [folder.name for folder in tmp_path.iterdir()] == ["step_000002"]


def test_each_kind_of_damage_is_named(tmp_path):
    folders = CheckpointFolders(tmp_path)
    write(folders, 3)
    shard = folders.folder(3) / "actor" / "weights"
    assert folders.problem(3, share=(0, 1)) is None
    shard.write_bytes(b"12346")  # a flipped bit: sizes agree
    assert folders.problem(3) is None
    assert "actor/weights was modified" in folders.problem(3, share=(0, 1))
    assert folders.problem(3, share=(1, 2)) is None  # another rank reads this file
    shard.write_bytes(b"12")
    assert folders.problem(3) == "actor/weights has 2 of 5 bytes"
    shard.unlink()
    assert folders.problem(3) == "actor/weights is missing"
    (folders.folder(3) / MANIFEST).write_text('{"step": 3, "fi')
    assert "cannot be read" in folders.problem(3)
    (folders.folder(3) / MANIFEST).unlink()
    assert "cannot be read" in folders.problem(3)


def test_manifest_without_sums_is_refused(tmp_path):
    folders = CheckpointFolders(tmp_path)
    write(folders, 3)
    for files in ({"actor/weights": 5}, {"actor/weights": {"bytes": 5}}, []):
        bare = {"step": 3, "files": files, "digests": []}
        (folders.folder(3) / MANIFEST).write_text(json.dumps(bare))
        found = folders.problem(3, share=(0, 1))
        assert (found is None) == (files == [])  # an empty checkpoint is whole


def test_quarantine_keeps_everything_with_reason(tmp_path):
    folders = CheckpointFolders(tmp_path)
    for _ in range(2):
        write(folders, 3)
        quarantined = folders.quarantine(3, "rank 1: a flipped bit")
        assert (quarantined / "actor" / "weights").read_bytes() == b"12345"
        assert (quarantined / "damage.txt").read_text() == "rank 1: a flipped bit\n"
    assert [folder.name for folder in folders.damaged()] == [
        "step_000003.damaged", "step_000003.damaged-2"]  # fmt: skip
    assert folders.steps() == []


def test_step_saved_again_replaces_checkpoint(tmp_path):
    folders = CheckpointFolders(tmp_path)
    write(folders, 3)
    write(folders, 3, b"again")
    assert (folders.folder(3) / "actor" / "weights").read_bytes() == b"again"
    assert [folder.name for folder in tmp_path.iterdir()] == ["step_000003"]
    shutil.rmtree(folders.folder(3))


def test_kill_between_renames_leaves_previous_checkpoint(tmp_path, monkeypatch):
    folders = CheckpointFolders(tmp_path)
    write(folders, 3)
    rename = module.Path.rename

    def killed(path, target):
        if path.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(module.Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        write(folders, 3, b"again")
    monkeypatch.undo()
    assert folders.steps() == []
    folders.clean()
    assert folders.intact_steps() == [3]
    assert (folders.folder(3) / "actor" / "weights").read_bytes() == b"12345"


def test_checkpoint_of_another_run_or_step_is_refused(tmp_path):
    runs = [CheckpointFolders(tmp_path / name / "checkpoints") for name in ("mine", "other")]
    for folders in runs:
        folders.path.mkdir(parents=True)
        folders.run_file.write_text(f"{folders.path.parent.name}\n")
        write(folders, 3)
        assert folders.problem(3, share=(0, 1)) is None
    mine, other = runs
    shutil.copytree(other.folder(3), mine.folder(4))
    assert mine.problem(4) == "it is of step 3"
    shutil.rmtree(mine.folder(3))
    shutil.copytree(other.folder(3), mine.folder(3))
    assert mine.problem(3) == "it is of another run, other"
    mine.run_file.unlink()  # of a run that had none yet
    assert mine.problem(3) is None
