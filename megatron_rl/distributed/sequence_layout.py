"""Sharding of a pack's tokens over context parallelism.

A pack is one row of T tokens made of S sequences. Every sequence is cut into 2 * cp_size equal
chunks; rank r keeps chunk r and chunk 2 * cp_size - 1 - r (zigzag: causal attention then costs
every rank the same; the partition is that of Transformer Engine's THD format). A rank's shard
contains, sequence by sequence, its early chunk followed by its late chunk. With cp_size 1 each
sequence is one early chunk.

Positions and lengths follow from the response mask of the whole pack, which every rank has, so they
need no communication. Sums along the sequences do: see `chunk_scan.py`.

A sequence may continue another one, its parent, which is computed once for all that continue it:
its tokens see those of its ancestors, and its positions count them. Each sequence is still cut into
chunks by itself.

Shapes: T tokens in the pack, t = T / cp_size on this rank, S sequences, R responses. A response is
one sequence unless an environment has replaced its history, which begins another.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import Group, all_gather, group_size, to_device

Table = TypeVar("Table")
INDEX = torch.int32  # dtype of per-token index tables; half the memory of torch's default int64
PADDING = 8  # largest size of padded tables, in multiples of a rank's tokens


class PaddedChunks(NamedTuple):
    """Places of a rank's tokens in padded tables, whose rows are the chunks of its sequences.

    One operation on a table works on all of its chunks. There is a single table if it has at most
    PADDING elements per token; otherwise chunks of similar length share one, so that there are at
    most log(longest chunk) / log(PADDING) + 1 tables, with less than PADDING elements per token.
    """

    shapes: tuple[tuple[int, int], ...]  # (rows, columns) of each table; they lie one by one
    places: Tensor  # [t] int32: place of each token; its row begins at the first column
    mirrored: Tensor  # [t] int32: the same with every chunk reversed

    @property
    def size(self) -> int:
        """Elements of all tables."""
        return sum(rows * columns for rows, columns in self.shapes)

    def tables(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield views of the tables in `flat` [size]."""
        sizes = [rows * columns for rows, columns in self.shapes]
        for part, shape in zip(flat.split(sizes), self.shapes, strict=True):
            yield part.view(shape)


class JoinedPlaces(NamedTuple):
    """Places of sequences in a table whose rows are responses, which have one or several."""

    rows: Tensor  # [S] int64: response of each sequence
    places: Tensor  # [S] int64: its place in the table, row by row
    shape: tuple[int, int]  # (R, most sequences of a response)


