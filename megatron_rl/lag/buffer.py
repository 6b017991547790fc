"""What has been generated and may still be trained: the queue and what is replayed, in one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.lag.schedule import Schedule
from megatron_rl.types import Group, Slot


@dataclass
class GroupBuffer:
    """The groups of a run that are not done with; the same on every rank.

    A step takes from it without changing it and says at its end what it has trained, so that what
    is held in the middle of a step leads to the same selection again.
    """

    schedule: Schedule
    groups: dict[Slot, Group] = field(default_factory=dict)
    begun: dict[Slot, Group] = field(default_factory=dict)  # under way: generated is 0

    def missing(self, step: int) -> list[list[Slot]]:
        """The slots to generate for now, those of one step together."""
        lacking = [slot for slot in self.schedule.due(step) if slot not in self.groups]
        steps = sorted({slot.step for slot in lacking})
        return [[slot for slot in lacking if slot.step == one] for one in steps]

    def spare(self, step: int) -> list[Slot]:
        """Slots of the first later step that nothing fills until the next one; last first."""
        due = set(self.schedule.due(step))
        for later in range(step + 1, self.schedule.steps + 1):
            free = [s for s in self.schedule.slots(later) if s not in self.groups and s not in due]
            if free:
                return free[::-1]  # the step's other prompts are asked in their order
        return []

    def hold(self, groups: Iterable[Group]) -> None:
        """Keep groups until they are trained, and as long as they may be replayed."""
        for group in groups:
            assert group.slot not in self.groups, f"slot {group.slot} is filled already"
            self.groups[group.slot] = group

    def contents(self) -> list[Group]:
        """All that is held, for a checkpoint."""
        return [*self.groups.values(), *self.begun.values()]

    def restore(self, groups: Iterable[Group]) -> None:
        """Hold what a checkpoint held, and nothing else."""
        everything = {group.slot: group for group in groups}
        self.groups = {slot: one for slot, one in everything.items() if one.generated}
        self.begun = {slot: one for slot, one in everything.items() if not one.generated}

    def select(self, step: int) -> list[Group]:
        """What step `step` trains, in order."""
        return [self.groups[slot] for slot in self.schedule.select(step, self.groups)]

    def release(self, step: int, made: Sequence[int] = (0,)) -> None:
        """Count what step `step` has trained, and let go of what none will train again.

        made: updates of each of its minibatches.
        """
        trained = self.schedule.select(step, self.groups)
        for place, slot in enumerate(trained):
            group = self.groups[slot]
            self.groups[slot] = replace(
                group,
                trained=group.trained + 1,
                uses=group.uses + made[place * len(made) // len(trained)],
                first_trained=group.first_trained or step,
            )
        self.groups = {
            slot: group
            for slot, group in self.groups.items()
            if not group.trained
            or slot.step > step  # else the slot would be filled again
            or self.schedule.is_kept(group.first_trained, after=step)
        }
