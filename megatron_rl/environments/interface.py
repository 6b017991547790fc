"""The interface of environments, and checks of what they return.

Environments run in worker processes (`megatron_rl.environments.pool`). This module and modules that
define environments import neither torch nor vLLM, so that these start in a second.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard

from megatron_rl.errors import UserError
from megatron_rl.fields import is_media
from megatron_rl.rewards.verifier import load_verifier
from megatron_rl.rewards.worker import LARGEST_REWARD, MAX_TEXT, as_number, format_value
from megatron_rl.texts import clean

MOST_MESSAGES = 10_000  # of an observation, which are rendered while other turns are generated
_ROLES = ("user", "tool", "system", "developer", "ipython")
FailureKind = Literal["timed_out", "failed", "rewritten", "lost"]
FAILURE_REASONS: dict[FailureKind, str] = {  # of the reward 0 of such a conversation
    "timed_out": "environment timed out",
    "failed": "environment failed",
    "rewritten": "earlier messages changed",
    "lost": "environment lost",
}


@dataclass(frozen=True)
class Answer:
    """The environment's answer to one turn of the policy.

    observation: the text of a user's message, or several messages (dicts with role and content),
    that the policy reads next. reward: added up over the turns; if no turn has a reward, the
    verifier grades the last turn. done: True ends the conversation, and the observation is not
    used.
    reason: a word or two for the records. token_ids: the tokens that follow the turn, in place of
    an observation. restarts: the observation replaces everything before it, the prompt too, at most
    `environment.max_rewrites` times; it may have messages of the assistant, which are read and not
    trained.
    """

    observation: str | list[dict[str, Any]] = ""
    reward: float | None = None
    done: bool = False
    reason: str = ""
    token_ids: list[int] | None = None
    restarts: bool = False


@dataclass(frozen=True)
class TurnTokens:
    """The tokens of a turn of the policy, for environments that take them.

    context: the tokens before it that are of no earlier turn: the prompt, later an observation.
    sampled, logprobs: the turn's tokens and their log-probs. is_complete: False if it was cut at
    its limit. restarts: the context replaces everything before it. in_thinking: the context ends
    with the mark that begins thinking, so that the turn is thinking up to its end mark.
    """

    context: list[int]
    sampled: list[int]
    logprobs: list[float]
    is_complete: bool
    restarts: bool = False
    in_thinking: bool = False


class Environment(Protocol):
    """One conversation's environment: made from a row of the prompt set and a seed.

    The prompt is the first thing that the policy reads; `step` answers each turn that it writes.
    It has a process of its own, forked from one that has imported its module, and all that it
    starts ends with the conversation. The answers must be a function of (row, seed, messages so
    far): if the process is lost, the messages are sent again to a new environment.

    Four methods are optional. `receive_tokens(tokens)` gets the `TurnTokens` of a turn before
    `step` gets its text. `timed_out(message) -> Answer` answers a turn whose `step` exceeded the
    time limit, in place of ending the conversation; the process of that `step` was ended, and a new
    environment has the state before it. `replay(turns)` restores the state after `turns`, a list of
    (message, Answer), where calling `step` again would repeat side effects. `close()`, which may be
    async, releases what the environment has outside when the conversation is over.
    """

    def __init__(self, row: Mapping[str, Any], seed: int) -> None: ...

    async def step(self, message: str) -> Answer:
        """Answer the turn that the policy has just written; may also be a plain function."""


@dataclass(frozen=True)
class EnvironmentFailure:
    """A conversation that its environment could not continue.

    kind: `timed_out`: a call exceeded the time limit; `failed`: the environment raised, returned no
    valid answer or ended its process; `rewritten`: its agent changed earlier messages; `lost`:
    infrastructure that it needs was lost, whatever the policy wrote. text: one line for the log.
    """

    kind: FailureKind
    text: str


class InfrastructureError(Exception):
    """Raised by an environment if something it needs is lost, whatever the policy wrote.

    The conversation is counted as `lost` and may be left out of the loss. Do not raise it for what
    depends on the policy's text: leaving such conversations out would bias the gradient.
    """


class BrokenEnvironmentError(RuntimeError):
    """An environment that cannot be loaded, or that failed with `on_error="end"`."""


def load_environment(name: str) -> Any:
    """Load the class or factory called `module:name`.

    Raises UserError if the name has another form or names nothing that can be called as an
    environment, and whatever importing its module raises.
    """
    if name.count(":") != 1 or name[:1] == ":" or name[-1:] == ":":
        raise UserError(f"an environment is named module:class, got {name!r}")
    make = load_verifier(name)
    _check_call(make, ("row", "seed"), what=f"{name}(row, seed)")
    if isinstance(make, type):
        step = getattr(make, "step", None)
        if not callable(step):
            raise UserError(
                f"{name} has no method step; define `async def step(self, message)` that returns "
                "megatron_rl.environments.Answer"
            )
        _check_call(step, ("self", "message"), what=f"{name}.step(message)")
    return make


def _check_call(function: Any, arguments: Sequence[str], *, what: str) -> None:
    """Raise UserError if a function does not take so many arguments by position."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise UserError(f"it is called as {what}, but its signature has: {error}") from None
    except ValueError:  # a builtin without a signature
        return


