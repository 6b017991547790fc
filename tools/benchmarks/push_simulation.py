"""The rounds of a weight push, simulated: which ports work in each round, and what that costs.

Each rank has a port that sends and one that receives at the same time, all of equal speed. All
ranks end a round together, at its busiest port. `ideal` is the busiest port of the whole push: no
order of the same messages can take less.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.push_schedule import schedule
from megatron_rl.resharding.senders import plan_slices


@dataclass(frozen=True)
class Simulated:
    """Elements of a push: out and into [rounds, ranks]."""

    out: np.ndarray
    into: np.ndarray

    @property
    def time(self) -> int:
        """Elements that pass the busiest port of each round, over all rounds."""
        return int(np.maximum(self.out, self.into).max(1).sum())

    @property
    def ideal(self) -> int:
        """Elements that pass the busiest port of the push."""
        return int(max(self.out.sum(0).max(), self.into.sum(0).max()))

    @property
    def over_ideal(self) -> float:
        """Time of the rounds over the ideal one."""
        return self.time / self.ideal

    @property
    def senders(self) -> float:
        """Mean number of ranks that send in a round."""
        return float((self.out > 0).sum(1).mean())


def simulate(
    shape: ModelShape,
    source: ActorLayout,
    destination: EngineLayout,
    *,
    wire_elements: int,
    ranks_per_node: int | None = None,
) -> Simulated:
    """Compute the elements that each rank sends and receives in each round."""
    out: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    into: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    slices = plan_slices(shape, source, destination, ranks_per_node=ranks_per_node)
    scheduled = schedule(
        slices, tensor_shapes(shape), world_size=source.world_size, wire_elements=wire_elements,
        ranks_per_node=ranks_per_node,
    )  # fmt: skip
    for number, each, path in scheduled:
        for sender, to in path.hops():
            out[number][sender] += each.size
            into[number][to] += each.size
    arrays = np.zeros((2, max(out) + 1 if out else 1, source.world_size), np.int64)
    for array, counts in zip(arrays, (out, into), strict=True):
        for number, by_rank in counts.items():
            for rank, elements in by_rank.items():
                array[number, rank] = elements
    return Simulated(*arrays)
