"""Policy lag: the schedule of generation and training, the buffer of groups, and their staleness.

The schedule is a pure function of (seed, step). Time is counted in steps, each of which trains one
rollout batch. Step s starts with the weights after s - 1 steps. A slot is a position in the order
of prompts. Slots, prompts and seeds do not depend on the lag, which only moves the step of
generation:

    step                       1        2        3        4
    lag 0   generated          1        2        3        4
            trained            1        2        3        4
    lag 2   generated       1 2 3       4        5        6      (slots, by their step)
            trained            1        2        3        4

The queue is filled before the first step: every step trains a complete rollout batch, and the lag
grows from 0 during the first `lag` steps.
"""

import importlib
import random
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import PromptGroup, PromptSlot, Response


class LagPolicy(Protocol):
    """Number of steps that each group is generated ahead of its training, and the order of both.

    `lag.policy` names a class with these three methods. It is built on every rank with the
    keywords `seed` and `steps`, both of the run, and those of `lag.settings`; its answers may
    depend on these and the arguments alone. It refuses settings by raising ValueError.
    """

    def most(self) -> int:
        """Return the maximum lag of any slot."""
        ...

    def lag(self, slot: PromptSlot) -> int:
        """Return the steps from the generation of a slot's group to the slot's step, from 0."""
        ...

    def ready(self, slot: PromptSlot, *, generated: int, longest: int) -> int:
        """Return the sort key of a group that is not trained yet; ties in slot order.

        generated: the step whose weights generated the group; longest: its longest response.
        """
        ...


@dataclass(frozen=True)
class ConstantLag(LagPolicy):
    """The lag of `lag.batches`; groups are trained in the order of prompts."""

    batches: int

    def most(self) -> int:
        return self.batches

    def lag(self, slot: PromptSlot) -> int:
        return self.batches

    def ready(self, slot: PromptSlot, *, generated: int, longest: int) -> int:
        return slot.step


@dataclass(frozen=True)
class Schedule:
    """Step of generation of each slot's group, and the groups that a step trains.

    groups: in a rollout batch. fresh: groups that no step has trained before; the remaining groups
    are drawn from groups that the last `capacity - 1` steps trained first. ValueError if that is
    impossible.
    """

    policy: LagPolicy
    seed: int
    groups: int
    fresh: int
    steps: int
    sync_weights_every: int = 1
    capacity: int = 1

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
        lag, most = self.policy.lag(slot), self.policy.most()
        if type(lag) is not int or not 0 <= lag <= most:
            raise UserError(
                f"lag.policy: {type(self.policy).__name__} gives {slot} the lag {lag!r}; it must "
                f"be an integer from 0 to its own most(), {most}"
            )
        earliest = max(1, slot.step - lag)
        return earliest - (earliest - 1) % self.sync_weights_every

    def due(self, step: int, *, ahead: int = 0) -> list[PromptSlot]:
        """Slots of this and later steps that are filled by now, or `ahead` steps later."""
        last = step + ahead + self.policy.most() + self.sync_weights_every - 1
        return [
            slot
            for later in range(step, min(self.steps, last) + 1)
            for slot in self.slots(later)
            if self.generation(slot) <= step + ahead
        ]

    def select(self, step: int, held: Mapping[PromptSlot, PromptGroup]) -> list[PromptSlot]:
        """Slots that a step trains, in order: new and replayed groups."""
        new = self._waiting(held)[: len(self.slots(step))]
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
        order = generator.sample(kept, len(kept))
        chosen = new + order[: self.groups - len(new)]
        assert len(chosen) == self.groups, f"step {step} lacks groups to replay"
        return generator.sample(chosen, len(chosen))  # every minibatch has some of both

    def selects_without(
        self,
        step: int,
        held: Mapping[PromptSlot, PromptGroup],
        coming: Iterable[PromptSlot],
        *,
        longest: int,
    ) -> bool:
        """True if a step trains the same groups whether it has those of `coming` or not.

        coming: slots whose groups are generated in this step, with at most `longest` tokens in a
        response.
        """
        waiting, count = self._waiting(held), len(self.slots(step))
        if len(waiting) < count:
            return False
        last, ready = waiting[count - 1], self.policy.ready
        group = held[last]
        limit = ready(last, generated=group.generated_at_step, longest=group.longest), last
        return all(
            (ready(slot, generated=step, longest=length), slot) > limit
            for slot in coming
            for length in range(longest, -1, -1)
        )

    def _waiting(self, held: Mapping[PromptSlot, PromptGroup]) -> list[PromptSlot]:
        """Slots of groups that no step has trained, in the order in which they are trained."""
        return sorted(
            (slot for slot in held if not held[slot].times_trained),
            key=lambda slot: (
                self.policy.ready(
                    slot, generated=held[slot].generated_at_step, longest=held[slot].longest
                ),
                slot,
            ),
        )

    def is_kept(self, first_trained_at_step: int, *, after: int) -> bool:
        """True if a group first trained in this step may be replayed after step `after`."""
        return first_trained_at_step > after + 1 - self.capacity


