"""Log-probs of given tokens from hidden states, without materializing all logits.

    log p(y) = x_y - log sum_k exp(x_k),    x = h W^T / temperature

The vocabulary (rows of W) is sharded over tensor parallelism. Logits are computed in float32 for
one tile of tokens and rows at a time, reduced to three running numbers per token (maximum, sum of
exponentials, the label's logit) and dropped; one all-gather of these numbers completes all tokens.
The backward pass recomputes each tile. The extra memory is therefore one tile, and the extra work
is one of the head's three matrix products (the bound of arXiv 2411.09009).

With a sampling mask (top-k, top-p and min-p; "Keep Sampling Mask" of arXiv 2512.02556, section 3.1)
the sum is over the tokens that the sampler kept. Logits of all others are REMOVED in their tile, so
that maximum, sums, entropy and gradients are those of the kept tokens, in the same arithmetic.

Shapes: n tokens, h hidden size, V vocabulary, v vocabulary rows on this rank (padding included), k
most tokens that a mask keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import Group, gather_stacked
from megatron_rl.runtime.processes import has_bfloat16_instructions

# Logits per tile: few enough for a CPU's cache, or enough to keep a GPU busy.
TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
MAX_TILE_TOKENS = 2048
ALIGNED_ROWS = 64  # products of other numbers of rows are slower
# Rows of a low-precision weight gradient computed at once before adding them to the float32 one.
WEIGHT_ROWS = 1 << 14
# Logit of a token that the sampler removed: its exp is 0 next to any real logit. It is finite,
# since a tile, or a whole rank, may have no kept token: maximum and sums are then finite too, and
# vanish when they are combined with those that have some.
REMOVED = -1e30


@dataclass(frozen=True)
class VocabShard:
    """The rows [start, start + v) of the output weight on one rank; the vocabulary has V rows."""

    start: int
    vocab_size: int
    group: Group = None

    def real_rows(self, rows: int) -> int:
        """Return how many of this rank's `rows` belong to the vocabulary; the rest is padding."""
        return max(0, min(rows, self.vocab_size - self.start))


def tile_shape(tokens: int, *, rows: int, device: str) -> tuple[int, int]:
    """Return (tokens, vocabulary rows) of one tile of logits, bounded by TILE_ELEMENTS."""
    tile_tokens = max(1, min(tokens, MAX_TILE_TOKENS))
    tile_rows = TILE_ELEMENTS[device] // tile_tokens
    if tile_rows > ALIGNED_ROWS:
        tile_rows -= tile_rows % ALIGNED_ROWS
    return tile_tokens, max(1, min(rows, tile_rows))


def spans(total: int, step: int) -> list[slice]:
    """Cut `total` indices into slices of at most `step`."""
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


@contextmanager
def _rounded_to(dtype: torch.dtype) -> Iterator[None]:
    """Let a CPU round the operands of float32 products to bfloat16, if they were made from it.

    Nothing is lost then, sums and result stay in float32, and instructions for bfloat16 are used.
    """
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    if dtype == torch.bfloat16 and has_bfloat16_instructions():
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def compute_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Compute h W^T / temperature in float32 for any input dtype; [c, h], [v, h] -> [c, v]."""
    if hidden.dtype == torch.float32:
        logits = hidden @ weight.t()
    elif hidden.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        with _rounded_to(hidden.dtype):
            logits = hidden.float() @ weight.float().t()
    return logits if temperature == 1.0 else logits.div_(temperature)


def apply_sampling_mask(logits: Tensor, mask: Tensor | None, first: int) -> Tensor:
    """Overwrite the logits of tokens that the sampler removed; [c, v], [c, k] -> [c, v].

    mask: ids of the kept tokens, -1 in unused places; a row without ids keeps everything. `first`
    is the vocabulary index of the first column.
    """
    if mask is None:
        return logits
    columns = logits.shape[1]
    local = mask.long() - first
    local = torch.where((mask >= 0) & (local >= 0) & (local < columns), local, columns)
    removed = torch.ones(len(logits), columns + 1, dtype=torch.bool, device=logits.device)
    removed.scatter_(1, local, False)
    removed &= (mask >= 0).any(1)[:, None]
    return logits.masked_fill_(removed[:, :columns], REMOVED)


def _labels_in(labels: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return each label's column in [first, first + rows), 0 if outside, and an inside mask."""
    local = labels - first
    here = (local >= 0) & (local < rows)
    return (local * here)[:, None], here


