"""The chunked, vocabulary-parallel head against log_softmax of materialized logits."""

import pytest
import torch

from megatron_rl.distributed import vocab_parallel
from megatron_rl.distributed.vocab_parallel import VocabShard, tile_shape, token_logprobs
from tests.ranks import run_ranks

TOKENS, HIDDEN, VOCAB, PADDED = 37, 16, 50, 64
TEMPERATURE = 0.7


def _inputs():
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator)

    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    weight = draw(PADDED, HIDDEN)
    weight[VOCAB:] = 50.0  # padding rows would dominate every sum if they were counted
    return draw(TOKENS, HIDDEN), weight, labels, draw(TOKENS), draw(TOKENS)


def _mask():
    """Ids that a sampler kept at each token, the label among them; [n, 9] int32, -1 beyond.

    One token keeps the label alone, one the whole vocabulary, and one ids of the first rows only,
    so that other tiles and ranks have none of its.
    """
    generator = torch.Generator().manual_seed(1)
    *_, labels, _, _ = _inputs()
    mask = torch.full((TOKENS, 9), -1, dtype=torch.int32)
    for token, label in enumerate(labels.tolist()):
        others = torch.randperm(VOCAB, generator=generator)[: token % 9].tolist()
        others = [] if token == 3 else range(4) if token == 5 else others
        kept = sorted({label, *others})
        mask[token, : len(kept)] = torch.tensor(kept)
    mask[7] = -1
    return mask


