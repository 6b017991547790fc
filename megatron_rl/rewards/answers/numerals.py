"""Readers of what is written with digits: numbers, numerals with a base, times and dates."""

import math
import re
from fractions import Fraction

from megatron_rl.rewards.answers import values
from megatron_rl.rewards.answers.kinds import Items, Number, Text, Time

_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
# 0.1666..., in which the last digits are written at least three times.
_REPEATED = re.compile(r"([+-]?\d*\.\d{0,20}?)(\d{1,10}?)\2{2,30} ?\\ldots")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
          "ten": 10, "twelve": 12, "sixteen": 16}  # fmt: skip
_BASED = re.compile(
    r"(-?)\s*(?:\(([\dA-Z]+)\)|([\dA-Z]+)|\\text\{ ?([\dA-Z]+) ?\})\s*_\s*"
    rf"(?:\{{\s*(\d\d?)\s*\}}|(\d)\b|\{{? ?\\text\{{ ?({'|'.join(_BASES)}) ?\}} ?\}}?)"
)
_TIME = re.compile(
    r"(\d{1,2}):(\d\d)(?::(\d\d))?\s*(?:\\text\{)?\s*([ap]\.?\s?m\.?)?\s*\}?"
    r"|(\d{1,2})\s*(?:\\text\{)?\s*([ap]\.?\s?m\.?)\s*\}?",
    re.IGNORECASE,
)
_DATE = re.compile(r"\d{4} ?([-/]) ?\d{1,2} ?\1 ?\d{1,2}|\d{1,2} ?([-/]) ?\d{1,2} ?\2 ?\d{4}")

_MONTHS = "january february march april may june july august september october november december"
_MONTH = "|".join(f"{month[:3]}(?:{month[3:]})?\\.?" for month in _MONTHS.split())
_DAY = r"(\d{1,2})(?: ?(?:st|nd|rd|th))?"
_WRITTEN_DATE = re.compile(
    rf"(?:{_DAY} (?:of )?({_MONTH})|({_MONTH}) {_DAY})(?:,? ?(\d{{4}}))?", re.IGNORECASE
)


def read_number(text: str) -> Number | None:
    if _THOUSANDS.fullmatch(text):
        parts = tuple(map(read_number, text.split(",")))
        value = values.rational(text.replace(",", ""))
        return None if value is None else Number(value, parts=Items(",", parts))
    if re.fullmatch(r"([+-]?) ?\\infty ?", text):
        return Number(-math.inf if text[0] == "-" else math.inf)
    if match := _REPEATED.fullmatch(text):
        text = rf"{match[1]}({match[2]})"
    value = values.rational(text)
    if value is None:
        return None
    digits = len(text.replace(".", "").lstrip("+-0")) if "." in text and text[-1] != ")" else 0
    return Number(value, digits=digits if "\\" not in text else 0)


def read_time(text: str) -> Time | None:
    """Read 10:30, 10:30 pm, 10 pm or 22:30, which is 10:30 pm."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    half = re.sub(r"[^apm]", "", (match[4] or match[6] or "").lower())
    hours, *rest = [int(one) for one in match.group(1, 2, 3) if one] or [int(match[5]), 0]
    if not half and 12 < hours < 24:
        hours, half = hours - 12, "pm"
    return Time((hours, *rest), half)


def read_date(text: str) -> Text | None:
    """Read `January 5th, 2026` and `5 January 2026`; keep 2026-01-05, which is no difference."""
    plain = re.sub(r" ?\\text\{([^{}]*)\}", r" \1", text)
    if match := _WRITTEN_DATE.fullmatch(re.sub(" +", " ", plain).strip(" ")):
        month = (match[2] or match[3])[:3].casefold()
        return Text(f"{month} {match[1] or match[4]} {match[5] or ''}")
    return Text(text.replace(" ", "")) if _DATE.fullmatch(text) else None


def read_based(text: str) -> Number | Text | None:
    """Read a numeral with its base, as 2516_8; its value is a number."""
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    sign, numeral = match[1], match[2] or match[3] or match[4]
    base = int(match[5] or match[6] or _BASES[match[7]])
    if numeral.isalpha() and (len(numeral) == 1 or base <= 10):
        return None  # a variable with an index
    try:
        return Number(Fraction(int(sign + numeral, base)))
    except ValueError:  # a digit that the base does not have
        return Text(text)
