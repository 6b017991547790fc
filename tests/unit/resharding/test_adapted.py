"""Rectangles of a weight plus its low-rank update: their bits, and their rounding to bfloat16."""

from dataclasses import replace

import pytest
import torch

from megatron_rl.resharding.adapted import (
    AdaptedWeight,
    read_rectangle,
    round_stochastically,
)
from megatron_rl.resharding.pieces import Piece

HEIGHT, WIDTH, RANK = 700, 40, 8
WHOLE = Piece("t", (0, HEIGHT), (0, WIDTH), "p")


def make(dtype, *, size=1e-3):
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return AdaptedWeight(
        draw(HEIGHT, WIDTH), draw(RANK, WIDTH), size * draw(HEIGHT, RANK), 0.5, seed=3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rectangle_has_the_bits_of_the_whole(dtype):
    weight = make(dtype)
    kept = weight.weight.clone()
    whole = weight.rectangle(WHOLE)
    for rows, columns in (((0, 1), (0, 40)), ((250, 530), (3, 17)), ((699, 700), (39, 40))):
        assert torch.equal(
            weight.rectangle(WHOLE.crop(rows, columns)), whole[slice(*rows), slice(*columns)]
        )
    exact = weight.weight.double() + 0.5 * weight.b.double() @ weight.a.double()
    unit = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    assert ((whole.double() - exact).abs() <= unit * exact.abs() + 1e-7).all()
    assert torch.equal(weight.weight, kept)


def test_rounding_is_that_of_the_position_in_the_whole_tensor():
    """A shard of rows 300 to 700, as a rank of another layout has it, below 60 other rows."""
    weight = make(torch.bfloat16)
    rows = slice(240, HEIGHT)
    shard = replace(weight, weight=weight.weight[rows], b=weight.b[rows])
    piece = Piece("t", (300, HEIGHT), (0, WIDTH), "p", top=60)
    same = shard.rectangle(piece) == weight.rectangle(WHOLE)[300:]
    assert same.float().mean() > 0.999  # the product's last bit decides the others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_an_update_it_is_the_weight(dtype):
    weight = make(dtype, size=0.0)
    assert torch.equal(read_rectangle(weight, WHOLE), weight.weight)
    assert read_rectangle(weight.weight, WHOLE).data_ptr() == weight.weight.data_ptr()


def test_seed_and_tensor_change_the_rounding():
    weight = make(torch.bfloat16)
    first = weight.rectangle(WHOLE)
    assert torch.equal(first, weight.rectangle(WHOLE))
    assert not torch.equal(first, replace(weight, seed=4).rectangle(WHOLE))
    assert not torch.equal(first, weight.rectangle(WHOLE._replace(tensor="u")))


def test_the_expected_value_is_exact():
    """500 seeds: 1 + 2^-10 is 1/8 above 1 in units of 2^-7; 8,000,000 draws, deviation 1e-4."""
    values = torch.full((100, 160), 1 + 2**-10)
    values[50:] *= -1
    total = torch.zeros_like(values)
    for seed in range(500):
        rounded = round_stochastically(values, seed=seed, row=7, column=9)
        assert torch.equal(rounded, rounded.bfloat16().float())
        total += (rounded - values.sign()) * values.sign() * 2**7
    means = total / 500
    assert abs(float(means.mean()) - 0.125) < 6e-4
    # Neither a position, nor a row, nor a column has numbers of its own: 0.125 (1 - 0.125) / 500.
    deviation = (0.125 * 0.875 / 500) ** 0.5
    assert float((means - 0.125).abs().max()) < 6 * deviation
    assert float((means.mean(0) - 0.125).abs().max()) < 6 * deviation / 10
    assert float((means.mean(1) - 0.125).abs().max()) < 6 * deviation / 160**0.5
    assert abs(float(means.std()) / deviation - 1) < 0.05


def test_neighbours_are_rounded_independently():
    values = torch.full((400, 400), 1 + 2**-8)  # half-way
    up = (round_stochastically(values, seed=5, row=0, column=0) > 1).float() - 0.5
    for shift in ((0, 1), (1, 0), (1, 1), (2, 3), (0, 64), (64, 0)):
        correlation = 4 * (up * up.roll(shift, (0, 1))).mean()
        assert abs(float(correlation)) < 5 / 400, shift


def test_what_is_not_finite_stays():
    values = torch.tensor([[torch.inf, -torch.inf, torch.nan]])
    rounded = round_stochastically(values, seed=1, row=0, column=0)
    assert torch.equal(rounded[:, :2], values[:, :2]) and rounded[0, 2].isnan()