class SequenceLayout:
    """The packing and sharding of one micro-batch.

    `lengths` are the padded lengths of the sequences in pack order; `response_mask` [T] marks the
    valid decisions of the whole pack. `joined` [R] is the number of consecutive sequences of each
    response, by default one: attention and shards treat them as separate sequences, while t, L and
    scans continue from one to the next. `parents` [S] is the earlier sequence that each one
    continues, -1 for none, and `used` [S] the number of its tokens without padding; both are empty
    if no sequence continues another. Without a group the tables of any rank can be computed, but
    nothing can be gathered. Raises ValueError if these arguments are inconsistent.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        response_mask: Tensor,
        *,
        joined: Sequence[int] = (),
        parents: Sequence[int] = (),
        used: Sequence[int] = (),
        cp_rank: int = 0,
        cp_size: int = 1,
        cp_group: Group = None,
    ) -> None:
        self.lengths = tuple(int(length) for length in lengths)
        self.joined = tuple(joined) if any(count > 1 for count in joined) else ()
        self.parents = tuple(parents) if any(parent >= 0 for parent in parents) else ()
        self.used = tuple(used) if self.parents else ()
        self.cp_rank, self.cp_size, self.cp_group = cp_rank, cp_size, cp_group
        self.full_mask = response_mask.bool()  # [T]
        self.device = response_mask.device
        self._cache: dict[Callable[[SequenceLayout], Any], Any] = {}
        self._check()
        # The lengths are on the host, so all table sizes are known without a device sync.
        self._host_lengths = torch.tensor(self.lengths, dtype=INDEX)  # [S]
        self.full_tokens = sum(self.lengths)
        self.local_tokens = self.full_tokens // cp_size

    def _check(self) -> None:
        total, tokens = sum(self.lengths), self.full_mask.numel()
        if self.full_mask.dim() != 1 or total != tokens or not self.lengths:
            raise ValueError(
                f"lengths sum to {total} over {len(self.lengths)} sequences but response_mask has "
                f"shape {tuple(self.full_mask.shape)}: give one length per sequence of the pack, "
                "padding included, and the mask of the whole pack [T]"
            )
        if self.joined and (sum(self.joined) != len(self.lengths) or min(self.joined) < 1):
            raise ValueError(
                f"joined {self.joined} must be positive and sum to {len(self.lengths)} sequences"
            )
        if self.parents and not (
            len(self.parents) == len(self.used) == len(self.lengths)
            and all(-1 <= parent < child for child, parent in enumerate(self.parents))
            and all(0 <= own <= length for own, length in zip(self.used, self.lengths, strict=True))
        ):
            raise ValueError(
                f"parents {self.parents} must be earlier sequences or -1, and used {self.used} at "
                f"most the padded lengths {self.lengths}: one of each per sequence"
            )
        if not 0 <= self.cp_rank < self.cp_size:
            raise ValueError(f"cp_rank {self.cp_rank} is not in 0..{self.cp_size - 1}")
        if self.cp_group is not None and group_size(self.cp_group) != self.cp_size:
            raise ValueError(
                f"cp_group has {group_size(self.cp_group)} ranks but cp_size is {self.cp_size}"
            )
        alignment = 1 if self.cp_size == 1 else 2 * self.cp_size
        for sequence, length in enumerate(self.lengths):
            if length < 1 or length % alignment:
                raise ValueError(
                    f"sequence {sequence} has padded length {length}: it must be a positive "
                    f"multiple of {alignment} to be cut into 2 * cp_size = {2 * self.cp_size} "
                    "equal chunks"
                )

    def _to_device(self, table: Tensor) -> Tensor:
        return to_device(table, self.device)

    @cached_property
    def chunk_lengths(self) -> Tensor:
        """Lengths of this rank's early and late chunk of every sequence, on the host; [S, 2]."""
        if self.cp_size == 1:
            return torch.stack((self._host_lengths, torch.zeros_like(self._host_lengths)), dim=1)
        return (self._host_lengths // (2 * self.cp_size))[:, None].expand(-1, 2)

    @cached_property
    def chunk_bounds(self) -> Tensor:
        """Start and end of each of the 2S chunks in the shard; [2, 2S] int32."""
        lengths = self.chunk_lengths.reshape(-1)
        ends = lengths.cumsum(0, dtype=INDEX)
        return self._to_device(torch.stack((ends - lengths, ends)))

    @cached_property
    def chunk_ids(self) -> Tensor:
        """Chunk index of each local token; [t] int32."""
        starts, ends = self.chunk_bounds
        return torch.repeat_interleave(ends - starts, output_size=self.local_tokens)

    @cached_property
    def chunk_columns(self) -> Tensor:
        """Offset of each local token in its chunk; [t] int32."""
        tokens = torch.arange(self.local_tokens, dtype=INDEX, device=self.device)
        return tokens - self.chunk_bounds[0][self.chunk_ids]

    @cached_property
    def padded_chunks(self) -> PaddedChunks:
        """Padded tables of this rank's chunks, for scans."""
        lengths = self.chunk_lengths.reshape(-1).long()  # [2S]; empty chunks have no row
        tables = [lengths > 0]
        if int(tables[0].sum() * lengths.max()) > PADDING * self.local_tokens:
            powers = [PADDING**n for n in range(int(lengths.max()).bit_length())]
            tables = [(lengths >= low) & (lengths < PADDING * low) for low in powers]
        shapes, starts, size = [], torch.zeros_like(lengths), 0
        for rows in tables:
            if count := int(rows.sum()):
                shape = count, int(lengths[rows].max())
                starts[rows] = size + torch.arange(count) * shape[1]
                shapes.append(shape)
                size += shape[0] * shape[1]
        begins, lasts = self._to_device(torch.stack((starts, starts + lengths - 1)).to(INDEX))
        places = begins[self.chunk_ids] + self.chunk_columns
        return PaddedChunks(tuple(shapes), places, lasts[self.chunk_ids] - self.chunk_columns)

    @cached_property
    def sequence_ids(self) -> Tensor:
        """Sequence index of each local token; [t] int32."""
        return self.chunk_ids // 2

    @cached_property
    def local_index(self) -> Tensor:
        """Position of each local token in the pack; [t] int32."""
        starts = self._host_lengths.cumsum(0, dtype=INDEX) - self._host_lengths
        chunk = self.chunk_lengths[:, 0]
        early = starts + self.cp_rank * chunk
        late = starts + (2 * self.cp_size - 1 - self.cp_rank) * chunk
        chunk_starts = self._to_device(torch.stack((early, late), dim=1).reshape(-1))
        return chunk_starts[self.chunk_ids] + self.chunk_columns

    @cached_property
    def gathered_index(self) -> Tensor:
        """Row of each pack position in the all-gathered shards; [T] int32.

        Row gathered_index[i] of an all-gather of the shards, [cp_size * t, ...], is token i of the
        pack.
        """
        if self.cp_size == 1:
            return torch.arange(self.full_tokens, dtype=INDEX, device=self.device)
        starts = self._host_lengths.cumsum(0, dtype=INDEX) - self._host_lengths
        table = self._to_device(torch.stack((self._host_lengths, starts)))  # [2, S]
        ids = torch.repeat_interleave(table[0], output_size=self.full_tokens)  # [T]
        chunk_length = table[0][ids] // (2 * self.cp_size)
        offset = torch.arange(self.full_tokens, dtype=INDEX, device=self.device) - table[1][ids]
        chunk, column = offset // chunk_length, offset % chunk_length
        late = chunk >= self.cp_size
        rank = torch.where(late, 2 * self.cp_size - 1 - chunk, chunk)
        local_start = table[1][ids] // self.cp_size + late * chunk_length
        return rank * self.local_tokens + local_start + column

    @cached_property
    def _response_lengths(self) -> Tensor:
        """Padded lengths of the responses, on the host; [R]."""
        if not self.joined:
            return self._host_lengths
        parts = self._host_lengths.split(list(self.joined))
        return torch.stack([part.sum(dtype=INDEX) for part in parts])

    @cached_property
    def response_ids(self) -> Tensor:
        """Response index of each local token; [t] int32."""
        if not self.joined:
            return self.sequence_ids
        return self.joined_places.rows[self.sequence_ids].to(INDEX)

    @cached_property
    def joined_places(self) -> JoinedPlaces:
        """Places of the sequences in a table with a row for each response, of joined ones."""
        assert self.joined, "each response is one sequence"
        counts = torch.tensor(self.joined)
        rows = torch.repeat_interleave(counts)  # [S]
        starts = counts.cumsum(0) - counts
        columns = torch.arange(len(self.lengths)) - starts[rows]
        width = int(counts.max())
        table = torch.stack((rows, rows * width + columns))
        rows, places = self._to_device(table)
        return JoinedPlaces(rows, places, (len(self.joined), width))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Number of tokens of the ancestors of each sequence, without padding; [S]."""
        depths: list[int] = []
        for parent in self.parents or (-1,) * len(self.lengths):
            depths.append(depths[parent] + self.used[parent] if parent >= 0 else 0)
        return tuple(depths)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Sequences by their number of ancestors, sequences without ancestors first."""
        numbers: list[int] = []
        for parent in self.parents or (-1,) * len(self.lengths):
            numbers.append(numbers[parent] + 1 if parent >= 0 else 0)
        rows = range(len(numbers))
        return tuple(
            tuple(row for row in rows if numbers[row] == level) for level in range(max(numbers) + 1)
        )

    def rows_before(self, sequence: int) -> Tensor:
        """Return the rows of a sequence's ancestors in the pack, in order; [depth] on the host."""
        rows: list[Tensor] = []
        starts = [0, *accumulate(self.lengths)]
        while self.parents and (sequence := self.parents[sequence]) >= 0:
            rows.insert(0, torch.arange(starts[sequence], starts[sequence] + self.used[sequence]))
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)

    @cached_property
    def mask(self) -> Tensor:
        """Response mask of this rank's tokens; [t] bool."""
        return self.shard(self.full_mask)

    @cached_property
    def _counts(self) -> tuple[Tensor, Tensor]:
        lengths = self._response_lengths
        full = torch.repeat_interleave(self._to_device(lengths), output_size=self.full_tokens)
        ends = self._to_device(lengths.cumsum(0, dtype=INDEX))
        # Integers: subtracting the count before the sequence is exact.
        running = torch.cat((ends.new_zeros(1), self.full_mask.cumsum(0, dtype=INDEX)))  # [T + 1]
        before = running[ends - self._to_device(lengths)]  # [R]
        length = running[ends] - before  # [R]
        ids = full[self.local_index]
        return running[self.local_index + 1] - before[ids], length[ids]

    @property
    def position(self) -> Tensor:
        """t: number of valid decisions in the response up to and including the token; [t] int32."""
        return self._counts[0]

    @property
    def length(self) -> Tensor:
        """L: number of valid decisions in each token's response; [t] int32."""
        return self._counts[1]

    @cached_property
    def is_used(self) -> Tensor:
        """True up to the last valid decision of each sequence; the rest is padding; [t] bool.

        Where sequences continue other sequences, True for all tokens that are not padding.
        """
        if self.parents:
            return self.offsets < self._to_device(torch.tensor(self.used))[self.sequence_ids]
        if self.joined:  # t < L is also true in the padding between sequences of a response
            apart = SequenceLayout(
                self.lengths, self.full_mask, cp_rank=self.cp_rank, cp_size=self.cp_size
            )
            return apart.is_used
        return (self.position < self.length) | self.mask

    @cached_property
    def offsets(self) -> Tensor:
        """Offset of each local token in its padded sequence; [t] int32."""
        starts = self._host_lengths.cumsum(0, dtype=INDEX) - self._host_lengths
        return self.local_index - self._to_device(starts)[self.sequence_ids]

    def once(self, compute: Callable[["SequenceLayout"], Table]) -> Table:
        """Return compute(self), cached; for tables that depend only on lengths and mask."""
        if compute not in self._cache:
            self._cache[compute] = compute(self)
        return self._cache[compute]

    def shard(self, x: Tensor) -> Tensor:
        """Select this rank's tokens of a whole pack, differentiable; [T, ...] -> [t, ...]."""
        if x.shape[0] != self.full_tokens:
            raise ValueError(f"shard needs the whole pack, T = {self.full_tokens}: got {x.shape}")
        return x.index_select(0, self.local_index)

    def gather(self, x: Tensor) -> Tensor:
        """Gather the whole pack from all ranks' tokens, differentiable; [t, ...] -> [T, ...]."""
        self.check_local(x)
        stacked = all_gather(x, group=self.require_group())
        return stacked.flatten(0, 1).index_select(0, self.gathered_index)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Expand one value per sequence to every local token; [S] -> [t]."""
        return per_sequence.index_select(0, self.sequence_ids)

    def spread_responses(self, per_response: Tensor) -> Tensor:
        """Expand one value per response to every local token; [R] -> [t]."""
        return per_response.index_select(0, self.response_ids)

    def require_group(self) -> Group:
        """Return the context-parallel group; raises ValueError if it is needed but missing."""
        if group_size(self.cp_group) != self.cp_size:
            raise ValueError(f"cp_size is {self.cp_size}: a scan or gather needs the cp_group")
        return self.cp_group

    def check_local(self, x: Tensor) -> None:
        """Raise ValueError unless `x` has one value, or row, per local token."""
        if x.shape[:1] != (self.local_tokens,):
            raise ValueError(
                f"this rank has t = {self.local_tokens} tokens of the pack's "
                f"T = {self.full_tokens}, but the tensor has shape {tuple(x.shape)}"
            )
