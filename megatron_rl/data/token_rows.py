"""Rows of per-token values on their way between ranks: on the host, unpadded, in pieces.

A row is one value for each token of a response: ids, log-probs. It is on the rank that owns the
response and on rank 0, which writes files; another rank receives the rows that it trains and
nothing else. Every rank knows the length of every row and who needs it, so that all of them cut
the same pieces without an agreement.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.distributed.agreement import gather_from_ranks, wire_device
from megatron_rl.types import GradeResult, RemoteRow, Response, Rollout, columns_of

WRITER = 0  # the rank that has every row, for the files of the run
PIECE_BYTES = 2**26  # sent or received by any rank in one collective; a longer row goes alone

Row = Any  # an array or RemoteRow; None: this rank does not have it, or nobody has


def remote_row(length: int) -> np.ndarray:
    """Stand in for a row that this rank does not have; everything but its length is an error."""
    return cast(np.ndarray, RemoteRow(length))


def is_local(row: Row) -> bool:
    """True if this rank has the values of the row."""
    return row is not None and not isinstance(row, RemoteRow)


@dataclass(frozen=True)
class Delivery:
    """The sender and the receivers of each row; the same on every rank."""

    sizes: Sequence[int]  # [N] values in each row
    sources: Sequence[int]  # [N]
    targets: Sequence[Collection[int]]  # [N]

    def send(self, rows: Sequence[Row], dtype: str) -> list[Row]:
        """Return `rows` with the rows that other ranks have sent to this rank; collective.

        dtype: of all rows. What is neither sent nor received stays as it is.
        """
        item = np.dtype(dtype).itemsize
        rank, complete = dist.get_rank(), list(rows)
        for piece in self._pieces(PIECE_BYTES // item):
            received = self._exchange(rows, piece, item)
            start = 0
            for index in self._in_order_of_source(piece):
                stop = start + self.sizes[index] * item
                complete[index] = received[start:stop].view(dtype)
                start = stop
        for index, size in enumerate(self.sizes):
            if not size and rank in self.targets[index]:
                complete[index] = np.empty(0, dtype)
        return complete

    def _exchange(self, rows: Sequence[Row], piece: Sequence[int], item: int) -> np.ndarray:
        """Send and receive the rows of one piece; the received ones by source, then index."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        outgoing: list[list[np.ndarray]] = [[] for _ in range(world_size)]
        incoming = [0] * world_size
        for index in piece:
            if self.sources[index] == rank:
                row = rows[index]
                assert is_local(row), f"row {index} is not on the rank that sends it"
                for target in set(self.targets[index]) - {rank}:
                    outgoing[target].append(np.ascontiguousarray(row).view(np.uint8))
            elif rank in self.targets[index]:
                incoming[self.sources[index]] += self.sizes[index] * item
        flat = [row for each in outgoing for row in each]
        sent = np.concatenate(flat) if flat else np.empty(0, np.uint8)
        device = wire_device()  # the host, except where a trainer of one's own has started no gloo
        received = torch.empty(sum(incoming), dtype=torch.uint8, device=device)
        dist.all_to_all_single(
            received,
            torch.from_numpy(sent).to(device),
            incoming,
            [sum(map(len, each)) for each in outgoing],
        )
        return received.cpu().numpy()

    def _in_order_of_source(self, piece: Sequence[int]) -> list[int]:
        rank = dist.get_rank()
        mine = [i for i in piece if self.sources[i] != rank and rank in self.targets[i]]
        return sorted(mine, key=lambda index: (self.sources[index], index))

    def _pieces(self, limit: int) -> Iterator[list[int]]:
        """Indices that travel together: no rank sends or receives more than `limit` values."""
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        piece: list[int] = []
        for index, (size, source) in enumerate(zip(self.sizes, self.sources, strict=True)):
            others = set(self.targets[index]) - {source}
            if not others or not size:
                continue
            most = max(sent[source] + size * len(others), *(received[to] + size for to in others))
            if piece and most > limit:
                yield piece
                sent, received, piece = Counter(), Counter(), []
            sent[source] += size * len(others)
            received.update(dict.fromkeys(others, size))
            piece.append(index)
        if piece:
            yield piece


