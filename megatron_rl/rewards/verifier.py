"""What a verifier is, and how one is named.

Verifiers run in worker processes of their own (`megatron_rl.rewards.pool`), so this module and
those that define verifiers import neither torch nor vLLM: a worker starts in a second.
"""

import importlib
from typing import Protocol

MATH_ANSWER = "megatron_rl.rewards.math_answer:verify_math_answer"

# Reasons for a reward of 0 that say nothing about the response; the metrics count them.
TIME_LIMIT = "time limit"
UNPARSABLE_TRUTH = "ground truth not understood"


class Verifier(Protocol):
    """Judges one response.

    Whatever a model may write is answered by a judgement; an exception means that the verifier
    itself is broken, and ends the run.
    """

    def __call__(
        self, text: str, ground_truth: str, data_source: str
    ) -> tuple[float, str, str | None]:
        """The fields of a `Verdict`: reward, the reason for it, and the answer it was given for."""


class VerifierError(RuntimeError):
    """A verifier failed, which is not a verdict: its code raised, or its process died twice."""


def load_verifier(name: str) -> Verifier:
    """The verifier called `module:function`.

    Raises ValueError if the name has another form, and what importing it raises.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"a verifier is named module:function, got {name!r}")
    return getattr(importlib.import_module(module), function)
