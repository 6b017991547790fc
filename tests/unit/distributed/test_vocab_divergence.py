"""Tiled, vocabulary-parallel divergences against softmax of materialized logits."""

import itertools

import pytest
import torch

from megatron_rl.distributed import vocab_parallel
from megatron_rl.distributed.vocab_divergence import token_divergences, top_tokens
from megatron_rl.distributed.vocab_parallel import VocabShard
from megatron_rl.types import ReferenceHead, ReferenceParts
from tests.ranks import run_ranks

TOKENS, HIDDEN, VOCAB, PADDED = 37, 16, 50, 64
TEMPERATURE = 0.7
DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")


def _inputs():
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator)

    weights = draw(PADDED, HIDDEN), draw(PADDED, HIDDEN)
    for weight in weights:
        weight[VOCAB:] = 50.0  # padding rows would dominate every sum if they were counted
    hidden, theirs = 0.3 * draw(TOKENS, HIDDEN), 0.3 * draw(TOKENS, HIDDEN)  # about 1.5 nats apart
    return hidden, weights[0], theirs, weights[1], draw(TOKENS)


def _buckets(p, q, top_k):
    """Sum both policies' probabilities over all but q's likeliest tokens, in plain loops."""
    rows = []
    for p_row, q_row in zip(p, q, strict=True):
        order = sorted(range(VOCAB), key=lambda token: -q_row[token].item())
        own, theirs = ([x[token] for token in order[:top_k]] for x in (p_row, q_row))
        own.append(sum(p_row[token] for token in order[top_k:]))
        theirs.append(sum(q_row[token] for token in order[top_k:]))
        rows.append((torch.stack(own), torch.stack(theirs)))
    return (torch.stack(x) for x in zip(*rows, strict=True))


def _plain(divergence, top_k=None, others=()):
    """Value and gradients by autograd from materialized float64 probabilities.

    others: tokens whose reference has its output weight in another order.
    """
    hidden, weight, their_hidden, their_weight, grad = (x.double() for x in _inputs())
    hidden.requires_grad_()
    weight.requires_grad_()
    p = torch.softmax(hidden @ weight[:VOCAB].t() / TEMPERATURE, dim=-1)
    q = torch.softmax(their_hidden @ their_weight[:VOCAB].t() / TEMPERATURE, dim=-1)
    for token in others:
        logits = their_weight[:VOCAB].flip(0) @ their_hidden[token]
        q[token] = torch.softmax(logits / TEMPERATURE, dim=-1)
    if top_k is not None:
        p, q = _buckets(p, q, top_k)

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)

    m = (p + q) / 2
    value = {
        "reverse_kl": lambda: kl(p, q),
        "forward_kl": lambda: kl(q, p),
        "jsd": lambda: (kl(p, m) + kl(q, m)) / 2,
    }[divergence]()
    value.backward(grad)
    return value.detach(), hidden.grad, weight.grad


def _tiled(rank, world_size, divergence, tokens, elements, same=False, top_k=None):
    vocab_parallel.TILE_ELEMENTS = {"cpu": elements}
    vocab_parallel.MAX_TILE_TOKENS = tokens
    group = torch.distributed.group.WORLD if world_size > 1 else None
    hidden, weight, their_hidden, their_weight, grad = _inputs()
    if same:
        their_hidden, their_weight = hidden.clone(), weight.clone()
    rows = PADDED // world_size
    own = slice(rank * rows, (rank + 1) * rows)
    weight = weight[own].clone().requires_grad_()
    hidden.requires_grad_()
    shard = VocabShard(rank * rows, VOCAB, group)
    reference = ReferenceHead(their_hidden, their_weight[own].clone())
    if top_k is not None:
        reference = top_tokens(
            their_hidden, reference.weight, top_k=top_k, shard=shard, temperature=TEMPERATURE
        )
    value = token_divergences(
        hidden,
        weight,
        reference,
        divergence=divergence,
        shard=shard,
        temperature=TEMPERATURE,
    )
    value.backward(grad)
    return tuple(x.numpy() for x in (value.detach(), hidden.grad, weight.grad))


TOP = (None, 1, 5, VOCAB - 1)  # likeliest tokens, or all


