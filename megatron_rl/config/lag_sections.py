"""Sections of a config for policy lag and replay (`docs/policy-lag.md`)."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from megatron_rl.config.sections import Count, Fraction, Section, refuse_bool


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


class LagSection(Section):
    """Policy lag: the age of the trained rollouts (`docs/policy-lag.md`)."""

    batches: Annotated[int, BeforeValidator(refuse_bool), Field(ge=0)] = 0
    """Number of rollout batches between generating a group and training on it."""
    policy: str | None = None
    """A lag policy of your own, as `module:class`, in place of `lag.batches`."""
    settings: dict[str, Any] = Field(default={})
    """Keyword arguments of `lag.policy`."""
    sync_weights_every: Count = 1
    """Rollout batches between weight syncs to the engine."""
    partial_rollouts: Annotated[
        int | dict[str, Any] | None, BeforeValidator(_check_partial_rollouts)
    ] = None
    """Sync weights while responses are being generated, every so many tokens of each response: a
    number, or `{every_tokens: N, cache: keep}`, or `{every_tokens: N, cache: recompute}`. null
    disables partial rollouts."""

    @model_validator(mode="after")
    def _check_policy(self) -> Self:
        if self.policy is not None and self.batches:
            raise ValueError(
                f"policy={self.policy} and batches={self.batches} both set the lag; unset one"
            )
        if self.policy is None and self.settings:
            raise ValueError("settings are those of lag.policy, which is not set; unset them")
        return self

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


def partial_rollout_problems(config: Any) -> list[str]:
    """List conflicts of `config.lag.partial_rollouts` with other settings of a `Config`."""
    problems = []
    if config.lag.keeps_cache and config.behavior == "actor":
        problems.append(
            "lag.partial_rollouts with cache: keep: later tokens attend to keys and values of "
            "older weights, so the actor cannot recompute their log-probs; set "
            "behavior=engine, or cache: recompute"
        )
    if config.lag.sync_weights_every > 1:
        problems.append(
            f"lag.sync_weights_every={config.lag.sync_weights_every} and lag.partial_rollouts "
            "both set when weights are synced; unset one"
        )
    problems += [
        f"rollout.engine.{name} does not work with lag.partial_rollouts; remove it"
        for name in ("enable_prefix_caching", "async_scheduling")
        if config.rollout.engine.get(name)
    ]
    if config.dynamic_sampling.rounds or config.offline.rollouts is not None:
        problems.append(
            "lag.partial_rollouts cannot be combined with dynamic_sampling or "
            "offline.rollouts; unset one"
        )
    if config.rollout.stop:
        problems.append(
            "rollout.stop: a stop string may span a weight sync, where lag.partial_rollouts "
            "does not detect it; use rollout.stop_token_ids, or unset one"
        )
    return problems
