"""Which groups are generated and which are trained in a step: a pure function of (seed, step).

The clock counts steps, one rollout batch of training each. Step s begins with the weights that
s - 1 steps have made. A slot is a place in the order of prompts; whatever the lag, slots, prompts
and seeds are the same, and only the moment of generation moves:

    step                       1        2        3        4
    lag 0   generated          1        2        3        4
            trained            1        2        3        4
    lag 2   generated       1 2 3       4        5        6      (slots, by their step)
            trained            1        2        3        4

The queue is filled before the first step, so every step trains a whole rollout batch, and in its
first `lag` steps the realised lag grows from 0.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.lag.policies import LagPolicy
from megatron_rl.seeds import derive_seed
from megatron_rl.types import Group, Slot


@dataclass(frozen=True)
class Schedule:
    """When each slot's group is generated, and what a step trains.

    groups: in a rollout batch. fresh: those of them that no step has trained before; the others
    are drawn from what the last `capacity - 1` steps trained first. ValueError where they cannot.
    """

    policy: LagPolicy
    seed: int
    groups: int
    fresh: int
    steps: int
    publish_every: int = 1
    capacity: int = 1
    draw: str = "uniform"

    def __post_init__(self) -> None:
        if self.capacity * self.fresh < self.groups:
            raise ValueError(
                f"replay.capacity={self.capacity} rollout batches with {self.fresh} new groups "
                f"each cannot fill {self.groups} groups without taking one twice; raise "
                f"replay.capacity to {-(-self.groups // self.fresh)} or more, or replay.fresh"
            )

    def slots(self, step: int) -> list[Slot]:
        """The new slots of a step; the first has nothing to replay."""
        return [Slot(step, group) for group in range(self.groups if step == 1 else self.fresh)]

    def prompts(self, step: int) -> tuple[int, int]:
        """Where the prompts of a step's slots stand: which block of how many prompts."""
        if step == 1:
            return 0, self.groups
        return -(-self.groups // self.fresh) + step - 2, self.fresh

    def generation(self, slot: Slot) -> int:
        """The step before whose training a slot's group is generated.

        What the engine would generate later with weights that are not pushed is generated while
        the actor still holds them.
        """
        earliest = max(1, slot.step - self.policy.lag(slot))
        return earliest - (earliest - 1) % self.publish_every

    def due(self, step: int, *, ahead: int = 0) -> list[Slot]:
        """The slots of this step and later ones that are filled by now, or `ahead` steps later."""
        last = step + ahead + self.policy.most + self.publish_every - 1
        return [
            slot
            for later in range(step, min(self.steps, last) + 1)
            for slot in self.slots(later)
            if self.generation(slot) <= step + ahead
        ]

    def select(self, step: int, held: Mapping[Slot, Group]) -> list[Slot]:
        """What a step trains, in order: whole groups, those that are new and those drawn again."""
        waiting = [slot for slot in held if not held[slot].trained]
        waiting.sort(
            key=lambda slot: (
                self.policy.ready(slot, generated=held[slot].generated, longest=held[slot].longest),
                slot,
            )
        )
        new = waiting[: len(self.slots(step))]
        assert len(new) == len(self.slots(step)), f"step {step} lacks new groups"
        if len(new) == self.groups:
            return new
        generator = random.Random(derive_seed(self.seed, "replay", step))
        kept = sorted(
            slot
            for slot in held
            if held[slot].trained and self.is_kept(held[slot].first_trained, after=step - 1)
        )
        if self.draw == "uniform":
            order = generator.sample(kept, len(kept))
        else:  # least_trained
            order = sorted(kept, key=lambda slot: (held[slot].trained, slot))
        chosen = new + order[: self.groups - len(new)]
        assert len(chosen) == self.groups, f"step {step} lacks groups to replay"
        return generator.sample(chosen, len(chosen))  # every minibatch has its part of both

    def is_kept(self, first_trained: int, *, after: int) -> bool:
        """Whether a group that a step trained first may be drawn again after step `after`."""
        return first_trained > after + 1 - self.capacity
