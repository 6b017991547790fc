"""Sums and minima along sequences in one process; test_ranks.py covers several ranks."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.distributed.chunk_scan import (
    Scan,
    prefix_sum,
    scan_together,
    sequence_sum,
)
from megatron_rl.distributed.sequence_layout import PADDING, SequenceLayout


def all_decisions(*lengths):
    return SequenceLayout(lengths, torch.ones(sum(lengths)).bool())


def test_sums_skip_masked_tokens():
    mask = torch.tensor([0, 1, 1, 0, 1, 1]).bool()
    layout = SequenceLayout((4, 2), mask)
    x = torch.tensor([float("nan"), 1.0, 2.0, float("inf"), 10.0, 20.0])
    assert prefix_sum(layout, x).tolist() == [0, 1, 3, 3, 10, 30]
    assert sequence_sum(layout, x).tolist() == [3, 3, 3, 3, 30, 30]


def test_min_scan_excludes_current_token():
    layout = SequenceLayout((4, 2), torch.tensor([1, 1, 0, 1, 1, 1]).bool())
    x = torch.tensor([2.0, 1.0, -9.0, 3.0, 5.0, 6.0])
    (before,) = scan_together(layout, Scan(x, "min"))
    assert before.running.tolist() == [math.inf, 2, 1, 1, math.inf, 5]
    assert before.total.tolist() == [1, 5]


def test_prefix_sum_gradient_is_suffix_sum():
    # d/dx_k (S_1 + 10 S_2 + 100 S_3) = all coefficients from k on; masked tokens get none.
    layout = SequenceLayout((4, 1), torch.tensor([1, 0, 1, 1, 1]).bool())
    x = torch.zeros(5, requires_grad=True)
    (prefix_sum(layout, x) * torch.tensor([1.0, 0.0, 10.0, 100.0, 7.0])).sum().backward()
    assert x.grad.tolist() == [111, 0, 110, 100, 7]


def test_prefix_sums_of_float32_log_ratios_have_float64_precision():
    # Against math.fsum, which does not round: a gate of 7e-4 compares S_t / t.
    lengths = (65_536, 40, 65_536, 1, 300, 2)
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


class Operations(TorchDispatchMode):
    """Counts operations, each of which is a kernel or more on a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **(options or {}))


def count_operations(sequences, length, combine="sum"):
    layout = all_decisions(*[length - i % 7 for i in range(sequences)])
    x = torch.randn(layout.full_tokens, dtype=torch.float64, requires_grad=True)
    scan_together(layout, Scan(x, combine))  # the layout's tables are computed once
    with Operations() as operations:
        scanned = scan_together(layout, Scan(x, combine))[0]
        if combine == "sum":
            torch.autograd.grad(scanned.running.sum() + scanned.total.sum(), x)
    return operations.count


def test_number_of_operations_does_not_depend_on_number_of_sequences():
    assert count_operations(4, 300) == count_operations(400, 300) == count_operations(4, 2000)
    assert count_operations(4, 300, "min") == count_operations(400, 300, "min")


UNEVEN = {
    "one long": (4096, *[3] * 400),
    "powers": tuple(2**n for n in range(13)),
    "alone": (5000,),
    "single tokens": (1,) * 700,
    "one short": (3000, 3000, 1),
    "seldom": (9, 4096, 1, 1, 2, 70, 700, 33),
}


@pytest.mark.parametrize("lengths", UNEVEN.values(), ids=UNEVEN)
@pytest.mark.parametrize("cp_size", [1, 2])
def test_padding_is_bounded_and_positions_match_chunks(lengths, cp_size):
    lengths = [2 * cp_size * length for length in lengths]
    ranks = [
        SequenceLayout(lengths, torch.ones(sum(lengths)), cp_rank=rank, cp_size=cp_size)
        for rank in range(cp_size)
    ]
    for layout in ranks:
        chunks = layout.padded_chunks
        assert layout.local_tokens <= chunks.size <= PADDING * layout.local_tokens
        assert len(chunks.shapes) <= 1 + math.log(max(lengths), PADDING)
        flat = torch.full((chunks.size,), -1.0)
        flat[chunks.places] = torch.arange(layout.local_tokens).float()
        mirrored = torch.full((chunks.size,), -1.0)
        mirrored[chunks.mirrored] = torch.arange(layout.local_tokens).float()
        rows = [row for table in chunks.tables(flat) for row in table]
        mirrors = [row for table in chunks.tables(mirrored) for row in table]
        found = sorted(row[row >= 0].tolist() for row in rows)
        bounds = zip(*layout.chunk_bounds.tolist(), strict=True)
        assert found == [[*range(*pair)] for pair in bounds if pair[0] < pair[1]]
        for row, mirror in zip(rows, mirrors, strict=True):
            length = int((row >= 0).sum())
            assert (row[length:] == -1).all() and torch.equal(mirror[:length].flip(0), row[:length])


def bits(values):
    return torch.tensor(values, dtype=torch.float64).view(torch.int64).tolist()


@pytest.mark.parametrize("lengths", UNEVEN.values(), ids=UNEVEN)
def test_scans_are_float64_loops_bit_for_bit(lengths):
    """On the CPU, where an operation along a row adds one element after the other."""
    layout = all_decisions(*lengths)
    generator = torch.Generator().manual_seed(1)
    x, grad = (
        torch.randn(sum(lengths), generator=generator, dtype=torch.float64) for _ in range(2)
    )
    x.requires_grad_()
    sums, minima = scan_together(layout, Scan(x), Scan(x.detach(), "min"))
    (suffixes,) = torch.autograd.grad(sums.running, x, grad)
    want = {"sums": [], "minima": [], "suffixes": []}
    for values, weights in zip(x.detach().split(lengths), grad.split(lengths), strict=True):
        total, least = 0.0, math.inf
        for value in values.tolist():
            want["minima"].append(least)
            total, least = total + value, min(least, value)
            want["sums"].append(total)
        after, suffix = [], 0.0
        for weight in reversed(weights.tolist()):
            suffix += weight
            after.append(suffix)
        want["suffixes"] += reversed(after)
    assert sums.running.detach().view(torch.int64).tolist() == bits(want["sums"])
    assert minima.running.view(torch.int64).tolist() == bits(want["minima"])
    assert suffixes.view(torch.int64).tolist() == bits(want["suffixes"])


def test_scan_without_group_raises():
    layout = SequenceLayout((8,), torch.ones(8).bool(), cp_rank=0, cp_size=2)
    with pytest.raises(ValueError, match="needs the cp_group"):
        prefix_sum(layout, torch.zeros(4))
    with pytest.raises(ValueError, match="this rank has t = 4 tokens"):
        prefix_sum(layout, torch.zeros(8))
