"""Rotary positions against their definition as a rotation of complex numbers."""

import torch

from megatron_rl.actor.rotary import build_rotation
from tests.unit.resharding.shapes import small_shape


def test_a_pair_is_rotated_by_position_times_frequency():
    shape = small_shape(head_dim=4, rotary_base=100.0)  # frequencies 1 and 1 / 10
    positions = torch.tensor([0, 3, 1])  # any order: packs and zigzag shards
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = build_rotation(positions, shape, dtype=torch.float32).apply(x)
    # Element i is the real and element i + 2 the imaginary part.
    before = torch.complex(x[..., :2], x[..., 2:])
    turn = torch.polar(torch.ones(3, 1, 2), positions[:, None, None] * torch.tensor([1.0, 0.1]))
    after = before * turn
    want = torch.cat((after.real, after.imag), dim=-1)
    torch.testing.assert_close(out, want)
    grad = torch.randn(3, 2, 4)
    (mine,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    (theirs,) = torch.autograd.grad(want, x, grad)
    torch.testing.assert_close(mine, theirs)
