"""Hand-written backward passes against autograd's, in float64."""

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.actor import layers
from megatron_rl.actor.layers import rms_norm, swiglu


def _draw(*size):
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def _gradients(function, *leaves):
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    out.backward(torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _compare(mine, plain, *leaves):
    want = _gradients(plain, *(leaf.double() for leaf in leaves))
    for got, expected in zip(_gradients(mine, *leaves), want, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm():
    x, weight = _draw(5, 1, 8) * 3, _draw(8)
    _compare(
        lambda x, weight: rms_norm(x, weight, eps=1e-2),
        lambda x, weight: F.rms_norm(x, (8,), weight, 1e-2),
        x,
        weight,
    )
    # By hand: x = (3, 4), mean of squares 12.5, so 3 / sqrt(12.5) = 0.848528.
    norm = rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), eps=0.0)
    torch.testing.assert_close(norm, torch.tensor([0.848528, 2.262742]))


def test_swiglu(monkeypatch):
    def plain(x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    # 300 rows: whole blocks of 128 and a rest. The gradient takes the place of the product with 1.
    monkeypatch.setattr(layers, "SWIGLU_ELEMENTS", 1280)
    _compare(lambda x: swiglu(x * 1), plain, _draw(300, 1, 10))


def test_swiglu_refuses_second_backward_pass():
    x = _draw(4, 1, 10).requires_grad_()
    inner = x * 1
    out = swiglu(inner)
    out.sum().backward(retain_graph=True)
    assert torch.equal(inner.detach(), x.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
