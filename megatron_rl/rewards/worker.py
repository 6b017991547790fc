"""A verifier's process: calls by its signature, and checks of what it returns. No torch here.

Forked by `megatron_rl.workers.template`; it grades many responses, one call at a time. A request is
a line of JSON with `items`; its reply has `answers`, or one `error` of the whole call.
"""

import asyncio
import concurrent.futures.thread as executors
import inspect
import json
import math
import numbers
import re
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.rewards.verifier import NUMBER, SHAPED, Item, load_verifier
from megatron_rl.texts import clean
from megatron_rl.workers.template import describe_error, ending_forks

Answer = list[Any] | dict[str, str]  # [reward, reason, answer], or {"error": description}
MAX_TEXT = 1_000_000  # characters that are returned to the trainer
_LONGEST_VALUE = 120  # characters of a wrong return value that an error repeats
LARGEST_REWARD = 1e30  # sums and differences of rewards stay in float32's range, which ends at 3e38
_MOST_NAMES, _LONGEST_NAME = 100, 100  # of rewards that a verifier returns by name
_OTHER_LIBRARIES = {"completions": "TRL", "solution_str": "verl"}  # a parameter of their rewards


def load(settings: dict[str, Any]) -> tuple[dict[str, Any], Callable[[socket.socket], None]]:
    """Load the verifier of the settings; returns its description and what a fork runs."""
    name = settings["name"]
    call = Call(load_verifier(name), name=name, memory_gib=settings["memory_gib"])
    description = {"is_batched": call.is_batched, "is_async": call.is_async}
    return description, lambda channel: serve(call, channel)


def serve(call: "Call", channel: socket.socket) -> None:
    """Grade until the broker closes the channel."""
    lines = channel.makefile("rb")
    while line := lines.readline():
        request = json.loads(line)
        with ending_forks():
            answers = call.grade([Item(*item) for item in request["items"]])
        # A thread that the call has left would slow the next one down, or keep the interpreter.
        left = {*threading.enumerate()} - {threading.main_thread(), *executors._threads_queues}
        has_failed = isinstance(answers, dict)
        reply = {"number": request["number"], "answers": answers}
        reply["is_last"] = bool(left) or has_failed
        channel.sendall(b"\n" + json.dumps(reply).encode() + b"\n")


class SignatureError(UserError):
    """A verifier does not accept the arguments it is called with."""


class Call:
    """A verifier and its calling convention."""

    def __init__(self, verifier: Any, *, name: str, memory_gib: float | None = None) -> None:
        self.verifier, self.name, self._memory_gib = verifier, name, memory_gib
        self.is_async = inspect.iscoroutinefunction(verifier) or inspect.iscoroutinefunction(
            getattr(verifier, "__call__", None)  # noqa: B004 - an object's own, not whether it has one
        )
        names = _parameters(verifier)
        self.is_batched = names[:1] == ["texts"]
        self.wants_row = ("rows" if self.is_batched else "row") in names
        self._check_signature(names)
        self._runner: asyncio.Runner | None = None

    def grade(self, items: Sequence[Item]) -> list[Answer] | dict[str, str]:
        """Return an answer for each item, or a single one if the whole call failed."""
        try:
            if self.is_batched:
                columns = [[item[column] for item in items] for column in range(3)]
                rows = {"rows": [json.loads(item.row) for item in items]} if self.wants_row else {}
                value = self._run(self.verifier(*columns, **rows))
                return [read_grade(one, name=self.name) for one in self._as_list(value, items)]
            return [self._grade_one(item) for item in items]
        except BaseException as error:  # noqa: BLE001 - whatever it is, the trainer decides
            _, trace = describe_error(error, memory_gib=self._memory_gib)
            return {"error": trace}

    def _check_signature(self, names: list[str]) -> None:
        """Raise SignatureError if a call would fail or pass arguments in the wrong order."""
        library = next((_OTHER_LIBRARIES[name] for name in names if name in _OTHER_LIBRARIES), None)
        wanted = ["texts", "ground_truths", "data_sources"] if self.is_batched else [
            "text", "ground_truth", "data_source"]  # fmt: skip
        row = ["rows" if self.is_batched else "row"] if self.wants_row else []
        try:
            inspect.signature(self.verifier).bind(*wanted, **dict.fromkeys(row))
            problem = ""
        except TypeError as error:
            problem = str(error)
        except ValueError:  # a builtin without a signature
            return
        if library is not None:
            raise SignatureError(
                f"{self.name} has the signature of a reward of {library} ({', '.join(names)}); "
                "here it is score(text, ground_truth, data_source), or with a fourth argument row: "
                "docs/rewards.md has a table of theirs and ours"
            )
        if problem:
            raise SignatureError(
                f"{self.name}({', '.join(names)}) cannot be called with ({', '.join(wanted + row)})"
                f": {problem}; docs/rewards.md lists the signatures"
            )

    def _grade_one(self, item: Item) -> Answer:
        extra = {"row": json.loads(item.row)} if self.wants_row else {}
        value = self.verifier(item.text, item.ground_truth, item.data_source, **extra)
        return read_grade(self._run(value), name=self.name)

    def _run(self, value: Any) -> Any:
        if not self.is_async:
            return value
        # One loop for the process: a client that the verifier keeps belongs to it.
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(value)

    def _as_list(self, value: Any, items: Sequence[Item]) -> list[Any]:
        if hasattr(value, "tolist"):  # an array or a tensor
            value = value.tolist()
        if not isinstance(value, list | tuple) or len(value) != len(items):
            raise TypeError(
                f"{self.name} returned {format_value(value)} for {len(items)} responses; return a "
                "list with a number, or (reward, reason, answer), for each of them"
            )
        return list(value)


