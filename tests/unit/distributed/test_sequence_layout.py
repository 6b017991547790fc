"""Positions, lengths and shards, without process groups."""

import pytest
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout


def test_positions_count_valid_decisions():
    # Sequence 0: prompt, prompt, decision, tool, decision, padding.  Sequence 1: all decisions.
    mask = torch.tensor([0, 0, 1, 0, 1, 0, 1, 1]).bool()
    layout = SequenceLayout((6, 2), mask)
    assert layout.position.tolist() == [0, 0, 1, 1, 2, 2, 1, 2]
    assert layout.length.tolist() == [2, 2, 2, 2, 2, 2, 2, 2]
    assert layout.sequence_ids.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_every_token_belongs_to_exactly_one_rank(cp_size):
    lengths = (2 * cp_size, 6 * cp_size)
    layouts = [_tables_of(lengths, rank, cp_size) for rank in range(cp_size)]
    owned = torch.cat([layout.local_index for layout in layouts])
    assert sorted(owned.tolist()) == list(range(sum(lengths)))


def test_zigzag_shards_of_two_ranks():
    # A sequence of 8 in chunks of 2: rank 0 has chunks 0 and 3, rank 1 chunks 1 and 2.
    assert _tables_of((8,), 0, 2).local_index.tolist() == [0, 1, 6, 7]
    assert _tables_of((8,), 1, 2).local_index.tolist() == [2, 3, 4, 5]
    # Two sequences, of 4 and 8 tokens: the shard is ordered by sequence.
    assert _tables_of((4, 8), 0, 2).local_index.tolist() == [0, 3, 4, 5, 10, 11]


def _tables_of(lengths, rank, cp_size):
    return SequenceLayout(lengths, torch.ones(sum(lengths)).bool(), cp_rank=rank, cp_size=cp_size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": (3, 4)}, "lengths sum to 7"),
        ({"lengths": (8, 0)}, "sequence 1 has padded length 0"),
        ({"lengths": (8,), "cp_rank": 1}, "cp_rank 1 is not in"),
        ({"lengths": (6, 2), "cp_size": 2}, "multiple of 4"),
    ],
)
def test_inconsistent_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout(response_mask=torch.ones(8).bool(), **arguments)
