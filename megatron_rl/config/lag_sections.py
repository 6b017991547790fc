"""Policy lag as settings (`docs/policy-lag.md`)."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from megatron_rl.config.sections import Count, Fraction, Section


def _check_in_flight(value: Any) -> Any:
    given = value if isinstance(value, dict) else {"every_tokens": value}
    tokens, cache = given.get("every_tokens"), given.get("cache", "keep")
    is_count = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 1
    known = given.keys() <= {"every_tokens", "cache"} and cache in ("keep", "recompute")
    if value is not None and not (is_count and known):
        raise ValueError(
            "give a number of tokens from 1, or {every_tokens: N, cache: keep}, or cache: recompute"
        )
    return value


class LagSection(Section):
    """How much older than the policy the trained rollouts are (`docs/policy-lag.md`)."""

    batches: int | dict[str, Any] = Field(default=0)
    """a queue: groups are trained so many rollout batches after their generation; or
    `{uniform: [LOW, HIGH]}`, `{by_length: {batches: K, tokens: N}}`, `{trace: schedule.jsonl}`"""
    publish_every: Count = 1
    """rollout batches between two weight pushes"""
    in_flight: Annotated[int | dict[str, Any] | None, AfterValidator(_check_in_flight)] = None
    """weights change under running generations, every so many tokens of each response: a number, or
    `{every_tokens: N, cache: keep}`, or with `cache: recompute`"""

    @property
    def every_tokens(self) -> int:
        """Tokens of a response between two changes of the weights; 0: they do not change."""
        if isinstance(self.in_flight, dict):
            return int(self.in_flight["every_tokens"])
        return self.in_flight or 0

    @property
    def keeps_cache(self) -> bool:
        """Whether later tokens attend to keys and values that older weights computed."""
        return not isinstance(self.in_flight, dict) or self.in_flight.get("cache") != "recompute"


class ReplaySection(Section):
    """Rollout batches that hold groups which were trained before (`docs/policy-lag.md`)."""

    capacity: Count = 1
    """rollout batches of new groups that are kept, the present one among them; 1: no replay"""
    fresh: Fraction = 1.0
    """of the groups of a rollout batch that are new; the others are drawn from what is kept"""
    draw: Literal["uniform", "least_trained"] = "uniform"
    """from all that is kept, alike; or what was trained the fewest times, the oldest first"""
