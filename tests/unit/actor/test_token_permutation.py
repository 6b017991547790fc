"""Tokens to experts' rows and back, against Megatron's own functions."""

import torch
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from megatron_rl.actor import layers

TOKENS, EXPERTS, CHOSEN, HIDDEN = 37, 8, 3, 5


def _route(dtype):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator, dtype=torch.float64)
    chosen = scores.topk(CHOSEN).indices
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    return tokens.to(dtype), routing_map, scores * routing_map


def _there_and_back(module, dtype):
    """Return the rows, their probabilities, the tokens' sums, and the gradient of the tokens."""
    tokens, routing_map, probs = _route(dtype)
    tokens.requires_grad_()
    rows, probs, token_of_row, *_ = module.permute(
        tokens, routing_map, probs=probs, num_out_tokens=TOKENS * CHOSEN
    )
    scaled = (rows * probs[:, None]).to(dtype)
    out = module.unpermute(scaled, token_of_row, tokens.shape, routing_map=routing_map)
    out.backward(torch.cos(torch.arange(out.numel())).view_as(out).to(dtype))
    return [rows, probs, out, tokens.grad]


def test_rows_sums_and_gradients_are_megatrons_on_a_cpu():
    got, want = (_there_and_back(one, torch.float32) for one in (layers, moe_utils))
    assert all(torch.equal(mine, plain) for mine, plain in zip(got, want, strict=True))


def test_sums_in_bfloat16_are_rounded_once():
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    token_of_row = torch.zeros(3, dtype=torch.long)
    assert layers.unpermute(rows, token_of_row, torch.Size((1, 1))).item() == 258


def test_rank_without_tokens():
    nothing = torch.zeros(0, HIDDEN, requires_grad=True)
    rows, _, token_of_row, *_ = layers.permute(
        nothing, torch.zeros(0, EXPERTS, dtype=torch.bool), num_out_tokens=0
    )
    out = layers.unpermute(rows, token_of_row, nothing.shape)
    out.sum().backward()
    assert out.shape == nothing.grad.shape == (0, HIDDEN)


def test_dispatchers_of_a_model_use_them():
    import megatron_rl.actor.model  # noqa: F401

    assert token_dispatcher.permute is layers.permute
    assert token_dispatcher.unpermute is layers.unpermute
