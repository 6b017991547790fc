"""Attention plan of a pack: the kernel calls, each with its runs of queries and visible keys.

On CUDA, where a few large kernels are fastest, sequences of similar lengths form a segment that is
attended as one padded batch. On the CPU a segment contains sequences of equal length and nothing is
padded; short sequences are attended in batches that fit into the cache. If sequences of equal
length are already adjacent in the pack, no tokens are copied.

With a sliding window of w tokens, a query at position i of its sequence attends to the keys j with
0 <= i - j < w. A run of queries skips the keys before the window of its first query.

Shapes: T tokens in the pack, t = T / cp on this rank; in a segment s sequences, q query slots and
k key slots each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import to_device
from megatron_rl.distributed.sequence_layout import INDEX, SequenceLayout

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
    builder = _PlanBuilder(layout, lengths=lengths, window=window, device=device, fused=fused)
    if fused:
        ratio = MIN_LENGTH_RATIO if layout.cp_size == 1 else 1.0
        segments = _group_by_length(lengths, min_ratio=ratio)
    else:
        segments = [
            batch
            for group in _group_by_length(lengths, min_ratio=1.0)
            for batch in group.split(_batch_size(int(lengths[group[0]])))
        ]
    for sequences in segments:
        builder.add_segment(sequences)
    return builder.finish()


def _batch_size(length: int) -> int:
    """Return how many sequences of one length the CPU attends at once; unlimited if long."""
    return max(1, BATCH_PAIRS // length**2) if length <= SHORT_SEQUENCE else 1 << 30


def _group_by_length(lengths: Tensor, *, min_ratio: float) -> list[Tensor]:
    """Sort sequences by descending length; start a group below min_ratio of the group's longest.

    Under context parallelism min_ratio must be 1: the chunks of a shorter sequence would be at
    other positions.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    segments = []
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
        window: int | None,
        device: torch.device,
        fused: bool,
    ) -> None:
        self.layout, self.lengths, self.window = layout, lengths, window
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
        self.masks: dict[int, Tensor] = {}  # by sequence length, which determines the mask

    def add_segment(self, sequences: Tensor) -> None:
        """Add these sequences, padded to the longest, and split their queries into runs."""
        lengths, starts = self.lengths[sequences, None], self.starts[sequences, None]
        cp_size = self.layout.cp_size
        keys, queries = int(lengths.max()), int(lengths.max()) // cp_size
        key_slot, query_slot = torch.arange(keys)[None], torch.arange(queries)[None]
        key_real, query_real = key_slot < lengths, query_slot < lengths // cp_size
        self.key_rows.append(self.gathered[starts + key_slot * key_real].view(-1))
        rows = starts // cp_size + query_slot * query_real
        self.query_rows.append(rows.view(-1))
        self.key_real.append(key_real.view(-1))
        self.query_real.append(query_real.view(-1))
        longest = self.offsets[rows[int(lengths.argmax())]]  # [q] positions
        is_whole = not self.fused and keys <= SHORT_SEQUENCE
        cut = self.window is not None and self.window < keys
        for run in [slice(0, queries)] if is_whole else self._runs(queries, cut=cut):
            first, last = int(longest[run.start]), int(longest[run.stop - 1])
            begin = max(0, first + 1 - self.window) if self.window is not None else 0
            self.blocks.append(
                Block(
                    queries=slice(self.query_count, self.query_count + rows.numel()),
                    keys=slice(self.key_count, self.key_count + key_real.numel()),
                    sequences=len(sequences),
                    rows=run,
                    visible=slice(0, keys) if is_whole else slice(begin, last + 1),
                    mask=self._mask(longest, keys) if is_whole else None,
                )
            )
        self.query_count += rows.numel()
        self.key_count += key_real.numel()

    def _mask(self, positions: Tensor, keys: int) -> Tensor:
        """Return the additive mask of keys hidden from each query's position; [q] -> [q, keys]."""
        if keys not in self.masks:
            seen = is_visible(positions[:, None] - torch.arange(keys), self.window)
            mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
            self.masks[keys] = to_device(mask, self.device)
        return self.masks[keys]

    def _runs(self, queries: int, *, cut: bool) -> list[slice]:
        """Split a rank's queries of one sequence into runs of consecutive positions.

        The queries are two chunks, or the whole sequence without context parallelism. Runs on the
        CPU are further limited to RUN_QUERIES, and fused runs to WINDOW_QUERIES where the window
        hides keys of this sequence (`cut`).
        """
        chunk = queries if self.layout.cp_size == 1 else queries // 2
        whole = not cut and (self.fused or (chunk == queries and queries >= LONG_SEQUENCE))
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
            query_rows, query_slots, key_rows, key_slots, self.blocks, self.fused, self.window
        )

    def _maps(self, rows: list[Tensor], real: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Return slot -> row and its inverse on real slots; (None, None) if both are identity."""
        row, is_real = torch.cat(rows), torch.cat(real)
        slots = torch.empty(int(is_real.sum()), dtype=INDEX)
        slots[row[is_real]] = torch.arange(len(row), dtype=INDEX)[is_real]
        if len(slots) == len(row) and bool((row == torch.arange(len(row))).all()):
            return None, None
        return to_device(row, self.device), to_device(slots, self.device)
