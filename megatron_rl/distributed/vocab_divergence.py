"""Divergences between two policies over the whole vocabulary, without materializing all logits.

With p the policy's and q the reference's probabilities of the next token, m = (p + q) / 2:

    reverse_kl  sum p log(p / q)                            d/dx = p (log(p / q) - reverse_kl)
    forward_kl  sum q log(q / p)                            d/dx = p - q
    jsd         1/2 sum p log(p / m) + 1/2 sum q log(q / m) d/dx = p (log(p / m) - KL(p, m)) / 2

Both policies' logits are computed tile by tile, as in `vocab_parallel`: once for their log-sums,
once for the divergence, and once more in the backward pass. The reference is given by its hidden
states, which are much smaller than its logits. Where both policies are the same to the last bit,
value and gradient are exactly 0.

With the reference's K likeliest tokens alone, all other tokens are one bucket: p and q then have
K + 1 values, of which the last is the sum over the others. Its derivative by the logit of one of
them is the bucket's, times the token's share of the bucket under the policy.

Shapes: n tokens, h hidden size, V vocabulary, v vocabulary rows on this rank (padding included),
K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import Group, gather_stacked
from megatron_rl.distributed.vocab_parallel import (
    VocabShard,
    add_product,
    compute_logits,
    log_sums,
    returned_gradient,
    spans,
    tile_shape,
    weight_gradient,
)
from megatron_rl.types import Divergence, ReferenceHead, ReferenceParts, ReferenceTop


def _half_log_to_mean(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute log(p / m) / 2 with m = (p + q) / 2; exactly 0 where p = q."""
    difference = log_q - log_p
    near = torch.log1p(torch.expm1(-difference.abs()) / 2)
    return -(difference.clamp(min=0) + near) / 2


