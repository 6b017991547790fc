"""Checksums against their definition, and the changes that they must detect."""

import pytest
import torch

from megatron_rl.resharding import transfer
from megatron_rl.resharding.pieces import Piece
from megatron_rl.resharding.push_schedule import Frame, Message, Slice, frames_of
from megatron_rl.resharding.transfer import (
    Parcel,
    groups_of_equal_layout,
    slice_checksum,
    slice_checksums,
)


def _by_definition(bits):
    """Compute slice_checksum element by element in Python integers, modulo 2^64."""
    height, width = len(bits), len(bits[0])
    total = sum((r + 1) * transfer._ROW_FACTOR * sum(bits[r]) for r in range(height))
    for c in range(width):
        total += (c + 1) * transfer._COLUMN_FACTOR * sum(row[c] for row in bits)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("block", [1, 12, 1 << 16])
def test_slice_checksum_matches_definition_for_any_block(block, monkeypatch):
    monkeypatch.setattr(transfer, "block_elements", lambda device: block)
    matrix = torch.randn(7, 20, generator=torch.Generator().manual_seed(0))[:, 3:9]
    for dtype, integers in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        bits = matrix.to(dtype).contiguous().view(integers).tolist()
        assert slice_checksum(matrix, dtype).item() == _by_definition(bits)
        assert slice_checksum(matrix.to(dtype)).item() == _by_definition(bits)


def test_slice_checksum_detects_moved_elements():
    matrix = torch.randn(6, 5)
    whole = slice_checksum(matrix)
    assert slice_checksum(matrix.clone()) == whole
    for other in (matrix.flip(0), matrix.flip(1), matrix[[1, 0, 2, 3, 4, 5]], matrix + 1):
        assert slice_checksum(other) != whole


@pytest.mark.parametrize("block", [1, 12, 1 << 16])
def test_slice_checksums_of_a_stack_are_those_of_its_matrices(block, monkeypatch):
    monkeypatch.setattr(transfer, "block_elements", lambda device: block)
    stack = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    for of in (stack, stack.transpose(1, 2), stack[:, 1:, :2]):
        singly = [slice_checksum(matrix, torch.bfloat16) for matrix in of]
        assert slice_checksums(of, torch.bfloat16).tolist() == [int(each) for each in singly]


@pytest.mark.parametrize("full", [False, True])
def test_slices_that_follow_each_other_are_one_run(full):
    """Each slice has memory of its own, the same alone and in a run."""
    shapes = [(1, 8), (1, 8), (1, 8), (2, 8), (3, 2), (3, 2), (4, 4), (4, 4), (4, 4), (1, 3)]
    tops = [5, 6, 7, 8, 0, 3, 0, 4, 9, 0]
    needed = [
        Piece(f"{n}", (0, h), (4, 4 + w), f"{w}", top)
        for n, ((h, w), top) in enumerate(zip(shapes, tops, strict=True))
    ]
    message = Message(0, 0, (1,), (1,), [Slice(0, (1,), each, each) for each in needed])
    alone = Message(0, 0, (2,), (2,), message.slices[:1])
    frames = frames_of((alone, message), full, 2)
    assert [each.sum_count for each in frames] == ([2, 11] if full else [1, 1])
    buffer = torch.arange(frames[-1].stop // 2, dtype=torch.int16)
    used = set[int]()
    for frame in frames:
        memory = buffer.view(torch.uint8)
        parcel = Parcel(frame, memory, buffer, memory[frame.start : frame.stop])
        slices = [one for _, matrices in parcel.runs() for one in matrices]
        assert [each.shape for each in slices] == shapes[: len(frame.message.slices)]
        for matrix in slices:
            places = set(matrix.flatten().tolist())
            assert len(places) == matrix.numel() and not used & places
            assert frame.first <= 2 * min(places) and 2 * max(places) < frame.stop
            used |= places
    # A slice of 6 numbers is padded, so the next is no continuation; the last [4, 4] is apart.
    runs = [(each.first, each.stop) for each in message.runs]
    assert runs == [(0, 3), (3, 4), (4, 5), (5, 6), (6, 8), (8, 9), (9, 10)]


def test_sums_of_a_round_are_those_of_its_messages():
    """Three messages of 48 bytes and one of 32 in one buffer, each after 16 bytes of sums."""
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randint(0, 256, (240,), generator=generator, dtype=torch.uint8)
    sizes, starts = (48, 48, 48, 32), (0, 64, 128, 192)
    parcels = []
    for start, size in zip(starts, sizes, strict=True):
        frame = Frame(Message(0, 0, (), (1,)), start, start + 16, start + 16 + size, 1)
        wire = buffer[frame.start : frame.stop]
        parcels.append(Parcel(frame, buffer, buffer.view(torch.bfloat16), wire))
    groups = list(groups_of_equal_layout(parcels))
    assert [len(group) for group in groups] == [3, 1]
    totals = torch.cat([transfer._totals(group) for group in groups])
    words = buffer.view(torch.int64).tolist()
    singly = [sum(words[at // 8 + 2 :][: n // 8]) for at, n in zip(starts, sizes, strict=True)]
    assert totals.tolist() == [(each + 2**63) % 2**64 - 2**63 for each in singly]
    sums = torch.cat([transfer._sums(group) for group in groups])
    assert sums.flatten().tolist() == [words[at // 8] for at in starts]
    buffer[64 + 16 + 47] ^= 1  # the last byte of the second one
    changed = torch.cat([transfer._totals(group) for group in groups]) != totals
    assert changed.tolist() == [False, True, False, False]
