"""Scratch memory is used again only when nobody can see it any more."""

import torch

from megatron_rl.resharding.scratch import ScratchPool


def test_memory_is_reused_once_the_last_view_is_gone():
    pool = ScratchPool(torch.bfloat16, torch.device("cpu"))
    first = pool.empty((4, 6))
    assert first.shape == (4, 6) and first.dtype == torch.bfloat16
    place, view = first.data_ptr(), first.fill_(3.0)[1:3, :2]
    del first
    second = pool.empty((4, 6)).fill_(7.0)
    assert second.data_ptr() != place and (view == 3.0).all(), "a view was overwritten"
    del view
    assert pool.empty((3, 5)).data_ptr() == place, "free memory was not used again"


def test_too_small_memory_is_replaced_not_kept():
    pool = ScratchPool(torch.float32, torch.device("cpu"))
    pool.empty((8,))
    larger = pool.empty((100,))
    assert larger.numel() == 100 and not pool._free
    del larger
    wide, narrow = pool.empty((60,)), pool.empty((50,))  # the free 400 bytes, and new ones
    del wide, narrow
    assert sorted(memory.size for memory in pool._free) == [200, 400]
    assert pool.empty((30,)).untyped_storage().nbytes() == 120  # the smallest that fits
    assert sorted(memory.size for memory in pool._free) == [200, 400] and pool.kept_bytes == 600


def test_memory_of_twice_the_size_is_left_to_larger_tensors():
    pool = ScratchPool(torch.float32, torch.device("cpu"))
    pool.empty((50,))
    held = pool.empty((24,))  # 96 bytes: the free 200 are more than twice that
    assert pool.kept_bytes == 0, "new memory takes the place of a free one"
    del held
    assert pool.kept_bytes == 96
