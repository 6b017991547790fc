"""Rows of per-token values on their way between ranks: on the host, unpadded, in pieces.

A row is one value for each token of a response: ids, log-probs. It is on the rank that owns the
response and on rank 0, which writes files; another rank receives the rows that it trains and
nothing else. Every rank knows the length of every row and who needs it, so that all of them cut
the same pieces without an agreement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.distributed.agreement import gather_from_ranks, wire_device
from megatron_rl.types import ROUTES, TOKEN_COLUMNS, RemoteRow, Response, Rollout

WRITER = 0  # the rank that has every row, for the files of the run
PIECE_BYTES = 2**26  # sent or received by any rank in one collective; a longer row goes alone

Row = np.ndarray | None  # None: this rank does not have it, or nobody has


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
        """Return `rows` with those that other ranks have sent to this one; collective.

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


def fetch_tokens(rollouts: Sequence[Rollout], needed: Collection[int]) -> list[Rollout]:
    """Return rollouts, with all arrays of those whose indices this rank needs.

    Collective, unless every rank has all arrays.
    """
    brought = fetch_responses([rollout.response for rollout in rollouts], needed)
    return [
        rollout if response is rollout.response else replace(rollout, response=response)
        for rollout, response in zip(rollouts, brought, strict=True)
    ]


def fetch_responses(responses: Sequence[Response], needed: Collection[int]) -> list[Response]:
    """Return responses, with all arrays of those whose indices this rank needs; as above."""
    brought, owners = list(responses), [response.owner for response in responses]
    if max(owners, default=-1) < 0:
        return brought
    wanted = gather_from_ranks(sorted(needed))
    columns = {}
    for name, dtype in (TOKEN_COLUMNS | ROUTES).items():
        rows = [getattr(response, name) for response in responses]
        targets = find_targets(wanted, owners=owners, at_writer=name not in ROUTES)
        columns[name] = Delivery([len(row) for row in rows], owners, targets).send(rows, dtype)
    for index in needed:
        arrays: dict[str, Any] = {name: rows[index] for name, rows in columns.items()}
        brought[index] = replace(responses[index], **arrays)
    return brought


def fetch_rows(
    rows: Sequence[Row], needed: Collection[int], *, rollouts: Sequence[Rollout]
) -> list[Row]:
    """Return one float32 row per rollout, with the values of those that this rank needs.

    Collective, unless every rank has all rows. A row that is None is so on every rank.
    """
    owners = [rollout.response.owner for rollout in rollouts]
    if max(owners, default=-1) < 0:
        return list(rows)
    sizes = [0 if row is None else len(row) for row in rows]
    targets = find_targets(gather_from_ranks(sorted(needed)), owners=owners)
    return Delivery(sizes, owners, targets).send(rows, "float32")


def find_targets(
    wanted: Sequence[Sequence[int]], *, owners: Sequence[int], at_writer: bool = True
) -> list[list[int]]:
    """Find the ranks that receive each row: those that need it and lack it.

    wanted: the rows that each rank needs. at_writer: whether rank 0 has every row.
    """
    targets: list[list[int]] = [[] for _ in owners]
    for rank, indices in enumerate(wanted):
        for index in indices:
            if owners[index] >= 0 and rank != owners[index] and not (at_writer and rank == WRITER):
                targets[index].append(rank)
    return targets
