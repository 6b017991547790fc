"""Checksums of one exchange, taken at both ends, compared when it is over."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.resharding.checksums import message_checksum, slice_checksum
from megatron_rl.resharding.plan import Copy
from megatron_rl.resharding.rounds import Message, RankPlan

End = Literal["sent", "received"]


@dataclass
class Ledger:
    """What this rank has seen of every message and, in a full check, of every slice.

    The sender reads a slice as it packs it; a receiver reads it where it hands it to the engine.
    Both keep their sums in the order of the plan, so only numbers are exchanged.
    """

    plan: RankPlan
    full: bool
    dtype: torch.dtype  # the engine's
    device: torch.device

    def __post_init__(self) -> None:
        # One tensor for all sums: kept one by one they would scatter over the heap and pin it.
        self._places: dict[tuple[End, int], int] = {}  # by id of the Message or the Copy
        for part in self.plan.rounds:
            for message in part.sends:
                self._add("sent", message, *message.copies)
            for message in part.receives:
                self._add("received", message, *message.copies)
        for copies in self.plan.local.values():
            self._add("sent", *copies)
            self._add("received", *copies)
        self._sums = torch.zeros(len(self._places), dtype=torch.int64, device=self.device)

    def _add(self, end: End, *items: Message | Copy) -> None:
        for item in items:
            if self.full or isinstance(item, Message):
                self._places[end, id(item)] = len(self._places)

    def note_message(self, end: End, message: Message, buffer: Tensor) -> None:
        """A whole message as it left or arrived."""
        self._sums[self._places[end, id(message)]] = message_checksum(buffer)

    def note_slice(self, end: End, copy: Copy, matrix: Tensor) -> None:
        """A slice at one of its ends, in any dtype; ignored unless this is a full check."""
        if self.full:
            self._sums[self._places[end, id(copy)]] = slice_checksum(matrix, self.dtype)

    def settle(self, *, wait: Callable[[list], None]) -> list[str]:
        """Exchange sums with every partner; the tensors that arrived here changed, sorted.

        wait: waits for point-to-point work within the time limit.
        """
        sent, received = self._listed("sent"), self._listed("received")
        told = {rank: torch.empty_like(sums) for rank, (sums, _) in received.items()}
        operations = [dist.P2POp(dist.isend, sent[to][0], to) for to in sorted(sent)]
        operations += [dist.P2POp(dist.irecv, told[of], of) for of in sorted(told)]
        if operations:
            wait(dist.batch_isend_irecv(operations))
        changed: set[str] = set()
        for rank, (sums, names) in received.items():
            differs = (sums != told[rank]).tolist()
            found = {name for name, wrong in zip(names, differs, strict=True) if wrong}
            # A slice names its tensor; a message only says that one of its tensors is wrong.
            changed |= {name for single in found if len(single) == 1 for name in single} or {
                name for several in found for name in several
            }
        return sorted(changed | self._changed_locally())

    def _listed(self, end: End) -> dict[int, tuple[Tensor, list[tuple[str, ...]]]]:
        """Per partner: its sums in the order of the plan, and the tensors each stands for."""
        places: dict[int, list[int]] = {}
        names: dict[int, list[tuple[str, ...]]] = {}
        for part in self.plan.rounds:
            for message in part.sends if end == "sent" else part.receives:
                items: list[Message | Copy] = [*message.copies, message] if self.full else [message]
                for rank in message.destinations if end == "sent" else (message.source,):
                    places.setdefault(rank, []).extend(self._places[end, id(i)] for i in items)
                    names.setdefault(rank, []).extend(_tensors_of(item) for item in items)
        return {rank: (self._sums[places[rank]], names[rank]) for rank in places}

    def _changed_locally(self) -> set[str]:
        """Tensors with a slice that changed on its way within this rank; full checks only."""
        if not self.full:
            return set()
        copies = [copy for each in self.plan.local.values() for copy in each]
        sent, received = (
            self._sums[[self._places[end, id(copy)] for copy in copies]]
            for end in ("sent", "received")
        )
        differs = (sent != received).tolist()
        return {copy.tensor for copy, wrong in zip(copies, differs, strict=True) if wrong}


def _tensors_of(item: Message | Copy) -> tuple[str, ...]:
    if isinstance(item, Copy):
        return (item.tensor,)
    return tuple(dict.fromkeys(copy.tensor for copy in item.copies))