def share_responses(
    own: Mapping[int, Response], *, on_all_ranks: bool = False,
    owners: Mapping[int, int] | None = None,
) -> dict[int, Response]:  # fmt: skip
    """Return all ranks' responses in the order of their positions; collective over all processes.

    own: this rank's by position. on_all_ranks: with their arrays and texts on every rank; else on
    their owner and on rank 0. owners: by position, the same on every rank; others belong to the
    rank that has them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(sorted(own.items()))
    texts = {place: _encode(response) for place, response in own.items()}
    heads = {place: (one.without_arrays(), len(texts[place])) for place, one in own.items()}
    gathered = gather_from_ranks(heads)
    sources = {place: rank for rank, each in enumerate(gathered) for place in each}
    places = sorted(sources)
    owned = [(owners or {}).get(place, sources[place]) for place in places]
    known = [own.get(place, gathered[sources[place]][place][0]) for place in places]
    send = partial(_send_shared, [sources[place] for place in places], owned, on_all_ranks)
    columns = {
        column.name: send([one.row(column.name) for one in known], column.dtype, column.at_writer)
        for column in columns_of(known)
    }
    sizes = [gathered[sources[place]][place][1] for place in places]
    letters = send([texts.get(place, remote_row(size)) for place, size in zip(places, sizes,
                   strict=True)], "uint8", True)  # fmt: skip
    return {
        place: replace(
            known[index].with_rows({name: rows[index] for name, rows in columns.items()}),
            owner=-1 if on_all_ranks else owned[index],
            **_decode(letters[index]),
        )
        for index, place in enumerate(places)
    }


def _send_shared(
    sources: Sequence[int],
    owners: Sequence[int],
    on_all_ranks: bool,
    rows: Sequence[Row],
    dtype: str,
    at_writer: bool,
) -> list[Row]:
    """Send rows to their owners and to rank 0, or to all; other ranks keep their lengths."""
    everyone = range(dist.get_world_size())
    targets: list[Collection[int]] = [
        everyone if on_all_ranks else {owner, WRITER} if at_writer else {owner} for owner in owners
    ]
    received = send_rows(rows, dtype, sources=sources, targets=targets)
    return [
        row if row is None or dist.get_rank() in ranks else remote_row(len(row))
        for row, ranks in zip(received, targets, strict=True)
    ]


def _encode(response: Response) -> np.ndarray:
    """Encode the texts of a response and its grade, if it has one."""
    about = [response.text, response.messages, response.grade and vars(response.grade)]
    return np.frombuffer(json.dumps(about).encode(), np.uint8)


def _decode(letters: Row) -> dict[str, Any]:
    """Decode what `_encode` has encoded; nothing on another rank."""
    if not is_local(letters):
        return {"text": "", "messages": (), "grade": None}
    text, messages, grade = json.loads(letters.tobytes())
    return {"text": text, "messages": tuple(messages), "grade": grade and GradeResult(**grade)}


def fetch_tokens(rollouts: Sequence[Rollout], needed: Collection[int]) -> list[Rollout]:
    """Return rollouts; the rollouts at the indices that this rank needs have all arrays.

    Collective, unless every rank has all arrays.
    """
    brought = fetch_responses([rollout.response for rollout in rollouts], needed)
    return [
        rollout if response is rollout.response else replace(rollout, response=response)
        for rollout, response in zip(rollouts, brought, strict=True)
    ]


def fetch_responses(responses: Sequence[Response], needed: Collection[int]) -> list[Response]:
    """Return responses; the responses at the indices that this rank needs have all arrays."""
    brought, owners = list(responses), [response.owner for response in responses]
    if max(owners, default=-1) < 0:
        return brought
    wanted = gather_from_ranks(sorted(needed))
    columns = {}
    for column in columns_of(responses):
        rows = [response.row(column.name) for response in responses]
        targets = find_targets(wanted, owners=owners, at_writer=column.at_writer)
        columns[column.name] = send_rows(rows, column.dtype, sources=owners, targets=targets)
    for index in needed:
        arrays = {name: rows[index] for name, rows in columns.items()}
        brought[index] = responses[index].with_rows(arrays)
    return brought


def send_rows(
    rows: Sequence[Row],
    dtype: str,
    *,
    sources: Sequence[int],
    targets: Sequence[Collection[int]],
) -> list[Row]:
    """Send rows of which every rank knows the lengths; None on all ranks stays None. Collective."""
    sizes = [0 if row is None else len(row) for row in rows]
    rows = [row.astype(dtype, copy=False) if is_local(row) else row for row in rows]
    sent = Delivery(sizes, sources, targets).send(rows, dtype)
    return [None if row is None else one for row, one in zip(rows, sent, strict=True)]


def find_targets(
    wanted: Sequence[Sequence[int]], *, owners: Sequence[int], at_writer: bool = True
) -> list[list[int]]:
    """Find the ranks that receive each row: the ranks that need the row and lack it.

    wanted: the rows that each rank needs. at_writer: whether rank 0 has every row.
    """
    targets: list[list[int]] = [[] for _ in owners]
    for rank, indices in enumerate(wanted):
        for index in indices:
            if owners[index] >= 0 and rank != owners[index] and not (at_writer and rank == WRITER):
                targets[index].append(rank)
    return targets