def read_answer(value: Any, *, name: str) -> dict[str, Any]:
    """Convert an environment's return value to a JSON object of an Answer's fields.

    Raises TypeError that describes the valid values.
    """
    if not isinstance(value, Answer):
        raise TypeError(
            f"{name} returned {format_value(value)}; return "
            "megatron_rl.environments.Answer(observation, reward, done, reason)"
        )
    reward = None if value.reward is None else as_number(value.reward)
    if value.reward is not None and reward is None:
        raise TypeError(
            f"{name} returned the reward {format_value(value.reward)}; return a finite "
            f"number, or None; numbers are between {-LARGEST_REWARD:g} and {LARGEST_REWARD:g}"
        )
    done, restarts = as_flag(value.done), as_flag(value.restarts)
    is_text = isinstance(value.reason, str) and len(value.reason) <= MAX_TEXT
    if done is None or restarts is None or not is_text:
        raise TypeError(
            f"{name} returned done={format_value(value.done)}, "
            f"restarts={format_value(value.restarts)} and reason={format_value(value.reason)}; "
            f"return True or False twice, and a text of at most {MAX_TEXT:,} characters"
        )
    roles = (*_ROLES, "assistant") if restarts else _ROLES
    observation = _read_observation(value.observation, name=name, roles=roles)
    fields: dict[str, Any] = {
        "observation": observation, "reward": reward, "done": done,
    }  # fmt: skip
    if value.token_ids is not None:
        fields["token_ids"] = _read_tokens(value.token_ids, name=name)
    if restarts and not done:
        fields["restarts"] = True
        if not (observation if value.token_ids is None else value.token_ids):
            raise TypeError(f"{name} returned restarts=True without an observation; return one")
    return fields | {"reason": clean(value.reason)}


def as_flag(value: Any) -> bool | None:
    """Convert a Boolean, also a NumPy or torch scalar, to bool; None for other values."""
    if not isinstance(value, bool) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, bool) else None


def _read_tokens(value: Any, *, name: str) -> list[int]:
    if not is_token_list(value):
        raise TypeError(
            f"{name} returned token_ids={format_value(value)}; return a list of at most "
            f"{MAX_TEXT:,} integers from 0 on"
        )
    return value


def is_token_list(value: Any) -> TypeGuard[list[int]]:
    """Return whether a value is a list of token ids, of any vocabulary."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_TEXT
        and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    )


def _read_observation(value: Any, *, name: str, roles: Sequence[str]) -> str | list[dict[str, Any]]:
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list | tuple) or not all(
        _is_message(one, roles) for one in messages
    ):
        raise TypeError(
            f"{name} returned the observation {format_value(value)}; return a text, or a list of "
            f"messages as {{'role': 'user', 'content': 'text'}} with a role of {', '.join(roles)}"
        )
    if media := [key for one in messages for key, value in one.items()
                 if key not in ("role", "content") and is_media(key, value)]:  # fmt: skip
        raise TypeError(
            f"{name} returned a message with the key {media[0]}; models here read text only: "
            "describe it in the content, or leave it out"
        )
    if len(messages) > MOST_MESSAGES:
        raise TypeError(
            f"{name} returned an observation of {len(messages):,} messages; return at most "
            f"{MOST_MESSAGES:,}"
        )
    try:
        json.dumps(messages, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} returned messages that JSON cannot contain: {error}; use texts, finite "
            "numbers, lists and dicts"
        ) from error
    characters = sum(
        (len(key) if key != "content" else 0) + count_characters(one)
        for message in messages for key, one in message.items() if key != "role"
    )  # fmt: skip
    if characters > MAX_TEXT:
        raise TypeError(
            f"{name} returned an observation of {characters:,} characters; shorten it to at most "
            f"{MAX_TEXT:,} in all keys of its messages, and better to what the model's context can "
            "take"
        )
    cleaned: str | list[dict[str, Any]] = clean(value)
    return cleaned


def count_characters(value: Any) -> int:
    """Return the characters of all texts and numbers in a value of JSON; 1 for a bracket."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return 1 + sum(len(str(key)) + count_characters(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return 1 + sum(map(count_characters, value))
    return len(str(value))


def _is_message(value: Any, roles: Sequence[str]) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in roles
        and isinstance(value.get("content"), str)
        and all(isinstance(key, str) for key in value)
    )
