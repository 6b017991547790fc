"""Which runs of a pack's queries are attended in one kernel call, and with which keys.

On CUDA, where few large kernels are fastest, sequences of similar lengths form a segment and are
attended as one padded batch. On the CPU sequences of one length are attended together, short ones
in batches that stay in the cache, and nothing is padded; a pack whose equals are neighbours is
attended where it lies.

Shapes: T tokens in the pack, t = T / cp on this rank; in a segment s sequences, q query slots and
k key slots each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import INDEX, SequenceLayout
from megatron_rl.distributed.to_device import to_device

# A segment's shortest sequence is at least this fraction of its longest: padding is bounded.
SIMILAR = 0.75
# On the CPU the scores of sequences up to this length are made whole, by a few operations on all
# of a batch; a fused kernel works on one sequence at a time and pays for it from there on.
SHORT = 96
# Pairs of a query and a key, per head, that a batch of such sequences has at most.
BATCH_PAIRS = 1 << 17
# Queries of one kernel call on the CPU. Its causal form skips hidden keys in steps of 512 only, so
# it is left to whole sequences that are long; else a mask hides what is left of shorter runs.
RUN, LONG = 192, 1024


@dataclass
class Block:
    """A run of queries of every sequence of one segment, and the keys that they may see."""

    queries: slice  # of the pack's query slots, s * q of them
    keys: slice  # of the pack's key slots, s * k of them
    sequences: int
    rows: slice  # consecutive ones of the segment's q query slots per sequence
    visible: int  # leading key slots that the last of these rows sees; each one before it one less
    # Of a batch of short sequences, whose rows need not be consecutive positions: what is added to
    # their scores, 0 or -inf; [q, k] float32. A row sees keys up to its own position.
    hidden: Tensor | None = None


@dataclass
class AttentionPlan:
    """How one pack is attended on one rank: which rows go to which slots, and back.

    Slots are rows of the (padded) segments, laid end to end. Slots of padding repeat a real row and
    are never read back.
    """

    query_rows: Tensor | None  # [query slots] local token of each slot; None: slots are the tokens
    query_slots: Tensor | None  # [t] slot of each local token
    key_rows: Tensor | None  # [key slots] row of the gathered keys [cp * t]
    key_slots: Tensor | None  # [cp * t] slot of each gathered row
    blocks: list[Block]
    fused: bool  # by torch's attention, as on CUDA; else by the kernels for the CPU


def build_attention_plan(
    layout: SequenceLayout, *, device: torch.device | None = None, fused: bool | None = None
) -> AttentionPlan:
    """The plan of a pack; a pure function of its padded lengths and the context-parallel layout.

    layout: on the host, or planning waits for the device. device: where the plan is used; the
    layout's by default. fused: attend by torch's choice of fused kernels; by default on CUDA.
    """
    device = device or layout.device
    fused = device.type == "cuda" if fused is None else fused
    lengths = torch.tensor(layout.lengths)
    builder = _PlanBuilder(layout, lengths=lengths, device=device, fused=fused)
    if fused:
        segments = _similar(lengths, least=SIMILAR if layout.cp_size == 1 else 1.0)
    else:
        segments = [
            batch
            for equals in _similar(lengths, least=1.0)
            for batch in equals.split(_batch(int(lengths[equals[0]])))
        ]
    for sequences in segments:
        builder.add_segment(sequences)
    return builder.finish()


def _batch(length: int) -> int:
    """Sequences of one length that the CPU attends at once: the fused kernel takes any number."""
    return max(1, BATCH_PAIRS // length**2) if length <= SHORT else 1 << 30


def _similar(lengths: Tensor, *, least: float) -> list[Tensor]:
    """Sequences by descending length, cut where one is below `least` of its segment's longest.

    Under context parallelism least must be 1: chunks of a shorter sequence would lie elsewhere.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    segments = []
    while len(order):
        count = int((lengths[order] >= least * lengths[order[0]]).sum())
        segments.append(order[:count])
        order = order[count:]
    return segments


class _PlanBuilder:
    """Collects the segments of one plan, on the host."""

    def __init__(
        self, layout: SequenceLayout, *, lengths: Tensor, device: torch.device, fused: bool
    ) -> None:
        self.layout, self.lengths, self.device, self.fused = layout, lengths, device, fused
        self.starts = lengths.cumsum(0) - lengths
        self.offsets = layout.offsets.cpu()  # [t] position in its sequence
        self.gathered = layout.gathered_index.cpu()  # [T] row of the gathered keys
        self.query_rows: list[Tensor] = []
        self.key_rows: list[Tensor] = []
        self.query_real: list[Tensor] = []
        self.key_real: list[Tensor] = []
        self.blocks: list[Block] = []
        self.query_count = self.key_count = 0
        self.hidden: dict[int, Tensor] = {}  # by the length of sequences, which decides it

    def add_segment(self, sequences: Tensor) -> None:
        """Lay these sequences side by side, padded to the longest, and cut their queries."""
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
        is_whole = not self.fused and keys <= SHORT
        for run in [slice(0, queries)] if is_whole else self._runs(queries):
            self.blocks.append(
                Block(
                    queries=slice(self.query_count, self.query_count + rows.numel()),
                    keys=slice(self.key_count, self.key_count + key_real.numel()),
                    sequences=len(sequences),
                    rows=run,
                    visible=keys if is_whole else int(longest[run.stop - 1]) + 1,
                    hidden=self._hidden(longest, keys) if is_whole else None,
                )
            )
        self.query_count += rows.numel()
        self.key_count += key_real.numel()

    def _hidden(self, positions: Tensor, keys: int) -> Tensor:
        """What hides the keys after each query's position; [q] -> [q, keys]."""
        if keys not in self.hidden:
            later = torch.arange(keys)[None] > positions[:, None]
            hidden = torch.zeros(later.shape).masked_fill_(later, float("-inf"))
            self.hidden[keys] = to_device(hidden, self.device)
        return self.hidden[keys]

    def _runs(self, queries: int) -> list[slice]:
        """A rank's queries of one sequence, cut where their positions jump and to kernels' liking.

        They are two chunks, or without context parallelism the whole sequence.
        """
        chunk = queries if self.layout.cp_size == 1 else queries // 2
        whole = self.fused or (chunk == queries and queries >= LONG)
        step = chunk if whole else min(chunk, RUN)
        return [
            slice(start, min(start + step, first + chunk))
            for first in range(0, queries, chunk)
            for start in range(first, first + chunk, step)
        ]

    def finish(self) -> AttentionPlan:
        """The plan on the device of the pack."""
        query_rows, query_slots = self._maps(self.query_rows, self.query_real)
        key_rows, key_slots = self._maps(self.key_rows, self.key_real)
        return AttentionPlan(query_rows, query_slots, key_rows, key_slots, self.blocks, self.fused)

    def _maps(self, rows: list[Tensor], real: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Slot -> row and its inverse on the real slots; (None, None) where both are identity."""
        row, is_real = torch.cat(rows), torch.cat(real)
        slots = torch.empty(int(is_real.sum()), dtype=INDEX)
        slots[row[is_real]] = torch.arange(len(row), dtype=INDEX)[is_real]
        if len(slots) == len(row) and bool((row == torch.arange(len(row))).all()):
            return None, None
        return to_device(row, self.device), to_device(slots, self.device)