def _on_four_ranks(rank, world_size):
    """In tiles of 5 x 12: the last of 4 ranks has 2 real rows of 16, fewer than 5 likeliest."""
    return {
        (divergence, same, top_k): _tiled(rank, world_size, divergence, 5, 60, same, top_k)
        for divergence, same, top_k in itertools.product(DIVERGENCES, (False, True), TOP)
    }


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(_on_four_ranks, 4)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("top_k", TOP)
@pytest.mark.parametrize("tiles", [(5, 35), (100, 1 << 20), None])
def test_token_divergences_equal_materialized(divergence, top_k, tiles, four_ranks, monkeypatch):
    # Tiles of 5 x 7, a single tile, and four ranks.
    for name in ("TILE_ELEMENTS", "MAX_TILE_TOKENS"):
        monkeypatch.setattr(vocab_parallel, name, getattr(vocab_parallel, name))
    if tiles:
        results = [_tiled(0, 1, divergence, *tiles, False, top_k)]
    else:
        results = [result[divergence, False, top_k] for result in four_ranks]
    results = [[torch.from_numpy(x).double() for x in result] for result in results]
    value, grad_hidden, grad_weight = _plain(divergence, top_k)
    for result in results:
        torch.testing.assert_close(result[0], value, rtol=1e-5, atol=1e-5)
        assert torch.equal(result[0], results[0][0])
    summed = sum(result[1] for result in results)
    torch.testing.assert_close(summed, grad_hidden, rtol=1e-5, atol=1e-5)
    weights = torch.cat([result[2] for result in results])
    torch.testing.assert_close(weights, grad_weight, rtol=1e-5, atol=1e-5)
    assert (weights[VOCAB:] == 0).all()


def test_same_policy_gives_exactly_zero(four_ranks):
    for results in four_ranks:
        assert not any(x.any() for (_, same, _), result in results.items() if same for x in result)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_far_policies_stay_finite(divergence):
    """Logits of +-400: probabilities underflow, and JSD is at most log 2."""
    hidden = torch.full((1, 1), 20.0, requires_grad=True)
    weight = torch.tensor([[20.0], [-20.0]])
    value = token_divergences(
        hidden,
        weight,
        ReferenceHead(-hidden.detach(), weight),
        divergence=divergence,
        shard=VocabShard(0, 2),
    )
    value.sum().backward()
    # All mass on the first token against all on the second: 800 nats, or log 2.
    torch.testing.assert_close(
        value.item(), 0.6931472 if divergence == "jsd" else 800.0, rtol=1e-6, atol=0
    )
    assert torch.isfinite(hidden.grad).all()


def test_reference_of_another_pack_is_rejected():
    hidden, weight, _, _, _ = _inputs()
    with pytest.raises(ValueError, match=r"hidden states have shape \(36, 16\)"):
        token_divergences(
            hidden,
            weight,
            ReferenceHead(hidden[1:], weight),
            divergence="jsd",
            shard=VocabShard(0, VOCAB),
        )


@pytest.mark.parametrize("top_k", [None, 5])
def test_each_token_is_compared_with_its_own_reference(top_k):
    """Every third token has the second reference, in any order of the two."""
    hidden, weight, theirs, their_weight, grad = _inputs()
    shard = VocabShard(0, VOCAB, None)
    second = torch.arange(0, TOKENS, 3)
    first = torch.tensor([n for n in range(TOKENS) if n % 3])
    flipped = torch.cat((their_weight[:VOCAB].flip(0), their_weight[VOCAB:]))
    parts = []
    for positions, head in ((second, flipped), (first, their_weight)):
        part = ReferenceHead(theirs[positions], head)
        if top_k is not None:
            part = top_tokens(part.hidden, head, top_k=top_k, shard=shard, temperature=TEMPERATURE)
        parts.append(part)
    hidden.requires_grad_()
    weight.requires_grad_()
    value = token_divergences(
        hidden, weight, ReferenceParts((second, first), tuple(parts)),
        divergence="jsd", shard=shard, temperature=TEMPERATURE,
    )  # fmt: skip
    value.backward(grad)
    wanted = _plain("jsd", top_k, others=second.tolist())
    for got, want in zip((value.detach(), hidden.grad, weight.grad), wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_likeliest_tokens_leave_some_for_the_others():
    hidden, weight, *_ = _inputs()
    with pytest.raises(ValueError, match=f"top_k is {VOCAB}, but the vocabulary has {VOCAB}"):
        top_tokens(hidden, weight, top_k=VOCAB, shard=VocabShard(0, VOCAB, None))
