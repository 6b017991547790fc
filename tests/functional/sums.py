"""Verifiers of the tiny task's responses that import nothing of this project or of others.

That of mathematics imports sympy, which takes a second on every rank of every run.
"""

import re

_BOX = re.compile(r"\\boxed\{([^{}]*)\}")


def grade(text, ground_truth, data_source):
    """Reward 1 if the content of the last box is the digit, as `verify_math_answer` gives here."""
    boxes = _BOX.findall(text)
    if not boxes:
        return 0.0, "no answer", None
    return (1.0, "equal", boxes[-1]) if boxes[-1] == ground_truth else (0.0, "wrong", boxes[-1])


def parity(text, ground_truth, data_source):
    """A reward that differs between responses of any model, also if all are cut."""
    return float(sum(map(ord, text)) % 2)
