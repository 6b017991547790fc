"""The kinds of answers."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class Text:
    """An answer of no known kind: equal only to the same text."""

    text: str


@dataclass(frozen=True)
class Words:
    """Words or letters, such as `Evelyn` or `ABCD`: their order counts, capitals do not."""

    text: str


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
