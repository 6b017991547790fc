"""The kinds of answers, and operations on sets of real numbers."""

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Text:
    """An answer of no known kind: equal only to the same text."""

    text: str


@dataclass(frozen=True)
class Words:
    """Words or letters, such as `Evelyn` or `ABCD`: their order counts, capitals do not.

    formula: the text as it is if it consists of symbols of elements: CO is not Co.
    """

    text: str
    formula: str = ""


@dataclass(frozen=True)
class Choice:
    """A letter of a multiple-choice question, with the text of the choice if it is given."""

    letter: str
    content: Any = None


@dataclass(frozen=True)
class Number:
    """A rational number or an infinity.

    digits: significant digits of a decimal. parts: the numbers of `100,200` if its comma does not
    separate thousands.
    """

    value: Fraction | float
    digits: int = 0
    parts: Any = None


@dataclass(frozen=True)
class Expression:
    """Anything else that has a value: roots, variables, functions."""

    latex: str


@dataclass(frozen=True)
class Quantity:
    """A number with a unit, a currency, degrees or a percent sign.

    letters: the whole as LaTeX if the unit could be a variable, as in `5 m`.
    """

    value: Any
    unit: str
    letters: str = ""


@dataclass(frozen=True)
class Time:
    """A time of day; half is `am`, `pm` or empty."""

    digits: tuple[int, ...]
    half: str


@dataclass(frozen=True)
class Items:
    """Several answers. brackets: `,` for a bare list, `{}`, `()`, `[)` and so on, `matrix`, `:`."""

    brackets: str
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Interval:
    """The numbers between two ends. name: the variable of an inequality."""

    low: Any
    high: Any
    brackets: str
    name: str = ""


@dataclass(frozen=True)
class Union:
    """A union of intervals and sets."""

    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Assignment:
    """A value with a name, such as `x = 5`, `f(x) = 2x` or `x \\in [1, 2)`."""

    name: str
    value: Any


@dataclass(frozen=True)
class Relation:
    """An equation or inequality between expressions: `left - right` and `=`, `<` or `\\le`."""

    sign: str
    difference: str


INFINITY = Number(math.inf)
MINUS_INFINITY = Number(-math.inf)


def as_interval(values: Any) -> Any:
    """Return a pair in brackets of an interval as an interval, and anything else as it is."""
    brackets = ("()", "[)", "(]", "[]")
    if isinstance(values, Items) and len(values.items) == 2 and values.brackets in brackets:
        return Interval(values.items[0], values.items[1], values.brackets)
    return values


def parts_of(values: Any) -> tuple[Any, ...]:
    """Return the parts of a union, or the one set that it is."""
    return values.parts if isinstance(values, Union) else (values,)


def without(base: Interval, points: Any) -> Union | None:
    """Return an interval without some points within it; None if they are not within."""
    if isinstance(points, Interval | Union) or as_interval(points) is not points:
        return None
    items = points.items if isinstance(points, Items) else (points,)
    ends = [base.low, *items, base.high]
    if len(items) > 1 or (base.low, base.high) != (MINUS_INFINITY, INFINITY):
        if not all(isinstance(one, Number) for one in ends):
            return None
        ends.sort(key=lambda one: one.value)
        if ends[0] != base.low or ends[-1] != base.high:
            return None
    brackets = base.brackets[0] + ")(" * len(items) + base.brackets[1]
    return Union(tuple(
        Interval(low, high, brackets[2 * index : 2 * index + 2], base.name)
        for index, (low, high) in enumerate(pairwise(ends))
    ))  # fmt: skip


def intersection(first: Any, second: Any) -> Interval | Union | None:
    """Intersect two half lines, or an interval and all numbers but a few; None for other sets."""
    if isinstance(first, Union):
        first, second = second, first
    if not isinstance(first, Interval) or not isinstance(second, Interval | Union):
        return None
    parts = parts_of(second)
    if not all(isinstance(one, Interval) and one.name == first.name for one in parts):
        return None
    if isinstance(second, Union):
        holes = tuple(one.high for one in parts[:-1])
        is_all_but = [one.low for one in parts] == [MINUS_INFINITY, *holes]
        return without(first, Items(",", holes)) if is_all_but else None
    if first.low != MINUS_INFINITY:
        first, second = second, first
    low, high = second.low, first.high
    if (first.low, second.high) != (MINUS_INFINITY, INFINITY):
        return None
    if isinstance(low, Number) and isinstance(high, Number) and low.value >= high.value:
        return None
    return Interval(low, high, second.brackets[0] + first.brackets[1], first.name)


def half_line(name: str, sign: str, end: Any) -> Interval | Union | None:
    """Return the numbers that are below, above or not equal to an end."""
    if sign == r"\ne":
        return without(Interval(MINUS_INFINITY, INFINITY, "()", name), end)
    if sign in ("<", r"\le"):
        return Interval(MINUS_INFINITY, end, "()" if sign == "<" else "(]", name)
    return Interval(end, INFINITY, "()" if sign == ">" else "[)", name)


def flipped(sign: str) -> str:
    """Return the sign of an inequality whose sides are exchanged."""
    return {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}.get(sign, sign)
