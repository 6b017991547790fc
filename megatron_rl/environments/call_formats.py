"""Tool calls in a model's text, in the formats of the supported model families.

vLLM's parsers of the same names are the reference (a test compares them); importing them into every
template would take seconds and half a gigabyte. What is written inside thinking is no call, as with
vLLM's reasoning parsers.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from megatron_rl.rewards.thinking import has_end, opens_thinking, without_thinking

CallFormat = Literal["hermes", "llama3_json", "qwen3_coder", "glm45"]
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_FUNCTION = (
    r"<function=(?P<name>[^<>\n]*)>(?P<body>.*?)(?P<end></function>|(?=<tool_call>|<function=)|\Z)"
)
_CODER = re.compile(
    rf"(?P<open><tool_call>\s*)?{_FUNCTION}(?:\s*</tool_call>)?"
    r"|<tool_call>(?P<other>.*?)(?:</tool_call>|(?=<tool_call>)|\Z)",
    re.DOTALL,
)
_PARAMETER = re.compile(
    r"<parameter=(?P<name>[^<>\n]*)>\n?(?P<value>.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)",
    re.DOTALL,
)
_KEYS = {"name", "type", "id"}  # of a call without arguments
_GLM_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_GLM_ARGUMENT = re.compile(
    r"<arg_key>(?P<name>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)"
    r"(?:</arg_value>|(?=<arg_key>)|\Z)",
    re.DOTALL,
)


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
            value = json.loads(match[1])
            call = _as_call(value if _is_complete(value) else None)
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
            call = _as_call(value if _is_complete(value) else None)
        except (ValueError, RecursionError):
            break
        if call.problem:
            break
        calls.append(call._replace(written=text[start:end]))
    return calls


def parse_qwen3_coder(text: str) -> list[ToolCall]:
    """Parse `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    Of Qwen3-Coder, Qwen3.5 and 3.6. Values are texts; `parse_calls` gives them their types.
    """
    calls = []
    for match in _CODER.finditer(without_thinking(text)):
        if match["name"] is None:
            call = ToolCall("", {}, "a call needs <function=NAME> inside of <tool_call>")
        elif not match["end"]:
            call = ToolCall("", {}, "the call does not end with </function>")
        else:
            pairs = {
                one["name"].strip(): one["value"] for one in _PARAMETER.finditer(match["body"])
            }
            call = _as_call({"name": match["name"].strip(), "arguments": pairs})
        calls.append(call._replace(written=match[0]))
    return calls


def parse_glm45(text: str) -> list[ToolCall]:
    """Parse `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

    Of GLM-4.5 to 4.7. Values are texts; `parse_calls` gives them their types.
    """
    calls = []
    for match in _GLM_CALL.finditer(without_thinking(text)):
        name = match[1].partition("<arg_key>")[0].strip()
        pairs = {one["name"].strip(): one["value"] for one in _GLM_ARGUMENT.finditer(match[1])}
        is_name = bool(re.fullmatch(r"[^\s<>{}]+", name))
        wrong = ToolCall("", {}, "a call begins with the name of a tool, after <tool_call>")
        call = _as_call({"name": name, "arguments": pairs}) if is_name else wrong
        calls.append(call._replace(written=match[0]))
    return calls


def parse_calls(
    text: str,
    call_format: CallFormat,
    *,
    in_thinking: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[ToolCall]:
    """Parse the calls of a turn; in_thinking: its context opened the thinking that it continues.

    tools: schemas, by which formats whose values are texts have other types.
    """
    if in_thinking and not has_end(text):
        return []
    calls = PARSERS[call_format](text)
    if call_format not in TEXT_VALUES or not calls:
        return calls
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    return [
        with_types(call, (functions.get(call.name) or {}).get("parameters") or {}) for call in calls
    ]


def with_types(call: ToolCall, schema: Mapping[str, Any]) -> ToolCall:
    """Return a call whose texts have the types of the parameters' JSON schema."""
    types = schema.get("properties") or {}
    arguments = {
        name: _convert(value, _types(types.get(name))) if isinstance(value, str) else value
        for name, value in call.arguments.items()
    }
    return call._replace(arguments=arguments)


def _types(schema: Any) -> set[str]:
    """Return the types that a schema allows; of one without a type, a text."""
    if not isinstance(schema, dict):
        return {"string"}
    given = schema.get("type", [])
    found = {given} if isinstance(given, str) else set(given)
    for key in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(key) or ():
            found |= _types(one)
    found |= {"object"} if "$ref" in schema else set()
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    found |= {names[type(one)] for one in schema.get("enum") or () if type(one) in names}
    return found or {"string"}


def _convert(text: str, types: set[str]) -> Any:
    """Return a text as the first type that it can be, in vLLM's order, or as it is."""
    plain = text.strip()
    if "null" in types and plain.lower() == "null":
        return None
    for kind, read in (("integer", int), ("number", _number)):
        if kind in types:
            try:
                return read(plain)
            except ValueError:
                pass
    if "boolean" in types and plain.lower() in ("true", "false", "1", "0"):
        return plain.lower() in ("true", "1")
    if types & {"object", "array"}:
        try:
            value = json.loads(plain, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return text
        return value if isinstance(value, dict | list) else text
    return text


def _number(text: str) -> int | float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("JSON has no such number")
    return int(value) if value.is_integer() else value


def begins_in_thinking(context: str) -> bool:
    """Return True if a turn after this text is thinking until it writes the end mark."""
    return opens_thinking(context)


PARSERS: dict[CallFormat, Callable[[str], list[ToolCall]]] = {
    "hermes": parse_hermes,
    "llama3_json": parse_llama3_json,
    "qwen3_coder": parse_qwen3_coder,
    "glm45": parse_glm45,
}
TEXT_VALUES = ("qwen3_coder", "glm45")  # formats that write texts without quotes


def _is_complete(value: Any) -> bool:
    """Return True unless a call has something else in place of arguments, as `input`."""
    keys = value.keys() if isinstance(value, dict) else set()
    return bool({"arguments", "parameters"} & keys) or keys <= _KEYS


def _as_call(value: Any) -> ToolCall:
    """Return a call; one without arguments has none, however that is written."""
    value = value if isinstance(value, dict) else {}
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return ToolCall("", {}, 'a call needs "name", a text, and "arguments", an object')
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        return ToolCall("", {}, "the call is not valid JSON: it has a number that is not finite")
    return ToolCall(name, arguments)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
