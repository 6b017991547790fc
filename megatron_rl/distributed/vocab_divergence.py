"""Divergences between two policies over the whole vocabulary, without materializing all logits.

With p the policy's and q the reference's probabilities of the next token, m = (p + q) / 2:

    reverse_kl  sum p log(p / q)                            d/dx = p (log(p / q) - reverse_kl)
    forward_kl  sum q log(q / p)                            d/dx = p - q
    jsd         1/2 sum p log(p / m) + 1/2 sum q log(q / m) d/dx = p (log(p / m) - KL(p, m)) / 2

Both policies' logits are computed tile by tile, as in `vocab_parallel`: once for their log-sums,
once for the divergence, and once more in the backward pass. The reference is given by its hidden
states, which are much smaller than its logits. Where both policies are the same to the last bit,
value and gradient are exactly 0.

Shapes: n tokens, h hidden size, V vocabulary, v vocabulary rows on this rank (padding included).
"""

from __future__ import annotations

from collections.abc import Iterator
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
from megatron_rl.types import Divergence, ReferenceHead


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
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        total = weight_gradient(weight, ctx.needs_input_grad[1], ctx.into_main_grad)
        for tokens, rows in _tiles(len(hidden), ctx.count, hidden.device.type):
            logs = _Divergence._log_probs(ctx, hidden, weight, tokens, rows)
            out = _logit_gradient(*logs, ctx.center[tokens], ctx.divergence)
            out.mul_(grad[tokens, None])
            if ctx.temperature != 1.0:
                out.div_(ctx.temperature)
            out = out.to(hidden.dtype)
            add_product(grad_hidden[tokens], out.t(), weight[rows])
            if total is not None:
                add_product(total[rows], out, hidden[tokens])
        grad_weight = returned_gradient(weight, total, ctx.into_main_grad)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None


def token_divergences(
    hidden: Tensor,
    weight: Tensor,
    reference: ReferenceHead,
    *,
    divergence: Divergence,
    shard: VocabShard,
    temperature: float = 1.0,
    into_main_grad: bool = False,
) -> Tensor:
    """Compute the divergence (nats) of the policy and the reference at each token; [n] float32.

    hidden [n, h], identical on every rank of the shard's group; weight [v, h], this rank's rows.
    Differentiable in both. The gradients are those of `token_logprobs`: of `hidden` this rank's
    part, and of the weight in `main_grad` with `into_main_grad`. Raises ValueError if the reference
    has other shapes.
    """
    for name, own, theirs in (
        ("hidden states", hidden, reference.hidden),
        ("output weight", weight, reference.weight),
    ):
        if own.shape != theirs.shape:
            raise ValueError(
                f"the reference's {name} have shape {tuple(theirs.shape)}, but the policy's "
                f"{tuple(own.shape)}: score the same pack with a model of the same shape"
            )
    value: Tensor = _Divergence.apply(
        hidden, weight, reference, divergence, shard, temperature, into_main_grad
    )
    return value
