"""Tests of the rounding of received weights."""

import pytest
import torch

from megatron_rl.engine.incoming import round_tensor, round_tensors

LAYER = "model.layers.3.self_attn.q_proj.weight"


def test_round_tensor_bf16_keeps_eight_bits():
    # Between 1 and 2 bfloat16 has steps of 2^-7: 1 + 3/1024 is nearer to 1, 1 + 5/1024 to 1 + 2^-7.
    given = torch.tensor([1 + 3 / 1024, 1 + 5 / 1024, -3.0])
    for name in (LAYER, "model.norm.weight"):
        assert round_tensor(name, given, "bf16").tolist() == [1.0, 1 + 1 / 128, -3.0]
    assert given[0] == 1 + 3 / 1024  # the actor's weights are not modified


def test_round_tensor_fp8_scales_each_matrix_to_largest_number():
    # The largest number is 448, so the scale is 1: steps between 16 and 32 are 2, ties round to
    # even; the smallest step is 2^-9.
    given = torch.tensor([[448.0, 17.5], [-18.5, 2.0**-9]])
    expected = [[448.0, 18.0], [-18.0, 2.0**-9]]
    assert round_tensor(LAYER, given, "fp8_e4m3").tolist() == expected
    # With halved inputs the scale and the results are halved.
    halves = [[value / 2 for value in row] for row in expected]
    assert round_tensor(LAYER, given / 2, "fp8_e4m3").tolist() == halves
    assert round_tensor(LAYER, torch.zeros(2, 2), "fp8_e4m3").tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (2, 2)), ("lm_head.weight", (2, 2)),
        ("model.layers.0.input_layernorm.weight", (2,)), ("model.layers.0.mlp.gate.weight", (2, 2)),
        ("model.layers.0.self_attn.q_proj.bias", (2,)),
    ],
)  # fmt: skip
def test_round_tensor_fp8_skips_other_weights(name, shape):
    given = torch.full(shape, 1.01)
    given.view(-1)[0] = 3.0
    assert torch.equal(round_tensor(name, given, "fp8_e4m3"), given)
    matrix = given.view(1, -1)
    expert = "model.layers.0.mlp.experts.1.up_proj.weight"
    assert not torch.equal(round_tensor(expert, matrix, "fp8_e4m3"), matrix)


def test_round_tensors_without_mismatch_returns_same_tensors():
    given = torch.randn(2, 2)
    assert next(round_tensors(iter([(LAYER, given)]), "none"))[1] is given
