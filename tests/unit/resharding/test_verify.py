"""Checksums against their definition, and the changes that they must detect."""

import pytest
import torch

from megatron_rl.resharding import verify
from megatron_rl.resharding.parcels import (
    Frame,
    Message,
    Parcel,
    Places,
    frames_of,
    runs_of_equal_layout,
)
from megatron_rl.resharding.pieces import Piece
from megatron_rl.resharding.slices import Slice
from megatron_rl.resharding.verify import slice_checksum, slice_checksums, word_sum


def _by_definition(bits):
    """Compute slice_checksum element by element in Python integers, modulo 2^64."""
    height, width = len(bits), len(bits[0])
    total = sum((r + 1) * verify._ROW_FACTOR * sum(bits[r]) for r in range(height))
    for c in range(width):
        total += (c + 1) * verify._COLUMN_FACTOR * sum(row[c] for row in bits)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("block", [1, 12, 1 << 16])
def test_slice_checksum_matches_definition_for_any_block(block, monkeypatch):
    monkeypatch.setattr(verify, "block_elements", lambda device: block)
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


def test_word_sum_detects_any_changed_bit():
    message = torch.arange(11, dtype=torch.bfloat16)  # 22 bytes: two words and a rest
    whole = word_sum(message)
    for place in range(11):
        changed = message.clone()
        changed.view(torch.int16)[place] ^= 1
        assert word_sum(changed) != whole
    longer = torch.cat([torch.zeros(1, dtype=torch.bfloat16), message])
    assert word_sum(longer[1:]) == whole  # read from an odd address


@pytest.mark.parametrize("block", [1, 12, 1 << 16])
def test_slice_checksums_of_a_stack_are_those_of_its_matrices(block, monkeypatch):
    monkeypatch.setattr(verify, "block_elements", lambda device: block)
    stack = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    for of in (stack, stack.transpose(1, 2), stack[:, 1:, :2]):
        singly = [slice_checksum(matrix, torch.bfloat16) for matrix in of]
        assert slice_checksums(of, torch.bfloat16).tolist() == [int(each) for each in singly]


def _parcel(buffer, start, size, separate=()):
    """Lay out a message of `size` bytes with one sum, which takes 16 bytes."""
    places = Places([0], size // 2, size // 2, list(range(len(separate))), [], [])
    end = start + 16 + size
    frame = Frame(Message(0, 0, (), (1,)), places, start, start + 16, end, end, 1)
    elements = buffer.view(torch.bfloat16)
    return Parcel(frame, buffer, elements, buffer[start:end], list(separate), {})


@pytest.mark.parametrize("full", [False, True])
def test_slices_of_equal_shapes_are_packed_as_one_stack(full):
    """Each slice has memory of its own, the same alone and in a stack; large ones come alone."""
    shapes = [(1, 3), (1, 3), (1, 3), (2, 3), (3, 2), (10, 10), (10, 10), (1, 3)]
    pieces = [Piece(f"{n}", (0, h), (4, 4 + w), f"{n}") for n, (h, w) in enumerate(shapes)]
    message = Message(0, 0, (1,), (1,), [Slice(0, (1,), each, each) for each in pieces])
    alone = Message(0, 0, (2,), (2,), message.slices[:1])
    frames = frames_of((alone, message), full, 100, 2)
    buffer = torch.arange(frames[-1].stop // 2, dtype=torch.int16)
    used = set[int]()
    for frame in frames:
        memory = buffer.view(torch.uint8)
        parcel = Parcel(frame, memory, buffer, memory[frame.start : frame.end], [], {})
        slices = [(n, one) for n, of in parcel.stacks() for n, one in enumerate(of, n)]
        assert [n for n, _ in slices] == list(range(len(frame.message.slices)))
        for number, matrix in slices:
            assert matrix.shape == shapes[number] and torch.equal(matrix, parcel.matrix(number))
            places = set(matrix.flatten().tolist())
            assert len(places) == matrix.numel() and not used & places
            assert frame.first <= 2 * min(places) and 2 * max(places) < frame.stop
            assert (2 * max(places) >= frame.end) == (number in (5, 6))
            used |= places
        assert [sum_count for *_, sum_count in frames] == ([2, 9] if full else [1, 1])
    assert [(each.first, each.stop) for each in frames[1].places.stacks] == [
        (0, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8),
    ]  # fmt: skip


def test_sums_of_a_round_are_those_of_its_messages():
    """Three messages of 48 bytes and one of 32 in one buffer; the last two come alone."""
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randint(0, 256, (288,), generator=generator, dtype=torch.uint8)
    apart = torch.randn(9, generator=generator)
    sizes, starts = (48, 48, 48, 32, 32), (0, 64, 128, 192, 240)
    parcels = [_parcel(buffer, at, size) for at, size in zip(starts, sizes, strict=True)]
    parcels[-1] = _parcel(buffer, starts[-1], 32, [apart])
    runs = list(runs_of_equal_layout(parcels))
    assert [len(run) for run in runs] == [3, 1, 1]
    totals = torch.cat([verify._totals(run) for run in runs])
    singly = [word_sum(buffer[at + 16 : at + 16 + n]) for at, n in zip(starts, sizes, strict=True)]
    singly[-1] += word_sum(apart)
    assert totals.tolist() == [int(each) for each in singly]
    sums = torch.cat([verify._sums(run) for run in runs])
    assert sums.flatten().tolist() == [int(buffer[at:].view(torch.int64)[0]) for at in starts]
    buffer[64 + 16 + 47] ^= 1  # the last byte of the second one
    changed = torch.cat([verify._totals(run) for run in runs]) != totals
    assert changed.tolist() == [False, True, False, False, False]
