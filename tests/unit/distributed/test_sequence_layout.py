"""Positions, lengths and scans of one process; the same across ranks is in test_ranks.py."""

import pytest
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout


def test_positions_count_valid_decisions_not_tokens():
    # Sequence 0: prompt, prompt, decision, tool, decision, padding.  Sequence 1: all decisions.
    mask = torch.tensor([0, 0, 1, 0, 1, 0, 1, 1]).bool()
    layout = SequenceLayout((6, 2), mask)
    assert layout.position.tolist() == [0, 0, 1, 1, 2, 2, 1, 2]
    assert layout.length.tolist() == [2, 2, 2, 2, 2, 2, 2, 2]
    assert layout.sequence_ids.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]


def test_sums_skip_what_the_mask_excludes():
    mask = torch.tensor([0, 1, 1, 0, 1, 1]).bool()
    layout = SequenceLayout((4, 2), mask)
    x = torch.tensor([float("nan"), 1.0, 2.0, float("inf"), 10.0, 20.0])
    assert layout.prefix_sum(x).tolist() == [0, 1, 3, 3, 10, 30]
    assert layout.sequence_sum(x).tolist() == [3, 3, 3, 3, 30, 30]


def test_prefix_min_inclusive_and_exclusive():
    layout = SequenceLayout((4,), torch.tensor([1, 1, 0, 1]).bool())
    x = torch.tensor([2.0, 1.0, -9.0, 3.0])
    infinity = float("inf")
    assert layout.prefix_min(x).tolist() == [2, 1, 1, 1]
    assert layout.prefix_min(x, exclusive=True).tolist() == [infinity, 2, 1, 1]


def test_gradient_of_the_prefix_sum_is_the_suffix_sum():
    # d/dx_k (S_1 + 10 S_2 + 100 S_3) = all coefficients from k on; masked tokens get none.
    layout = SequenceLayout((4,), torch.tensor([1, 0, 1, 1]).bool())
    x = torch.zeros(4, requires_grad=True)
    (layout.prefix_sum(x) * torch.tensor([1.0, 0.0, 10.0, 100.0])).sum().backward()
    assert x.grad.tolist() == [111, 0, 110, 100]


def test_gradient_of_the_prefix_min_goes_to_the_earliest_minimum():
    layout = SequenceLayout((3, 1), torch.ones(4).bool())
    x = torch.tensor([2.0, 1.0, 1.0, -5.0], requires_grad=True)
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    (layout.prefix_min(x) * weights).sum().backward()
    assert x.grad.tolist() == [1, 110, 0, 1000]
    x.grad = None
    exclusive = layout.prefix_min(x, exclusive=True)  # [inf, 2, 1, inf]
    (torch.where(exclusive < torch.inf, exclusive, 0) * weights).sum().backward()
    assert x.grad.tolist() == [10, 100, 0, 0]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_every_token_of_a_pack_lives_on_exactly_one_rank(cp_size):
    lengths = (2 * cp_size, 6 * cp_size)
    layouts = [_tables_of(lengths, rank, cp_size) for rank in range(cp_size)]
    owned = torch.cat([layout.local_index for layout in layouts])
    assert sorted(owned.tolist()) == list(range(sum(lengths)))


def test_zigzag_of_two_ranks_by_hand():
    # A sequence of 8 in chunks of 2: rank 0 has chunks 0 and 3, rank 1 chunks 1 and 2.
    assert _tables_of((8,), 0, 2).local_index.tolist() == [0, 1, 6, 7]
    assert _tables_of((8,), 1, 2).local_index.tolist() == [2, 3, 4, 5]
    # Two sequences, of 4 and 8: sequence after sequence.
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
def test_contradictions_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout(response_mask=torch.ones(8).bool(), **arguments)


def test_a_scan_without_the_group_does_not_pretend():
    with pytest.raises(ValueError, match="needs the cp_group"):
        _tables_of((8,), 0, 2).prefix_sum(torch.zeros(4))
