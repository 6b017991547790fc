"""Every segment is scanned for itself, whatever the others hold, at a bounded cost."""

import pytest
import torch

from megatron_rl.distributed.segmented_scan import SegmentedScan


def make_scan(lengths):
    return SegmentedScan(torch.tensor(lengths), to_device=lambda table: table)


def test_hand_worked_sums_and_minima():
    # Segments [1, 2, 3], [], [5], [-1, 4].
    scan = make_scan([3, 0, 1, 2])
    x = torch.tensor([1.0, 2.0, 3.0, 5.0, -1.0, 4.0])
    running, totals = scan(x, combine="sum")
    assert running.tolist() == [1, 3, 6, 5, -1, 3]
    assert totals.tolist() == [6, 0, 5, 3]
    running, totals = scan(x, combine="sum", reverse=True)
    assert running.tolist() == [6, 5, 3, 5, 3, 4]
    assert totals.tolist() == [6, 0, 5, 3]
    running, totals = scan(x, combine="min")
    assert running.tolist() == [1, 1, 1, 5, -1, -1]
    assert totals.tolist() == [1, float("inf"), 5, -1]


@pytest.mark.parametrize("reverse", [False, True])
def test_long_tailed_lengths_against_one_cumsum_per_segment(reverse):
    # 3000 and 257 need several rows of 64; 1, 63, 64, 65 sit around the row width.
    lengths = [3000, 1, 63, 64, 65, 257, 2]
    scan = make_scan(lengths)
    x = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    running, totals = scan(x, combine="sum", reverse=reverse)
    for part, got, total in zip(x.split(lengths), running.split(lengths), totals, strict=True):
        wanted = part.flip(0).cumsum(0).flip(0) if reverse else part.cumsum(0)
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)
        torch.testing.assert_close(total, part.sum(), atol=1e-12, rtol=0)


def test_a_huge_neighbour_costs_no_precision():
    # One cumsum over the pack minus its value at the start would lose 1e-3 beside 1e20.
    scan = make_scan([2, 2])
    running, _ = scan(torch.tensor([1e20, 1e20, 1e-3, 1e-3]), combine="sum")
    assert running[2:].tolist() == pytest.approx([1e-3, 2e-3], rel=1e-6)


def test_infinity_stays_in_its_segment():
    scan = make_scan([2, 2])
    running, _ = scan(torch.tensor([float("inf"), 1.0, 1.0, 1.0]), combine="sum")
    assert running[2:].tolist() == [1.0, 2.0]


def test_memory_is_near_the_tokens_not_segments_times_longest():
    # 100 segments, one of 16,384: a rectangle would hold 1.6 million elements for 26,284 tokens.
    lengths = [16_384] + [100] * 99
    scan = make_scan(lengths)
    assert scan.rows * scan.width + scan.segments * scan.rows_of_longest < 2 * sum(lengths)
