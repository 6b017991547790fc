"""Digests change with any bit and with the order of elements, but not with the block size."""

import torch

from megatron_rl.actor import digest
from megatron_rl.actor.digest import digest_tensors


def test_digest_changes_with_one_bit_and_swapped_values():
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(50, generator=torch.Generator().manual_seed(1)).to(dtype)
        before = digest_tensors([values])
        assert before == digest_tensors([values.clone()])
        exchanged = values[[1, 0, *range(2, 50)]]
        assert digest_tensors([exchanged]) != before
        bits = values.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).clone()
        bits[-1] ^= 1
        assert digest_tensors([bits.view(dtype)]) != before


def test_digest_is_independent_of_block_size(monkeypatch):
    values = torch.arange(1000, dtype=torch.float32)
    whole = digest_tensors([values])
    monkeypatch.setitem(digest.BLOCK, "cpu", 7)
    assert digest_tensors([values]) == whole
    # By hand: the bits of 1.0 are 127 * 2^23, at places 1 and 2 times 3 and 5.
    assert digest_tensors([torch.ones(2)]) == f"{127 * 2**23 * 8:016x}"
