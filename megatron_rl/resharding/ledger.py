"""Checksums of one exchange, taken at both ends, compared when it is over."""

from collections.abc import Callable
from dataclasses import dataclass, field
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

    full: bool
    _messages: dict[int, Tensor] = field(default_factory=dict)  # by id of the Message
    _slices: dict[tuple[End, int], Tensor] = field(default_factory=dict)  # by id of the Copy

    def note_message(self, message: Message, buffer: Tensor) -> None:
        """A whole message as it left or arrived."""
        self._messages[id(message)] = message_checksum(buffer)

    def note_slice(self, end: End, copy: Copy, matrix: Tensor) -> None:
        """A slice at one of its ends; ignored unless this is a full check."""
        if self.full:
            self._slices[end, id(copy)] = slice_checksum(matrix)

    def settle(self, plan: RankPlan, *, wait: Callable[[list], None]) -> list[str]:
        """Exchange sums with every partner; the tensors that arrived here changed, sorted.

        wait: waits for point-to-point work within the time limit.
        """
        sent, received = self._listed(plan, "sent"), self._listed(plan, "received")
        told = {rank: torch.empty_like(torch.stack(sums)) for rank, (sums, _) in received.items()}
        operations = [dist.P2POp(dist.isend, torch.stack(sent[to][0]), to) for to in sorted(sent)]
        operations += [dist.P2POp(dist.irecv, told[of], of) for of in sorted(told)]
        if operations:
            wait(dist.batch_isend_irecv(operations))
        changed: set[str] = set()
        for rank, (sums, names) in received.items():
            differs = (torch.stack(sums) != told[rank]).tolist()
            found = {name for name, wrong in zip(names, differs, strict=True) if wrong}
            # A slice names its tensor; a message only says that one of its tensors is wrong.
            changed |= {name for single in found if len(single) == 1 for name in single} or {
                name for several in found for name in several
            }
        for copies in plan.local.values() if self.full else ():
            for copy in copies:
                held, handed = (self._slices.get((end, id(copy))) for end in ("sent", "received"))
                if held is not None and handed is not None and not torch.equal(held, handed):
                    changed.add(copy.tensor)
        return sorted(changed)

    def _listed(
        self, plan: RankPlan, end: End
    ) -> dict[int, tuple[list[Tensor], list[tuple[str, ...]]]]:
        """Per partner: its sums in the order of the plan, and the tensors each stands for."""
        listed: dict[int, tuple[list[Tensor], list[tuple[str, ...]]]] = {}
        for part in plan.rounds:
            for message in part.sends if end == "sent" else part.receives:
                others = message.destinations if end == "sent" else (message.source,)
                whole = self._messages[id(message)]
                for rank in others:
                    sums, names = listed.setdefault(rank, ([], []))
                    if self.full:
                        sums += [self._slices[end, id(copy)] for copy in message.copies]
                        names += [(copy.tensor,) for copy in message.copies]
                    sums.append(whole)
                    names.append(tuple(dict.fromkeys(copy.tensor for copy in message.copies)))
        return listed
