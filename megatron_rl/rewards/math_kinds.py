r"""The kinds of answers, and when two answers of a kind are equal.

`read` tries the readers of `READERS` in order; each recognises one kind. `equal` compares two
readings by the rules of their kinds. docs/rewards.md has the same table with examples, and
tests/unit/rewards/math_answers.csv several hundred of them.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from megatron_rl.rewards import math_values
from megatron_rl.rewards.math_text import closing, split, tidy, unwrap
from megatron_rl.rewards.math_units import split_unit
from megatron_rl.rewards.math_values import TooLarge


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


_FLOAT_DIGITS = 15  # a decimal of so many significant digits is a rounded float
_INFINITY = Number(math.inf)
_COMMA = re.compile(
    r"[,;]|\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_OR = re.compile(r"\\cup(?![a-zA-Z])|\\text\{\s*or\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])")
_CUP = re.compile(r"\\cup(?![a-zA-Z])")
_INEQUALITY = re.compile(r"\\le |\\ge |\\ne |<|>")
_EQUALS = re.compile(r"=")
_NAME = re.compile(
    r"(?:\\text\{[^{}]*\}|\\?[a-zA-Z]+)(?:_(?:\w|\{\w+\}))?'*(?:\^\{-1\})?"
    r"(?:\s*\([a-zA-Z](?:, ?[a-zA-Z])*\))?|\([a-zA-Z](?:, ?[a-zA-Z])*\)"
)
_MATRIX = re.compile(
    r"[(\[]? ?\\begin\{([pb]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\} ?[)\]]?", re.DOTALL
)
_BASED = re.compile(r"(-?)\s*(?:\(([\dA-Z]+)\)|([\dA-Z]+))\s*_\s*(?:\{\s*(\d\d?)\s*\}|(\d)\b)")
_TIME = re.compile(
    r"(\d{1,2}):(\d\d)(?::(\d\d))?\s*(?:\\text\{)?\s*([ap]\.?\s?m\.?)?\s*\}?", re.IGNORECASE
)
_CHOICE = re.compile(
    r"(?:\\text\{)?\s*\(\s*([A-Za-z])\s*\)\s*\}?[.:]?\s*((?![,;]|and\b|or\b|\\text\{ *(?:and|or)\b).*)"
    r"|(?:\\text\{)?\s*([A-Z])(?:\s*\}?\s*[.):]\s*|\}\s+)(\S.*)"
    r"|(?:\\text\{)?\s*([A-J])[.):]?\s*\}?"
)
_WORD = r"(?:[^\W\d_]{2,}(?:['-][^\W\d_]{2,})*|[^\W\d_](?:'[^\W\d_]+)?)\.?"
_WORDS = re.compile(rf"{_WORD}(?: {_WORD})*")
_GEOMETRY = re.compile(
    r"\\(?:triangle|angle|overline|overrightarrow|vec|parallel|perp|cong|sim|square|odot)"
)


@lru_cache(maxsize=10_000)
def read(text: str) -> Any:
    """Return the reading of an answer as it was written."""
    return read_tidy(tidy(text))


def read_tidy(text: str) -> Any:
    """Return the reading of a part of a tidy answer."""
    text = unwrap(text.strip(" "))
    for reader in READERS:
        reading = reader(text)
        if reading is not None:
            return reading
    return Text(text)


def _read_number(text: str) -> Number | None:
    if _THOUSANDS.fullmatch(text):
        parts = tuple(read_tidy(part) for part in text.split(","))
        value = math_values.rational(text.replace(",", ""))
        return None if value is None else Number(value, parts=Items(",", parts))
    if re.fullmatch(r"([+-]?) ?\\infty ?", text):
        return Number(-math.inf if text[0] == "-" else math.inf)
    value = math_values.rational(text)
    if value is None:
        return None
    digits = len(text.replace(".", "").lstrip("+-0")) if "." in text and text[-1] != ")" else 0
    return Number(value, digits=digits if "\\" not in text else 0)


def _read_choice(text: str) -> Choice | None:
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    letter = (match[1] or match[3] or match[5]).upper()
    content = match[2] or match[4]
    return Choice(letter, read_tidy(content) if content else None)


def _read_time(text: str) -> Time | None:
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    half = re.sub(r"[^apm]", "", (match[4] or "").lower())
    return Time(tuple(int(one) for one in match.group(1, 2, 3) if one), half)


def _read_based(text: str) -> Number | Text | None:
    """Read a numeral with its base, as 2516_8; its value is a number."""
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    sign, numeral, base = match[1], match[2] or match[3], int(match[4] or match[5])
    if numeral.isalpha() and (len(numeral) == 1 or base <= 10):
        return None  # a variable with an index
    try:
        return Number(Fraction(int(sign + numeral, base)))
    except ValueError:  # a digit that the base does not have
        return Text(text)


def _read_geometry(text: str) -> Text | None:
    """Keep names of angles, segments and triangles as they are written."""
    return Text(text.replace(" ", "")) if _GEOMETRY.search(text) and "=" not in text else None


def _read_plus_minus(text: str) -> Items | None:
    if r"\pm" not in text and r"\mp" not in text:
        return None
    up = text.replace(r"\pm", "+").replace(r"\mp", "-")
    down = text.replace(r"\pm", "-").replace(r"\mp", "+")
    return Items(",", (read_tidy(up.lstrip("+ ")), read_tidy(down)))


def _read_union(text: str) -> Any:
    if text == r"\mathbb{R}":
        return Interval(Number(-math.inf), _INFINITY, "()")
    base, without, points = text.partition(r"\setminus")
    if without and base.strip() == r"\mathbb{R}":
        return _all_except(read_tidy(points), "")
    parts = split(text, _CUP)
    if len(parts) == 1:
        parts = split(text, _OR)
        if not all(_INEQUALITY.search(part) for part in parts):
            return None
    if len(parts) == 1 or not all(parts):
        return None
    readings = [read_tidy(part) for part in parts]
    names = {one.name for one in readings if isinstance(one, Interval) and one.name}
    if len(names) > 1:
        return Text(text)
    return Union(tuple(inner for one in readings for inner in _union_parts(one)))


def _union_parts(reading: Any) -> tuple[Any, ...]:
    return reading.parts if isinstance(reading, Union) else (reading,)


def _all_except(points: Any, name: str) -> Union | None:
    """Return the real numbers without some points."""
    items = points.items if isinstance(points, Items) else (points,)
    if len(items) > 1 and not all(isinstance(one, Number) for one in items):
        return None
    ordered = sorted(items, key=lambda one: one.value) if len(items) > 1 else list(items)
    ends = [Number(-math.inf), *ordered, _INFINITY]
    return Union(
        tuple(Interval(low, high, "()", name) for low, high in zip(ends, ends[1:], strict=False))
    )


def _read_items(text: str) -> Any:
    """Read a list, a tuple, a set or an interval."""
    parts = _commas(text)
    if len(parts) > 1:
        return Items(",", _flat(parts))
    ratio = text.split(":")
    if len(ratio) > 1 and all(re.fullmatch(r" ?[\d./a-z\\ {}]+", part) for part in ratio):
        return Items(":", tuple(read_tidy(part) for part in ratio))
    opening, inner, end = _bracketed(text)
    if not opening:
        return None
    parts = _commas(inner, is_bracketed=True)
    if opening + end == "()" and len(parts) == 1 or not all(parts):
        return None
    return Items(opening + end, _flat(parts) if opening == "{" else tuple(map(read_tidy, parts)))


def _flat(parts: list[str]) -> tuple[Any, ...]:
    r"""Read the items of a list, of which `\pm 3` is two."""
    readings = [read_tidy(part) for part in parts if part]
    return tuple(
        item
        for one in readings
        for item in (one.items if isinstance(one, Items) and one.brackets == "," else (one,))
    )


def _bracketed(text: str) -> tuple[str, str, str]:
    for opening, end in ((r"\{", r"\}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")")):
        if text.startswith(opening) and text.endswith(end):
            start = len(opening) - 1
            if closing(text, start) == len(text) - 1:
                return opening[-1], text[len(opening) : -len(end)].strip(" "), end[-1]
    return "", text, ""


def _commas(text: str, *, is_bracketed: bool = False) -> list[str]:
    """Split at commas, but not at those of thousands, as in `1,000, 2,000`."""
    parts = split(text, _COMMA)
    if len(parts) == 1:
        return parts
    joined = re.sub(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,]*\d)",
                    lambda match: match[0].replace(",", ""), text)  # fmt: skip
    parts_without = split(joined, _COMMA)
    return parts if is_bracketed and len(parts_without) == 1 else [p for p in parts_without if p]


def _read_matrix(text: str) -> Items | None:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr", match[2]) if row.strip()]
    return Items("matrix", tuple(
        Items("row", tuple(read_tidy(entry) for entry in row.split("&"))) for row in rows
    ))  # fmt: skip


def _read_membership(text: str) -> Assignment | None:
    name, member, values = text.partition(r"\in ")
    if not member or not _NAME.fullmatch(name.strip()):
        return None
    return Assignment(_plain_name(name), read_tidy(values))


def _read_inequality(text: str) -> Any:
    parts = split(text, _INEQUALITY)
    if len(parts) == 1 or not all(parts) or "=" in text:
        return None
    signs = [match[0].strip() for match in _INEQUALITY.finditer(text)]
    if len(signs) != len(parts) - 1:
        return Text(text)
    names = [bool(_NAME.fullmatch(part)) for part in parts]
    if len(parts) == 2:
        if names == [True, False] or names == [False, True]:
            return _half_line(parts, signs[0], name_first=names[0])
        return _relation(parts[0], signs[0], parts[1])
    if len(parts) != 3 or not names[1] or r"\ne" in signs:
        return Text(text)
    if {sign[-1] in ">" or sign == r"\ge" for sign in signs} == {True}:
        parts, signs = parts[::-1], [_flipped(sign) for sign in signs[::-1]]
    if not set(signs) <= {"<", r"\le"}:
        return Text(text)
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Interval(read_tidy(parts[0]), read_tidy(parts[2]), brackets, _plain_name(parts[1]))


def _half_line(parts: list[str], sign: str, *, name_first: bool) -> Any:
    name, end = _plain_name(parts[0 if name_first else 1]), read_tidy(parts[1 if name_first else 0])
    sign = sign if name_first else _flipped(sign)
    if sign == r"\ne":
        return _all_except(end, name)
    if sign in ("<", r"\le"):
        return Interval(Number(-math.inf), end, "()" if sign == "<" else "(]", name)
    return Interval(end, _INFINITY, "()" if sign == ">" else "[)", name)


def _flipped(sign: str) -> str:
    return {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}.get(sign, sign)


def _relation(left: str, sign: str, right: str) -> Relation | None:
    if sign in (">", r"\ge"):
        left, sign, right = right, _flipped(sign), left
    difference = f"({left})-({right})"
    return Relation(sign, difference) if math_values.parse(difference) is not None else None


def _plain_name(name: str) -> str:
    """Return the name of a variable; labels in words, such as `Area`, are not compared."""
    name = re.sub(r"[\s{}]|\\text", "", name)
    return "" if re.fullmatch(r"[a-zA-Z]{2,}", name) else name


def _read_equation(text: str) -> Any:
    sides = split(text, _EQUALS)
    if len(sides) == 1 or _INEQUALITY.search(text) or not all(sides):
        return None
    if _NAME.fullmatch(sides[0]):
        return Assignment(_plain_name(sides[0]), read_tidy(sides[-1]))
    if len(sides) == 2 and (relation := _relation(sides[0], "=", sides[1])):
        if math_values.parse(relation.difference).free_symbols:
            return relation
    return read_tidy(sides[-1])


def _read_quantity(text: str) -> Quantity | None:
    found = split_unit(text)
    if found is None:
        return None
    value, unit, factor = found
    if unit == "degree" and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", value):
        return None  # the angle of a function
    reading = read_tidy(value)
    if isinstance(reading, Number):
        number = Number(reading.value * factor)
        letters = text if re.fullmatch(r".* [a-zA-Z]", text) else ""
        return Quantity(number, unit, letters) if unit else number
    return Quantity(reading, unit) if isinstance(reading, Expression) and unit else None


def _read_words(text: str) -> Words | None:
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).replace("$", "").strip(" ")
    if not _WORDS.fullmatch(plain) or (len(plain) == 1 and plain.isascii()):
        return None
    words = re.split(r"[ -]+", plain.strip(".").casefold())
    is_spelled = all(len(word) == 1 for word in words)
    return Words(("" if is_spelled else " ").join(words))


def _read_expression(text: str) -> Any:
    latex = re.sub(r"\\text\{\s*([a-zA-Z]|[^a-zA-Z{}]*)\s*\}", r"\1", text)
    latex = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", latex)
    tree = math_values.parse(latex)
    if tree is None:
        return None
    try:
        value = math_values.exact(tree)
    except TooLarge:
        return Text(re.sub(r"\{(\w)\}", r"\1", text.replace(" ", "")))
    return Expression(latex) if value is None else Number(value)


READERS: tuple[Callable[[str], Any], ...] = (
    _read_number,
    _read_choice,
    _read_time,
    _read_based,
    _read_matrix,
    _read_geometry,
    _read_union,
    _read_membership,
    _read_items,
    _read_plus_minus,
    _read_inequality,
    _read_equation,
    _read_quantity,
    _read_words,
    _read_expression,
)


def equal(truth: Any, answer: Any) -> bool:
    """Whether an answer equals the ground truth, both as readings."""
    if truth == answer:
        return True
    if isinstance(truth, Number) and isinstance(answer, Number):
        return _equal_numbers(truth, answer)
    if isinstance(truth, Quantity) and truth.letters and isinstance(answer, Number):
        return False
    if isinstance(truth, Number) and truth.digits >= _FLOAT_DIGITS and isinstance(answer, Expression):
        return math_values.is_near(math_values.parse(answer.latex), truth.value)
    for first, second in ((truth, answer), (answer, truth)):
        for kind, rule in RULES:
            if isinstance(first, kind):
                verdict = rule(first, second)
                if verdict is not None:
                    return verdict
    return False


def _equal_numbers(truth: Number, answer: Number) -> bool:
    """Compare exactly; a ground truth of 15 or more digits is a rounded float."""
    if truth.value == answer.value:
        return True
    return truth.digits >= _FLOAT_DIGITS and math_values.is_near(answer.value, truth.value)


# Each rule returns whether two readings are equal, or None if another rule decides.


def _equal_choice(choice: Choice, other: Any) -> bool | None:
    if isinstance(other, Choice):
        if choice.letter != other.letter:
            return False
        return None in (choice.content, other.content) or equal(choice.content, other.content)
    if isinstance(other, Expression) and choice.content is None:
        is_small_letter = other.latex.upper() == choice.letter
        return is_small_letter or equal(Expression(choice.letter), other)
    return choice.content is not None and equal(choice.content, other)


def _equal_assignment(assignment: Assignment, other: Any) -> bool | None:
    """A name may be missing: `x = 5` is 5, and `f(x) = 2x` is 2x; two names must be the same."""
    if isinstance(other, Assignment):
        same_name = not (assignment.name and other.name) or assignment.name == other.name
        if same_name and equal(assignment.value, other.value):
            return True
        relations = _as_relation(assignment), _as_relation(other)
        return None not in relations and equal(*relations)
    if isinstance(other, Relation):
        relation = _as_relation(assignment)
        return relation is not None and equal(relation, other)
    if isinstance(other, Interval | Union) and _name_of(other):
        return assignment.name in ("", _name_of(other)) and equal(assignment.value, other)
    return None if isinstance(other, Items) and len(other.items) == 1 else equal(
        assignment.value, other)  # fmt: skip


def _as_relation(assignment: Assignment) -> Relation | None:
    value = assignment.value
    if isinstance(value, Expression) and re.fullmatch(r"\\?[a-zA-Z](_\w+)?", assignment.name):
        return _relation(assignment.name, "=", value.latex)
    return None


def _name_of(values: Any) -> str:
    parts = _union_parts(values)
    return parts[0].name if isinstance(parts[0], Interval) else ""


def _equal_quantity(quantity: Quantity, other: Any) -> bool | None:
    """A unit may be missing; two must be the same. Percent may also be applied: 50% is 0.5."""
    if isinstance(other, Quantity):
        if quantity.unit == other.unit:
            return equal(quantity.value, other.value)
        return False
    if isinstance(other, Words | Text | Choice):
        return False
    if isinstance(other, Expression) and quantity.letters:
        return equal(Expression(quantity.letters), other)
    if equal(quantity.value, other):
        return True
    if quantity.unit != "%" or not isinstance(quantity.value, Number):
        return False if isinstance(other, Number | Expression) else None
    return isinstance(other, Number) and quantity.value.value == other.value * 100


def _equal_time(time: Time, other: Any) -> bool:
    if not isinstance(other, Time):
        return False
    return time.digits == other.digits and (not (time.half and other.half) or time.half == other.half)


def _equal_union(union: Union, other: Any) -> bool | None:
    if not isinstance(other, Union | Interval | Items):
        return None
    names = {name for name in (_name_of(union), _name_of(other)) if name}
    if len(names) > 1:
        return False
    return _match_any_order(list(union.parts), list(_union_parts(other)))


def _equal_interval(interval: Interval, other: Any) -> bool | None:
    if isinstance(other, Items) and len(other.items) == 2 and other.brackets in ("()", "[)", "(]", "[]"):
        other = Interval(*other.items, other.brackets)
    if not isinstance(other, Interval):
        return None
    if interval.name and other.name and interval.name != other.name:
        return False
    return (
        _ends(interval) == _ends(other)
        and equal(interval.low, other.low)
        and equal(interval.high, other.high)
    )


def _ends(interval: Interval) -> str:
    """Return the brackets; an end at infinity is open, however it is written."""
    low = "(" if equal(interval.low, Number(-math.inf)) else interval.brackets[0]
    return low + (")" if equal(interval.high, _INFINITY) else interval.brackets[1])


def _equal_items(items: Items, other: Any) -> bool | None:
    if isinstance(other, Number) and other.parts is not None and items.brackets == ",":
        other = other.parts
    if not isinstance(other, Items):
        alone = len(items.items) == 1 and items.brackets in (",", "{}", "[]")
        return equal(items.items[0], other) if alone else None
    kinds = {items.brackets, other.brackets}
    first, second = list(items.items), list(other.items)
    if len(kinds) == 1 and items.brackets not in (",", "{}") or kinds == {",", "()"}:
        return len(first) == len(second) and all(map(equal, first, second))
    if kinds == {"()", "[]"} and len(first) > 2:  # vectors: only pairs are intervals
        return len(first) == len(second) and all(map(equal, first, second))
    if kinds < {"()", "[)", "(]", "[]"} and len(first) == len(second) == 2:
        return _equal_interval(Interval(*first, items.brackets), other)
    if not kinds <= {",", "{}"}:
        return False
    if Text(r"\ldots") in first + second:  # a sequence
        return len(first) == len(second) and all(map(equal, first, second))
    if "{}" in kinds:
        first, second = _distinct(first), _distinct(second)
    return _match_any_order(first, second)


def _distinct(items: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for item in items:
        if not any(equal(one, item) for one in kept):
            kept.append(item)
    return kept


def _match_any_order(first: list[Any], second: list[Any]) -> bool:
    if len(first) != len(second):
        return False
    waiting = list(second)
    for item in first:
        match = next((index for index, one in enumerate(waiting) if equal(item, one)), None)
        if match is None:
            return False
        del waiting[match]
    return True


def _equal_relation(relation: Relation, other: Any) -> bool | None:
    if not isinstance(other, Relation) or relation.sign != other.sign:
        return None
    trees = math_values.parse(relation.difference), math_values.parse(other.difference)
    return _decided(math_values.proportional, *trees, positive=relation.sign != "=")


def _equal_expression(expression: Expression, other: Any) -> bool | None:
    """Compare values; letters without signs, such as `ab`, are the product if the other has any."""
    if isinstance(other, Number) and isinstance(other.value, Fraction):
        second = math_values.rational_tree(other.value)
    elif isinstance(other, Expression):
        second = math_values.parse(other.latex)
    elif isinstance(other, Words) and re.fullmatch("[a-z]{1,4}", other.text):
        second = math_values.parse(other.text)
    else:
        return None
    first = math_values.parse(expression.latex)
    return second is not None and _decided(math_values.same, first, second)


def _decided(compare: Callable[..., bool], *trees: Any, **options: Any) -> bool:
    try:
        return compare(*trees, **options)
    except TooLarge:
        return bool(trees[0] == trees[1])


RULES: tuple[tuple[type, Callable[[Any, Any], bool | None]], ...] = (
    (Choice, _equal_choice),
    (Assignment, _equal_assignment),
    (Items, _equal_items),
    (Quantity, _equal_quantity),
    (Time, _equal_time),
    (Union, _equal_union),
    (Interval, _equal_interval),
    (Relation, _equal_relation),
    (Expression, _equal_expression),
)

