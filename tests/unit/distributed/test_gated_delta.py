"""Gated delta rule and convolution of packs, against the recurrence, token by token, in float64.

Sequences have odd lengths; what follows them in their padding is random.
"""

import functools
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.distributed import chunk_scan
from megatron_rl.distributed import gated_delta as convolution
from megatron_rl.distributed import gated_delta as delta
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.engine import starting
from tests.unit.distributed.four_ranks import all_results
from tests.unit.objectives.mutate import mutated

LENGTHS = (37, 5, 130, 1, 63, 8, 2)
KEY_HEADS, HEADS, KEY, VALUE = 1, 3, 8, 12
CHANNELS = 10
CP_SIZES = (1, 2, 4)
NAMES = ("outputs", "convolved", "q", "k", "v", "g", "beta", "x", "weight")


def inputs(dtype=torch.float64):
    """Return q, k, v, g, beta, x of all sequences, the taps, and the cotangents of both outputs."""
    generator = torch.Generator().manual_seed(3)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    tokens = sum(LENGTHS)
    q, k = (F.normalize(draw(tokens, KEY_HEADS, KEY), dim=-1) for _ in range(2))
    values = (
        q, k, draw(tokens, HEADS, VALUE),
        -F.softplus(draw(tokens, HEADS)) * torch.tensor([2.0, 0.3, 0.02]),
        draw(tokens, HEADS).sigmoid(), draw(tokens, CHANNELS), draw(CHANNELS, 4),
        draw(tokens, HEADS, VALUE), draw(tokens, CHANNELS),
    )  # fmt: skip
    return [value.to(dtype) for value in values]


def recurrence(q, k, v, g, beta):
    """The rule as it is written, for one sequence."""
    repeats = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q, k))
    state, out = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1]), []
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        read = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - read))
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) / q.shape[-1] ** 0.5)
    return torch.stack(out)


@functools.cache
def expected():
    *values, cotangent, of_convolved = inputs()
    leaves = [value.requires_grad_() for value in values]
    parts = zip(*(leaf.split(LENGTHS) for leaf in leaves[:5]), strict=True)
    out = torch.cat([recurrence(*part) for part in parts])
    x, weight = leaves[5:]
    convolved = torch.cat([
        F.conv1d(part.T[None], weight[:, None], padding=3, groups=CHANNELS)[0, :, : len(part)].T
        for part in x.split(LENGTHS)
    ])  # fmt: skip
    ((out * cotangent).sum() + (convolved * of_convolved).sum()).backward()
    tensors = (out.detach(), convolved.detach(), *(leaf.grad for leaf in leaves))
    return [tensor.numpy() for tensor in tensors]


