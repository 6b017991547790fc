"""Schedule of generation and training: a pure function of (seed, step).

Time is counted in steps, each of which trains one rollout batch. Step s starts with the weights
after s - 1 steps. A slot is a position in the order of prompts. Slots, prompts and seeds do not
depend on the lag, which only moves the step of generation:

    step                       1        2        3        4
    lag 0   generated          1        2        3        4
            trained            1        2        3        4
    lag 2   generated       1 2 3       4        5        6      (slots, by their step)
            trained            1        2        3        4

The queue is filled before the first step: every step trains a complete rollout batch, and the lag
grows from 0 during the first `lag` steps.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.errors import UserError
from megatron_rl.rollouts.lag_policies import LagPolicy
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import PromptGroup, PromptSlot


@dataclass(frozen=True)
class Schedule:
    """Step of generation of each slot's group, and the groups that a step trains.

    groups: in a rollout batch. fresh: those that no step has trained before; the others are drawn
    from groups that the last `capacity - 1` steps trained first. ValueError if that is impossible.
    """

    policy: LagPolicy
    seed: int
    groups: int
    fresh: int
    steps: int
    sync_weights_every: int = 1
    capacity: int = 1
    sampling: str = "uniform"

    def __post_init__(self) -> None:
        if self.capacity * self.fresh < self.groups:
            raise UserError(
                f"replay.capacity={self.capacity} rollout batches with {self.fresh} new groups "
                f"each cannot fill {self.groups} groups without repeating one; raise "
                f"replay.capacity to {-(-self.groups // self.fresh)} or more, or replay.fresh"
            )

    def slots(self, step: int) -> list[PromptSlot]:
        """New slots of a step; the first step has no groups to replay."""
        return [
            PromptSlot(step, group) for group in range(self.groups if step == 1 else self.fresh)
        ]

    def prompts(self, step: int) -> tuple[int, int]:
        """Prompts of a step's slots: (index of the block, its number of prompts)."""
        if step == 1:
            return 0, self.groups
        return -(-self.groups // self.fresh) + step - 2, self.fresh

    def generation(self, slot: PromptSlot) -> int:
        """Step in which a slot's group is generated, before training.

        Generation between two weight syncs moves to the earlier one, when the actor has the same
        weights as the engine.
        """
        earliest = max(1, slot.step - self.policy.lag(slot))
        return earliest - (earliest - 1) % self.sync_weights_every

    def due(self, step: int, *, ahead: int = 0) -> list[PromptSlot]:
        """Slots of this step and later ones that are filled by now, or `ahead` steps later."""
        last = step + ahead + self.policy.most + self.sync_weights_every - 1
        return [
            slot
            for later in range(step, min(self.steps, last) + 1)
            for slot in self.slots(later)
            if self.generation(slot) <= step + ahead
        ]

    def select(self, step: int, held: Mapping[PromptSlot, PromptGroup]) -> list[PromptSlot]:
        """Slots that a step trains, in order: new groups and replayed ones."""
        waiting = [slot for slot in held if not held[slot].times_trained]
        waiting.sort(
            key=lambda slot: (
                self.policy.ready(
                    slot, generated=held[slot].generated_at_step, longest=held[slot].longest
                ),
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
            if held[slot].times_trained
            and self.is_kept(held[slot].first_trained_at_step, after=step - 1)
        )
        if self.sampling == "uniform":
            order = generator.sample(kept, len(kept))
        else:  # least_used
            order = sorted(kept, key=lambda slot: (held[slot].times_trained, slot))
        chosen = new + order[: self.groups - len(new)]
        assert len(chosen) == self.groups, f"step {step} lacks groups to replay"
        return generator.sample(chosen, len(chosen))  # every minibatch has some of both

    def is_kept(self, first_trained_at_step: int, *, after: int) -> bool:
        """True if a group first trained in this step may be replayed after step `after`."""
        return first_trained_at_step > after + 1 - self.capacity
