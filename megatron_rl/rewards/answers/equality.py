r"""Equality of two answers, by the rules of their kinds.

docs/rewards.md has these rules as a table, and tests/unit/rewards/math_answers.tsv a thousand
examples.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from megatron_rl.rewards.answers import values
from megatron_rl.rewards.answers.kinds import (
    INFINITY,
    MINUS_INFINITY,
    Assignment,
    Choice,
    Expression,
    Interval,
    Items,
    Number,
    Quantity,
    Relation,
    Text,
    Time,
    Union,
    Words,
    as_interval,
    parts_of,
)  # fmt: skip
from megatron_rl.rewards.answers.reading import relation
from megatron_rl.rewards.answers.values import TooLargeError

_FLOAT_DIGITS = 15  # a decimal of so many significant digits is a rounded float


def equal(truth: Any, answer: Any) -> bool:
    """Return True if an answer equals the ground truth, both as readings."""
    if truth == answer:
        return True
    if isinstance(truth, Number) and isinstance(answer, Number):
        return _equal_numbers(truth, answer)
    if isinstance(truth, Quantity) and truth.letters and isinstance(answer, Number):
        return False
    if (share := _as_share(answer)) is not None and not isinstance(truth, Quantity):
        # A sign may be missing where both are the same decimal, but 1/2 is not 0.5%.
        are_decimals = isinstance(truth, Number) and truth.digits and answer.value.digits
        is_ratio = isinstance(truth, Items) and truth.brackets == ":"
        if is_ratio or (0 < abs(share) < Fraction(1, 100) and not are_decimals):
            return equal(truth, Number(share))
    both_orders = ((truth, answer), (answer, truth))
    for first, second in both_orders:
        if _is_float(first) and isinstance(second, Expression):
            return values.is_near(values.parse(second.latex), first.value)
    for first, second in both_orders:
        for kind, rule in RULES:
            if isinstance(first, kind):
                verdict = rule(first, second)
                if verdict is not None:
                    return verdict
    return False


def _as_share(reading: Any) -> Fraction | None:
    """Return a percentage as a part of one."""
    if not isinstance(reading, Quantity) or reading.unit != "%":
        return None
    number = reading.value.value if isinstance(reading.value, Number) else None
    return number / 100 if isinstance(number, Fraction) else None


def _is_float(reading: Any) -> bool:
    return isinstance(reading, Number) and reading.digits >= _FLOAT_DIGITS


def _equal_numbers(truth: Number, answer: Number) -> bool:
    """Compare exactly, except that a rounded float is near an endless decimal, as 1/3 is."""
    if truth.value == answer.value:
        return True
    is_rounded = _is_float(truth) or (_is_float(answer) and values.is_endless(truth.value))
    return is_rounded and values.is_near(answer.value, truth.value)


def _equal_words(words: Words, other: Any) -> bool | None:
    """Compare words; letters A to J are also a list of choices, in order unless they are sorted."""
    if isinstance(other, Words):
        formulas = {words.formula, other.formula}
        return words.text == other.text and (len(formulas) == 1 or "" in formulas)
    if not isinstance(other, Items) or other.brackets not in (",", "{}"):
        return None
    letters = [one.letter if isinstance(one, Choice) else "" for one in other.items]
    if not all(letters) or not re.fullmatch("[a-j]{2,10}", words.text):
        return None
    expected = list(words.text.upper())
    return letters == expected or (expected == sorted(set(expected)) == sorted(letters))


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
        return relation(assignment.name, "=", value.latex)
    return None


def _name_of(values: Any) -> str:
    parts = parts_of(values)
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
    return time.digits == other.digits and (
        not (time.half and other.half) or time.half == other.half
    )


def _equal_union(union: Union, other: Any) -> bool | None:
    if not isinstance(other, Union | Interval | Items):
        return None
    names = {name for name in (_name_of(union), _name_of(other)) if name}
    if len(names) > 1:
        return False
    return _match_any_order(list(union.parts), list(_parts_of_list(other) or parts_of(other)))


def _parts_of_list(other: Any) -> tuple[Any, ...] | None:
    """Return the intervals of a list of intervals, which is their union."""
    if not isinstance(other, Items) or other.brackets != ",":
        return None
    is_all = all(isinstance(as_interval(one), Interval) for one in other.items)
    return other.items if is_all else None


def _equal_interval(interval: Interval, other: Any) -> bool | None:
    other = as_interval(other)
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
    low = "(" if equal(interval.low, MINUS_INFINITY) else interval.brackets[0]
    return low + (")" if equal(interval.high, INFINITY) else interval.brackets[1])


def _equal_items(items: Items, other: Any) -> bool | None:
    if isinstance(other, Number) and other.parts is not None and items.brackets == ",":
        other = other.parts
    if items.brackets == ":" and (quotients := _quotients(items, other)):
        return quotients[0] == quotients[1]
    if not isinstance(other, Items):
        alone = len(items.items) == 1 and items.brackets in (",", "{}", "[]")
        return equal(items.items[0], other) if alone else None
    items, other = _as_vector(items, other), _as_vector(other, items)
    kinds = {items.brackets, other.brackets}
    first, second = list(items.items), list(other.items)
    if (len(kinds) == 1 and items.brackets not in (",", "{}")) or kinds == {",", "()"}:
        return len(first) == len(second) and all(map(equal, first, second))
    if kinds == {"()", "[]"} and len(first) > 2:  # vectors: only pairs are intervals
        return len(first) == len(second) and all(map(equal, first, second))
    if kinds < {"()", "[)", "(]", "[]"} and len(first) == len(second) == 2:
        return _equal_interval(Interval(first[0], first[1], items.brackets), other)
    if not kinds <= {",", "{}"}:
        return False
    if Text(r"\ldots") in first + second:  # a sequence
        return len(first) == len(second) and all(map(equal, first, second))
    if "{}" in kinds:
        first, second = _distinct(first), _distinct(second)
    return _match_any_order(first, second)


def _quotients(ratio: Items, other: Any) -> list[Any] | None:
    """Return the quotients of a ratio of numbers and of another one; 3:2 is also 3/2."""
    pair = []
    for one in (ratio, other):
        numbers = (
            one.items
            if isinstance(one, Items) and one.brackets == ":"
            else (one, Number(Fraction(1)))
        )
        if not all(isinstance(number, Number) and number.value for number in numbers):
            return None
        pair.append([number.value / numbers[-1].value for number in numbers])
    return pair


def _as_vector(items: Items, other: Items) -> Items:
    """Read a matrix of one row or column as a tuple if the other is one, [[1], [2]] as a matrix."""
    if items.brackets == "matrix" and other.brackets in ("()", "[]", ","):
        if len(items.items) == 1:
            return Items(other.brackets, items.items[0].items)
        if all(len(row.items) == 1 for row in items.items):
            return Items(other.brackets, tuple(row.items[0] for row in items.items))
    is_nested = all(isinstance(row, Items) and row.brackets == "[]" for row in items.items)
    if items.brackets == "[]" and other.brackets == "matrix" and is_nested:
        return Items("matrix", tuple(Items("row", row.items) for row in items.items))
    return items


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
    trees = values.parse(relation.difference), values.parse(other.difference)
    return _decided(values.proportional, *trees, positive=relation.sign != "=")


def _equal_expression(expression: Expression, other: Any) -> bool | None:
    """Compare values; letters without signs, such as `ab`, are the product if the other has any."""
    if isinstance(other, Number) and isinstance(other.value, Fraction):
        second = values.rational_tree(other.value)
    elif isinstance(other, Expression):
        second = values.parse(other.latex)
    elif isinstance(other, Words) and re.fullmatch("[a-z]{1,4}", other.text):
        second = values.parse(other.text)
    else:
        return None
    first = values.parse(expression.latex)
    return second is not None and _decided(values.same, first, second)


def _decided(compare: Callable[..., bool], *trees: Any, **options: Any) -> bool:
    try:
        return compare(*trees, **options)
    except TooLargeError:
        return bool(trees[0] == trees[1])


RULES: tuple[tuple[type, Callable[[Any, Any], bool | None]], ...] = (
    (Choice, _equal_choice),
    (Words, _equal_words),
    (Assignment, _equal_assignment),
    (Items, _equal_items),
    (Quantity, _equal_quantity),
    (Time, _equal_time),
    (Union, _equal_union),
    (Interval, _equal_interval),
    (Relation, _equal_relation),
    (Expression, _equal_expression),
)
