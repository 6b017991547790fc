"""The virtual clock: how old is what a step trains, in steps, versions and updates, not seconds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.types import Group


@dataclass(frozen=True)
class LagClock:
    """The moment before a step's first update."""

    step: int
    updates: int  # optimizer updates so far

    @classmethod
    def at(cls, step: int, *, updates: int) -> "LagClock":
        """Step `step` begins to train, after `updates` updates."""
        return cls(step, updates)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """The realised lag of the trained groups, and how many were trained before."""
        steps = [self.step - group.generated for group in groups]
        return {
            "lag/steps_mean": statistics.fmean(steps),
            "lag/steps_max": max(steps),
            "lag/updates_mean": statistics.fmean(self.updates - group.updates for group in groups),
            "replay/fraction": statistics.fmean(group.trained > 0 for group in groups),
        }

    def record(self, groups: Sequence[Group]) -> dict[str, Any]:
        """The step's line of schedule.jsonl; lists have one entry per group, in trained order."""
        return {
            "step": self.step,
            "updates": self.updates,
            "slot": [list(group.slot) for group in groups],
            "lag": [self.step - group.generated for group in groups],
            "lag_updates": [self.updates - group.updates for group in groups],
            "replays": [group.trained for group in groups],
            "longest": [group.longest for group in groups],
        }
