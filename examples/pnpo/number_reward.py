"""The reward of `real_model.yaml`, as a user writes one: the last number of the response."""

import re
from fractions import Fraction

# A minus sign has no digit before it; commas separate groups of three digits.
NUMBER = re.compile(
    r"(?:(?<!\d)[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+)(?:/[1-9]\d*)?"
)


def score(text: str, ground_truth: str, data_source: str) -> float:
    """Return 1 if the last number, such as -12, 1,234, 2.50 or 1/5, has the answer's value."""
    numbers = NUMBER.findall(text)
    return float(
        bool(numbers) and len(numbers[-1]) < 100 and value(numbers[-1]) == value(ground_truth)
    )


def value(number: str) -> Fraction:
    """Return the exact value of a number in digits."""
    top, _, bottom = number.replace(",", "").replace("\u2212", "-").partition("/")
    return Fraction(top) / Fraction(bottom or 1)