def _terms(log_p: Tensor, log_q: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Return sums over these columns of the divergence and of what centers its gradient; [c]."""
    if divergence == "reverse_kl":
        value = (log_p.exp() * (log_p - log_q)).sum(1)
        return value, value
    if divergence == "forward_kl":
        value = (log_q.exp() * (log_q - log_p)).sum(1)
        return value, torch.zeros_like(value)
    center = (log_p.exp() * _half_log_to_mean(log_p, log_q)).sum(1)
    return center + (log_q.exp() * _half_log_to_mean(log_q, log_p)).sum(1), center


def _logit_gradient(log_p: Tensor, log_q: Tensor, center: Tensor, divergence: Divergence) -> Tensor:
    """Compute the derivative by the policy's logits; [c, v], [c, v], [c] -> [c, v]."""
    if divergence == "forward_kl":
        return log_p.exp() - log_q.exp()
    force = log_p - log_q if divergence == "reverse_kl" else _half_log_to_mean(log_p, log_q)
    return log_p.exp() * (force - center[:, None])


def _tiles(tokens: int, rows: int, device: str) -> Iterator[tuple[slice, slice]]:
    """Yield the tokens and vocabulary rows of each tile."""
    steps = tile_shape(tokens, rows=rows, device=device)
    for span in spans(tokens, steps[0]):
        for part in spans(rows, steps[1]):
            yield span, part


def _sum_over_ranks(table: Tensor, group: Group) -> Tensor:
    return gather_stacked(table, group=group).sum(0)


def _backward(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    grad: Tensor,
    logit_gradient: Callable[[slice, slice], Tensor],
) -> tuple[Tensor | None, ...]:
    """Return the gradients from those of each tile's logits, which are recomputed; [c, v] each."""
    grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
    total = weight_gradient(weight, ctx.needs_input_grad[1], ctx.into_main_grad)
    for tokens, rows in _tiles(len(hidden), ctx.count, hidden.device.type):
        out = logit_gradient(tokens, rows).mul_(grad[tokens, None])
        if ctx.temperature != 1.0:
            out.div_(ctx.temperature)
        out = out.to(hidden.dtype)
        add_product(grad_hidden[tokens], out.t(), weight[rows])
        if total is not None:
            add_product(total[rows], out, hidden[tokens])
    grad_weight = returned_gradient(weight, total, ctx.into_main_grad)
    return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None


class _Divergence(torch.autograd.Function):
    """Tiled divergence: keeps hidden states and log-sums; backward recomputes the tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        reference: ReferenceHead,
        divergence: Divergence,
        shard: VocabShard,
        temperature: float,
        into_main_grad: bool,
    ) -> Tensor:
        """[n, h], [v, h] -> [n] float32."""
        count = shard.real_rows(len(weight))
        ctx.sums = tuple(
            log_sums(states, head[:count], shard=shard, temperature=temperature)
            for states, head in ((hidden, weight), (reference.hidden, reference.weight))
        )
        table = torch.zeros(2, len(hidden), dtype=torch.float32, device=hidden.device)
        ctx.save_for_backward(hidden, weight)
        ctx.reference, ctx.divergence, ctx.temperature = reference, divergence, temperature
        ctx.count, ctx.into_main_grad = count, into_main_grad
        for tokens, rows in _tiles(len(hidden), count, hidden.device.type):
            logs = _Divergence._log_probs(ctx, hidden, weight, tokens, rows)
            table[:, tokens] += torch.stack(_terms(*logs, divergence))
        value, ctx.center = _sum_over_ranks(table, shard.group)
        return value

    @staticmethod
    def _log_probs(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: slice, rows: slice
    ) -> tuple[Tensor, Tensor]:
        """Return log p and log q of one tile; [c, v] each."""
        own, theirs = ctx.sums
        other = ctx.reference
        log_p = compute_logits(hidden[tokens], weight[rows], ctx.temperature)
        log_q = compute_logits(other.hidden[tokens], other.weight[rows], ctx.temperature)
        return log_p.sub_(own[tokens, None]), log_q.sub_(theirs[tokens, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden (this rank's part of the group's sum) and weight."""
        hidden, weight = ctx.saved_tensors

        def logit_gradient(tokens: slice, rows: slice) -> Tensor:
            logs = _Divergence._log_probs(ctx, hidden, weight, tokens, rows)
            return _logit_gradient(*logs, ctx.center[tokens], ctx.divergence)

        return _backward(ctx, hidden, weight, grad, logit_gradient)


SMALLEST_REST = -80.0  # log-probability of the other tokens together, where it underflows


def _columns(ids: Tensor, first: int, rows: int) -> Tensor:
    """Return the columns of tokens in [first, first + rows), and `rows` for others; like `ids`."""
    local = ids - first
    return torch.where((local >= 0) & (local < rows), local, rows)


def _top_log_probs(
    hidden: Tensor, real: Tensor, ids: Tensor, sums: Tensor, shard: VocabShard, temperature: float
) -> Tensor:
    """Compute log-probs of given tokens, and of all others together; [n, K] -> [n, K + 1]."""
    table = torch.zeros(len(hidden), ids.shape[1] + 1, dtype=torch.float32, device=hidden.device)
    for tokens, rows in _tiles(len(hidden), len(real), hidden.device.type):
        logits = compute_logits(hidden[tokens], real[rows], temperature).sub_(sums[tokens, None])
        columns = _columns(ids[tokens], shard.start + rows.start, logits.shape[1])
        padded = torch.nn.functional.pad(logits, (0, 1))  # the last column: tokens elsewhere
        table[tokens, :-1] += padded.gather(1, columns)
        others = padded.scatter_(1, columns, -torch.inf)[:, :-1]
        table[tokens, -1] += others.exp_().sum(1)
    table = _sum_over_ranks(table, shard.group)
    table[:, -1] = table[:, -1].log().clamp(min=SMALLEST_REST)
    return table


@torch.no_grad()
def top_tokens(
    hidden: Tensor, weight: Tensor, *, top_k: int, shard: VocabShard, temperature: float = 1.0
) -> ReferenceTop:
    """Find the likeliest tokens of a model at each position, and their log-probs.

    hidden [n, h], identical on every rank of the shard's group; weight [v, h], this rank's rows.
    Identical on every rank. Raises ValueError if `top_k` leaves no token outside the K.
    """
    if top_k >= shard.vocab_size:
        raise ValueError(
            f"top_k is {top_k}, but the vocabulary has {shard.vocab_size} tokens: give less, or "
            "compare all tokens"
        )
    real = weight[: shard.real_rows(len(weight))]
    best = torch.full((len(hidden), top_k), -torch.inf, device=hidden.device)
    ids = torch.zeros(len(hidden), top_k, dtype=torch.int64, device=hidden.device)
    for tokens, rows in _tiles(len(hidden), len(real), hidden.device.type):
        logits = compute_logits(hidden[tokens], real[rows], temperature)
        values, places = logits.topk(min(top_k, logits.shape[1]), dim=1)
        values = torch.cat((best[tokens], values), dim=1)
        known = torch.cat((ids[tokens], places + shard.start + rows.start), dim=1)
        best[tokens], order = values.topk(top_k, dim=1)
        ids[tokens] = known.gather(1, order)
    bests, known = (gather_stacked(x, group=shard.group) for x in (best, ids))  # [tp, n, K]
    order = torch.cat(list(bests), dim=1).topk(top_k, dim=1).indices
    ids = torch.cat(list(known), dim=1).gather(1, order)
    sums = log_sums(hidden, real, shard=shard, temperature=temperature)
    table = _top_log_probs(hidden, real, ids, sums, shard, temperature)
    return ReferenceTop(ids, table[:, :-1].contiguous(), table[:, -1].contiguous())


class _TopDivergence(torch.autograd.Function):
    """Tiled divergence on the reference's likeliest tokens and the bucket of all others."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        top: ReferenceTop,
        divergence: Divergence,
        shard: VocabShard,
        temperature: float,
        into_main_grad: bool,
    ) -> Tensor:
        """[n, h], [v, h] -> [n] float32."""
        real = weight[: shard.real_rows(len(weight))]
        ctx.sums = log_sums(hidden, real, shard=shard, temperature=temperature)
        log_p = _top_log_probs(hidden, real, top.ids, ctx.sums, shard, temperature)
        log_q = torch.cat((top.logprobs, top.rest[:, None]), dim=1)
        value, center = _terms(log_p, log_q, divergence)
        ctx.gradient = _logit_gradient(log_p, log_q, center, divergence)  # [n, K + 1]
        ctx.save_for_backward(hidden, weight)
        ctx.ids, ctx.rest, ctx.count = top.ids, log_p[:, -1], len(real)
        ctx.shard, ctx.temperature, ctx.into_main_grad = shard, temperature, into_main_grad
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden (this rank's part of the group's sum) and weight."""
        hidden, weight = ctx.saved_tensors

        def logit_gradient(tokens: slice, rows: slice) -> Tensor:
            log_p = compute_logits(hidden[tokens], weight[rows], ctx.temperature)
            log_p.sub_((ctx.sums + ctx.rest)[tokens, None])  # relative to the bucket
            out = torch.nn.functional.pad(log_p.exp_().mul_(ctx.gradient[tokens, -1:]), (0, 1))
            columns = _columns(ctx.ids[tokens], ctx.shard.start + rows.start, log_p.shape[1])
            return out.scatter_(1, columns, ctx.gradient[tokens, :-1])[:, :-1]

        return _backward(ctx, hidden, weight, grad, logit_gradient)


def token_divergences(
    hidden: Tensor,
    weight: Tensor,
    reference: ReferenceHead | ReferenceTop | ReferenceParts,
    *,
    divergence: Divergence,
    shard: VocabShard,
    temperature: float = 1.0,
    into_main_grad: bool = False,
) -> Tensor:
    """Compute the divergence (nats) of the policy and the reference at each token; [n] float32.

    hidden [n, h], identical on every rank of the shard's group; weight [v, h], this rank's rows.
    Differentiable in both. The gradients are those of `token_logprobs`: of `hidden` this rank's
    part, and of the weight in `main_grad` with `into_main_grad`. The reference's hidden size may be
    another. With `ReferenceParts` each token has the divergence from its own reference, 0 without
    any. Raises ValueError if a reference has other tokens or another vocabulary.
    """
    if isinstance(reference, ReferenceParts):
        value = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        for positions, one in zip(reference.positions, reference.parts, strict=True):
            own = token_divergences(
                hidden[positions],
                weight,
                one,
                divergence=divergence,
                shard=shard,
                temperature=temperature,
                into_main_grad=into_main_grad,
            )
            value = value.index_copy(0, positions, own)
        return value
    if isinstance(reference, ReferenceTop):
        top: Tensor = _TopDivergence.apply(
            hidden, weight, reference, divergence, shard, temperature, into_main_grad
        )
        return top
    for name, own, theirs in (
        ("hidden states", hidden, reference.hidden),
        ("output weights", weight, reference.weight),
    ):
        if len(own) != len(theirs):
            raise ValueError(
                f"the reference's {name} have shape {tuple(theirs.shape)}, but the policy's "
                f"{tuple(own.shape)}: score the same pack with a model of the same vocabulary"
            )
    whole: Tensor = _Divergence.apply(
        hidden, weight, reference, divergence, shard, temperature, into_main_grad
    )
    return whole
