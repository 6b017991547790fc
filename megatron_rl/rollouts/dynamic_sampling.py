"""Dynamic sampling: groups without a gradient are replaced by groups for other prompts.

DAPO (arXiv 2503.14476), section 3.2. All advantages of a group with equal rewards are 0. The number
of rounds is limited, surplus groups are kept for the next rollout batch, and all generated groups
are counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_rl.types import PromptSlot, Rollout


class Request(NamedTuple):
    """Request for responses to prompts of one step: in round 0 those of its slots."""

    slots: Sequence[PromptSlot]  # of one step
    number: int  # the round; from 1 on with further prompts
    prompts: int  # at most as many as slots


class Answers(NamedTuple):
    """Graded rollouts of several requests, generated in one call."""

    groups: list[list[list[Rollout]]]  # for each request, the responses to each prompt
    engine_seconds: tuple[float, ...]  # of each engine


class Filled(NamedTuple):
    """Slots with the rollouts that fill them, in group order."""

    slots: Sequence[PromptSlot]
    rollouts: list[Rollout]
    engine_seconds: tuple[float, ...]


def is_informative(group: Sequence[Rollout], *, by_turn: bool = False) -> bool:
    """True if the rewards of the group differ, apart from those of lost conversations.

    by_turn: or those of their turns, with 0 after the last one.
    """
    known = [one for one in group if one.response.finish_reason != "lost"]
    if not by_turn:
        return len({one.grade_result.reward for one in known}) > 1
    by_turns = itertools.zip_longest(*(one.turn_rewards for one in known), fillvalue=0.0)
    return any(len(set(rewards)) > 1 for rewards in by_turns)


@dataclass
class DynamicSampling:
    """Fills slots within `rounds` rounds, by default 0, and counts the cost of a step."""

    rounds: int
    by_turn: bool = False  # as of `is_informative`
    costs: dict[str, float] = field(default_factory=dict)

    def fill(
        self,
        parts: Sequence[Sequence[PromptSlot]],
        *,
        ask: Callable[[Sequence[Request]], Answers],
        spare: list[PromptSlot],
    ) -> list[Filled]:
        """Fill all slots of each part with a group, and spare slots with surplus groups.

        parts: the slots of different steps, filled independently. ask: answers all requests in one
        call. A round requests, for each part, the missing groups divided by the fraction of groups
        that were informative so far, at most as many as there are slots. An informative group keeps
        its slot; after the last round, others do too. Filled spare slots are removed from the list.
        The engines' seconds of all calls are attributed to the first part.
        """
        groups, seconds = ask([Request(slots, 0, len(slots)) for slots in parts])
        searches = [
            _Search(slots, first, self.by_turn) for slots, first in zip(parts, groups, strict=True)
        ]
        for number in range(1, self.rounds + 1):
            lacking = [one for one in searches if one.found < len(one.slots)]
            if not lacking:
                break
            new = ask([Request(one.slots, number, one.prompts_to_request) for one in lacking])
            for one, further in zip(lacking, new.groups, strict=True):
                self._drop(one.add_groups(further))
                self._add("rounds", 1)
            seconds = tuple(map(sum, zip(seconds, new.engine_seconds, strict=True)))
        filled = []
        for one in searches:
            filled += self._fill_part(one, spare) if self.rounds else [(one.slots, one.first)]
        idle = (0.0,) * len(seconds)
        return [
            Filled(slots, _flat(own), idle if place else seconds)
            for place, (slots, own) in enumerate(filled)
        ]

    def _fill_part(
        self, search: _Search, spare: list[PromptSlot]
    ) -> list[tuple[Sequence[PromptSlot], list[list[Rollout]]]]:
        """Slots of a part with their groups, and spare slots with surplus groups."""
        waiting = iter(search.further)
        kept = [g if search.is_good(g) else next(waiting, g) for g in search.first]
        left = list(waiting)
        later = sorted(spare[: len(left)])
        del spare[: len(later)]
        dropped = [old for old, now in zip(search.first, kept, strict=True) if now is not old]
        self._drop([*dropped, *left[len(later) :]])
        self._add("rounds", 0)
        self._add("groups_generated", search.generated)
        self._add("groups_kept_for_later", len(later))
        self._add("groups_lacking", sum(not search.is_good(group) for group in kept))
        further = [(later, left[: len(later)])] if later else []
        return [(search.slots, kept), *further]

    def pop_costs(self) -> dict[str, float]:
        """Return and reset the counts since the last call; empty without rounds."""
        costs, self.costs = self.costs, {}
        if responses := costs.pop("dynamic/responses_dropped", 0):
            costs["dynamic/dropped_length_mean"] = costs["dynamic/tokens_dropped"] / responses
        return costs

    def _drop(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Count generated groups that are not trained."""
        rollouts = _flat(groups)
        self._add("tokens_dropped", sum(one.response.length for one in rollouts))
        self._add("responses_dropped", len(rollouts))

    def _add(self, name: str, value: float) -> None:
        self.costs[f"dynamic/{name}"] = self.costs.get(f"dynamic/{name}", 0) + value


@dataclass
class _Search:
    """Groups of one part's slots, and informative ones of later rounds."""

    slots: Sequence[PromptSlot]
    first: list[list[Rollout]]
    by_turn: bool
    further: list[list[Rollout]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generated = len(self.first)
        self.found = sum(map(self.is_good, self.first))

    def is_good(self, group: Sequence[Rollout]) -> bool:
        """Return whether a group has a gradient."""
        return is_informative(group, by_turn=self.by_turn)

    @property
    def prompts_to_request(self) -> int:
        """Number of prompts that are expected to yield the missing informative groups."""
        lacking = len(self.slots) - self.found
        return min(len(self.slots), math.ceil(lacking * self.generated / max(self.found, 1)))

    def add_groups(self, groups: list[list[Rollout]]) -> list[list[Rollout]]:
        """Keep informative groups; return the others."""
        good = [group for group in groups if self.is_good(group)]
        self.further += good
        self.generated += len(groups)
        self.found += len(good)
        return [group for group in groups if not self.is_good(group)]


def _flat(groups: Sequence[Sequence[Rollout]]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]