def _sum_exp(logits: Tensor, maximum: Tensor) -> Tensor:
    """Sum exp(x - maximum) per row, overwriting the logits; [c, v], [c] -> [c]."""
    return logits.sub_(maximum[:, None]).exp_().sum(1)


def _softmax_gradient(logits: Tensor, log_sum: Tensor, gain: Tensor) -> Tensor:
    """Compute gain * exp(x - log_sum), overwriting the logits; [c, v], [c], [c] -> [c, v]."""
    return logits.sub_(log_sum[:, None]).exp_().mul_(gain[:, None])


def _reduce_tokens(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    first: int,
    temperature: float,
    entropy: bool,
    mask: Tensor | None,
) -> Tensor:
    """Reduce to (maximum, sum exp(x - maximum), label logit, sum x exp(x - maximum)); [4, c].

    `first` is the vocabulary index of the first row. Rows are processed in blocks; when a block
    contains a larger maximum, the previous sums are rescaled.
    """
    zeros = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
    maximum, total, target, mean = zeros - float("inf"), zeros, zeros, zeros
    step = tile_shape(len(hidden), rows=len(weight), device=hidden.device.type)[1]
    for rows in spans(len(weight), step):
        logits = compute_logits(hidden, weight[rows], temperature)
        logits = apply_sampling_mask(logits, mask, first + rows.start)
        local, here = _labels_in(labels, first + rows.start, logits.shape[1])
        target = target + torch.where(here, logits.gather(1, local).squeeze(1), 0.0)
        larger = torch.maximum(maximum, logits.amax(1))
        shrink = (maximum - larger).exp_()
        if entropy:
            weights = (logits - larger[:, None]).exp_()
            mean = mean * shrink + (weights * logits).sum(1)
            total = total * shrink + weights.sum(1)
            del weights
        else:
            total = total * shrink + _sum_exp(logits, larger)
        maximum = larger
        del logits  # free it before the next block
    return torch.stack((maximum, total, target, mean))


