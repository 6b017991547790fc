"""Checkpoint tables are read; pickles that would run code are refused without running it."""

import pickle

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.planner import WriteItemType

from megatron_rl.actor.checkpoint_contents import check_pickle


class ByName:
    """Pickled as Python 3.11.0 to 3.11.3 pickle a member of an enum; others read it too."""

    def __init__(self, of, name):
        self.arguments = of, name

    def __reduce__(self):
        return getattr, self.arguments


class Runs:
    def __reduce__(self):
        return print, ("this code ran",)


def test_check_pickle_accepts_torch_metadata(tmp_path):
    tensors = {"a": torch.ones(3, 2), "b": torch.ones(2, dtype=torch.bfloat16), "c": {"n": 1}}
    save(tensors, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    check_pickle(tmp_path / ".metadata")
    assert FileSystemReader(tmp_path).read_metadata().state_dict_metadata["a"].size == (3, 2)


def test_check_pickle_refuses_code_without_running_it(tmp_path, capsys):
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps({"state_dict_metadata": Runs()}))
    with pytest.raises(ValueError, match=r"builtins\.print; it was not read"):
        check_pickle(file)
    assert "ran" not in capsys.readouterr().out


def test_check_pickle_accepts_enum_members_but_no_other_attributes(tmp_path):
    file = tmp_path / ".metadata"
    for of, name in ((WriteItemType, "TENSOR"), (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")):
        file.write_bytes(pickle.dumps({"type": ByName(of, name)}))
        check_pickle(file)
    for of, name in ((WriteItemType, "mro"), (torch.Size, "numel")):
        file.write_bytes(pickle.dumps({"type": ByName(of, name)}))
        with pytest.raises(ValueError, match=f"it references {name} of"):
            check_pickle(file)


def test_check_pickle_refuses_other_files(tmp_path):
    for content in (b"", b"not a pickle"):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match="is not the table of a checkpoint"):
            check_pickle(tmp_path / ".metadata")
