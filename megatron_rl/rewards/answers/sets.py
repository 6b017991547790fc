"""Operations on sets of real numbers."""

from itertools import pairwise
from typing import Any

from megatron_rl.rewards.answers.kinds import (
    INFINITY,
    MINUS_INFINITY,
    Interval,
    Items,
    Number,
    Union,
    as_interval,
    parts_of,
)


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
    """Intersect two half lines, or an interval and all numbers but some; None for other sets."""
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
