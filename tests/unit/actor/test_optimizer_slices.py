"""Boxes of a range of a parameter's elements contain every element once, in order."""

import itertools

import pytest
import torch

from megatron_rl.actor.optimizer_slices import cut_into_boxes


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 4, 2), (2, 3, 2, 2), (1, 6), (6, 1)])
@pytest.mark.parametrize("largest", [1, 3, 5, 100])
def test_boxes_contain_every_element_once_in_row_order(shape, largest):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(tensor.numel() + 1), 2):
        boxes = list(cut_into_boxes(shape, start, stop, largest=largest))
        found = [
            tensor[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].flatten()
            for offset, size in boxes
        ]
        assert all(0 < len(box) <= largest for box in found)
        assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(
            range(start, stop)
        )


def test_matrix_takes_three_boxes_at_most():
    # Rows of 4: elements 6 to 17 are the end of row 1, rows 2 and 3, the beginning of row 4.
    assert list(cut_into_boxes((5, 4), 6, 17)) == [
        ((1, 2), (1, 2)),
        ((2, 0), (2, 4)),
        ((4, 0), (1, 1)),
    ]
