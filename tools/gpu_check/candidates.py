"""Kernels that may replace those in use: timed next to them; none is used by default."""

import importlib.util
from contextlib import contextmanager, nullcontext
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tools.gpu_check.numerics import attend, attention_inputs
from tools.gpu_check.row import DEVICE, LOW
from tools.gpu_check.speed import timed

HEAD = (8192, 1536, 151936) if DEVICE == "cuda" else (64, 32, 1000)  # tokens, hidden, vocabulary
SEQUENCES = (4096,) * 4 if DEVICE == "cuda" else (64,) * 2
HEADS_AND_SIZE = ((12, 2, 2), 128) if DEVICE == "cuda" else ((4, 2, 2), 32)
SWIGLU = (16384, 2 * 8960) if DEVICE == "cuda" else (64, 128)


@cache
def compiled(function):
    """Compile a function: by Inductor on CUDA, without code generation on a CPU."""
    return torch.compile(function, backend="inductor" if DEVICE == "cuda" else "eager")


def fused_sum_exp(logits, maximum):
    """Compute the head's sum of exponentials in one expression."""
    return (logits - maximum[:, None]).exp().sum(1)


def fused_gradient(logits, log_sum, gain):
    """Compute the head's gradient of a tile in one expression."""
    return (logits - log_sum[:, None]).exp() * gain[:, None]


@contextmanager
def _compiled_tiles():
    from megatron_rl.distributed import vocab_parallel

    kept = vocab_parallel._sum_exp, vocab_parallel._softmax_gradient
    vocab_parallel._sum_exp = compiled(fused_sum_exp)
    vocab_parallel._softmax_gradient = compiled(fused_gradient)
    try:
        yield
    finally:
        vocab_parallel._sum_exp, vocab_parallel._softmax_gradient = kept


def _tiled(hidden, weight, labels):
    from megatron_rl.distributed.vocab_parallel import VocabShard, token_logprobs

    return token_logprobs(hidden, weight, labels, shard=VocabShard(0, len(weight)))[0]


def _materialized(hidden, weight, labels):
    logits = (hidden @ weight.t()).float()
    return -F.cross_entropy(logits, labels, reduction="none")


def _cut_cross_entropy(hidden, weight, labels):
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, labels, reduction="none")


HEADS = {
    "in use": _tiled,
    "compiled tiles": _tiled,
    "whole logits": _materialized,
    "cut_cross_entropy": _cut_cross_entropy,
}


def check_heads(row):
    """Time forward and backward of several heads on the same inputs; compare their gradients."""
    tokens, size, vocab = HEAD
    torch.manual_seed(0)
    hidden = torch.randn(tokens, size, device=DEVICE, dtype=LOW, requires_grad=True)
    weight = (torch.randn(vocab, size, device=DEVICE, dtype=LOW) * 0.05).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), device=DEVICE)
    weights = torch.randn(tokens, device=DEVICE)
    wanted = None
    for name, head in HEADS.items():
        package = name if name == "cut_cross_entropy" else "torch"
        if importlib.util.find_spec(package) is None:
            row.note(name, "not installed")
            continue
        results = []

        def act(name=name, head=head, results=results):
            with _compiled_tiles() if name == "compiled tiles" else nullcontext():
                loss = (head(hidden, weight, labels) * weights).sum()
                results[:] = torch.autograd.grad(loss, (hidden, weight))

        seconds = min(timed(act) for _ in range(4))
        row.note(f"{name}, ms", 1e3 * seconds)
        wanted = wanted or [one.clone() for one in results]
        gap = max(
            ((got.float() - want.float()).norm() / want.float().norm()).item()
            for got, want in zip(results, wanted, strict=True)
        )
        row.at_most(f"{name}, gradient's difference", gap, 3e-2)


def check_swiglu(row):
    """Time forward and backward of the activation in use and of a compiled one."""
    from megatron_rl.actor.layers import swiglu

    def plain(x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    torch.manual_seed(0)
    x = torch.randn(SWIGLU, device=DEVICE, dtype=LOW, requires_grad=True)
    results = {}
    for name, function in {"in use": swiglu, "compiled": compiled(plain)}.items():

        def act(name=name, function=function):
            out = function(x * 1)  # a copy: the one in use overwrites its input
            results[name] = torch.autograd.grad(out.sum(), x)[0]

        row.note(f"{name}, ms", 1e3 * min(timed(act) for _ in range(4)))
    gap = (results["in use"] - results["compiled"]).float().norm() / results[
        "in use"
    ].float().norm()
    row.at_most("gradient's difference", gap.item(), 1e-2)


# The fused kernels of scaled_dot_product_attention, which return the output and its log-sums.
FUSED = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def plain_attention(inputs):
    """Attend by torch's own autograd, which keeps output and log-sums for the backward pass."""
    q, k, v = (x.view(len(SEQUENCES), -1, *x.shape[1:]).transpose(1, 2) for x in inputs)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def _keep_fused(context, operation, *arguments, **options):
    del context, arguments, options
    return CheckpointPolicy.MUST_SAVE if operation in FUSED else CheckpointPolicy.PREFER_RECOMPUTE


def _layer(attention, *inputs):
    """Attention between two elementwise steps, as part of a recomputed layer."""
    return torch.tanh(attention([x * 1.5 for x in inputs]))


def _recomputed(attention, inputs, **options):
    return checkpoint(partial(_layer, attention), *inputs, use_reentrant=False, **options)


ATTENTIONS = {  # with the forward passes of attention that an update makes
    "in use": (2, lambda inputs: _layer(partial(attend, SEQUENCES), *inputs)),
    "output kept": (1, lambda inputs: _layer(plain_attention, *inputs)),
    "in use, layer recomputed": (3, partial(_recomputed, partial(attend, SEQUENCES))),
    "output kept, layer recomputed": (2, partial(_recomputed, plain_attention)),
    "output kept by the recomputed layer": (
        1,
        partial(
            _recomputed, plain_attention,
            context_fn=partial(create_selective_checkpoint_contexts, _keep_fused),
        ),
    ),
}  # fmt: skip


def check_attention_kept(row):
    """Time attention that repeats its forward pass next to variants that keep its output."""
    torch.manual_seed(0)
    inputs = attention_inputs(SEQUENCES, LOW, *HEADS_AND_SIZE)
    weights = torch.randn(sum(SEQUENCES), HEADS_AND_SIZE[0][0], HEADS_AND_SIZE[1], device=DEVICE)
    wanted = None
    for name, (passes, attention) in ATTENTIONS.items():
        results = []

        def act(attention=attention, results=results):
            results[:] = torch.autograd.grad((attention(inputs) * weights).sum(), inputs)

        row.note(f"{name}, {passes} forward, ms", 1e3 * min(timed(act) for _ in range(4)))
        wanted = wanted or [one.clone() for one in results]
        gap = max(
            ((got.float() - want.float()).norm() / want.float().norm()).item()
            for got, want in zip(results, wanted, strict=True)
        )
        row.at_most(f"{name}, gradient's difference", gap, 1e-2)