def build_schedule(config: Config) -> Schedule:
    """Build the schedule of `lag` and `replay`; ValueError naming an invalid setting."""
    assert config.data.epochs is None, "resolve_epochs turns it into steps before"
    return Schedule(
        policy=_build_policy(config),
        seed=config.seed,
        groups=config.rollout.prompts_per_step,
        fresh=config.fresh_groups,
        steps=config.trainer.steps,
        sync_weights_every=config.lag.sync_weights_every,
        capacity=config.replay.capacity,
    )


def _build_policy(config: Config) -> LagPolicy:
    name = config.lag.policy
    if name is None:
        return ConstantLag(config.lag.batches)
    module, _, kind = name.partition(":")
    try:
        build = getattr(importlib.import_module(module), kind)
        policy: LagPolicy = build(
            seed=config.seed, steps=config.trainer.steps, **config.lag.settings
        )
        missing = [one for one in ("most", "lag", "ready") if not hasattr(policy, one)]
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"lag.policy={name}: {error}; settings: {config.lag.settings}") from error
    if missing:
        raise UserError(f"lag.policy={name} has no {missing[0]}; write most, lag and ready")
    return policy


def token_versions(response: Response) -> np.ndarray:
    """Weight version that generated each token; [L] int64."""
    starts, versions = zip(*response.versions, strict=True)
    return np.repeat(versions, np.diff([*starts, response.length]))


def _mean_version(groups: Sequence[PromptGroup]) -> float | None:
    """Mean over all tokens of the weight version that generated each; None: another run."""
    responses = [rollout.response for group in groups for rollout in group.rollouts]
    if min(version for one in responses for _, version in one.versions) < 0:
        return None
    total = sum(int(token_versions(response).sum()) for response in responses)
    return total / sum(response.length for response in responses)


@dataclass(frozen=True)
class LagClock:
    """The moment before a step's first update."""

    step: int
    updates: int  # optimizer updates so far

    def metrics(
        self, groups: Sequence[PromptGroup], held: Iterable[PromptGroup]
    ) -> dict[str, float]:
        """Lag of the trained groups, their replay counts, and the waiting groups.

        held: all groups in the buffer at the start of the step, including the trained ones.
        """
        steps = [self.step - group.generated_at_step for group in groups]
        updates = [self.updates - group.updates for group in groups]
        trained = {group.slot for group in groups}
        waiting = [group for group in held if not group.times_trained and group.slot not in trained]
        metrics = {
            "lag/steps_mean": statistics.fmean(steps),
            "lag/steps_max": max(steps),
            "lag/updates_mean": statistics.fmean(updates),
            "lag/updates_max": max(updates),
            "lag/waiting_groups": len(waiting),
            "replay/fraction": statistics.fmean(group.times_trained > 0 for group in groups),
            "replay/max_uses": max(group.times_trained for group in groups),
        }
        version = _mean_version(groups)
        if version is not None:
            metrics["lag/versions_mean"] = self.step - 1 - version
        if waiting:
            lengths = [one.response.length for group in waiting for one in group.rollouts]
            metrics["lag/waiting_length_mean"] = statistics.fmean(lengths)
        for lag in sorted(set(steps)):
            metrics[f"lag/fraction_of_{lag}"] = steps.count(lag) / len(steps)
        return metrics

    def record(self, groups: Sequence[PromptGroup]) -> dict[str, Any]:
        """The step's line of schedule.jsonl; lists have one entry per group, in trained order."""
        return {
            "step": self.step,
            "updates": self.updates,
            "slot": [list(group.slot) for group in groups],
            "lag": [self.step - group.generated_at_step for group in groups],
            "lag_updates": [self.updates - group.updates for group in groups],
            "replays": [group.times_trained for group in groups],
            "uses": [group.num_updates for group in groups],
            "longest": [group.longest for group in groups],
        }


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

    def update(self, groups: Iterable[PromptGroup]) -> None:
        """Replace groups by what they are now."""
        for group in groups:
            assert group.slot in self.groups, f"slot {group.slot} is empty"
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
        """Count uses of the groups that `step` trained; drop groups that no step trains again.

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
