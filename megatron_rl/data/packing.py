"""Pack rollouts into micro-batches by token budget, and bring per-token values back to rollouts.

Every rank knows all rollouts of a step and their lengths, so each rank computes the plan itself by
a pure function; their tokens come to the ranks whose packs hold them (`data/token_rows.py`).
Prompt groups are split in order into equal minibatches (one optimizer update each); inside
a minibatch sequences are spread over data-parallel ranks and micro-batches, longest first into the
emptiest pack. Every rank gets the same number of micro-batches; an empty pack gets a
filler sequence without response tokens, so that all ranks run the same passes. A rollout that need
not be computed is in no pack, but in the sizes that losses are divided by.

A sequence is the prompt and all but the last token of the response (nothing follows that one), and
is padded only to the layout's alignment. Where matrix products want more of the sum of a pack's
tokens, its last sequence is padded further. A response whose history was replaced is several
sequences in the same pack, each without its last token, and still one rollout wherever rollouts are
counted.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.data.token_rows import WRITER, Delivery, fetch_tokens, remote_row
from megatron_rl.distributed.agreement import gather_from_ranks
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.types import (
    ARRAY_NAMES,
    Denominators,
    Minibatch,
    Response,
    Rollout,
    SamplingMask,
    TokenBatch,
    columns_of,
)

FILLER = -1  # in TokenBatch.rollout_indices


def sequence_length(rollout: Rollout) -> int:
    """Positions that predict something, in all sequences of a rollout."""
    return sum(sequence_lengths(rollout))


def sequence_lengths(rollout: Rollout) -> list[int]:
    """Positions that predict something: of each sequence of a rollout, all but the last token."""
    bounds = [-len(rollout.prompt.token_ids), *rollout.response.restarts]
    ends = [*rollout.response.restarts, len(rollout.response.token_ids)]
    return [max(1, end - start - 1) for start, end in zip(bounds, ends, strict=True)]


def padded_lengths(rollout: Rollout, *, alignment: int) -> tuple[int, ...]:
    """Padded lengths of the sequences of a rollout."""
    return tuple(padded_length(one, alignment=alignment) for one in sequence_lengths(rollout))


def padded_length(length: int, *, alignment: int) -> int:
    """`length` rounded up to a multiple of `alignment`."""
    return -(-length // alignment) * alignment


def split_groups(rollouts: Sequence[Rollout], *, minibatches: int) -> list[range]:
    """Ranges of rollouts, one per minibatch: whole prompt groups, in order, equally many.

    Raises ValueError when the groups cannot be divided.
    """
    starts = [
        index
        for index, rollout in enumerate(rollouts)
        if index == 0
        or rollout.response.prompt_index != rollouts[index - 1].response.prompt_index
        or rollout.response.sample_index <= rollouts[index - 1].response.sample_index
    ]
    if not starts or len(starts) % minibatches:
        raise UserError(
            f"{len(starts)} prompt groups cannot be split into {minibatches} equal minibatches; "
            "make the number of prompts a multiple of the number of minibatches"
        )
    size = len(starts) // minibatches
    bounds = [*starts[::size], len(rollouts)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def assign_packs(
    lengths: Sequence[int], *, budget: int, ranks: int, multiple: int = 1
) -> list[list[list[int]]]:
    """Assign sequences to packs: `[rank][micro-batch]` -> indices, longest first.

    lengths: padded. The fewest micro-batches for which no pack exceeds the budget (a sequence that
    alone exceeds it gets a pack of its own size), a multiple of `multiple`. Deterministic.
    """
    budget = max([budget, *lengths])
    least = max(1, -(-sum(lengths) // (ranks * budget)))
    micro_batches = padded_length(least, alignment=multiple)
    while True:
        bins = _longest_first(lengths, bins=ranks * micro_batches)
        if max(sum(lengths[i] for i in one) for one in bins) <= budget:
            return [bins[rank::ranks] for rank in range(ranks)]
        micro_batches += multiple


def _longest_first(lengths: Sequence[int], *, bins: int) -> list[list[int]]:
    """Each sequence, longest first, into the emptiest of `bins` (Graham's LPT rule)."""
    heap = [(0, place) for place in range(bins)]
    packs: list[list[int]] = [[] for _ in range(bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, place = heapq.heappop(heap)
        packs[place].append(index)
        heapq.heappush(heap, (load + lengths[index], place))
    return packs


def plan_minibatches(
    rollouts: Sequence[Rollout],
    advantages: Tensor,
    *,
    minibatches: int,
    tokens_per_micro_batch: int,
    topology: Topology,
    gemm_tokens: int = 1,
    computed: Sequence[bool] | None = None,
    counted: Sequence[bool] | None = None,
) -> list[Minibatch]:
    """This data-parallel rank's packs of a rollout batch, with each minibatch's global sizes.

    advantages [N], one per rollout. tokens_per_micro_batch is the budget of one pack, over all its
    context-parallel shards. gemm_tokens: each shard of a pack is a multiple of it. computed [N]:
    the rollouts that are in packs, all by default; counted [N]: those that the global sizes count,
    all by default. Sizes are at least 1: a minibatch may have nothing to learn from.
    Collective over all processes, unless every rank has the tokens of all rollouts.
    Raises ValueError when the groups cannot be divided into minibatches.
    """
    alignment = topology.alignment
    multiple_of = pack_multiple(alignment, gemm_tokens=gemm_tokens)
    planned: list[tuple[list[list[int]], Denominators]] = []
    for span in split_groups(rollouts, minibatches=minibatches):
        packed = [i for i in span if computed is None or computed[i]]
        lengths = [sum(padded_lengths(rollouts[i], alignment=alignment)) for i in packed]
        packs = assign_packs(
            lengths,
            # Padding the sum to a multiple must not exceed the budget.
            budget=tokens_per_micro_batch // multiple_of * multiple_of,
            ranks=topology.dp_size,
            multiple=topology.round_size,
        )
        own = [[packed[i] for i in pack] for pack in packs[topology.dp_rank]]
        sizes = [rollouts[i].response.length for i in span if counted is None or counted[i]]
        denominators = Denominators(
            responses=float(max(1, sum(size > 0 for size in sizes))),
            tokens=float(max(1, sum(sizes))),
        )
        planned.append((own, denominators))
    own_rollouts = [index for own, _ in planned for pack in own for index in pack]
    rollouts = fetch_tokens(rollouts, own_rollouts)
    build = partial(build_pack, rollouts, advantages, alignment=alignment, gemm_tokens=gemm_tokens)
    return [
        Minibatch([build(indices=pack) for pack in own], denominators)
        for own, denominators in planned
    ]


def pack_multiple(alignment: int, *, gemm_tokens: int) -> int:
    """Compute the number that a pack's token count must be a multiple of.

    alignment: that of a sequence, twice the number of shards over context and tensor parallelism.
    """
    return alignment // 2 * math.lcm(2, gemm_tokens)


def build_pack(
    rollouts: Sequence[Rollout],
    advantages: Tensor,
    *,
    indices: Sequence[int],
    alignment: int,
    gemm_tokens: int = 1,
) -> TokenBatch:
    """One pack of the rollouts at `indices`, in order; a filler sequence when there are none."""
    parts = [padded_lengths(rollouts[index], alignment=alignment) for index in indices]
    parts = parts or [(alignment,)]
    total = sum(map(sum, parts))
    further = -total % pack_multiple(alignment, gemm_tokens=gemm_tokens)
    parts[-1] = (*parts[-1][:-1], parts[-1][-1] + further)
    lengths = [sum(part) for part in parts]
    tokens, labels = np.zeros((2, sum(lengths)), np.int64)
    positions = [np.arange(size) for sizes in parts for size in sizes]
    mask = np.zeros(sum(lengths), bool)
    routes = np.zeros((sum(lengths), _bytes_per_token(rollouts, indices)), np.uint8)
    start = 0
    for index, sizes in zip(indices, parts, strict=False):  # a filler has no index
        prompt, response = rollouts[index].prompt.token_ids, rollouts[index].response
        text = np.concatenate((prompt, response.token_ids)).astype(np.int64)
        own = np.concatenate((np.zeros(len(prompt), bool), response.own))
        bounds = [0, *(len(prompt) + place for place in response.restarts), len(text)]
        begin = start
        for (first, stop), size in zip(itertools.pairwise(bounds), sizes, strict=True):
            end = start + stop - first - 1
            tokens[start:end], labels[start:end] = text[first : stop - 1], text[first + 1 : stop]
            mask[start:end] = own[first + 1 : stop]
            start += size
        if routes.size:
            assert not response.restarts, "the engine's routes are of one sequence"
            routes[begin : begin + len(text) - 1] = response.routes.reshape(-1, routes.shape[1])
    responses = [rollouts[index].response for index in indices]
    return TokenBatch(
        tokens=torch.from_numpy(tokens),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        labels=torch.from_numpy(labels),
        response_mask=torch.from_numpy(mask),
        lengths=tuple(lengths),
        parts=tuple(parts) if any(len(part) > 1 for part in parts) else (),
        rollout_indices=tuple(indices) or (FILLER,),
        advantages=advantages[list(indices)].float() if indices else torch.zeros(1),
        **spread_columns(responses, mask),
        engine_routes=torch.from_numpy(routes) if routes.size else None,
        sampling_mask=_spread_masks(responses, mask),
    )


def spread_columns(responses: Sequence[Response], response_mask: np.ndarray) -> dict[str, Any]:
    """Spread the columns of a pack's responses over its tokens, as fields of a `TokenBatch`.

    response_mask: [T]. A column that a response lacks is None, or missing if it is a further one.
    """
    fields: dict[str, Any] = {"further": {}}
    for column in columns_of(responses):
        if column.fill is None:
            continue
        values = np.full(len(response_mask), column.fill, column.dtype)
        rows = [one.row(column.name) for one in responses]
        if column.name == "rollout_logprobs":
            rows = [row if one.has_engine_logprobs else None
                    for row, one in zip(rows, responses, strict=True)]  # fmt: skip
        # The trainer's are complete once those of the last tokens have been computed.
        is_known = all(
            row is not None and (column.by == "engine" or len(row) == one.length)
            for row, one in zip(rows, responses, strict=True)
        )
        if rows and is_known:
            values[response_mask] = np.concatenate(rows)
        if column.name not in ARRAY_NAMES and is_known:
            fields["further"][column.name] = torch.from_numpy(values)
        elif column.name in ARRAY_NAMES:
            fields[column.name] = torch.from_numpy(values) if is_known else None
    return fields


def _spread_masks(responses: Sequence[Response], response_mask: np.ndarray) -> SamplingMask | None:
    """Spread the masks of responses over a pack; [T] bool -> T positions. None without any."""
    if not any(len(one.mask_counts) for one in responses):
        return None
    counts = np.zeros(len(response_mask), np.int32)
    counts[response_mask] = np.concatenate(
        [one.mask_counts if len(one.mask_counts) else np.zeros(one.length, np.int32)
         for one in responses]
    )  # fmt: skip
    ids = np.concatenate([one.mask_ids for one in responses])
    return SamplingMask(torch.from_numpy(ids), torch.from_numpy(counts))


def _bytes_per_token(rollouts: Sequence[Rollout], indices: Sequence[int]) -> int:
    """Return the bytes of the engine's routes of a token; 0 if none were recorded."""
    if not indices:
        return 0
    rollout = rollouts[indices[0]]
    return len(rollout.response.routes) // sequence_length(rollout)


def scatter_to_packs(
    packs: Sequence[TokenBatch], rows: Sequence[np.ndarray | None]
) -> list[Tensor]:
    """Spread one row of values per rollout over the tokens of packs, 0 off the mask; [T] each.

    The inverse of `gather_by_rollout`; every rollout in a pack needs a row.
    """
    scattered = []
    for pack in packs:
        values = torch.zeros(pack.response_mask.shape)
        own = [rows[index] for index in pack.rollout_indices if index != FILLER]
        if own:
            known = [row for row in own if row is not None]
            assert len(known) == len(own), "every rollout of a pack needs its row"
            values[pack.response_mask] = torch.from_numpy(np.concatenate(known))
        scattered.append(values)
    return scattered


def gather_by_rollout(
    packs: Sequence[TokenBatch],
    values: Sequence[Tensor],
    *,
    count: int,
    topology: Topology,
    owners: Sequence[int] | None = None,
) -> list[np.ndarray | None]:
    """Bring per-token values [T] of this rank's packs together as one array per rollout.

    An array contains the values of the sampled tokens in order; None for rollouts in no pack.
    owners: of the rollouts, as in `types.Response`. A rollout's array is on its owner and on rank
    0, with a `RemoteRow` on the others; without owners it is on every rank. Collective over all
    processes.
    """
    rows: list[np.ndarray | None] = [None] * count
    for pack, value in zip(packs, values, strict=True):
        parts = value.float().cpu().split(list(pack.lengths))
        masks = pack.response_mask.cpu().split(list(pack.lengths))
        for index, part, mask in zip(pack.rollout_indices, parts, masks, strict=True):
            if index != FILLER:
                rows[index] = part[mask].numpy()
    if topology.world_size == 1:
        return rows
    owners = owners or [-1] * count
    sizes = [0] * count
    having: list[list[int]] = [[] for _ in range(count)]
    own = [(index, len(row)) for index, row in enumerate(rows) if row is not None]
    for rank, pairs in enumerate(gather_from_ranks(own)):
        for index, size in pairs:
            sizes[index] = size
            having[index].append(rank)
    everyone = range(topology.world_size)
    delivery = Delivery(
        sizes,
        # The ranks of a replica, which all have the values, send them in turn.
        [ranks[index % len(ranks)] if ranks else WRITER for index, ranks in enumerate(having)],
        [
            () if not ranks else everyone if owner < 0 else (owner, WRITER)
            for ranks, owner in zip(having, owners, strict=True)
        ],
    )
    gathered = delivery.send(rows, "float32")
    return [
        None
        if not ranks
        else row
        if topology.rank in (owner, WRITER) or owner < 0
        else remote_row(size)
        for row, ranks, owner, size in zip(gathered, having, owners, sizes, strict=True)
    ]
