"""Positions, lengths and shards, without process groups."""

import pytest
import torch

from megatron_rl.distributed.chunk_scan import Scan, scan_together
from megatron_rl.distributed.sequence_layout import SequenceLayout


def test_positions_count_valid_decisions():
    # Sequence 0: prompt, prompt, decision, tool, decision, padding.  Sequence 1: all decisions.
    mask = torch.tensor([0, 0, 1, 0, 1, 0, 1, 1]).bool()
    layout = SequenceLayout((6, 2), mask)
    assert layout.position.tolist() == [0, 0, 1, 1, 2, 2, 1, 2]
    assert layout.length.tolist() == [2, 2, 2, 2, 2, 2, 2, 2]
    assert layout.sequence_ids.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]


def test_positions_and_scans_of_joined_sequences_continue():
    # Response 0 has sequences of 4 and 3 tokens, response 1 one of 2. The padding at the end of the
    # first sequence is not used, although t < L there.
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1]).bool()
    layout = SequenceLayout((4, 3, 2), mask, joined=(2, 1))
    assert layout.position.tolist() == [0, 1, 2, 2, 2, 3, 3, 1, 2]
    assert layout.length.tolist() == [3] * 7 + [2] * 2
    assert layout.offsets.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    assert layout.response_ids.tolist() == [0] * 7 + [1] * 2
    assert layout.is_used.tolist() == [True] * 3 + [False] + [True] * 2 + [False] + [True] * 2
    assert layout.spread_responses(torch.tensor([5, 6])).tolist() == [5] * 7 + [6] * 2
    x = torch.arange(1.0, 10.0)
    sums, before = scan_together(layout, Scan(x), Scan(x, "min"))
    assert sums.running.tolist() == [0, 2, 5, 5, 5, 11, 11, 8, 17]
    assert sums.total.tolist() == [11, 11, 17]  # of the response, at each of its sequences
    assert before.running[mask].tolist() == [torch.inf, 2, 2, torch.inf, 8]


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
        ({"lengths": (4, 4), "joined": (2, 1)}, r"joined \(2, 1\) must be positive and sum to 2"),
    ],
)
def test_inconsistent_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout(response_mask=torch.ones(8).bool(), **arguments)
