"""Tool calls in a model's text, in the formats of the supported model families.

vLLM's parsers of the same names are the reference (a test compares them); importing them into every
worker process would take seconds and half a gigabyte.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

CallFormat = Literal["hermes", "llama3_json"]
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


class ToolCall(NamedTuple):
    """A call that a model wrote; `problem` explains why it cannot be made."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""


def parse_hermes(text: str) -> list[ToolCall]:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen2.5, Qwen3, Hermes)."""
    calls = []
    for written in _HERMES.findall(text):
        try:
            calls.append(_as_call(json.loads(written)))
        except ValueError as error:
            calls.append(ToolCall("", {}, f"the call is not valid JSON: {error}"))
        except RecursionError:
            calls.append(ToolCall("", {}, "the call is nested too deep"))
    return calls


def parse_llama3_json(text: str) -> list[ToolCall]:
    """Parse `{"name": ..., "parameters": {...}}`, also several (Llama 3).

    Text with a brace that begins no call is an answer, not a wrong call.
    """
    calls, end, decoder = [], 0, json.JSONDecoder()
    while (start := text.find("{", end)) >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
            call = _as_call(value)
        except (ValueError, RecursionError):
            return []
        if call.problem:
            return []
        calls.append(call)
    return calls


PARSERS: dict[CallFormat, Callable[[str], list[ToolCall]]] = {
    "hermes": parse_hermes,
    "llama3_json": parse_llama3_json,
}


def _as_call(value: Any) -> ToolCall:
    value = value if isinstance(value, dict) else {}
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", {}, 'a call needs "name", a text, and "arguments", an object')
    return ToolCall(name, arguments)
