"""Dynamic sampling: groups that teach nothing are replaced by groups for other prompts.

DAPO (arXiv 2503.14476), section 3.2. A group whose verdicts are all equal has no advantage other
than 0. Rounds are bounded, what is generated beyond need is kept for the next rollout batch, and
everything that was generated is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_rl.types import Rollout, Slot


class Answers(NamedTuple):
    """What was generated and judged in one go."""

    groups: list[list[Rollout]]  # the responses to each prompt
    engine_seconds: tuple[float, ...]  # of each engine

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], size: int, seconds: Sequence[float]) -> Answers:
        """From rollouts that come group after group, `size` each."""
        groups = [list(rollouts[i : i + size]) for i in range(0, len(rollouts), size)]
        return cls(groups, tuple(seconds))


class Filled(NamedTuple):
    """Slots with the rollouts that fill them, group after group in their order."""

    slots: Sequence[Slot]
    rollouts: list[Rollout]
    engine_seconds: tuple[float, ...]


def is_informative(group: Sequence[Rollout]) -> bool:
    """Whether its verdicts differ."""
    return len({rollout.verdict.reward for rollout in group}) > 1


@dataclass
class DynamicSampling:
    """Fills slots within `rounds` rounds, 0 of them by default, and counts what a step costs."""

    rounds: int
    costs: dict[str, float] = field(default_factory=dict)

    def fill(
        self,
        slots: Sequence[Slot],
        first: Answers,
        *,
        ask: Callable[[int, int], Answers],
        spare: list[Slot],
    ) -> list[Filled]:
        """The slots with a group each; then, where groups are left over, spare slots with those.

        ask(round, count): answers to up to `count` further prompts, round from 1. A round asks for
        what is lacking over the share of groups that were informative so far, at most for as many
        as there are slots. An informative group keeps its slot; where rounds end, others do too.
        Spare slots that are filled are taken from the list.
        """
        if not self.rounds:
            return [Filled(slots, _flat(first.groups), first.engine_seconds)]
        further, seconds = self._ask(first, ask)
        waiting = iter(further)
        kept = [g if is_informative(g) else next(waiting, g) for g in first.groups]
        left = list(waiting)
        later = sorted(spare[: len(left)])
        del spare[: len(later)]
        dropped = [old for old, now in zip(first.groups, kept, strict=True) if now is not old]
        self._drop([*dropped, *left[len(later) :]])
        self._add("groups_kept_for_later", len(later))
        self._add("groups_lacking", sum(not is_informative(group) for group in kept))
        filled = [Filled(slots, _flat(kept), seconds)]
        if later:
            idle = (0.0,) * len(seconds)
            filled.append(Filled(later, _flat(left[: len(later)]), idle))
        return filled

    def _ask(
        self, first: Answers, ask: Callable[[int, int], Answers]
    ) -> tuple[list[list[Rollout]], tuple[float, ...]]:
        """Informative groups from the rounds, and the engines' seconds of all that was asked."""
        wanted, seconds = len(first.groups), first.engine_seconds
        found, generated, used = sum(map(is_informative, first.groups)), wanted, 0
        further: list[list[Rollout]] = []
        while used < self.rounds and found < wanted:
            used += 1
            count = min(wanted, math.ceil((wanted - found) * generated / max(found, 1)))
            new = ask(used, count)
            good = [group for group in new.groups if is_informative(group)]
            self._drop([group for group in new.groups if not is_informative(group)])
            further += good
            found, generated = found + len(good), generated + len(new.groups)
            seconds = tuple(map(sum, zip(seconds, new.engine_seconds, strict=True)))
        self._add("rounds", used)
        self._add("groups_generated", generated)
        return further, seconds

    def take_costs(self) -> dict[str, float]:
        """What was counted since the last call; nothing without rounds."""
        costs, self.costs = self.costs, {}
        if responses := costs.pop("dynamic/responses_dropped", 0):
            costs["dynamic/dropped_length_mean"] = costs["dynamic/tokens_dropped"] / responses
        return costs

    def _drop(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Count what was generated and will not be trained."""
        rollouts = _flat(groups)
        self._add("tokens_dropped", sum(len(one.response.token_ids) for one in rollouts))
        self._add("responses_dropped", len(rollouts))

    def _add(self, name: str, value: float) -> None:
        self.costs[f"dynamic/{name}"] = self.costs.get(f"dynamic/{name}", 0) + value


def _flat(groups: Sequence[Sequence[Rollout]]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]
