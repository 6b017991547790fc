"""The tokens that the engine's sampler kept at the positions of a pack, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl.types import Response


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """Ids of N positions, one position after the other; on the host.

    A position without ids has no mask: its log-prob is over the whole vocabulary.
    """

    ids: Tensor  # [sum of counts] int32
    counts: Tensor  # [N] int32

    def select(self, positions: Tensor) -> SamplingMask:
        """Return the mask of some positions; [n] int64."""
        counts = self.counts[positions].long()
        starts = (self.counts.cumsum(0) - self.counts)[positions]
        # place in `ids` of each id: the start of its position, and how far behind that it is
        moved = torch.repeat_interleave(starts - (counts.cumsum(0) - counts), counts)
        return SamplingMask(self.ids[moved + torch.arange(len(moved))], counts.int())

    def padded(self) -> Tensor:
        """Return the ids as rows, -1 in unused places; [N, largest count] int32."""
        width = int(self.counts.max()) if len(self.counts) else 0
        rows = torch.full((len(self.counts), width), -1, dtype=torch.int32)
        rows[torch.arange(width) < self.counts[:, None]] = self.ids
        return rows


def spread_masks(responses: Sequence[Response], response_mask: np.ndarray) -> SamplingMask | None:
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
