"""Scratch memory is reused only when unreferenced, and kept only within its limit."""

import torch

from megatron_rl.resharding.scratch import Scratch

CPU = torch.device("cpu")


def test_scratch_reuses_memory_after_last_view():
    scratch = Scratch(torch.bfloat16, CPU, limit=1000)
    first = scratch.tensor((4, 6))
    assert first.shape == (4, 6) and first.dtype == torch.bfloat16
    place, view = first.data_ptr(), first.fill_(3.0)[1:3, :2]
    del first
    second = scratch.tensor((4, 6)).fill_(7.0)
    assert second.data_ptr() != place and (view == 3.0).all(), "a view was overwritten"
    del view
    assert scratch.tensor((3, 8)).data_ptr() == place, "free memory was not used again"


def test_scratch_keeps_free_memory_within_limit():
    scratch = Scratch(torch.float32, CPU, limit=1000)
    one, two = scratch.tensor((100,)), scratch.tensor((90,))
    assert (scratch.bytes_in_use, scratch.bytes_free) == (760, 0)
    del one
    del two
    assert (scratch.bytes_in_use, scratch.bytes_free) == (0, 760)
    held = scratch.tensor((80,))  # 760 + 320 exceed the limit: the older 400 are released
    assert (scratch.bytes_in_use, scratch.bytes_free) == (320, 360)
    large = scratch.tensor((300,))  # allowed because it is needed, but no free memory is kept
    assert (scratch.bytes_in_use, scratch.bytes_free) == (1520, 0)
    del large
    assert (scratch.bytes_in_use, scratch.bytes_free) == (320, 0)
    assert held.numel() == 80


def test_scratch_wire_alternates_two_buffers():
    scratch = Scratch(torch.float32, CPU, limit=0)
    first, second = scratch.wire(0, 10), scratch.wire(1, 10)
    assert first.data_ptr() != second.data_ptr()
    assert scratch.wire(2, 10).data_ptr() == first.data_ptr()
    assert scratch.wire(3, 11).numel() == 11, "a larger round needs a larger buffer"
