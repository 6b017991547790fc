"""FLOPs that the stand-ins of CUDA's kernels report, against counted pairs."""

import pytest
import torch

from megatron_rl.actor import dry_run_kernels
from megatron_rl.distributed.context_attention import is_visible


@pytest.mark.parametrize("window", [None, 1, 5, 9, 12, 13])
@pytest.mark.parametrize("queries", [1, 4, 12])
def test_attention_counts_visible_pairs(queries, window):
    """2 sequences, 4 query heads of size 8: 2 FLOPs per pair and element, 2 products, then 5."""
    counted = []
    query, key = torch.zeros(2, 4, queries, 8, requires_grad=True), torch.zeros(2, 2, 12, 8)
    attend = dry_run_kernels.attention(counted.append)
    attend(query, key, key, window=window).sum().backward()
    positions = torch.arange(12)
    pairs = is_visible(positions[12 - queries :, None] - positions, window).sum().item()
    assert counted == [2 * 2 * 4 * 8 * pairs * products for products in (2, 5)]
