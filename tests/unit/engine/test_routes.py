"""The engine's routes as vLLM returns them on CUDA, and those that are refused."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.engine.routes import EngineRoutes
from megatron_rl.models.shape import ExpertShape, ModelShape

LAYERS, K = 3, 2
SIZES = {
    "architecture": "Qwen3MoeForCausalLM", "num_layers": LAYERS, "hidden_size": 8,
    "num_attention_heads": 2, "num_query_groups": 2, "head_dim": 4, "ffn_hidden_size": 8,
    "vocab_size": 16, "max_position_embeddings": 16, "rotary_base": 1e4, "norm_epsilon": 1e-6,
    "tied_embeddings": False,
}  # fmt: skip


def routes_of(found, *, num_experts=8):
    """Read the routes of a request with 3 tokens of prompt and 2 of response."""
    shape = ModelShape(**SIZES, experts=ExpertShape(num_experts, K, 4, True))
    completion = SimpleNamespace(token_ids=[1, 2], routed_experts=found)
    output = SimpleNamespace(request_id="0-0", prompt_token_ids=[3, 4, 5], outputs=[completion])
    return EngineRoutes(shape, on_cuda=True).of(output)


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(8, np.uint8), (256, np.uint8), (512, np.int16)]
)
def test_routes_are_bytes_in_the_engines_order(num_experts, dtype):
    generator = np.random.default_rng(0)
    rows = np.array([generator.permutation(num_experts)[:K] for _ in range(4 * LAYERS)])
    found = rows.reshape(4, LAYERS, K).astype(np.uint16)
    flat = routes_of(found, num_experts=num_experts)
    np.testing.assert_array_equal(flat.view(dtype).reshape(4, LAYERS, K), found)


@pytest.mark.parametrize("shape", [None, (5, LAYERS, K), (4, LAYERS, K + 1)])
def test_routes_of_another_shape_are_refused(shape):
    found = None if shape is None else np.zeros(shape, np.uint8)
    with pytest.raises(RuntimeError, match=r"of shape .* request of 4 tokens in 3 layers with 2"):
        routes_of(found)


@pytest.mark.parametrize("pair", [(1, 1), (0, 8)])
def test_routes_that_are_no_choice_are_refused(pair):
    found = np.tile(np.array([0, 1], np.uint8), (4, LAYERS, 1))
    found[2, 1] = pair
    with pytest.raises(RuntimeError, match="not 2 different experts of 8"):
        routes_of(found)


def test_vllm_returns_routes_on_cuda_and_caches_no_prefix_on_cpu():
    shape = ModelShape(**SIZES, experts=ExpertShape(8, K, 4, True))
    on_cuda, on_cpu = (EngineRoutes(shape, on_cuda=place).arguments() for place in (True, False))
    assert on_cuda == {"enable_return_routed_experts": True}
    assert on_cpu == {"enable_prefix_caching": False}
