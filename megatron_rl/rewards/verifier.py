"""What a verifier is, and how one is named.

Verifiers run in worker processes of their own (`megatron_rl.rewards.pool`), so this module and
those that define verifiers import neither torch nor vLLM: a worker starts in a second.
"""

import importlib
from typing import Any, NamedTuple, Protocol

MATH_ANSWER = "megatron_rl.rewards.math_answer:verify_math_answer"

# Reasons for a reward of 0 that say nothing about the response; the metrics count them.
TIME_LIMIT = "time limit"
UNPARSABLE_TRUTH = "ground truth not understood"
FAILED = "verifier failed"  # only where reward.on_error is zero
NUMBER = "scored"  # the reason of a verifier that returns a number


class Item(NamedTuple):
    """What is judged: a response, and the row of the prompt set that it answers."""

    text: str
    ground_truth: str
    data_source: str
    row: str = "{}"  # the whole row, as JSON


class Verifier(Protocol):
    """Judges one response: a function with these three arguments, in this order.

    A fourth one called `row` is given the whole row of the prompt set, as a dict. A function whose
    first argument is called `texts` is given lists, and returns a list; its fourth one is `rows`.
    Both may be `async`. Whatever a model may write is answered by a judgement; an exception means
    that the verifier itself is broken, and ends the run unless `reward.on_error` says otherwise.
    """

    def __call__(
        self, text: str, ground_truth: str, data_source: str
    ) -> float | tuple[float, str, str | None]:
        """The reward; or with the reason for it and the answer that it was given for."""


class VerifierError(RuntimeError):
    """A verifier failed, which is not a verdict: its code raised, or its process died twice."""


def load_verifier(name: str) -> Any:
    """The verifier called `module:function`.

    Raises ValueError if the name has another form, and what importing it raises.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"a verifier is named module:function, got {name!r}")
    return getattr(importlib.import_module(module), function)
