"""Section of a config for conversations with an environment (`docs/agents.md`)."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_rl.config.sections import Count, Positive, Section, Variable


class EnvironmentSection(Section):
    """Conversations: every response has turns of the policy, which an environment answers."""

    name: str
    """Environment as `module:class` (`docs/agents.md`). Required."""
    max_context_tokens: Count
    """Maximum length of a whole conversation in tokens: prompt, turns and observations (with
    `max_rewrites`, of each of its sequences); what the policy writes in all turns is limited by
    `rollout.max_response_tokens`. Required."""
    max_turns: Count = 8
    """Maximum number of turns of the policy in a conversation."""
    max_turn_tokens: Count | None = None
    """Maximum number of tokens of one turn; a longer turn is cut and answered as it is. null limits
    a turn by `rollout.max_response_tokens` only."""
    time_limit_seconds: Positive = 60.0
    """Time limit in seconds for one answer, without the time for which others take the processor
    cores; the process of an environment that takes longer is killed, and its conversation gets
    reward 0."""
    memory_gib: Positive | None = 4.0
    """Private memory in GiB that a process of a conversation may use in addition to that of the
    loaded module; allocations above it raise a MemoryError in the environment. null removes the
    limit."""
    variables: list[Variable] = Field(default_factory=list)
    """Environment variables passed to the environments in addition to the standard ones, such as
    the API key of a tool or an agent."""
    on_error: Literal["end", "zero"] = "end"
    """Reaction to an environment that raises, returns no valid answer or crashes: `end` ends the
    run, `zero` ends the conversation with reward 0."""
    max_rewrites: Annotated[int, Field(ge=0, le=255)] = 0
    """Number of times that an agent may change earlier messages of a conversation, for example by
    a summary or by removing thinking. Each time begins another sequence, and all sequences are
    trained as one response. A further such request is refused, which is a failure of the
    conversation (`on_error`)."""
    in_rounds: bool = False
    """Continue all conversations of an engine together, once each turn is answered. On CUDA,
    results are then reproducible although environments answer at different speeds; it costs
    time."""


def credit_problems(config: Any) -> list[str]:
    """List conflicts of `advantage.credit=turn` with other sections of a `Config`."""
    if config.advantage.credit == "response":
        return []
    problems = []
    if config.environment is None and config.offline.rollouts is None:
        problems.append(
            "advantage.credit=turn: no effect without environment, which gives rewards to turns; "
            "set environment, or unset it"
        )
    if config.advantage.estimator == "optimal_value":
        problems.append(
            "advantage.credit=turn: advantage.estimator=optimal_value is the value of a whole "
            "response; choose another estimator, or unset advantage.credit"
        )
    if config.shaping.signed:
        problems.append(
            "advantage.credit=turn: shaping.signed rescales the reward of a whole response; return "
            "such rewards from the environment, or unset one"
        )
    return problems


def environment_problems(config: Any) -> list[str]:
    """List conflicts of `config.environment` with other sections of a `Config`."""
    environment: EnvironmentSection | None = config.environment
    if environment is None:
        return []
    written, context = config.rollout.max_response_tokens, environment.max_context_tokens
    problems = []
    for name, value in (
        ("data.max_prompt_tokens", config.data.max_prompt_tokens),
        ("rollout.max_response_tokens", written),
    ):
        if context <= value:
            problems.append(
                f"environment.max_context_tokens={context} must be above {name}={value}, which is "
                "only a part of a conversation; raise it, or lower the other"
            )
    if (environment.max_turn_tokens or 0) > written:
        problems.append(
            f"environment.max_turn_tokens={environment.max_turn_tokens} is more than all turns "
            f"may have, rollout.max_response_tokens={written}; lower it"
        )
    if environment.max_rewrites >= environment.max_turns:
        problems.append(
            f"environment.max_rewrites={environment.max_rewrites} must be below "
            f"environment.max_turns={environment.max_turns}: a history changes only between two "
            "turns; lower it, or raise max_turns"
        )
    limit, stall = environment.time_limit_seconds, config.rollout.stall_seconds
    if limit >= stall:
        problems.append(
            f"environment.time_limit_seconds={limit:g}: one answer may take longer than "
            f"rollout.stall_seconds={stall:g}, after which the run ends; raise that, or lower the "
            "limit"
        )
    if config.lag.partial_rollouts is not None:
        problems.append(
            "environment and lag.partial_rollouts cannot be combined: the state of an environment "
            "is in no checkpoint, so a conversation cannot continue in a later step; unset one"
        )
    if config.offline.rollouts is not None:
        problems.append(
            "environment has no effect with offline.rollouts, which generates nothing; unset one"
        )
    return problems