def _combine(table: Tensor, *, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Combine all ranks' tables to (log-sum-exp, label logit, mean of x under p) per token."""
    tables = gather_stacked(table, group=group)  # [tp, 4, n]
    maximum = tables[:, 0].amax(0)
    scale = (tables[:, 0] - maximum).exp()
    total = (tables[:, 1] * scale).sum(0)
    mean = (tables[:, 3] * scale).sum(0) / total
    return maximum + total.log(), tables[:, 2].sum(0), mean


def _reduce(
    hidden: Tensor,
    real: Tensor,
    labels: Tensor,
    shard: VocabShard,
    temperature: float,
    entropy: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (log-sum-exp, label logit, mean of x under p) of all tokens over all ranks; [n]."""
    step = tile_shape(len(hidden), rows=len(real), device=hidden.device.type)[0]
    tables = [
        _reduce_tokens(
            hidden[c], real, labels[c], shard.start, temperature, entropy, _rows(mask, c)
        )
        for c in spans(len(hidden), step)
    ]
    table = torch.cat(tables, dim=1) if tables else hidden.new_zeros(4, 0).float()
    return _combine(table, group=shard.group)


def _rows(mask: Tensor | None, tokens: slice) -> Tensor | None:
    return None if mask is None else mask[tokens]


def log_sums(hidden: Tensor, real: Tensor, *, shard: VocabShard, temperature: float) -> Tensor:
    """Compute log sum exp of the logits of each token; real: this rank's rows without padding."""
    labels = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    return _reduce(hidden, real, labels, shard, temperature, False)[0]


class _TokenLogprobs(torch.autograd.Function):
    """Tiled log-probs: keeps hidden states and log-sum-exps; backward recomputes the tiles."""

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
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """[n, h], [v, h], [n] -> log-probs [n] and entropies [n] (zeros without `entropy`)."""
        real = weight[: shard.real_rows(len(weight))]
        log_sum, target, mean = _reduce(hidden, real, labels, shard, temperature, entropy, mask)
        ctx.save_for_backward(hidden, weight, labels, log_sum, mean, mask)
        ctx.shard, ctx.temperature, ctx.entropy = shard, temperature, entropy
        ctx.into_main_grad = into_main_grad
        entropies = log_sum - mean if entropy else torch.zeros_like(log_sum)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return target - log_sum, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden (this rank's part of the group's sum) and weight."""
        hidden, weight, labels, log_sum, mean, mask = ctx.saved_tensors
        real = weight[: ctx.shard.real_rows(len(weight))]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        total = weight_gradient(weight, ctx.needs_input_grad[1], ctx.into_main_grad)
        steps = tile_shape(len(hidden), rows=len(real), device=hidden.device.type)
        for tokens in spans(len(hidden), steps[0]):
            for rows in spans(len(real), steps[1]):
                first = ctx.shard.start + rows.start
                out = compute_logits(hidden[tokens], real[rows], ctx.temperature)
                out = apply_sampling_mask(out, _rows(mask, tokens), first)
                gain = -grad[tokens]
                if ctx.entropy:  # dH/dx = -p (log p + H)
                    out.sub_(log_sum[tokens, None])
                    surplus = out + (log_sum - mean)[tokens, None]
                    out.exp_().mul_(surplus.mul_(-grad_entropy[tokens, None]).add_(gain[:, None]))
                else:
                    out = _softmax_gradient(out, log_sum[tokens], gain)
                local, here = _labels_in(labels[tokens], first, out.shape[1])
                out.scatter_add_(1, local, torch.where(here, grad[tokens], 0.0)[:, None])
                if ctx.temperature != 1.0:
                    out.div_(ctx.temperature)
                out = out.to(hidden.dtype)
                add_product(grad_hidden[tokens], out.t(), real[rows])
                if total is not None:
                    add_product(total[rows], out, hidden[tokens])
                del out
        grad_weight = returned_gradient(weight, total, ctx.into_main_grad)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None, None


def weight_gradient(weight: Tensor, is_trained: bool, into_main_grad: bool) -> Tensor | None:
    """Return the tensor that tiles add the weight's gradient to; None for a frozen weight."""
    if into_main_grad:
        main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]
        return main_grad
    if not is_trained:
        return None
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def returned_gradient(weight: Tensor, total: Tensor | None, into_main_grad: bool) -> Tensor | None:
    """Return what autograd gets as the weight's gradient: nothing if it is in `main_grad`."""
    if total is not None and not into_main_grad:
        return total.to(weight.dtype)
    if total is not None and getattr(weight, "returns_zero_gradient", False):
        return weight.new_zeros(()).expand_as(weight)  # triggers the gradient hook
    return None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute total += left^T right, accumulated in total's dtype; [v, h], [c, v], [c, h].

    On a CPU torch has no product of low-precision operands with a float32 result. The product is
    accumulated in float32 and rounded once before it is added, as every other layer's gradient.
    """
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
        return
    for start in range(0, len(total), WEIGHT_ROWS):
        rows = slice(start, start + WEIGHT_ROWS)
        if left.is_cuda:
            total[rows] += torch.mm(left[:, rows].t(), right, out_dtype=total.dtype)
        else:
            total[rows] += left[:, rows].t() @ right


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shard: VocabShard,
    temperature: float = 1.0,
    entropy: bool = False,
    into_main_grad: bool = False,
    sampling_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute float32 log-probs of `labels`, and optionally entropies, from hidden states.

    hidden [n, h], identical on every rank of the shard's group; weight [v, h], this rank's rows;
    labels [n] in [0, V); sampling_mask [n, k] int32: ids of the tokens that the sampler kept, the
    label among them, -1 in unused places. Log-probs and entropies are then those of the kept tokens
    alone; a row without ids keeps the whole vocabulary. Returns ([n], [n] or None). The gradient of
    `hidden` is this rank's part: the caller sums it over the group (a reduce-scatter under sequence
    parallelism). With into_main_grad the weight's gradient is added to the float32
    `weight.main_grad` and autograd receives none, so that a tied embedding accumulates both of its
    gradients; if the weight has `returns_zero_gradient`, autograd receives zeros, for hooks that
    wait for a gradient.
    """
    logprobs, entropies = _TokenLogprobs.apply(
        hidden, weight, labels, shard, temperature, entropy, into_main_grad, sampling_mask
    )
    return logprobs, entropies if entropy else None
