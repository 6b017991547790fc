"""FLOPs that the stand-ins of CUDA's kernels report, against counted pairs."""

import pytest
import torch

from megatron_rl.actor import dry_run_kernels
from megatron_rl.distributed import joined_attention
from megatron_rl.distributed.context_attention import is_visible
from megatron_rl.distributed.sequence_layout import SequenceLayout


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


def test_joined_attention_counts_visible_pairs_and_fits_the_kernel_on_a_device(monkeypatch):
    """A prompt of 12 tokens with two responses of 4; `meta` checks the shapes of CUDA's kernel."""
    layout = SequenceLayout((12, 4, 4), torch.ones(20).bool(), parents=(-1, 0, 0), used=(12, 4, 4))
    calls = joined_attention.build_calls(layout, device=torch.device("meta"))
    assert [call.pairs for call in calls] == [78 + 10 + 10, 8 * 12]
    counted = []
    for name, products in (("attend", 2), ("attend_backward", 5)):
        counting = dry_run_kernels.joined(
            getattr(joined_attention, name), counted.append, products=products
        )
        monkeypatch.setattr(joined_attention, name, counting)
    query, key = (
        torch.empty(20, heads, 64, device="meta", dtype=torch.bfloat16).requires_grad_()
        for heads in (4, 2)
    )
    assert joined_attention.can_join(query) and not joined_attention.can_join(query.float())
    out = joined_attention.JoinedAttention.apply(query, key, key, None, calls, None, None, 0)
    out.sum().backward()
    assert (query.grad.shape, key.grad.shape) == (query.shape, key.shape)
    each = [2 * 4 * 64 * call.pairs for call in calls]
    assert counted == [pairs * products for products in (2, 5) for pairs in each]
