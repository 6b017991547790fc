"""Policy lag as settings (`docs/policy-lag.md`)."""

from typing import Any, Literal

from pydantic import Field

from megatron_rl.config.sections import Count, Fraction, Section


class LagSection(Section):
    """How much older than the policy the trained rollouts are (`docs/policy-lag.md`)."""

    batches: int | dict[str, Any] = Field(default=0)
    """a queue: groups are trained so many rollout batches after their generation; or
    `{uniform: [LOW, HIGH]}`, `{by_length: {batches: K, tokens: N}}`, `{trace: schedule.jsonl}`"""
    publish_every: Count = 1
    """rollout batches between two weight pushes"""


class ReplaySection(Section):
    """Rollout batches that hold groups which were trained before (`docs/policy-lag.md`)."""

    capacity: Count = 1
    """rollout batches of new groups that are kept, the present one among them; 1: no replay"""
    fresh: Fraction = 1.0
    """of the groups of a rollout batch that are new; the others are drawn from what is kept"""
    draw: Literal["uniform", "least_trained"] = "uniform"
    """from all that is kept, alike; or what was trained the fewest times, the oldest first"""
