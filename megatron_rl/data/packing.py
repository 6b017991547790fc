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

Where sequences begin alike, a pack may have their common beginning once (`data/prefix_tree.py`,
`data/sharing.py`). It is then a sequence of its own that the others continue, without decisions
unless it is a part of a response, and among responses it counts as a filler.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rl.data.prefix_tree import ANY, Path, Segment, build_tree, list_segments
from megatron_rl.data.sharing import Item, Sharing, dense_items, longest_first, plan_items
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

FILLER = ANY  # in TokenBatch.rollout_indices
SAVED = 0.02  # least fraction of the cost that makes sharing worth other packs


def sequence_length(rollout: Rollout) -> int:
    """Number of predicting positions: each sequence's tokens minus one, summed."""
    return sum(sequence_lengths(rollout))


def sequence_lengths(rollout: Rollout) -> list[int]:
    """Predicting positions: all tokens of each sequence of a rollout but its last token."""
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
    lengths: Sequence[int],
    *,
    budget: int,
    ranks: int,
    multiple: int = 1,
    weights: Sequence[float] = (),
) -> list[list[list[int]]]:
    """Assign sequences to packs: `[rank][micro-batch]` -> indices, longest first.

    lengths: padded. The fewest micro-batches for which no pack exceeds the budget (a sequence that
    alone exceeds it gets a pack of its own size), a multiple of `multiple`.
    weights: costs that are balanced over packs, by default the lengths. Deterministic.
    """
    budget = max([budget, *lengths])
    least = max(1, -(-sum(lengths) // (ranks * budget)))
    micro_batches = padded_length(least, alignment=multiple)
    while True:
        bins = longest_first(weights or lengths, bins=ranks * micro_batches)
        if max(sum(lengths[i] for i in one) for one in bins) <= budget:
            return [bins[rank::ranks] for rank in range(ranks)]
        micro_batches += multiple


class Assignment(NamedTuple):
    """The packs of every rank."""

    packs: list[list[list[int]]]  # of each rank: packs of rollouts
    cost: float  # of the rank that has the most
    shared: frozenset[int]  # rollouts whose common beginnings are computed once


def _assign(
    items: Sequence[Item], *, budget: int, ranks: int, multiple: int, by_cost: bool = True
) -> Assignment:
    """Assign items as `assign_packs` does; by_cost: ranks get equal costs instead of rows."""
    assigned = assign_packs(
        [item.rows for item in items], budget=budget, ranks=ranks, multiple=multiple,
        weights=[item.cost for item in items] if by_cost else (),
    )  # fmt: skip
    return Assignment(
        [[[index for i in pack for index in items[i].rollouts] for pack in own]
         for own in assigned],
        max(sum(items[i].cost for pack in own for i in pack) for own in assigned),
        frozenset(index for item in items if item.is_shared for index in item.rollouts),
    )  # fmt: skip


def share_packs(
    rollouts: Sequence[Rollout],
    packed: Sequence[int],
    *,
    sharing: Sharing,
    alignment: int,
    budget: int,
    ranks: int,
    multiple: int,
) -> Assignment:
    """Assign the rollouts at `packed` as `assign_packs` does, those that begin alike together.

    Of several ways to cut the items the one with the least cost; none is cut at all if sharing
    saves less than SAVED.
    """
    lengths = [sequence_lengths(rollouts[index]) for index in packed]
    apart = dense_items(packed, lengths, alignment=alignment, sharing=sharing)
    budget = max([budget, *(item.rows for item in apart)])
    assign = partial(_assign, budget=budget, ranks=ranks, multiple=multiple)
    dense = assign(apart, by_cost=False)

    share = -(-sum(item.rows for item in apart) // ranks)
    largest = {budget, *(min(budget, max(1, share // parts)) for parts in (1, 2, 4, 8))}
    ways = [
        plan_items(
            rollouts, packed, lengths, alignment=alignment, budget=rows, sharing=sharing
        )
        for rows in sorted(largest, reverse=True)
    ]  # fmt: skip
    together = min(map(assign, ways), key=lambda one: one.cost)
    is_worth_it = sharing.always or together.cost <= (1 - SAVED) * dense.cost
    return together if is_worth_it else dense


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
    sharing: Sharing | None = None,
) -> list[Minibatch]:
    """This data-parallel rank's packs of a rollout batch, with each minibatch's global sizes.

    advantages [N], one per rollout. tokens_per_micro_batch is the budget of one pack, over all its
    context-parallel shards. gemm_tokens: each shard of a pack is a multiple of it. computed [N]:
    the rollouts that are in packs, all by default; counted [N]: those that the global sizes count,
    all by default. Sizes are at least 1: a minibatch may have nothing to learn from. sharing: when
    packs compute what sequences have in common once; None: never.
    Collective over all processes, unless every rank has the tokens of all rollouts.
    Raises ValueError when the groups cannot be divided into minibatches.
    """
    alignment = topology.alignment
    multiple_of = pack_multiple(alignment, gemm_tokens=gemm_tokens)
    # Padding the sum to a multiple must not exceed the budget.
    budget = tokens_per_micro_batch // multiple_of * multiple_of
    ranks, multiple = topology.dp_size, topology.round_size
    room: dict[str, Any] = {"budget": budget, "ranks": ranks, "multiple": multiple}
    shared: set[int] = set()
    planned: list[tuple[list[list[int]], Denominators]] = []
    for span in split_groups(rollouts, minibatches=minibatches):
        packed = [i for i in span if computed is None or computed[i]]
        if sharing is None:
            packs = assign_packs(
                [sum(padded_lengths(rollouts[i], alignment=alignment)) for i in packed],
                **room,
            )
            own = [[packed[i] for i in pack] for pack in packs[topology.dp_rank]]
        else:
            assigned = share_packs(rollouts, packed, sharing=sharing, alignment=alignment, **room)
            own = assigned.packs[topology.dp_rank]
            shared |= assigned.shared
        sizes = [rollouts[i].response.length for i in span if counted is None or counted[i]]
        denominators = Denominators(
            responses=float(max(1, sum(size > 0 for size in sizes))),
            tokens=float(max(1, sum(sizes))),
        )
        planned.append((own, denominators))
    own_rollouts = [index for own, _ in planned for pack in own for index in pack]
    rollouts = fetch_tokens(rollouts, own_rollouts)
    build = partial(
        build_pack, rollouts, advantages, alignment=alignment, gemm_tokens=gemm_tokens,
        sharing=sharing, shared=shared,
    )  # fmt: skip
    return [
        Minibatch([build(indices=pack) for pack in own], denominators)
        for own, denominators in planned
    ]


def pack_multiple(alignment: int, *, gemm_tokens: int) -> int:
    """Compute the number that a pack's token count must be a multiple of.

    alignment: that of a sequence, twice the number of shards over context and tensor parallelism.
    """
    return alignment // 2 * math.lcm(2, gemm_tokens)


class _Sequence(NamedTuple):
    """A sequence of a rollout, with the token that follows its last position."""

    rollout: int
    number: int  # in the rollout
    text: np.ndarray  # [n + 1] int64
    own: np.ndarray  # [n + 1] bool: sampled by the policy

    @property
    def path(self) -> Path:
        """The sequence as `data/prefix_tree.py` takes it."""
        length = max(0, len(self.text) - 1)
        decisions = np.flatnonzero(self.own[1:])
        first = int(decisions[0]) if len(decisions) else length
        return Path(self.rollout, self.text, max(0, min(first, length - 1)), length)


def _sequences(rollout: Rollout, index: int) -> list[_Sequence]:
    prompt, response = rollout.prompt.token_ids, rollout.response
    text = np.concatenate((prompt, response.token_ids)).astype(np.int64)
    own = np.concatenate((np.zeros(len(prompt), bool), response.own))
    bounds = [0, *(len(prompt) + place for place in response.restarts), len(text)]
    return [
        _Sequence(index, number, text[first:stop], own[first:stop])
        for number, (first, stop) in enumerate(itertools.pairwise(bounds))
    ]


def _segments(
    sequences: Sequence[_Sequence],
    *,
    alignment: int,
    sharing: Sharing | None,
    shared: AbstractSet[int],
) -> list[Segment]:
    """Return the segments of a pack in order: those that begin alike, then rollouts by themselves.

    A rollout that is not in `shared` shares with its own later sequences, if that is worth it.
    """
    segments: list[Segment] = []
    by_tree: dict[int, list[int]] = {}
    for place, one in enumerate(sequences):
        by_tree.setdefault(ANY if one.rollout in shared else one.rollout, []).append(place)
    for owner, own in by_tree.items():
        paths = [sequences[place].path for place in own]
        if sharing is None or len(own) == 1:
            apart = zip(own, paths, strict=True)
            segments += [Segment(i, 0, one.length, one.owner, -1, (i,)) for i, one in apart]
            continue
        rule = replace(sharing, always=True) if owner == ANY else sharing
        tree = build_tree(paths, is_worth=rule.is_worth(alignment))
        base = len(segments)
        segments += [
            one._replace(
                source=own[one.source],
                parent=one.parent + base if one.parent >= 0 else -1,
                readers=tuple(own[reader] for reader in one.readers),
            )
            for one in list_segments(tree, paths)
        ]
    return segments


def _responses(
    segments: Sequence[Segment], sizes: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Return (owner, sizes) of each filler, and of each response, whose segments are together."""
    parts: list[tuple[int, tuple[int, ...]]] = []
    for one, size in zip(segments, sizes, strict=True):
        if parts and parts[-1][0] == one.owner != ANY:
            parts[-1] = (one.owner, (*parts[-1][1], size))
        else:
            parts.append((one.owner, (size,)))
    return parts


def build_pack(
    rollouts: Sequence[Rollout],
    advantages: Tensor,
    *,
    indices: Sequence[int],
    alignment: int,
    gemm_tokens: int = 1,
    sharing: Sharing | None = None,
    shared: AbstractSet[int] = frozenset(),
) -> TokenBatch:
    """One pack of the rollouts at `indices`, in order; a filler sequence when there are none.

    shared: rollouts whose common beginnings are computed once. They come first.
    """
    sequences = [one for index in indices for one in _sequences(rollouts[index], index)]
    segments = _segments(sequences, alignment=alignment, sharing=sharing, shared=shared)
    segments = segments or [Segment(-1, 0, 0, ANY, -1, ())]
    sizes = [padded_length(max(1, one.stop - one.first), alignment=alignment) for one in segments]
    sizes[-1] += -sum(sizes) % pack_multiple(alignment, gemm_tokens=gemm_tokens)
    tokens, labels = np.zeros((2, sum(sizes)), np.int64)
    mask = np.zeros(sum(sizes), bool)
    routes = np.zeros((sum(sizes), _bytes_per_token(rollouts, indices)), np.uint8)
    for one, start in zip(segments, itertools.accumulate(sizes, initial=0), strict=False):
        if one.source < 0:
            continue
        sequence, here = sequences[one.source], slice(start, start + one.stop - one.first)
        tokens[here] = sequence.text[one.first : one.stop]
        labels[here] = sequence.text[one.first + 1 : one.stop + 1]
        if one.owner != ANY:
            mask[here] = sequence.own[one.first + 1 : one.stop + 1]
        if routes.size:
            response = rollouts[sequence.rollout].response
            assert not response.restarts, "the engine's routes are of one sequence"
            of_tokens = response.routes.reshape(-1, routes.shape[1])
            routes[here] = of_tokens[one.first : one.stop]
    parts = _responses(segments, sizes)
    responses = [rollouts[owner].response for owner, _ in parts if owner != ANY]
    positions = [
        one.first + np.arange(size) for one, size in zip(segments, sizes, strict=True)
    ]  # fmt: skip
    return TokenBatch(
        tokens=torch.from_numpy(tokens),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        labels=torch.from_numpy(labels),
        response_mask=torch.from_numpy(mask),
        lengths=tuple(sum(own) for _, own in parts),
        parts=tuple(own for _, own in parts) if any(len(own) > 1 for _, own in parts) else (),
        rollout_indices=tuple(owner for owner, _ in parts),
        advantages=_advantages(advantages, [owner for owner, _ in parts]),
        **spread_columns(responses, mask),
        engine_routes=torch.from_numpy(routes) if routes.size else None,
        sampling_mask=_spread_masks(responses, mask),
        **_parents(segments, sequences),
    )


def _advantages(advantages: Tensor, owners: Sequence[int]) -> Tensor:
    """Return the advantage of each response of a pack, 0 of fillers; [R] float32."""
    rows = torch.tensor(owners)
    values = torch.zeros(len(rows))
    values[rows != ANY] = advantages[rows[rows != ANY]].float()
    return values


def _parents(segments: Sequence[Segment], sequences: Sequence[_Sequence]) -> dict[str, Any]:
    """Return the fields of a pack whose sequences continue others; {} if none does."""
    if all(one.parent < 0 for one in segments):
        return {}
    names = [(one.rollout, one.number) for one in sequences]
    return {
        "parents": tuple(one.parent for one in segments),
        "used": tuple(one.stop - one.first for one in segments),
        "readers": tuple(tuple(names[i] for i in one.readers) for one in segments),
    }


def spread_columns(responses: Sequence[Response], response_mask: np.ndarray) -> dict[str, Any]:
    """Spread the columns of a pack's responses over its tokens, as fields of a `TokenBatch`.

    response_mask: [T]. A column that a response lacks is None, or missing if it is a further
    column.
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
