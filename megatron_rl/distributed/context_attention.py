"""Causal attention within the sequences of a pack that is sharded over context parallelism.

Every rank gathers the keys and values of the whole pack (one collective) and attends with its own
queries; the gradients of keys and values are summed back to their owners (one collective). If the
gathered tensors are large, the backward pass gathers them again instead of keeping them (one more
collective). No T x T matrix is materialized: each block of queries attends to the keys of its
sliding window, or all keys, up to its own positions. CUDA uses fused kernels,
whose memory is linear in the tokens.

Shapes: T tokens in the pack, t = T / cp on this rank, H query heads, K key-value heads, d their
size; in a segment s sequences, q query slots and k key slots each.

*Plan.* On CUDA, where a few large kernels are fastest, sequences of similar lengths form a segment
that is attended as one padded batch. On the CPU a segment contains sequences of equal length and
nothing is padded; short sequences are attended in batches that fit into the cache. If sequences of
equal length are already adjacent in the pack, no tokens are copied.

With a sliding window of w tokens, a query at position i of its sequence attends to the keys j with
0 <= i - j < w. A run of queries skips the keys before the window of its first query.

*Parents.* The keys of a sequence that continues others are those of its ancestors, without their
padding, and its own: the plan's key rows name a parent's rows once for each sequence that sees
them. Their gradients are then added from the youngest sequences up, in a fixed order. The copies
exist during one layer's pass; above KEPT_BYTES they are selected again in the backward pass. On
CUDA, `joined_attention` copies no keys, except where a window hides some (it then copies at most a
window for each sequence) or in float32, for which its kernel does not exist.

*On a CPU*, one head after another, or as many groups of heads at once as have their scores in the
cache. Queries, keys and values are stored by head, [heads, slots, d]: batched matrix products then
read the short sequences of a block of one head without a copy. Long sequences go to torch's CPU
kernel in runs of queries, in memory linear in the tokens. Rotary embeddings use the same memory
layout, so no transposition is needed in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_rl.distributed.collectives import (
    Group,
    gather_stacked,
    group_size,
    sum_to_owners,
    to_device,
)
from megatron_rl.distributed.joined_attention import Call, JoinedAttention, build_calls, can_join
from megatron_rl.distributed.sequence_layout import INDEX, SequenceLayout


@lru_cache(maxsize=16)
def _last_rows(width: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the last RUN_QUERIES rows of an additive causal mask over `width` keys.

    The mask of any shorter run is its lower right corner.
    """
    positions = torch.arange(width, dtype=torch.int32)
    seen = is_visible(positions[width - RUN_QUERIES :, None] - positions, window)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))


def _causal(query: Tensor, key: Tensor, window: int | None) -> dict[str, Any]:
    """Return the kernel's mask arguments; the last query has the last key's position."""
    queries, keys = query.shape[2], key.shape[2]
    window = None if window is None or window >= keys else window
    if queries == keys and window is None:
        return {"is_causal": True}
    width = max(RUN_QUERIES, 1 << (keys - 1).bit_length())  # few widths, so that caching works
    mask = _last_rows(width, window, query.dtype)
    return {"attn_mask": mask[None, None, -queries:, -keys:]}


def _attend_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend one run by torch's CPU kernel; output [s, H, q, d] and log-sum-exps [s, H, q].

    The kernel has no sinks. With one, all weights are smaller by the same factor.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sum = kernel(query, key, value, **_causal(query, key, window), scale=scale)
    if sinks is None:
        return out, log_sum
    whole = torch.logaddexp(log_sum, sinks.float()[:, None])
    return out * (log_sum - whole).exp()[..., None].to(out.dtype), whole


def _attend_runs_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from the saved output and log-sum-exps.

    The kernel computes weights from the log-sum-exps and their gradient from the output, so both
    may contain a sink.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    causal = {"is_causal": False, **_causal(query, key, window)}
    return kernel(grad, query, key, value, out, log_sum, dropout_p=0.0, **causal, scale=scale)