def read_grade(value: Any, *, name: str) -> list[Any]:
    """Convert a verifier's return value to [reward, reason, answer]; rewards may be a dict.

    Raises TypeError that describes the valid return values.
    """
    if (reward := _as_reward(value)) is not None:
        return [reward, NUMBER, None]
    if isinstance(value, list | tuple) and len(value) == 3:
        reward, reason, answer = _as_reward(value[0]), value[1], value[2]
        if reward is not None and isinstance(reason, str) and isinstance(answer, str | None):
            if len(reason) + len(answer or "") > MAX_TEXT:
                raise TypeError(
                    f"{name} returned a reason of {len(reason):,} characters and an answer of "
                    f"{len(answer or ''):,}; shorten them to {MAX_TEXT:,} together"
                )
            return [reward, clean(reason), clean(answer)]
    raise TypeError(
        f"{name} returned {format_value(value)}; return the reward, a finite number, or a tuple "
        "(reward, reason, answer): that number, a text, and a text or None. Numbers are between "
        f"{-LARGEST_REWARD:g} and {LARGEST_REWARD:g}. Several rewards are a dictionary in place of "
        'the number, as {"correct": 1.0, "format": 0.5}; names are letters, digits and _, and not '
        f'"{SHAPED}", at most {_MOST_NAMES} of at most {_LONGEST_NAME} characters'
    )


def _as_reward(value: Any) -> float | dict[str, float] | None:
    """Convert to a finite number, or several by name; None for other values."""
    if not isinstance(value, dict):
        return as_number(value)
    rewards = {name: as_number(one) for name, one in value.items() if _is_name(name)}
    known = {name: one for name, one in rewards.items() if one is not None}
    return known if value and len(known) == len(value) <= _MOST_NAMES else None


def _is_name(name: Any) -> bool:
    if not isinstance(name, str) or len(name) > _LONGEST_NAME or name == SHAPED:
        return False
    return bool(re.fullmatch(r"[A-Za-z]\w*", name))


def as_number(value: Any) -> float | None:
    """Convert a number, also a NumPy or torch scalar, to float; None for other values.

    Numbers that are not finite, or larger than `LARGEST_REWARD`, are such values.
    """
    try:
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except Exception:  # noqa: BLE001 - an integer that is too large, or an object's own
        return None
    return number if abs(number) <= LARGEST_REWARD else None  # also for nan


def _parameters(verifier: Any) -> list[str]:
    try:
        return list(inspect.signature(verifier).parameters)
    except ValueError:  # a builtin without a signature
        return []


def format_value(value: Any) -> str:
    """Format a wrong return value for an error, shortened."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an integer of too many digits, or an object's own
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
