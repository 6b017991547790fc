"""Sections of a config for policy lag and replay (`docs/policy-lag.md`)."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_rl.config.sections import Count, Fraction, Section


def _check_partial_rollouts(value: Any) -> Any:
    given = value if isinstance(value, dict) else {"every_tokens": value}
    tokens, cache = given.get("every_tokens"), given.get("cache", "keep")
    is_count = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 1
    known = given.keys() <= {"every_tokens", "cache"} and cache in ("keep", "recompute")
    if value is not None and not (is_count and known):
        raise ValueError(
            "must be a number of tokens, at least 1, or {every_tokens: N, cache: keep} or "
            "{every_tokens: N, cache: recompute}"
        )
    return value


def _check_batches(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | dict):
        raise ValueError(
            "must be a number of rollout batches, at least 0, or one of {uniform: [LOW, HIGH]}, "
            "{by_length: {batches: K, tokens: N}}, {trace: FILE}"
        )
    return value


class LagSection(Section):
    """Policy lag: the age of the trained rollouts (`docs/policy-lag.md`)."""

    batches: Annotated[int | dict[str, Any], BeforeValidator(_check_batches)] = Field(default=0)
    """Number of rollout batches between generating a group and training on it; a distribution is
    given as `{uniform: [LOW, HIGH]}`, `{by_length: {batches: K, tokens: N}}` or
    `{trace: schedule.jsonl}`."""
    sync_weights_every: Count = 1
    """Rollout batches between weight syncs to the engine."""
    partial_rollouts: Annotated[
        int | dict[str, Any] | None, BeforeValidator(_check_partial_rollouts)
    ] = None
    """Sync weights while responses are being generated, every so many tokens of each response: a
    number, or `{every_tokens: N, cache: keep}`, or `{every_tokens: N, cache: recompute}`. null
    disables partial rollouts."""

    @property
    def every_tokens(self) -> int:
        """Tokens of a response between two weight syncs; 0 without partial rollouts."""
        if isinstance(self.partial_rollouts, dict):
            return int(self.partial_rollouts["every_tokens"])
        return self.partial_rollouts or 0

    @property
    def keeps_cache(self) -> bool:
        """True if later tokens attend to keys and values that older weights computed."""
        return (
            not isinstance(self.partial_rollouts, dict)
            or self.partial_rollouts.get("cache") != "recompute"
        )


class ReplaySection(Section):
    """Replay: rollout batches with groups of earlier batches (`docs/policy-lag.md`)."""

    capacity: Count = 1
    """Size of the replay buffer in rollout batches of new groups, including the current one; 1
    disables replay."""
    fresh: Fraction = 1.0
    """Fraction of the groups of a rollout batch that are new; the rest is sampled from the
    buffer."""
    sampling: Literal["uniform", "least_used"] = "uniform"
    """Sampling from the buffer: `uniform`, or `least_used` for the groups trained the fewest times,
    oldest first."""
