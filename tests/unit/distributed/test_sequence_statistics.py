"""Sums and minima along sequences in one process; test_ranks.py covers several ranks."""

import math

import pytest
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.sequence_statistics import (
    Scan,
    prefix_sum,
    scan_together,
    sequence_sum,
)


def all_decisions(*lengths):
    return SequenceLayout(lengths, torch.ones(sum(lengths)).bool())


def test_sums_skip_masked_tokens():
    mask = torch.tensor([0, 1, 1, 0, 1, 1]).bool()
    layout = SequenceLayout((4, 2), mask)
    x = torch.tensor([float("nan"), 1.0, 2.0, float("inf"), 10.0, 20.0])
    assert prefix_sum(layout, x).tolist() == [0, 1, 3, 3, 10, 30]
    assert sequence_sum(layout, x).tolist() == [3, 3, 3, 3, 30, 30]


def test_min_scan_excludes_the_current_token():
    layout = SequenceLayout((4, 2), torch.tensor([1, 1, 0, 1, 1, 1]).bool())
    x = torch.tensor([2.0, 1.0, -9.0, 3.0, 5.0, 6.0])
    (before,) = scan_together(layout, Scan(x, "min"))
    assert before.running.tolist() == [math.inf, 2, 1, 1, math.inf, 5]
    assert before.total.tolist() == [1, 5]


def test_prefix_sum_gradient_is_the_suffix_sum():
    # d/dx_k (S_1 + 10 S_2 + 100 S_3) = all coefficients from k on; masked tokens get none.
    layout = SequenceLayout((4, 1), torch.tensor([1, 0, 1, 1, 1]).bool())
    x = torch.zeros(5, requires_grad=True)
    (prefix_sum(layout, x) * torch.tensor([1.0, 0.0, 10.0, 100.0, 7.0])).sum().backward()
    assert x.grad.tolist() == [111, 0, 110, 100, 7]


@pytest.mark.parametrize("lengths", [(131_072,), (65_536, 40, 65_536, 1, 300, 2)])
def test_prefix_sums_of_float32_log_ratios_have_float64_precision(lengths):
    # Against math.fsum, which does not round: a gate of 7e-4 compares S_t / t.
    layout = all_decisions(*lengths)
    generator = torch.Generator().manual_seed(0)
    x = 1e-3 + 0.03 * torch.randn(sum(lengths), generator=generator)
    x[sum(lengths) // 7] = 1e4
    running = scan_together(layout, Scan(x.double()))[0].running
    for part, sums in zip(x.split(lengths), running.split(lengths), strict=True):
        values, length = part.tolist(), len(part)
        for t in {1, length, *range(1, length, max(1, length // 40))}:
            assert abs(sums[t - 1].item() - math.fsum(values[:t])) <= 1e-15 * t


def test_prefix_sum_precision_is_independent_of_huge_neighbours():
    # One sum over the pack minus its value at the start would lose 1e-3 next to 1e20; in the
    # backward pass unbounded weights reach such sizes.
    layout = all_decisions(2, 2, 2)
    x = torch.tensor([1e20, 1e20, 1e-3, 1e-3, 1e20, 1e20], requires_grad=True)
    running = prefix_sum(layout, x)
    assert running[2:4].tolist() == pytest.approx([1e-3, 2e-3], rel=1e-6)
    (running * x.detach()).sum().backward()
    assert x.grad[2:4].tolist() == pytest.approx([2e-3, 1e-3], rel=1e-6)


def test_infinity_stays_in_its_sequence():
    running = prefix_sum(all_decisions(2, 2), torch.tensor([float("inf"), 1.0, 1.0, 1.0]))
    assert running[2:].tolist() == [1.0, 2.0]


def test_scan_without_group_raises():
    layout = SequenceLayout((8,), torch.ones(8).bool(), cp_rank=0, cp_size=2)
    with pytest.raises(ValueError, match="needs the cp_group"):
        prefix_sum(layout, torch.zeros(4))
    with pytest.raises(ValueError, match="this rank has t = 4 tokens"):
        prefix_sum(layout, torch.zeros(8))
