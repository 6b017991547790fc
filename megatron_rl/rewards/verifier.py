"""The interface of verifiers, and loading them by name.

Verifiers run in worker processes (`megatron_rl.rewards.pool`). This module and modules that define
verifiers import neither torch nor vLLM, so that these start in a second.
"""

import importlib
from typing import Any, NamedTuple, Protocol

from megatron_rl.errors import UserError

MATH_ANSWER = "megatron_rl.rewards.math_answer:verify_math_answer"

# Reasons for a reward of 0 that are not the response's fault; the metrics count them.
TIME_LIMIT = "time limit"
UNPARSABLE_TRUTH = "ground truth not understood"
FAILED = "verifier failed"  # only where reward.on_error is zero
UNGRADED = (TIME_LIMIT, UNPARSABLE_TRUTH, FAILED)
NO_ANSWER = "no answer"
NUMBER = "scored"  # the reason of a verifier that returns a number
SHAPED = "shaped"  # no name of a reward: reward/shaped_mean is another metric


class Item(NamedTuple):
    """An item to grade: a response, and the row of the prompt set."""

    text: str
    ground_truth: str
    data_source: str
    row: str = "{}"  # the whole row, as JSON


class Verifier(Protocol):
    """A function that grades one response, with these three arguments in this order.

    A fourth argument named `row` receives the whole row of the prompt set as a dict. A function
    whose first argument is named `texts` receives lists and returns a list; its fourth is `rows`.
    Both may be `async`. A verifier must return a reward for any text; an exception means that the
    verifier is broken, and ends the run unless `reward.on_error` is set.
    """

    def __call__(
        self, text: str, ground_truth: str, data_source: str
    ) -> float | dict[str, float] | tuple[float | dict[str, float], str, str | None]:
        """Return the reward, or several by name, optionally with a reason and the answer."""


class VerifierError(RuntimeError):
    """A failure of a verifier: its code raised, or its process died twice."""


def load_verifier(name: str) -> Any:
    """The verifier called `module:function`.

    Raises ValueError if the name has another form or names no function, and what importing raises.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise UserError(f"a verifier is named module:function, got {name!r}")
    loaded = importlib.import_module(module)
    found = getattr(loaded, function, None)
    if callable(found):
        return found
    there = [key for key, value in vars(loaded).items() if callable(value) and key[0] != "_"]
    raise UserError(
        f"{module} has no function {function}; name one of: {', '.join(there) or 'none'}"
    )