class Sent(TorchDispatchMode):
    """Counts the bytes that leave this rank in all-to-alls."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is torch.ops.c10d.alltoall_base_.default:
            # of [ranks, ...] all but the own part
            whole = arguments[1]
            self.bytes += whole.nbytes // len(whole) * (len(whole) - 1)
        return function(*arguments, **(options or {}))


def compute(dtype=torch.float64, *, cp_rank=0, cp_size=1, group=None):
    """Return outputs and gradients of all tokens in the order of `NAMES`, and the bytes sent."""
    padded = [-(-length // (2 * cp_size)) * 2 * cp_size for length in LENGTHS]
    starts = np.cumsum([0, *padded[:-1]])
    rows = torch.cat([
        torch.arange(length) + start for length, start in zip(LENGTHS, starts, strict=True)
    ])  # fmt: skip
    mask = torch.zeros(sum(padded), dtype=torch.bool)
    mask[rows] = True
    layout = SequenceLayout(padded, mask, cp_rank=cp_rank, cp_size=cp_size, cp_group=group)

    def shard(value, scale):
        generator = torch.Generator().manual_seed(9)
        size = (sum(padded), *value.shape[1:])
        full = scale * torch.randn(size, generator=generator, dtype=value.dtype)
        full[rows] = value
        return layout.shard(full)

    *values, x, weight, cotangent, of_convolved = inputs(dtype)
    scales = (0.1, 0.1, 1, 0, 0.1, 1)
    leaves = [
        shard(value, scale).requires_grad_()
        for value, scale in zip((*values, x), scales, strict=True)
    ]
    weight = weight.clone().requires_grad_()
    with Sent() as forward:
        out = delta.gated_delta(*leaves[:5], layout)
    with Sent() as backward:
        (out * shard(cotangent, 0)).sum().backward()
    convolved = convolution.causal_convolution(leaves[5], weight, layout)
    (convolved * shard(of_convolved, 0)).sum().backward()
    tokens = [out.detach(), convolved.detach(), *(leaf.grad for leaf in leaves)]
    if group is not None:
        dist.all_reduce(weight.grad, group=group)
    gathered = [layout.gather(value)[rows].numpy() for value in tokens]
    return [*gathered, weight.grad.numpy()], (forward.bytes, backward.bytes)


MUTATIONS = {
    "chunks in the wrong order": (chunk_scan.order_chunks, ".flip(0)", ""),
    "state of another sequence": (
        delta._apply_states,
        "states[blocks.chunks]",
        "states.roll(2, 0)[blocks.chunks]",
    ),
    "state of another head": (
        chunk_scan._from_units,
        "return units.transpose(1, 2).flatten(0, 1)",
        "return units.roll(1, 1).transpose(1, 2).flatten(0, 1)",
    ),
    "halo off by one": (convolution._build_taps, "halo - within", "(halo - within - 1) % halo"),
    "decay applied twice": (
        delta._scan_blocks,
        "state = decay[part] * state",
        "state = decay[part] ** 2 * state",
    ),
    "gradient of the state before instead of after": (
        chunk_scan._StatesBeforeChunks.backward,
        "range(len(before) - 1, 0, -1)",
        "range(len(before) - 2, -1, -1)",
    ),
}


def on_rank(rank, world_size):
    results = {}
    for cp_size in CP_SIZES[1:]:
        groups = [
            dist.new_group(list(range(start, start + cp_size)))
            for start in range(0, world_size, cp_size)
        ]
        place = {
            "cp_rank": rank % cp_size, "cp_size": cp_size, "group": groups[rank // cp_size],
        }  # fmt: skip
        for dtype in (torch.float64, torch.float32):
            results[cp_size, dtype] = compute(dtype, **place)
        if cp_size == 2:
            for mistake, change in MUTATIONS.items():
                with mutated(*change):
                    results[mistake] = compute(**place)
    return results


def deviations(dtype, cp_size, results=None):
    if results is None:
        results = compute(dtype) if cp_size == 1 else own_results()[cp_size, dtype]
    return {
        name: abs(a - b).max() / max(1, abs(b).max())
        for name, a, b in zip(NAMES, results[0], expected(), strict=True)
    }


def own_results():
    return all_results()[0]["delta"]


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_outputs_and_gradients_are_those_of_the_recurrence(cp_size):
    assert max(deviations(torch.float64, cp_size).values()) < 1e-12
    assert max(deviations(torch.float32, cp_size).values()) < 1e-5


@pytest.mark.parametrize("mistake", MUTATIONS)
def test_mistakes_are_caught(mistake):
    assert max(deviations(torch.float64, 2, own_results()[mistake]).values()) > 1e-3


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_bytes_do_not_depend_on_lengths(cp_size):
    units = -(-len(LENGTHS) * HEADS // cp_size) * cp_size
    each = 8 * 2 * units // cp_size * (cp_size - 1)  # bytes of an element of both chunks, sent
    states, maps = KEY * VALUE, KEY * KEY + KEY * VALUE
    sent = compute()[1] if cp_size == 1 else own_results()[cp_size, torch.float64][1]
    assert sent == (each * (maps + states), each * 2 * states)


def test_decays_of_any_strength_stay_finite():
    layout = SequenceLayout((70,), torch.ones(70).bool())
    q = F.normalize(torch.ones(70, 1, 8), dim=-1)
    g = torch.full((70, 1), -1e4, requires_grad=True)
    v = torch.ones(70, 1, 8)
    out = delta.gated_delta(q, q, v, g, torch.ones(70, 1), layout)
    out.sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(g.grad).all()


@pytest.mark.parametrize(
    ("lengths", "size"), [((1024,), 64), ((16,) * 8, 16), ((95, 31), 32), ((3,) * 5, 16)]
)
def test_block_size_follows_the_chunks(lengths, size):
    layout = SequenceLayout(lengths, torch.ones(sum(lengths)).bool())
    assert layout.once(delta._rule_blocks).rows.shape[1] == size


def test_tokens_of_an_engine_on_a_cpu_follow_the_recurrence():
    """They do not use the actor's rule, so that comparing both before the first step shows faults.

    130 tokens after 5 that the rule has read at once, as an engine reads a prompt.
    """
    q, k, v, g, beta = (x[37 : 37 + 135] for x in inputs()[:5])
    expected = recurrence(q, k, v, g, beta)
    layout = SequenceLayout((5,), torch.ones(5, dtype=torch.bool))
    _, states = delta.torch_rule(q[:5], k[:5], v[:5], g[:5], beta[:5], None, layout)
    state = states[0]
    with mock.patch.object(delta, "torch_rule", side_effect=AssertionError):
        for at in range(5, 135):
            out, state = starting.take_token(q[at], k[at], v[at], g[at], beta[at], state)
            assert torch.allclose(out, expected[at], rtol=0, atol=1e-12)
