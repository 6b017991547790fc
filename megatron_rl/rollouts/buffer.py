"""Buffer of generated groups: the queue of new ones and those that may be replayed."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.rollouts.schedule import Schedule
from megatron_rl.types import PromptGroup, PromptSlot


@dataclass
class GroupBuffer:
    """Groups of a run that may still be trained; the same on every rank.

    `select` does not change the buffer; `evict` does at the end of the step. A checkpoint inside a
    step therefore leads to the same selection again.
    """

    schedule: Schedule
    groups: dict[PromptSlot, PromptGroup] = field(default_factory=dict)
    # Partially generated groups, whose generated_at_step is 0.
    unfinished: dict[PromptSlot, PromptGroup] = field(default_factory=dict)

    def missing(self, step: int, *, arrived: Collection[PromptSlot] = ()) -> list[list[PromptSlot]]:
        """Slots to generate now, grouped by their step.

        arrived: slots whose groups are not inserted yet.
        """
        filled = self.groups.keys() | set(arrived)
        lacking = [slot for slot in self.schedule.due(step) if slot not in filled]
        steps = sorted({slot.step for slot in lacking})
        return [[slot for slot in lacking if slot.step == one] for one in steps]

    def next_empty_slots(
        self, step: int, *, arrived: Collection[PromptSlot] = ()
    ) -> list[PromptSlot]:
        """Slots of the first later step that are empty and not due yet; last first."""
        used = {*self.schedule.due(step), *self.groups, *arrived}
        for later in range(step + 1, self.schedule.steps + 1):
            free = [slot for slot in self.schedule.slots(later) if slot not in used]
            if free:
                return free[::-1]  # the prompts of the step's other slots are used in their order
        return []

    def selects_without(self, step: int, coming: Iterable[PromptSlot], *, longest: int) -> bool:
        """True if `select` does not depend on groups that are being generated, see `Schedule`."""
        return self.schedule.selects_without(step, self.groups, coming, longest=longest)

    def insert(self, groups: Iterable[PromptGroup]) -> None:
        """Insert groups; they stay while they may be trained or replayed."""
        for group in groups:
            assert group.slot not in self.groups, f"slot {group.slot} is filled already"
            self.groups[group.slot] = group

    def contents(self) -> list[PromptGroup]:
        """All groups, for a checkpoint."""
        return [*self.groups.values(), *self.unfinished.values()]

    def restore(self, groups: Iterable[PromptGroup]) -> None:
        """Replace the contents by the groups of a checkpoint."""
        everything = {group.slot: group for group in groups}
        self.groups = {slot: one for slot, one in everything.items() if one.generated_at_step}
        self.unfinished = {
            slot: one for slot, one in everything.items() if not one.generated_at_step
        }

    def select(self, step: int) -> list[PromptGroup]:
        """Groups that step `step` trains, in order."""
        return [self.groups[slot] for slot in self.schedule.select(step, self.groups)]

    def evict(self, step: int, made: Sequence[int] = (0,)) -> None:
        """Count uses of the groups that `step` trained; drop those that no step trains again.

        made: number of updates of each minibatch.
        """
        trained = self.schedule.select(step, self.groups)
        for place, slot in enumerate(trained):
            group = self.groups[slot]
            self.groups[slot] = replace(
                group,
                times_trained=group.times_trained + 1,
                num_updates=group.num_updates + made[place * len(made) // len(trained)],
                first_trained_at_step=group.first_trained_at_step or step,
            )
        self.groups = {
            slot: group
            for slot, group in self.groups.items()
            if not group.times_trained
            or slot.step > step  # else the slot would be filled again
            or self.schedule.is_kept(group.first_trained_at_step, after=step)
        }