def _loops():
    """Values and gradients of the kept tokens from float64 loops over tokens and ids."""
    hidden, weight, labels, grad, grad_entropy = (
        x.double() if x.is_floating_point() else x for x in _inputs()
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, entropies = [], []
    for token, row in enumerate(_mask().tolist()):
        kept = [one for one in row if one >= 0] or range(VOCAB)
        logits = {one: hidden[token] @ weight[one] / TEMPERATURE for one in kept}
        total = sum(logit.exp() for logit in logits.values())
        logprobs.append(logits[labels[token].item()] - total.log())
        chances = [logit.exp() / total for logit in logits.values()]
        entropies.append(-sum(chance * chance.log() for chance in chances))
    logprobs, entropies = torch.stack(logprobs), torch.stack(entropies)
    torch.autograd.backward((logprobs, entropies), (grad, grad_entropy))
    return logprobs.detach(), entropies.detach(), hidden.grad, weight.grad


def _plain():
    """Values and gradients from float64 log_softmax."""
    hidden, weight, labels, grad, grad_entropy = (
        x.double() if x.is_floating_point() else x for x in _inputs()
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    logps = torch.log_softmax(hidden @ weight[:VOCAB].t() / TEMPERATURE, dim=-1)
    logprobs = logps.gather(1, labels[:, None]).squeeze(1)
    entropies = -(logps.exp() * logps).sum(-1)
    torch.autograd.backward((logprobs, entropies), (grad, grad_entropy))
    return logprobs.detach(), entropies.detach(), hidden.grad, weight.grad


def _tiled(rank, world_size, tokens, elements, mask=None, group=None):
    vocab_parallel.TILE_ELEMENTS = {"cpu": elements}
    vocab_parallel.MAX_TILE_TOKENS = tokens
    if world_size > 1:
        group = torch.distributed.group.WORLD
    hidden, weight, labels, grad, grad_entropy = _inputs()
    rows = PADDED // world_size
    shard = VocabShard(rank * rows, VOCAB, group)
    weight = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    hidden.requires_grad_()
    logprobs, entropies = token_logprobs(
        hidden, weight, labels, shard=shard, temperature=TEMPERATURE, entropy=True,
        sampling_mask=mask,
    )  # fmt: skip
    torch.autograd.backward((logprobs, entropies), (grad, grad_entropy))
    results = logprobs.detach(), entropies.detach(), hidden.grad, weight.grad
    return tuple(x.numpy() for x in results)


def _on_four_ranks(rank, world_size):
    """In tiles of 5 x 12: the last of 4 ranks has 2 real rows and 14 rows of padding."""
    return [_tiled(rank, world_size, 5, 60, mask) for mask in (None, _mask())]


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(_on_four_ranks, 4)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tiles", [(5, 35), (100, 1 << 20), None])
def test_token_logprobs_equal_log_softmax(tiles, masked, monkeypatch, four_ranks):
    # Tiles of 5 x 7, a single tile, and four ranks.
    for name in ("TILE_ELEMENTS", "MAX_TILE_TOKENS"):
        monkeypatch.setattr(vocab_parallel, name, getattr(vocab_parallel, name))
    if tiles:
        results = [_tiled(0, 1, *tiles, _mask() if masked else None)]
    else:
        results = [result[masked] for result in four_ranks]
    results = [[torch.from_numpy(x).double() for x in result] for result in results]
    logprobs, entropies, grad_hidden, grad_weight = _loops() if masked else _plain()
    for result in results:
        torch.testing.assert_close(result[0], logprobs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result[1], entropies, rtol=1e-5, atol=1e-5)
    summed = sum(result[2] for result in results)
    torch.testing.assert_close(summed, grad_hidden, rtol=1e-5, atol=1e-5)
    weights = torch.cat([result[3] for result in results])
    torch.testing.assert_close(weights, grad_weight, rtol=1e-5, atol=1e-5)
    assert (weights[VOCAB:] == 0).all()


def test_rank_with_only_padding_gives_zero_gradient():
    hidden, weight, labels, _, _ = _inputs()
    shard = VocabShard(64, VOCAB)  # every row of this rank is padding
    assert shard.real_rows(16) == 0
    hidden.requires_grad_()
    logprobs, _ = token_logprobs(hidden, weight[:16].requires_grad_(), labels, shard=shard)
    logprobs.sum().backward()
    assert (hidden.grad == 0).all()


def test_weight_gradient_is_added_to_main_grad_with_tied_embeddings():
    hidden, weight, labels, grad, _ = _inputs()
    weight = torch.nn.Parameter(weight)
    weight.main_grad = torch.ones_like(weight)  # an earlier micro-batch
    logprobs, _ = token_logprobs(
        hidden, weight, labels, shard=VocabShard(0, VOCAB), into_main_grad=True
    )
    embedded = torch.nn.functional.embedding(labels, weight)  # tied embeddings: a second use
    torch.autograd.backward((logprobs, embedded), (grad, torch.ones_like(embedded)))
    counts = torch.bincount(labels, minlength=PADDED).float()
    torch.testing.assert_close(weight.grad, counts[:, None].expand_as(weight))
    other = weight.detach().clone().requires_grad_()
    plain, _ = token_logprobs(hidden, other, labels, shard=VocabShard(0, VOCAB))
    plain.backward(grad)
    torch.testing.assert_close(weight.main_grad, 1 + other.grad)


@pytest.mark.parametrize("mask", [None, _mask()])
def test_no_grad_gives_bit_identical_logprobs(mask):
    hidden, weight, labels, _, _ = _inputs()
    how = {"shard": VocabShard(0, VOCAB), "sampling_mask": mask}
    trained, _ = token_logprobs(hidden.requires_grad_(), weight, labels, **how)
    with torch.no_grad():
        scored, _ = token_logprobs(hidden, weight, labels, **how)
    assert torch.equal(trained, scored)


def test_label_that_the_sampler_kept_alone_has_logprob_0_and_no_gradient():
    hidden, weight, labels, _, _ = _inputs()
    mask = labels[:, None].int()
    logprobs, entropies = token_logprobs(
        hidden.requires_grad_(), weight, labels, shard=VocabShard(0, VOCAB), entropy=True,
        sampling_mask=mask,
    )  # fmt: skip
    (logprobs + entropies).sum().backward()
    assert (logprobs == 0).all()
    assert (entropies == 0).all()
    assert (hidden.grad == 0).all()


def test_tile_size_is_bounded_for_any_number_of_tokens():
    # 2^20 = 1,048,576 logits at once on a CPU: 256 tokens x 4,096 rows, 2048 tokens x 512 rows.
    assert tile_shape(256, rows=151_936, device="cpu") == (256, 4096)
    assert tile_shape(1 << 20, rows=151_936, device="cpu") == (2048, 512)
    assert tile_shape(3000, rows=64, device="cpu") == (2048, 64)


def test_low_precision_operands_give_logprobs_as_exact_as_float32(monkeypatch):
    """Against float64 of the same values; gradients within two roundings to bfloat16."""
    monkeypatch.setattr(vocab_parallel, "TILE_ELEMENTS", {"cpu": 1 << 14})
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(64, 48, generator=generator).mul(2).bfloat16().requires_grad_()
    weight = torch.randn(3000, 48, generator=generator).mul(0.5).bfloat16().requires_grad_()
    labels = torch.randint(0, 3000, (64,), generator=generator)
    grad = torch.randn(64, generator=generator)
    logprobs, _ = token_logprobs(hidden, weight, labels, shard=VocabShard(0, 3000))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    plain = (exact[0] @ exact[1].t()).log_softmax(1).gather(1, labels[:, None]).squeeze(1)
    assert logprobs.dtype == torch.float32
    assert (logprobs - plain).abs().max() < 1e-5  # logits in bfloat16 are 0.1 off
    found = torch.autograd.grad(logprobs, (hidden, weight), grad)
    for one, other in zip(found, torch.autograd.grad(plain, exact, grad.double()), strict=True):
        assert (one.double() - other).norm() < 2**-8 * other.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_bfloat16_operands_are_rounded_to_it_and_the_setting_is_restored(dtype, monkeypatch):
    monkeypatch.setattr(vocab_parallel, "has_bfloat16_instructions", lambda: True)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(64, 64, generator=generator).to(dtype) for _ in range(2))
    expected = hidden.double() @ weight.double().t()
    assert (vocab_parallel.compute_logits(hidden, weight, 1.0) - expected).abs().max() < 1e-4
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
    with vocab_parallel._rounded_to(dtype):
        wanted = "bf16" if dtype == torch.bfloat16 else "none"
        assert torch.backends.mkldnn.matmul.fp32_precision == wanted


def test_no_tokens_give_no_logprobs():
    hidden, weight, _, _, _ = _inputs()
    none, _ = token_logprobs(
        hidden[:0].requires_grad_(),
        weight,
        torch.zeros(0, dtype=torch.int64),
        shard=VocabShard(0, VOCAB),
    )
    none.sum().backward()
    assert none.shape == (0,)
