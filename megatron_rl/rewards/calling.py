"""How a verifier is called, as its signature asks, and what it may return.

Runs in a worker process: no torch here.
"""

import asyncio
import inspect
import json
import math
import numbers
import traceback
from collections.abc import Sequence
from typing import Any

from megatron_rl.rewards.verifier import NUMBER, TIME_LIMIT, Item

Answer = list[Any] | dict[str, str]  # [reward, reason, answer], or {"error": what went wrong}
_LONGEST_VALUE = 120  # characters of a wrong return value that an error repeats


class Call:
    """A verifier with the way in which it wants to be called.

    time_limit: seconds for one call; those of an async verifier for single responses run together.
    """

    def __init__(self, verifier: Any, *, name: str, time_limit: float) -> None:
        self.verifier, self.name, self.time_limit = verifier, name, time_limit
        self.is_async = inspect.iscoroutinefunction(verifier) or inspect.iscoroutinefunction(
            getattr(verifier, "__call__", None)  # noqa: B004 - an object's own, not whether it has one
        )
        names = _parameters(verifier)
        self.is_batched = names[:1] == ["texts"]
        self.wants_row = ("rows" if self.is_batched else "row") in names
        self.takes_many = self.is_batched or self.is_async
        # One loop for the process: a client that the verifier keeps belongs to it.
        self._runner = asyncio.Runner() if self.is_async else None

    def judge(self, items: Sequence[Item]) -> list[Answer] | dict[str, str]:
        """An answer for each item; where the call as a whole failed, one for all."""
        try:
            if self.is_batched:
                value = self._call_batched(items)
                return [read_verdict(one, name=self.name) for one in self._as_list(value, items)]
            if self._runner is not None:
                return self._runner.run(self._judge_together(items))
            return [self._judge_one(item) for item in items]
        except Exception:  # noqa: BLE001 - whatever it is, the parent decides
            return {"error": traceback.format_exc()}

    def _judge_one(self, item: Item) -> Answer:
        try:
            return read_verdict(self._call(item), name=self.name)
        except Exception:  # noqa: BLE001 - whatever it is, the parent decides
            return {"error": traceback.format_exc()}

    async def _judge_together(self, items: Sequence[Item]) -> list[Answer]:
        async def one(item: Item) -> Answer:
            try:
                async with asyncio.timeout(self.time_limit) as limit:
                    return read_verdict(await self._call(item), name=self.name)
            except Exception as error:  # noqa: BLE001 - whatever it is, the parent decides
                # Its own client may have raised a TimeoutError, too.
                if isinstance(error, TimeoutError) and limit.expired():
                    return [0.0, TIME_LIMIT, None]
                return {"error": traceback.format_exc()}

        return list(await asyncio.gather(*map(one, items)))

    def _call(self, item: Item) -> Any:
        extra = {"row": json.loads(item.row)} if self.wants_row else {}
        return self.verifier(item.text, item.ground_truth, item.data_source, **extra)

    def _call_batched(self, items: Sequence[Item]) -> Any:
        columns = [[item[column] for item in items] for column in range(3)]
        extra = {"rows": [json.loads(item.row) for item in items]} if self.wants_row else {}
        value = self.verifier(*columns, **extra)
        return value if self._runner is None else self._runner.run(value)

    def _as_list(self, value: Any, items: Sequence[Item]) -> list[Any]:
        if hasattr(value, "tolist"):  # an array or a tensor
            value = value.tolist()
        if not isinstance(value, list | tuple) or len(value) != len(items):
            raise TypeError(
                f"{self.name} returned {_shown(value)} for {len(items)} responses; return a list "
                "with a number, or (reward, reason, answer), for each of them"
            )
        return list(value)


def read_verdict(value: Any, *, name: str) -> list[Any]:
    """[reward, reason, answer] of what a verifier returned.

    Raises TypeError that says what it should have returned.
    """
    if (number := _as_number(value)) is not None:
        return [number, NUMBER, None]
    if isinstance(value, list | tuple) and len(value) == 3:
        reward, reason, answer = _as_number(value[0]), value[1], value[2]
        if reward is not None and isinstance(reason, str) and isinstance(answer, str | None):
            return [reward, str(reason), answer if answer is None else str(answer)]
    raise TypeError(
        f"{name} returned {_shown(value)}; return the reward, a finite number, or a tuple (reward, "
        "reason, answer): that number, a text, and a text or None"
    )


def _as_number(value: Any) -> float | None:
    """A finite number as a float; None for anything else. NumPy's and torch's scalars count."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        return None
    return float(value)


def _parameters(verifier: Any) -> list[str]:
    try:
        return list(inspect.signature(verifier).parameters)
    except ValueError:  # a builtin that does not say
        return []


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
