"""Reading model folders."""

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.actor.weights import HfReader, read_piece
from megatron_rl.resharding.pieces import Piece


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_model_folder_with_non_finite_values_raises(tmp_path, value):
    tensors = {"good": torch.ones(4, 2), "bad": torch.ones(4, 2)}
    tensors["bad"][3, 1] = value
    save_file(tensors, tmp_path / "model.safetensors")
    reader = HfReader(tmp_path)
    assert read_piece(reader, piece("good", rows=(0, 4))).shape == (4, 2)
    read_piece(reader, piece("bad", rows=(0, 3)))
    with pytest.raises(ValueError, match=r"model.safetensors: bad has values that are not finite"):
        read_piece(reader, piece("bad", rows=(3, 4)))


def piece(tensor, *, rows):
    return Piece(tensor=tensor, rows=rows, columns=(0, 2), parameter="p")
