"""vLLM's own parameters, where they are as the plan expects."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.engine.incoming import (
    PLAIN_BACKENDS,
    parameters_as_expected,
)


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
