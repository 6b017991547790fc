"""The rounds of a weight push, simulated: which ports work in each round, and what that costs.

Each rank has a port that sends and one that receives at the same time, all of equal speed. All
ranks end a round together, at its busiest port. `ideal` is the busiest port of the whole push: no
order of the same messages can take less.
"""

from dataclasses import dataclass

import numpy as np

from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.push_schedule import Part, parts_in_rounds, schedule


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
    tensor_elements: int | None = None,
    ranks_per_node: int | None = None,
) -> Simulated:
    """Compute the elements that each rank sends and receives in each round."""
    plan, scheduled = schedule(
        shape, source, destination, wire_elements=wire_elements, tensor_elements=tensor_elements,
        ranks_per_node=ranks_per_node,
    )  # fmt: skip
    ports: dict[int, np.ndarray] = {}  # transfers of a turn, out and into [2, ranks]
    whole: dict[int, np.ndarray] = {}  # elements of a step's parts, by its loads: [2, ranks]
    rounds: list[np.ndarray] = []

    def of_part(part: Part) -> np.ndarray:
        if id(part.turn) not in ports:
            hops = np.array([hop for path in part.turn.paths for hop in path.hops()], np.int64)
            ports[id(part.turn)] = np.stack(
                [np.bincount(ends, minlength=plan.world_size) for ends in hops.reshape(-1, 2).T]
            )
        return part.size * ports[id(part.turn)]

    for step, numbers in scheduled:
        while len(rounds) <= numbers[-1]:
            rounds.append(np.zeros((2, plan.world_size), np.int64))
        if len(numbers) > 1:
            for number, part in parts_in_rounds(step, numbers):
                rounds[number] += of_part(part)
            continue
        if id(step.loads) not in whole:
            of_parts = [of_part(part) for part in step.parts()]
            whole[id(step.loads)] = np.sum(of_parts, axis=0) if of_parts else 0 * rounds[0]
        rounds[numbers[0]] += whole[id(step.loads)]
    return Simulated(*np.stack(rounds, axis=1))
