r"""Verifier of mathematical answers.

The answer is the content of the last `\boxed{...}`, or else of the last line with `Answer:`, the
format of DAPO-Math-17k. It is right if it equals the ground truth as text or according to
math-verify (https://github.com/huggingface/Math-Verify).
"""

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

# Imported at module level, before the worker is ready, so that the seconds which sympy takes do
# not count towards the time limit of a call.
from math_verify import parse, verify

from megatron_rl.rewards.verifier import UNPARSABLE_TRUTH

# The pool's own time limit replaces math-verify's, which cannot stop a hang inside C code and
# warns at every call when disabled.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# An escaped brace, as in \{1, 2\}, is not a delimiter.
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"answer\s*:([^\n]+)", re.IGNORECASE)
# An integer or a fraction of integers; math-verify handles the rest.
_RATIONAL = re.compile(
    r"(?P<integer>[+-]?[0-9]{1,30})"
    r"|(?P<sign>-?)(?:\\[dt]?frac\{(?P<top>-?[0-9]{1,30})\}\{(?P<bottom>[0-9]{1,30})\}"
    r"|(?P<before>[0-9]{1,30})/(?P<after>[0-9]{1,30}))"
)
# As in 1\,000 and 1,\!000, which math-verify cannot read.
_THOUSANDS = re.compile(r"(?<=\d)(\\,|,\\!)(?=\d{3})")
_LONGEST_ANSWER = 2000  # characters; longer answers are prose, and slow to parse
_DEEPEST_ANSWER = 12  # nested brackets; each level doubles the time of math-verify's parser
_LONGEST_TEXT = 1_000_000  # characters; only the end of a longer text is read


def verify_math_answer(
    text: str, ground_truth: str, data_source: str
) -> tuple[float, str, str | None]:
    """Return reward 1 for the right answer, otherwise 0, with reason and extracted answer."""
    answer = extract_answer(text[-_LONGEST_TEXT:])
    if answer is None:
        return 0.0, "no answer", None
    if answer == ground_truth.strip():
        return 1.0, "same text", answer
    if len(answer) > _LONGEST_ANSWER:
        return 0.0, "answer too long", answer[:_LONGEST_ANSWER]
    if _depth(answer) > _DEEPEST_ANSWER:
        return 0.0, "answer too deep", answer
    return (*_compare(answer, ground_truth.strip()), answer)


def extract_answer(text: str) -> str | None:
    r"""Extract the last complete `\boxed{...}`, or else the last `Answer:` line, if any.

    Makes a single pass over the text.
    """
    boxed = _extract_last_box(text)
    if boxed is not None:
        return boxed.strip() or None
    lines = _ANSWER_LINE.findall(text)
    return (lines[-1].strip(" \t\r*$.") or None) if lines else None


def _extract_last_box(text: str) -> str | None:
    open_braces: list[int | None] = []  # start of the content of a box; None: another brace
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            open_braces.append(None)
        elif token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
        elif token.startswith("\\boxed"):
            open_braces.append(match.end())
    return text[last[0] : last[1]] if last else None


def _depth(answer: str) -> int:
    """Return the maximum nesting depth of brackets."""
    deepest = depth = 0
    for character in answer:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


@lru_cache(maxsize=10_000)
def _compare(answer: str, ground_truth: str) -> tuple[float, str]:
    numbers = _as_rational(answer), _as_rational(ground_truth)
    if None not in numbers:  # the common case, without the parser
        return (1.0, "equal") if numbers[0] == numbers[1] else (0.0, "wrong answer")
    truth, given = _parse(ground_truth), _parse(answer)
    if verify(truth, given, timeout_seconds=None):
        return 1.0, "equal"
    if all(isinstance(reading, str) for reading in truth):  # could not be parsed
        return 0.0, UNPARSABLE_TRUTH
    return 0.0, "wrong answer" if given else "answer not understood"


def _as_rational(answer: str) -> Fraction | None:
    match = _RATIONAL.fullmatch(answer)
    if match is None:
        return None
    if match["integer"]:
        return Fraction(int(match["integer"]))
    bottom = int(match["bottom"] or match["after"])
    if not bottom:
        return None
    value = Fraction(int(match["top"] or match["before"]), bottom)
    return -value if match["sign"] else value


@lru_cache(maxsize=1000)  # a group shares its ground truth
def _parse(answer: str) -> list[Any]:
    """Parse an answer into sympy expressions followed by its text; empty for an empty answer."""
    tidy = _THOUSANDS.sub("", answer.strip("$ ").removesuffix("."))
    return parse(f"\\boxed{{{tidy}}}", parsing_timeout=None)


_parse(r"\frac{1}{2}")  # builds the tables of the grammar before the worker is ready
