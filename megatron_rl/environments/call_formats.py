"""Tool calls in a model's text, in the formats of the supported model families.

vLLM's parsers of the same names are the reference (a test compares them); importing them into every
template would take seconds and half a gigabyte. What is written inside thinking is no call, as with
vLLM's reasoning parsers.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from megatron_rl.rewards.thinking import has_end, opens_thinking, without_thinking

CallFormat = Literal["hermes", "llama3_json"]
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


class ToolCall(NamedTuple):
    """A call as a model wrote it; `problem` explains why it cannot be made."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""
    written: str = ""


def parse_hermes(text: str) -> list[ToolCall]:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen2.5, Qwen3, Hermes)."""
    calls = []
    for match in _HERMES.finditer(without_thinking(text)):
        try:
            call = _as_call(json.loads(match[1]))
        except ValueError as error:
            call = ToolCall("", {}, f"the call is not valid JSON: {error}")
        except RecursionError:
            call = ToolCall("", {}, "the call is nested too deep")
        calls.append(call._replace(written=match[0]))
    return calls


def parse_llama3_json(text: str) -> list[ToolCall]:
    """Parse `{"name": ..., "parameters": {...}}`, also several (Llama 3).

    Text whose first brace begins no call is an answer, not a wrong call; what follows a call may
    have braces.
    """
    calls: list[ToolCall] = []
    text, end, decoder = without_thinking(text), 0, json.JSONDecoder()
    while (start := text.find("{", end)) >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
            call = _as_call(value)
        except (ValueError, RecursionError):
            break
        if call.problem:
            break
        calls.append(call._replace(written=text[start:end]))
    return calls


def parse_calls(text: str, call_format: CallFormat, *, in_thinking: bool) -> list[ToolCall]:
    """Parse the calls of a turn; in_thinking: its context opened the thinking that it continues."""
    return [] if in_thinking and not has_end(text) else PARSERS[call_format](text)


def begins_in_thinking(context: str) -> bool:
    """Return True if a turn after this text is thinking until it writes the end mark."""
    return opens_thinking(context)


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
