"""Tests of the rounding of received weights."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.engine.incoming import (
    PLAIN_BACKENDS,
    parameters_as_expected,
    round_tensor,
    round_tensors,
)

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


class _Experts(torch.nn.Module):
    """A layer like vLLM's, with kernels of one kind; None as in a release without the name."""

    def __init__(self, backend):
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(2, 8, 4))
        self.quant_method = SimpleNamespace(unquantized_backend=backend) if backend else None


def _read(backend, size=(2, 8, 4)):
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    model = torch.nn.Sequential(_Experts(backend and UnquantizedMoeBackend[backend]))
    llm = SimpleNamespace(apply_model=lambda function: [function(model)])
    return parameters_as_expected(
        llm, {"0.w13_weight": size}, shape=SimpleNamespace(tied_embeddings=False, weights=()),
        dtype=torch.float32,
    )  # fmt: skip


def test_parameters_as_expected_needs_kernels_that_keep_experts_in_order():
    assert _read("TRITON").keys() == {"0.w13_weight"}
    for backend in ("FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM", "AITER", "CPU", None):
        assert _read(backend) is None, backend
    assert _read("TRITON", size=(2, 4, 8)) is None


@pytest.mark.parametrize("backend", PLAIN_BACKENDS)
def test_vllm_leaves_experts_of_plain_kernels_as_loaded(backend):
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    given = torch.randn(2, 8, 4), torch.randn(2, 4, 4)
    kept = unquantized.convert_to_unquantized_kernel_format(
        unquantized.UnquantizedMoeBackend[backend], SimpleNamespace(is_act_and_mul=True), *given
    )
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(given, kept, strict=True))
