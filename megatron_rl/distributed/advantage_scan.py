"""Generalized advantage estimates over context-parallel shards: an affine scan from the right.

Schulman et al., arXiv 1506.02438. Over the valid decisions t = 1..L of a response,

    A_t = delta_t + gamma_t lambda_t A_{t+1},    delta_t = r_t + gamma_t V_{t+1} - V_t,

with A_{L+1} = V_{L+1} = 0. Tokens that are no decisions, as observations of an environment, are
passed: t + 1 is the next decision, wherever it stands. What enters a chunk of tokens from the right
is a pair (A, V), and a chunk maps it to the pair that leaves to the left:

    A' = m A + b + c V,    V' = v + e V        (e is 1 for a chunk without a decision, else 0).

So the exchange is that of `chunk_scan.py`, mirrored: one all-gather of a table [S, 2, 2 + 3 K] for
K values of lambda (m, b and c each; v and e once), and no token travels. Everything is computed in
float64. Shapes: T tokens in the pack, t on this rank, S sequences, R responses, C = 2 cp_size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.distributed.chunk_scan import order_chunks
from megatron_rl.distributed.collectives import gather_stacked
from megatron_rl.distributed.sequence_layout import SequenceLayout


def generalized_advantages(
    layout: SequenceLayout,
    values: Tensor,
    rewards: Tensor,
    *,
    gamma: Tensor,
    lambdas: Sequence[Tensor],
) -> list[Tensor]:
    """Compute A_t for each lambda; [t] float64 each, 0 where no decision is.

    values, rewards, gamma and each lambda are [t] and count at decisions alone. gamma_t and
    lambda_t belong to the step from decision t to decision t + 1. A response that was cut
    bootstraps if its last reward includes gamma times a value of what would have followed.
    Collective.
    """
    for x in (values, rewards, gamma, *lambdas):
        layout.check_local(x)
    mask = layout.mask
    value, reward, discount = (torch.where(mask, x.double(), 0) for x in (values, rewards, gamma))
    # V of the next decision is v + e V_in: known within the chunk (e = 0), or what enters it.
    follows = _scan_chunks(layout, (~mask).double(), value[:, None])
    e, v = _shift(layout, follows.factor, 1.0), _shift(layout, follows.offset[:, 0], 0.0)
    delta = torch.stack((reward + discount * v - value, discount * e), dim=1)  # [t, 2]: b and c V
    delta = torch.where(mask[:, None], delta, 0)
    scans = [
        _scan_chunks(layout, torch.where(mask, discount * one.double(), 1.0), delta)
        for one in lambdas
    ]
    totals = [follows.totals] + [scan.totals for scan in scans]
    entering = _enter_from_right(layout, totals)  # [2 S, 1 + K]
    value_in, *advantages_in = entering[layout.chunk_ids].unbind(1)
    return [
        torch.where(mask, s.factor * a + s.offset[:, 0] + s.offset[:, 1] * value_in, 0)
        for s, a in zip(scans, advantages_in, strict=True)
    ]


class _Maps:
    """Maps from what enters a chunk on its right to what leaves each of its tokens on the left."""

    def __init__(self, layout: SequenceLayout, factor: Tensor, offset: Tensor) -> None:
        self.factor, self.offset = factor, offset  # [t], [t, n]
        starts, ends = layout.chunk_bounds
        first = starts.clamp(0, max(len(factor) - 1, 0)).long()
        table = torch.cat((factor[:, None], offset), dim=1)[first]
        identity = torch.zeros_like(table[0])
        identity[0] = 1.0
        self.totals = torch.where((starts < ends)[:, None], table, identity)  # [2 S, 1 + n]


def _scan_chunks(layout: SequenceLayout, factor: Tensor, offset: Tensor) -> _Maps:
    """Compose x -> factor x + offset from each token to its chunk's end; [t] and [t, n].

    Composition is associative, so log2(longest chunk) rounds, each of which doubles the number of
    composed tokens, suffice. Neither divides, so factors of 0 and of 1e-300 are exact alike.
    """
    rows = layout.padded_chunks
    factors = factor.new_ones(rows.size)
    offsets = offset.new_zeros(offset.shape[1], rows.size)
    factors[rows.mirrored], offsets[:, rows.mirrored] = factor, offset.t()
    tables = zip(rows.tables(factors), zip(*map(rows.tables, offsets), strict=True), strict=True)
    for m, parts in tables:
        distance = 1
        while distance < m.shape[1]:
            before = m[:, :-distance].clone()
            for b in parts:
                b[:, distance:] += m[:, distance:] * b[:, :-distance].clone()
            m[:, distance:] *= before
            distance *= 2
    return _Maps(layout, factors[rows.mirrored], offsets[:, rows.mirrored].t())


def _shift(layout: SequenceLayout, x: Tensor, last: float) -> Tensor:
    """Return the next token's value in the same chunk, `last` at a chunk's end; [t] -> [t]."""
    moved = torch.cat((x[1:], x[:1]))
    is_last = layout.chunk_columns + 1 == (layout.chunk_bounds[1] - layout.chunk_bounds[0])[
        layout.chunk_ids
    ]  # fmt: skip
    return torch.where(is_last, last, moved)


def _enter_from_right(layout: SequenceLayout, totals: Sequence[Tensor]) -> Tensor:
    """Return the value and the advantages that enter each of this rank's chunks; [2 S, 1 + K].

    totals: of values [2 S, 2] (e, v), then of each lambda [2 S, 3] (m, b, c). The only collective.
    """
    sequences, scans = len(layout.lengths), len(totals) - 1
    table = torch.cat(list(totals), dim=1).view(sequences, 2, -1)
    gathered = gather_stacked(table, group=layout.require_group())  # [cp, S, 2, n]
    chunks = order_chunks(gathered.transpose(1, 2))  # [C, S, n]
    joined = layout.joined_places if layout.joined else None
    responses, width = joined.shape if joined else (sequences, 1)
    if joined:
        identity = chunks.new_zeros(chunks.shape[2])
        identity[0] = 1.0
        identity[2::3] = 1.0
        spread = identity.expand(len(chunks), responses * width, -1).clone()
        spread[:, joined.places] = chunks
        chunks = spread
    # A response's chunks in order: those of its first sequence, then of its second, ...
    steps = chunks.view(len(chunks), responses, width, -1).transpose(0, 1).transpose(1, 2)
    value = chunks.new_zeros(responses)
    advantages = chunks.new_zeros(responses, scans)
    entering = chunks.new_zeros(responses, width, len(chunks), 1 + scans)
    for column in reversed(range(width)):
        for chunk in reversed(range(len(chunks))):
            entering[:, column, chunk] = torch.cat((value[:, None], advantages), dim=1)
            e, v = steps[:, column, chunk, :2].unbind(1)
            m, b, c = steps[:, column, chunk, 2:].unflatten(1, (scans, 3)).unbind(2)
            advantages = m * advantages + b + c * value[:, None]
            value = v + e * value
    by_sequence = entering.flatten(0, 1)
    if joined:
        by_sequence = by_sequence[joined.places]
    early, late = layout.cp_rank, 2 * layout.cp_size - 1 - layout.cp_rank
    return by_sequence[:, [early, late]].flatten(0, 1)
