"""Staleness of the trained groups in steps, weight versions and updates."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.types import PromptGroup, Response


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

    @classmethod
    def at(cls, step: int, *, updates: int) -> "LagClock":
        """Start of training in step `step`, after `updates` updates."""
        return cls(step, updates)

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
