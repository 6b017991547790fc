"""Checksums against their definition, and the changes that they must detect."""

import pytest
import torch

from megatron_rl.resharding import verify
from megatron_rl.resharding.verify import slice_checksum, word_sum


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