def _head_runs(query: Tensor, key: Tensor) -> list[tuple[slice, slice]]:
    """Return the query heads and key heads of each call: one of each, or whole groups.

    query [H, s, q, d], key [K, s, k, d]. All scores of a call, [h, s, q, k], fit into the cache.
    """
    repeats, pairs = len(query) // len(key), key[0, ..., 0].numel() * query.shape[2]
    if pairs * repeats > BATCH_PAIRS:
        return [(slice(h, h + 1), slice(h // repeats, h // repeats + 1)) for h in range(len(query))]
    groups = BATCH_PAIRS // max(pairs * repeats, 1)
    starts = range(0, len(key), max(groups, 1))
    return [(slice(k * repeats, (k + groups) * repeats), slice(k, k + groups)) for k in starts]


def _batch(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Return a batch of `heads` heads, each of x repeated; [h, s, n, d] -> [heads * s, n, d]."""
    if len(x) < heads:
        x = x[:, None].expand(-1, heads // len(x), -1, -1, -1).flatten(0, 1)
    return x.to(dtype).flatten(0, 1)


def _attend_batch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    out: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """Attend a batch of short sequences into `out`; return the weights, [h, s, q, k] of each run.

    query, out [H, s, q, d]; key, value [K, s, k, d].
    """
    weights = []
    wide = torch.promote_types(query.dtype, torch.float32)
    mask = mask.to(wide)
    for heads, groups in _head_runs(query, key):
        into = out[heads]
        q, k, v = (_batch(x, len(into), wide) for x in (query[heads], key[groups], value[groups]))
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
        if sinks is None:
            p = scores.softmax(-1)
        else:
            sink = sinks[heads].to(wide).repeat_interleave(query.shape[1])[:, None, None]
            sink = sink.expand(-1, scores.shape[1], 1)
            p = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        into.copy_(torch.bmm(p, v).view_as(into))
        weights.append(p.unflatten(0, (len(into), -1)))
    return weights


def _attend_batch_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: list[Tensor],
    *,
    into: tuple[Tensor, Tensor, Tensor],
    scale: float,
) -> None:
    """Compute the gradients of query, key and value from the saved weights p.

    With dp = g v^T: ds = p (dp - sum of p dp), dq = ds k, dk = ds^T q, dv = p^T g. This also holds
    for weights that sum to less than 1, because a sink has no value.
    """
    repeats, (grad_query, grad_key, grad_value) = len(query) // len(key), into
    for (heads, groups), kept in zip(_head_runs(query, key), weights, strict=True):
        p, count = kept.flatten(0, 1), len(kept)
        given = (grad[heads], query[heads], key[groups], value[groups])
        g, q, k, v = (_batch(x, count, p.dtype) for x in given)
        grad_weights = torch.bmm(g, v.transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_weights, p, -1, p.dtype)
        grad_scores *= scale
        grad_query[heads] = torch.bmm(grad_scores, k).view_as(grad_query[heads])
        for total, part in (
            (grad_key[groups], torch.bmm(grad_scores.transpose(1, 2), q)),
            (grad_value[groups], torch.bmm(p.transpose(1, 2), g)),
        ):
            by_head = part.view(len(total), -1, *total.shape[1:])
            by_head = by_head.sum(1) if by_head.shape[1] > 1 else by_head[:, 0]
            # The first head of a group overwrites the buffer, other runs of the group add to it.
            total.copy_(by_head if heads.start % repeats == 0 else total + by_head)


def _sink_gradient(grad: Tensor, out: Tensor, sink_weights: Tensor) -> Tensor:
    """Return the gradient of sinks, - sum of p g o; [..., H, n, d], [..., H, n] -> [H].

    Of a sink's weight p, dp is 0, so ds = p (0 - sum of p dp), and the sum is g o.
    """
    product = (grad.float() * out.float()).sum(-1)  # [..., H, n]
    return -(sink_weights * product).movedim(-2, 0).flatten(1).sum(1)


class PackedAttention(torch.autograd.Function):
    """Attention of one pack on the CPU.

    Saves the queries, keys and values in their slots (if those are large, only this rank's own keys
    and values), the attention weights of short sequences and the outputs of long ones.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: AttentionPlan,
        group: Group,
        scale: float | None,
        kept_bytes: int,
    ) -> Tensor:
        """[t, H, d], [t, K, d], [t, K, d], [H] -> [t, H, d]."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        own = torch.stack((key.transpose(0, 1), value.transpose(0, 1)))  # [2, K, t, d]
        keys = _key_slots_of_heads(own, plan, group)
        queries = _select_rows_of_heads(
            query.transpose(0, 1).contiguous(), plan.query_rows
        )  # [H, query slots, d]
        out = torch.empty_like(queries)
        kept: list[Any] = []  # by block
        for block in plan.blocks:
            q, o, (k, v) = _queries(queries, block), _queries(out, block), _keys(keys, block)
            if block.mask is not None:
                kept.append(_attend_batch(q, k, v, block.mask, out=o, scale=scale, sinks=sinks))
            else:
                q, k, v = (x.transpose(0, 1) for x in (q, k, v))
                attended, log_sum = _attend_runs(
                    q, k, v, window=plan.window, scale=scale, sinks=sinks
                )
                o.copy_(attended.transpose(0, 1))
                kept.append(log_sum)
        out = out.transpose(0, 1).contiguous()  # [query slots, H, d]
        ctx.plan, ctx.group, ctx.kept, ctx.scale = plan, group, kept, scale
        ctx.gathers = plan.adds_keys(group) and keys.nbytes > kept_bytes
        ctx.save_for_backward(queries, own if ctx.gathers else keys, out, sinks)
        return out if plan.query_slots is None else out.index_select(0, plan.query_slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks."""
        plan, group = ctx.plan, ctx.group
        queries, keys, out, sinks = ctx.saved_tensors
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        if ctx.gathers:
            keys = _key_slots_of_heads(keys, plan, group)
        # No slot is padding here, so every slot has a gradient.
        grads = _select_rows_of_heads(grad.transpose(0, 1).contiguous(), plan.query_rows)
        grad_queries = torch.empty_like(queries)
        # Several runs of queries add to one key's gradient; bfloat16 would round each addition.
        grad_keys = torch.empty_like(keys, dtype=torch.promote_types(keys.dtype, torch.float32))
        for index, block in enumerate(plan.blocks):
            q, g, dq = (_queries(x, block) for x in (queries, grads, grad_queries))
            (k, v), (dk, dv) = _keys(keys, block), _keys(grad_keys, block)
            o, kept = _queries(out.transpose(0, 1), block), ctx.kept[index]
            if block.mask is not None:
                _attend_batch_backward(g, q, k, v, kept, into=(dq, dk, dv), scale=ctx.scale)
                if grad_sinks is not None:
                    of_sinks = 1 - torch.cat([p.sum(-1) for p in kept]).transpose(0, 1)
                    grad_sinks += _sink_gradient(g.transpose(0, 1), o.transpose(0, 1), of_sinks)
                continue
            if block.rows.start == 0:  # the first run of these sequences
                grad_keys[:, :, block.keys] = 0
            g, q, k, v, o = (x.transpose(0, 1) for x in (g, q, k, v, o))
            if grad_sinks is not None:
                of_sinks = (sinks.float()[:, None] - kept).exp()
                grad_sinks += _sink_gradient(g, o, of_sinks)
            run_grads = _attend_runs_backward(
                g, q, k, v, o, kept, window=plan.window, scale=ctx.scale
            )
            dq.copy_(run_grads[0].transpose(0, 1))
            dk += run_grads[1].transpose(0, 1)
            dv += run_grads[2].transpose(0, 1)
        for parent, child in plan.copies:
            grad_keys[:, :, parent] += grad_keys[:, :, child]
        owned = _select_rows_of_heads(grad_keys, plan.key_slots).to(keys.dtype)  # [2, K, cp t, d]
        parts = owned.unflatten(2, (group_size(group), -1)).movedim(2, 0)  # [cp, 2, K, t, d]
        owned = sum_to_owners(parts, group=group)
        grad_query = _select_rows_of_heads(grad_queries, plan.query_slots)
        if grad_sinks is not None:
            grad_sinks = grad_sinks.to(sinks.dtype)
        by_token = (x.transpose(0, 1) for x in (grad_query, *owned))
        return *by_token, grad_sinks, None, None, None, None


def _select_rows_of_heads(x: Tensor, rows: Tensor | None) -> Tensor:
    """Select rows of each head; [..., rows, d]."""
    return x if rows is None else x.index_select(-2, rows)


def _key_slots_of_heads(own: Tensor, plan: AttentionPlan, group: Group) -> Tensor:
    """Gather the whole pack's keys and values into slots; [2, K, t, d] -> [2, K, key slots, d]."""
    gathered = gather_stacked(own, group=group)  # [cp, 2, K, t, d]
    return _select_rows_of_heads(gathered.movedim(0, 2).flatten(2, 3), plan.key_rows)


def _queries(x: Tensor, block: Block) -> Tensor:
    """Return a block's run of query slots as a view; [H, query slots, d] -> [H, s, q, d]."""
    return x[:, block.queries].unflatten(1, (block.sequences, -1))[:, :, block.rows]


def _keys(x: Tensor, block: Block) -> Tensor:
    """Return a block's visible keys, values as views; [2, K, key slots, d] -> [2, K, s, k, d]."""
    return x[:, :, block.keys].unflatten(2, (block.sequences, -1))[:, :, :, block.visible]


# Minimum ratio of a segment's shortest to its longest sequence; bounds the padding.
MIN_LENGTH_RATIO = 0.75
# Longest sequence whose full score matrix is computed on the CPU, batched over sequences. The fused
# CPU kernel processes one sequence at a time and is faster only for longer sequences.
SHORT_SEQUENCE = 96
# Maximum number of query-key pairs, per head, in a batch of short sequences.
BATCH_PAIRS = 1 << 17
# Queries per kernel call on the CPU. The kernel's causal mode skips masked keys in steps of 512
# only, so it is used for whole sequences of at least LONG_SEQUENCE tokens; shorter runs use an
# explicit mask.
RUN_QUERIES, LONG_SEQUENCE = 192, 1024
# Queries per fused kernel call where a sliding window hides keys. Such a call has an explicit mask.
WINDOW_QUERIES = 1024


@dataclass
class Block:
    """One kernel call: a run of queries of every sequence of one segment, and their keys."""

    queries: slice  # s * q of the pack's query slots
    keys: slice  # s * k of the pack's key slots
    sequences: int
    rows: slice  # consecutive query slots, of the q per sequence in the segment
    # Key slots from the first that the first row attends to, to the last that the last row attends
    # to, of the k per sequence. Each earlier row attends to one fewer at the end.
    visible: slice
    # Additive causal mask (0 or -inf) for a batch of short sequences, whose rows need not be
    # consecutive positions; [q, k] float32.
    mask: Tensor | None = None


@dataclass
class AttentionPlan:
    """Kernel calls for one pack on one rank, and the mapping between rows and slots.

    Slots are the rows of the (padded) segments, concatenated. Padding slots repeat a real row and
    are never read back.
    """

    query_rows: Tensor | None  # [query slots] local token of each slot; None: slots equal tokens
    query_slots: Tensor | None  # [t] slot of each local token
    key_rows: Tensor | None  # [key slots] row of the gathered keys [cp * t]
    key_slots: Tensor | None  # [cp * t] slot of each gathered row
    blocks: list[Block]
    fused: bool  # True: torch's fused attention, as on CUDA; False: the CPU kernels
    window: int | None  # sliding window in tokens; None: unlimited
    # of each sequence with a parent, the youngest first: slots of its parent's keys, and of the
    # same keys as it sees them
    copies: list[tuple[slice, slice]]
    joined: list[Call] | None = None  # the same without copies, where sequences have parents

    def adds_keys(self, group: Group) -> bool:
        """Return True if the slots hold more keys than this rank's own tokens have."""
        return group_size(group) > 1 or bool(self.copies)


def is_visible(distance: Tensor, window: int | None) -> Tensor:
    """Return whether a query attends to a key, given its position minus the key's."""
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def build_attention_plan(
    layout: SequenceLayout,
    *,
    window: int | None = None,
    device: torch.device | None = None,
    fused: bool | None = None,
) -> AttentionPlan:
    """Plan attention for a pack from its padded lengths and the context-parallel layout alone.

    layout: should be on the host; otherwise planning waits for the device. window: tokens that a
    query attends to, itself included; None: all up to itself. device: the device the plan is used
    on; defaults to the layout's. fused: use torch's fused kernels; defaults to True on CUDA and
    False on the CPU.
    """
    device = device or layout.device
    fused = device.type == "cuda" if fused is None else fused
    lengths = torch.tensor(layout.lengths)
    # Keys before each sequence that some of its queries see.
    before = torch.tensor(layout.depths)
    before = before if window is None else before.clamp(max=window - 1)
    builder = _PlanBuilder(
        layout, lengths=lengths, before=before, window=window, device=device, fused=fused
    )
    ratio = MIN_LENGTH_RATIO if fused and layout.cp_size == 1 else 1.0
    for group in _group_by_length(lengths, before, min_ratio=ratio):
        longest, depth = int(lengths[group[0]]), int(before[group[0]])
        batch = len(group) if fused else _batch_size(longest, keys=depth + longest)
        for sequences in group.split(batch):
            builder.add_segment(sequences)
    return builder.finish()


def _batch_size(length: int, *, keys: int) -> int:
    """Return how many sequences of one length the CPU attends at once; unlimited if long."""
    return max(1, BATCH_PAIRS // (length * keys)) if keys <= SHORT_SEQUENCE else 1 << 30


def _group_by_length(lengths: Tensor, before: Tensor, *, min_ratio: float) -> list[Tensor]:
    """Sort sequences by descending length; start a group below min_ratio of the group's longest.

    Sequences of a group have equally many keys before them. Under context parallelism min_ratio
    must be 1: the chunks of a shorter sequence would be at other positions.
    """
    segments = []
    for depth in before.unique():
        order = torch.argsort(lengths, descending=True, stable=True)
        order = order[before[order] == depth]
        while len(order):
            count = int((lengths[order] >= min_ratio * lengths[order[0]]).sum())
            segments.append(order[:count])
            order = order[count:]
    return segments


class _PlanBuilder:
    """Builder that collects the segments of one plan on the host."""

    def __init__(
        self,
        layout: SequenceLayout,
        *,
        lengths: Tensor,
        before: Tensor,
        window: int | None,
        device: torch.device,
        fused: bool,
    ) -> None:
        self.layout, self.lengths, self.window = layout, lengths, window
        self.before = before  # [S] keys of ancestors that are visible
        self.device, self.fused = device, fused
        self.starts = lengths.cumsum(0) - lengths
        self.offsets = layout.offsets.cpu()  # [t] position in its sequence
        self.gathered = layout.gathered_index.cpu()  # [T] row in the gathered keys
        self.query_rows: list[Tensor] = []
        self.key_rows: list[Tensor] = []
        self.query_real: list[Tensor] = []
        self.key_real: list[Tensor] = []
        self.blocks: list[Block] = []
        self.query_count = self.key_count = 0
        self.masks: dict[tuple[int, int], Tensor] = {}  # by keys before and all keys
        self.key_starts = torch.zeros_like(lengths)  # [S] first key slot

    def add_segment(self, sequences: Tensor) -> None:
        """Add these sequences, padded to the longest, and split their queries into runs.

        Equally many keys are before each of them.
        """
        lengths, starts = self.lengths[sequences, None], self.starts[sequences, None]
        cp_size, before = self.layout.cp_size, int(self.before[sequences[0]])
        longest, queries = int(lengths.max()), int(lengths.max()) // cp_size
        keys = before + longest
        key_slot, query_slot = torch.arange(longest)[None], torch.arange(queries)[None]
        key_real, query_real = key_slot < lengths, query_slot < lengths // cp_size
        key_rows = starts + key_slot * key_real
        if before:
            each = [self.layout.rows_before(one)[-before:] for one in sequences.tolist()]
            key_rows = torch.cat((torch.stack(each), key_rows), dim=1)
            # The rows of ancestors are their own sequences', where they have their slots.
            key_real = F.pad(key_real, (before, 0), value=False)
        self.key_starts[sequences] = self.key_count + keys * torch.arange(len(sequences))
        self.key_rows.append(self.gathered[key_rows].view(-1))
        rows = starts // cp_size + query_slot * query_real
        self.query_rows.append(rows.view(-1))
        self.key_real.append(key_real.view(-1))
        self.query_real.append(query_real.view(-1))
        positions = before + self.offsets[rows[int(lengths.argmax())]]  # [q] among the keys
        is_whole = not self.fused and keys <= SHORT_SEQUENCE
        cut = self.window is not None and self.window < keys
        runs = [slice(0, queries)] if is_whole else self._runs(queries, before=before, cut=cut)
        for run in runs:
            first, last = int(positions[run.start]), int(positions[run.stop - 1])
            begin = max(0, first + 1 - self.window) if self.window is not None else 0
            self.blocks.append(
                Block(
                    queries=slice(self.query_count, self.query_count + rows.numel()),
                    keys=slice(self.key_count, self.key_count + key_real.numel()),
                    sequences=len(sequences),
                    rows=run,
                    visible=slice(0, keys) if is_whole else slice(begin, last + 1),
                    mask=self._mask(positions, before, keys) if is_whole else None,
                )
            )
        self.query_count += rows.numel()
        self.key_count += key_real.numel()

    def _mask(self, positions: Tensor, before: int, keys: int) -> Tensor:
        """Return the additive mask of keys hidden from each query's position; [q] -> [q, keys]."""
        if (before, keys) not in self.masks:
            seen = is_visible(positions[:, None] - torch.arange(keys), self.window)
            mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
            self.masks[before, keys] = to_device(mask, self.device)
        return self.masks[before, keys]

    def _runs(self, queries: int, *, before: int, cut: bool) -> list[slice]:
        """Split a rank's queries of one sequence into runs of consecutive positions.

        The queries are two chunks, or the whole sequence without context parallelism. Runs on the
        CPU are further limited to RUN_QUERIES, and fused runs to WINDOW_QUERIES where the window
        hides keys of this sequence (`cut`).
        """
        chunk = queries if self.layout.cp_size == 1 else queries // 2
        is_causal = chunk == queries and not before  # as many queries as keys
        whole = not cut and (self.fused or (is_causal and queries >= LONG_SEQUENCE))
        step = chunk if whole else min(chunk, WINDOW_QUERIES if self.fused else RUN_QUERIES)
        return [
            slice(start, min(start + step, first + chunk))
            for first in range(0, queries, chunk)
            for start in range(first, first + chunk, step)
        ]

    def finish(self) -> AttentionPlan:
        """Return the plan, with its index tensors on the plan's device."""
        query_rows, query_slots = self._maps(self.query_rows, self.query_real)
        key_rows, key_slots = self._maps(self.key_rows, self.key_real)
        return AttentionPlan(
            query_rows, query_slots, key_rows, key_slots, self.blocks, self.fused, self.window,
            self._copies(), self._joined_calls(),
        )  # fmt: skip

    def _joined_calls(self) -> list[Call] | None:
        is_cut = self.window is not None and self.window < max(self.layout.depths) + max(
            self.layout.lengths
        )
        if not self.fused or is_cut or not self.layout.parents:
            return None
        return build_calls(self.layout, device=self.device)

    def _copies(self) -> list[tuple[slice, slice]]:
        """Return `AttentionPlan.copies`: a child's slots begin with its parent's, maybe cut off."""
        copies = []
        for child, parent in reversed(list(enumerate(self.layout.parents))):
            if parent < 0 or not (count := int(self.before[child])):
                continue
            # Both begin at a position along the same path.
            position = self.layout.depths[child] - count
            skipped = position - (self.layout.depths[parent] - int(self.before[parent]))
            start, own = int(self.key_starts[parent]) + skipped, int(self.key_starts[child])
            copies.append((slice(start, start + count), slice(own, own + count)))
        return copies

    def _maps(self, rows: list[Tensor], real: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Return slot -> row and its inverse on real slots; (None, None) if both are identity."""
        row, is_real = torch.cat(rows), torch.cat(real)
        slots = torch.empty(int(is_real.sum()), dtype=INDEX)
        slots[row[is_real]] = torch.arange(len(row), dtype=INDEX)[is_real]
        if len(slots) == len(row) and bool((row == torch.arange(len(row))).all()):
            return None, None
        return to_device(row, self.device), to_device(slots, self.device)


# Gathered keys and values of one layer and pack are kept for the backward pass up to this size;
# below it, gathering again costs more than the memory saved.
KEPT_BYTES = 1 << 24
SINK_WIDTH = 8  # dimensions added to each head for the score of a sink


def _select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _scatter_rows(x: Tensor, slots: Tensor | None, *, like: Tensor) -> Tensor:
    """Copy rows into their slots; padding slots get zero gradient, since they repeat real rows."""
    return x if slots is None else torch.zeros_like(like).index_copy_(0, slots.long(), x)


def attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend one run by torch's fused kernels; [s, H, q, d], [s, K, k, d] -> [s, H, q, d].

    The last query has the last key's position. A window of fewer than k tokens needs a [q, k] mask.
    scale: of the scores; None: 1 / sqrt(d). sinks: see `context_attention`.
    """
    if sinks is not None:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        extended = with_sink(query, key, value, sinks=sinks, scale=scale)
        out = _attend_masked(*extended, window=window, scale=scale, first_seen=1)
        return out[..., : query.shape[-1]]
    return _attend_masked(query, key, value, window=window, scale=scale, first_seen=0)


def with_sink(
    query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key whose score is the sink and whose value is 0 before all other keys.

    The score comes from one more dimension of each head: sink / scale in queries, 1 in the new key,
    0 in the other keys. Kernels need sizes that are multiples of 8, so seven zeros follow.
    """
    column = (sinks / scale).to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
    query = F.pad(torch.cat((query, column), dim=-1), (0, SINK_WIDTH - 1))
    first = key.new_zeros(key.shape[-1] + SINK_WIDTH)
    first[key.shape[-1]] = 1
    first = first.expand(*key.shape[:2], 1, -1)
    key = torch.cat((first, F.pad(key, (0, SINK_WIDTH))), dim=2)
    return query, key, F.pad(value, (0, SINK_WIDTH, 1, 0))


def _attend_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None,
    scale: float | None,
    first_seen: int,
) -> Tensor:
    """Attend causally and within a window; every query attends to the keys before first_seen."""
    queries, keys = query.shape[2], key.shape[2]
    repeats = query.shape[1] // key.shape[1]
    grouped, cut = repeats > 1, window is not None and window < keys - first_seen
    if grouped and (cut or query.dtype == torch.float32):
        # Only half-precision kernels without an explicit mask support grouped queries; others would
        # materialize all scores.
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        grouped = False
    if cut:
        positions = torch.arange(keys, device=query.device)
        bias = is_visible(positions[keys - queries :, None] - positions, window)  # [q, k]
        bias[:, :first_seen] = True
    else:
        bias = causal_lower_right(queries, keys)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, enable_gqa=grouped, scale=scale
    )


def _attend_fused_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None,
    scale: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and sinks by recomputing the forward pass."""
    inputs = (query, key, value) if sinks is None else (query, key, value, sinks)
    with torch.enable_grad():
        q, k, v, *s = leaves = [x.detach().requires_grad_() for x in inputs]
        out = attend_fused(q, k, v, window=window, scale=scale, sinks=s[0] if s else None)
        return torch.autograd.grad(out, leaves, grad)


class _FusedAttention(torch.autograd.Function):
    """Attention of one pack by fused kernels.

    Saves the queries, keys and values in their slots; if those are large, only this rank's own
    keys and values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: AttentionPlan,
        group: Group,
        scale: float | None,
    ) -> Tensor:
        """[t, H, d], [t, K, d], [t, K, d], [H] -> [t, H, d]."""
        own = torch.stack((key, value), dim=1)  # [t, 2, K, d]
        keys = _key_slots(own, plan, group)
        queries = _select_rows(query, plan.query_rows)  # [query slots, H, d]
        out = torch.empty_like(queries)
        for block in plan.blocks:
            q, (k, v) = _rows(queries, block), _keys_and_values(keys, block)
            attended = attend_fused(q, k, v, window=plan.window, scale=scale, sinks=sinks)
            _rows(out, block).copy_(attended)
        ctx.plan, ctx.group, ctx.scale = plan, group, scale
        ctx.gathers = plan.adds_keys(group) and keys.nbytes > KEPT_BYTES
        # The backward pass recomputes attention and does not read the output.
        ctx.save_for_backward(queries, own if ctx.gathers else keys, sinks)
        return _select_rows(out, plan.query_slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks."""
        plan, group = ctx.plan, ctx.group
        queries, keys, sinks = ctx.saved_tensors
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        if ctx.gathers:
            keys = _key_slots(keys, plan, group)
        grads = _scatter_rows(grad, plan.query_slots, like=queries)
        grad_queries = torch.empty_like(queries)
        # Several runs of queries add to one key's gradient; bfloat16 would round each addition.
        grad_keys = torch.zeros_like(keys, dtype=torch.promote_types(keys.dtype, torch.float32))
        for block in plan.blocks:
            q, g = _rows(queries, block), _rows(grads, block)
            k, v = _keys_and_values(keys, block)
            dq, dk, dv, *ds = _attend_fused_backward(
                g, q, k, v, window=plan.window, scale=ctx.scale, sinks=sinks
            )
            _rows(grad_queries, block).copy_(dq)
            if grad_sinks is not None:
                grad_sinks += ds[0]
            into_k, into_v = _keys_and_values(grad_keys, block)
            into_k += dk
            into_v += dv
        for parent, child in plan.copies:
            grad_keys[parent] += grad_keys[child]
        owned = _select_rows(grad_keys, plan.key_slots).to(keys.dtype)
        owned = sum_to_owners(owned.view(group_size(group), -1, *owned.shape[1:]), group=group)
        grad_query = _select_rows(grad_queries, plan.query_slots)
        if grad_sinks is not None:
            grad_sinks = grad_sinks.to(sinks.dtype)
        return grad_query, owned[:, 0], owned[:, 1], grad_sinks, None, None, None


def _key_slots(own: Tensor, plan: AttentionPlan, group: Group) -> Tensor:
    """Gather the whole pack's keys and values into slots; [t, 2, K, d] -> [key slots, 2, K, d]."""
    return _select_rows(gather_stacked(own, group=group).flatten(0, 1), plan.key_rows)


def _rows(x: Tensor, block: Block) -> Tensor:
    """Return a block's run of query slots as a view; [query slots, H, d] -> [s, H, q, d]."""
    segment = x[block.queries].view(block.sequences, -1, *x.shape[1:])
    return segment[:, block.rows].transpose(1, 2)


def _keys_and_values(keys: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Return the visible keys and values of a block as views; each [s, K, k, d]."""
    segment = keys[block.keys].view(block.sequences, -1, *keys.shape[1:])[:, block.visible]
    return segment[:, :, 0].transpose(1, 2), segment[:, :, 1].transpose(1, 2)


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: AttentionPlan,
    group: Group,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal softmax(scale q k^T) v within each sequence and the plan's window.

    query [t, H, d], key and value [t, K, d] -> [t, H, d]. H must be a multiple of K (grouped
    queries). Differentiable; gradients of keys and values are summed over the group. scale: None
    for 1 / sqrt(d). sinks: [H], a further score of every query, without a value (arXiv 2309.17453):
    the weights of the keys then sum to less than 1. Their gradient is that of this rank's queries.
    """
    if plan.joined and can_join(query):
        calls = plan.joined
        return JoinedAttention.apply(query, key, value, sinks, calls, group, scale, KEPT_BYTES)
    if plan.fused:
        return _FusedAttention.apply(query, key, value, sinks, plan, group, scale)
    return PackedAttention.apply(query, key, value, sinks, plan, group, scale, KEPT_BYTES)
