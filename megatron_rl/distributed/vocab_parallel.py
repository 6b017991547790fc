"""Log-probs of given tokens from hidden states, without ever holding tokens x vocabulary logits.

    log p(y) = x_y - log sum_k exp(x_k),    x = h W^T / temperature

The vocabulary (rows of W) is cut over tensor parallelism. Tokens are walked in chunks: a chunk's
logits are made in float32, reduced to three numbers per token (maximum, sum of exponentials, the
label's logit) and dropped; one all-gather of these numbers completes all tokens at once. The
backward pass makes each chunk's logits again. So the extra memory is that of one chunk, and the
extra work one of the head's three matrix products (arXiv 2411.09009 gives the same bound).

Shapes: n tokens, h hidden size, V vocabulary, v rows of it on this rank (padding included).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import Group, gather_stacked

# A chunk's logits have at most this many elements where there are few tokens ...
SMALL_CHUNK_ELEMENTS = 1 << 22
# ... else at most this share of the tokens, up to this many: enough rows for a fast product.
CHUNKS = 16
MAX_CHUNK_TOKENS = 1024
# Rows of a low-precision weight gradient that are made at once before they join the float32 one.
WEIGHT_ROWS = 1 << 14


@dataclass(frozen=True)
class VocabShard:
    """The rows of the output weight that one rank holds: [start, start + v) of V real ones."""

    start: int
    vocab_size: int
    group: Group = None

    def real_rows(self, rows: int) -> int:
        """How many of this rank's `rows` belong to the vocabulary; the rest is padding."""
        return max(0, min(rows, self.vocab_size - self.start))


def chunk_tokens(tokens: int, *, rows: int) -> int:
    """Tokens whose logits are held at once: bounded, yet enough for a fast matrix product."""
    return max(SMALL_CHUNK_ELEMENTS // max(1, rows), min(MAX_CHUNK_TOKENS, -(-tokens // CHUNKS)), 1)


def _chunks(tokens: int, rows: int) -> list[slice]:
    step = chunk_tokens(tokens, rows=rows)
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """h W^T / temperature in float32, whatever the inputs' precision; [c, h], [v, h] -> [c, v]."""
    if hidden.dtype == torch.float32:
        logits = hidden @ weight.t()
    elif hidden.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight.float().t()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _local_labels(labels: Tensor, shard: VocabShard, real: int) -> tuple[Tensor, Tensor]:
    """Column of each label on this rank (0 where elsewhere) and whether it is here; [n], [n]."""
    local = labels - shard.start
    here = (local >= 0) & (local < real)
    return local * here, here


def _reduce_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabShard,
    temperature: float,
    entropy: bool,
) -> Tensor:
    """This rank's (maximum, sum exp(x - maximum), label logit, sum x exp(x - maximum)); [4, n]."""
    local, here = _local_labels(labels, shard, len(weight))
    table = torch.zeros(4, len(hidden), dtype=torch.float32, device=hidden.device)
    if not len(weight):  # this rank's rows are padding only
        table[0] = float("-inf")
        return table
    for chunk in _chunks(len(hidden), len(weight)):
        logits = _logits(hidden[chunk], weight, temperature)
        target = logits.gather(1, local[chunk, None]).squeeze(1)
        table[2, chunk] = torch.where(here[chunk], target, 0.0)
        maximum = logits.amax(1)
        table[0, chunk] = maximum
        if entropy:
            weights = (logits - maximum[:, None]).exp_()
            table[3, chunk] = (weights * logits).sum(1)
        else:
            weights = logits.sub_(maximum[:, None]).exp_()
        table[1, chunk] = weights.sum(1)
    return table


def _combine(table: Tensor, *, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """(log-sum-exp, label logit, mean of x under p) of every token from all ranks' tables."""
    tables = gather_stacked(table, group=group)  # [tp, 4, n]
    maximum = tables[:, 0].amax(0)
    scale = (tables[:, 0] - maximum).exp()
    total = (tables[:, 1] * scale).sum(0)
    mean = (tables[:, 3] * scale).sum(0) / total
    return maximum + total.log(), tables[:, 2].sum(0), mean


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps hidden states and log-sum-exps; backward makes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        shard: VocabShard,
        temperature: float,
        entropy: bool,
        into_main_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        """[n, h], [v, h], [n] -> log-probs [n] and entropies [n] (zeros unless asked)."""
        real = weight[: shard.real_rows(len(weight))]
        table = _reduce_chunks(hidden, real, labels, shard, temperature, entropy)
        log_sum, target, mean = _combine(table, group=shard.group)
        ctx.save_for_backward(hidden, weight, labels, log_sum, mean)
        ctx.shard, ctx.temperature, ctx.entropy = shard, temperature, entropy
        ctx.into_main_grad = into_main_grad
        entropies = log_sum - mean if entropy else torch.zeros_like(log_sum)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return target - log_sum, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden (this rank's part of the sum over the group) and weight."""
        hidden, weight, labels, log_sum, mean = ctx.saved_tensors
        real = weight[: ctx.shard.real_rows(len(weight))]
        local, here = _local_labels(labels, ctx.shard, len(real))
        grad_hidden = torch.zeros_like(hidden)
        if ctx.into_main_grad:
            total = weight.main_grad
        else:
            total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        chunks = _chunks(len(hidden), len(real)) if len(real) else []
        for chunk in chunks:
            logits = _logits(hidden[chunk], real, ctx.temperature).sub_(log_sum[chunk, None])
            if ctx.entropy:  # dH/dx = -p (log p + H)
                surplus = logits + (log_sum - mean)[chunk, None]
                factor = surplus.mul_(-grad_entropy[chunk, None]).sub_(grad[chunk, None])
                out = logits.exp_().mul_(factor)
            else:
                out = logits.exp_().mul_(-grad[chunk, None])
            gain = torch.where(here[chunk], grad[chunk], 0.0)
            out.scatter_add_(1, local[chunk, None], gain[:, None])
            if ctx.temperature != 1.0:
                out.div_(ctx.temperature)
            out = out.to(hidden.dtype)
            torch.mm(out, real, out=grad_hidden[chunk])
            _add_product(total[: len(real)], out, hidden[chunk])
        grad_weight = None if ctx.into_main_grad else total.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right, accumulated in total's precision; [v, h], [c, v], [c, h]."""
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
        return
    for start in range(0, len(total), WEIGHT_ROWS):
        rows = slice(start, start + WEIGHT_ROWS)
        if left.is_cuda:
            total[rows] += torch.mm(left[:, rows].t(), right, out_dtype=total.dtype)
        else:
            total[rows] += left[:, rows].t().to(total.dtype) @ right.to(total.dtype)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shard: VocabShard,
    temperature: float = 1.0,
    entropy: bool = False,
    into_main_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Float32 log-probs of `labels`, and entropies when asked, from hidden states.

    hidden [n, h], the same on every rank of the shard's group; weight [v, h], this rank's rows;
    labels [n] in [0, V). Returns ([n], [n] or None). The gradient of `hidden` is this rank's part:
    the caller sums it over the group (a reduce-scatter under sequence parallelism). With
    into_main_grad the weight's gradient is added to the float32 `weight.main_grad` and none is
    returned to autograd, so that a weight that is also the embedding gets both of its gradients.
    """
    logprobs, entropies = _TokenLogprobs.apply(
        hidden, weight, labels, shard, temperature, entropy, into_main_grad
    )
    return logprobs, entropies if entropy else None
