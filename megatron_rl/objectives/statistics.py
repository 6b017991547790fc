"""What an objective reports: sums and maxima that merge exactly over micro-batches and ranks.

Because only sums and maxima are kept, merging gives the numbers of one big batch; nothing waits
for the device until `raise_on_faults` or `to_metrics`, which copy once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import Group, reduce_max, reduce_sum
from megatron_rl.objectives.metrics import compute_metrics, raise_on_faults
from megatron_rl.objectives.schema import MAXIMA, MAXIMA_SIZE, SUMS_SIZE


@dataclass
class Statistics:
    """Sums and maxima over the valid decisions of one or more micro-batches."""

    sums: Tensor  # [SUMS_SIZE] float64: SUMS, then [BUCKETS, BUCKET_SUMS], then [BUCKETS, BINS]
    maxima: Tensor  # [MAXIMA_SIZE] float64: MAXIMA, then FAULTS

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> "Statistics":
        """The statistics of no tokens: what merging starts from."""
        return cls(
            torch.zeros(SUMS_SIZE, dtype=torch.float64, device=device),
            torch.full((MAXIMA_SIZE,), -torch.inf, dtype=torch.float64, device=device),
        )

    def merge(self, other: "Statistics") -> "Statistics":
        """The statistics of both batches together."""
        return Statistics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def all_reduce(self, group: Group) -> "Statistics":
        """The statistics of all ranks of the group together, on each of them."""
        return Statistics(reduce_sum(self.sums, group=group), reduce_max(self.maxima, group=group))

    def raise_on_faults(self) -> None:
        """Raise ValueError naming sequence and position if an input was unusable; copies once."""
        raise_on_faults(self.maxima[len(MAXIMA) :].cpu())

    def to_metrics(self, prefix: str = "") -> dict[str, float]:
        """Named numbers for logging; waits for the device.

        Raises ValueError naming sequence and position if an input was unusable.
        """
        everything = torch.cat((self.sums, self.maxima)).cpu()
        sums, maxima = everything[:SUMS_SIZE], everything[SUMS_SIZE:]
        raise_on_faults(maxima[len(MAXIMA) :])
        metrics = compute_metrics(sums, maxima[: len(MAXIMA)])
        return {prefix + name: value for name, value in metrics.items()}
