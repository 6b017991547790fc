"""Chat messages and tools as data sets store them, converted to what chat templates take.

The formats are OpenAI's chat completions (with the JSON text of arguments, and null or parts as
content), those of TRL and verl, and ShareGPT's `conversations`; `docs/prompts.md` has the table.
Whatever cannot be converted without a guess raises UserError.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.fields import changes_training, find_choices, find_passage, is_media
from megatron_rl.texts import clean

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")  # ipython: Llama's `tool`
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant",
    "chatgpt": "assistant", "assistant": "assistant", "tool": "tool", "observation": "tool",
    "function_call": "assistant",
}  # fmt: skip
TOOLS = "tools"  # the default name of their column
SYSTEMS = ("system", "system_prompt", "system_message")  # columns that become the system message
# Arguments of a call in OpenAI's form, Llama's, LangChain's and Anthropic's; schemas of a tool's in
# OpenAI's form, Anthropic's and MCP's.
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_SCHEMAS = ("parameters", "input_schema", "inputSchema")
_TEXT_PARTS = ("text", "input_text", "output_text")
# A list of messages that was written as a text, by json.dumps or, wrongly, by str.
_WRITTEN_LIST = re.compile(r"\s*\[\s*\{")
_WRITTEN_KEYS = (("role", "content"), ("from", "value"))


def parse_messages(value: Any, *, key: str, from_table: bool = False) -> tuple[Message, ...]:
    """Convert a prompt: the text of a user, or a list of messages, which may be a JSON text.

    key: name of the value in errors. from_table: the value comes from typed columns (parquet,
    `datasets`), whose structs have a null for each key that only other rows have; these are removed
    at any depth.
    """
    messages = _convert(value, key=key, from_table=from_table)
    last = messages[-1]
    if last["role"] == "assistant":
        raise UserError(
            f"{key} ends with a message of the assistant, so the policy would be shown a solution; "
            "remove that message, or name the column of the question as data.columns.prompt"
        )
    if last["role"] == "user" and not last["content"].strip():
        raise UserError(f"{key} ends with a message of the user without text; give it one")
    _refuse_empty(messages, value, key=key)
    return messages


def parse_conversation(value: Any, *, key: str, from_table: bool = False) -> tuple[Message, ...]:
    """Convert messages as `parse_messages` does; they may end with the assistant's."""
    messages = _convert(value, key=key, from_table=from_table)
    _refuse_empty(messages, value, key=key)
    return messages


def _refuse_empty(messages: Sequence[Message], value: Any, *, key: str) -> None:
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        raise UserError(f"{key} has messages without any text, {value!r:.80}; give them one")


def _convert(value: Any, *, key: str, from_table: bool) -> tuple[Message, ...]:
    if isinstance(value, str) and value.strip():
        if not _is_written_list(value):
            return ({"role": "user", "content": value},)
        try:
            value = _parse_json(value)
        except UserError as error:
            raise UserError(
                f"{key} looks like a list of chat messages, but {error}; write such lists by "
                "json.dumps, not by str, and a question of this form as the content of a message"
            ) from None
    value = _as_rows(value)
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"{key} must be a text or a list of chat messages, got {value!r:.80}")
    messages = []
    for place, message in enumerate(drop_nulls(value) if from_table else value, start=1):
        try:
            messages.append(parse_message(_parse_object(message)))
        except UserError as error:
            raise UserError(f"{key}, message {place}: {error}") from None
    return tuple(in_order_of_calls(messages))


def _as_rows(value: Any) -> Any:
    """Return a mapping of lists, as `datasets` stores a sequence of structs, as a list of them."""
    if not isinstance(value, Mapping) or not {"role", "from"} & value.keys():
        return value
    columns = {key: one for key, one in value.items() if one is not None}
    if not all(isinstance(one, list | tuple) for one in columns.values()):
        return value
    if len({len(one) for one in columns.values()}) != 1:
        return value
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the results of several calls in the order of the calls.

    Results name their calls by ids, which most templates leave out, so that the policy reads only
    from the order which result belongs to which call. Results with other ids stay as they are.
    """
    ordered = list(messages)
    for place, message in enumerate(ordered):
        calls = [call.get("id") for call in message.get("tool_calls") or ()]
        results = list(itertools.takewhile(lambda one: one["role"] == "tool", ordered[place + 1 :]))
        given = [one.get("tool_call_id") for one in results]
        if len(calls) > 1 and len({*given}) == len(given) and {*given} <= {*calls} - {None}:
            results.sort(key=lambda one: calls.index(one["tool_call_id"]))
            ordered[place + 1 : place + 1 + len(results)] = results
    return ordered


def parse_tools(
    value: Any, *, key: str = TOOLS, from_table: bool = False
) -> tuple[dict[str, Any], ...]:
    """Convert a row's tools, a list of OpenAI's schemas or its JSON text, to such schemas."""
    if isinstance(value, str) and not value.strip():
        return ()
    try:
        value = _parse_json(drop_nulls(value) if from_table else value)
        value = [_parse_object(one) for one in value] if isinstance(value, list) else value
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    if value is None:
        return ()
    if not isinstance(value, list):
        raise UserError(f"{key} must be a list of tools or its JSON text, got {value!r:.80}")
    tools = []
    for tool in value:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(
                f'{key} must have {{"type": "function", "function": {{"name": ..., "parameters": '
                f"...}}}} for each tool, got {tool!r:.80}"
            )
        function = {key: one for key, one in function.items() if key != "type"}
        schema = next((key for key in _SCHEMAS if function.get(key) is not None), "parameters")
        if schema != "parameters":
            function["parameters"] = function.pop(schema)
        tools.append(_as_json({"type": "function", "function": function}))
    return tuple(tools)


def refuse_left_out(
    row: Mapping[str, Any],
    *,
    prompt: str,
    messages: Sequence[Message],
    truth: str | None = None,
    used: Sequence[str] = (),
) -> None:
    """Raise UserError if the prompt lacks the text of a column that published formats add to it.

    prompt: the name of its column. These are the choices of a question (MMLU, ARC), the passage
    that it is about (SQuAD, Dolly), `input` next to `instruction` (Alpaca), and what OpenAI's older
    API and TRL pass to the template. used: columns that are read.
    """
    text = "\n".join(message["content"] for message in messages)
    cure = "write it into the prompt, or rename the column if the prompt is to be without it"
    if isinstance(row.get(prompt), str) and (name := find_passage(row, text, skip=used)):
        raise UserError(f"the prompt lacks the text of the column {name}; {cure}")
    if names := find_choices(row, text, truth=truth, skip=(prompt, *used)):
        raise UserError(f"the prompt lacks the texts of the column {names}; {cure}")
    given = row.get("input")
    if prompt == "instruction" and isinstance(given, str) and given.strip() not in text:
        raise UserError(f"the prompt lacks the text of the column input; {cure}")
    if drop_nulls(row.get("chat_template_kwargs")):
        raise UserError(
            "has chat_template_kwargs; set data.template_arguments for all rows, and leave the "
            "column out"
        )
    if "functions" not in used and not row.get(TOOLS) and _are_tools(row.get("functions")):
        raise UserError(
            "has functions, OpenAI's older name of tools; set data.columns.tools=functions, or "
            "rename the column"
        )


def _are_tools(value: Any) -> bool:
    try:
        return bool(parse_tools(value))
    except UserError:
        return False


def unread_keys(message: Message, template: str) -> list[str]:
    """Return the keys of a message that a chat template does not name, as `.key` or `'key'`."""
    return [
        key
        for key, value in message.items()
        if key not in ("role", "content", "tool_calls")
        and value not in (None, "", [], {})
        and not re.search(rf"""(?:\.|["']){re.escape(key)}\b""", template)
    ]


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return messages with tool calls as OpenAI's API has them, which some templates want.

    Arguments are a JSON text, and a message without text has null as content.
    """
    return [
        message
        | {
            "content": message.get("content") or None,
            "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]],
        }
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def drop_nulls(value: Any) -> Any:
    """Remove the keys whose value is None from nested mappings; lists keep their length."""
    if isinstance(value, dict):
        return {key: drop_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [drop_nulls(one) for one in value]
    return value


def _is_written_list(text: str) -> bool:
    """Return True if a text is meant as a list of messages."""
    return bool(_WRITTEN_LIST.match(text)) and any(
        all(re.search(rf"""["']{key}["']\s*:""", text) for key in keys) for keys in _WRITTEN_KEYS
    )


def parse_message(message: Any) -> Message:
    """Convert one message; its content is a text, and the arguments of its calls are objects."""
    if not isinstance(message, dict):
        raise UserError(f"a chat message must have a role and content, got {message!r:.80}")
    message = {key: value for key, value in message.items() if value is not None}
    if "role" not in message and "from" in message:
        message = _from_sharegpt(message)
    if media := [key for key in message if key != "content" and is_media(key, message[key])]:
        raise UserError(f"has the key {media[0]}; models here read text only")
    role = "tool" if message.get("role") == "function" else message.get("role")
    if role not in ROLES:
        raise UserError(
            f"a chat message must have a role of {', '.join(ROLES)}, got role={role!r:.40} in "
            f"{message!r:.80}"
        )
    calls = _parse_json(message.get("tool_calls") or []) or []
    if message.get("function_call"):  # OpenAI's form before tool_calls
        if calls:
            raise UserError("has tool_calls and function_call; remove one of them")
        calls = [message["function_call"]]
    if not isinstance(calls, list | tuple):
        raise UserError(f"tool_calls must be a list, got {calls!r:.80}")
    parsed = {"role": role, "content": _parse_content(message, has_calls=bool(calls))}
    known = (*parsed, "tool_calls", "function_call")
    others = {key: one for key, one in message.items() if key not in known}
    for part in message["content"] if isinstance(message.get("content"), list | tuple) else ():
        others |= {
            f"content.{key}": one
            for key, one in part.items()
            if key not in ("type", "text") and one not in (None, "", [], {})
        }
    if calls:
        others["tool_calls"] = [_parse_call(call) for call in calls]
    return parsed | (_as_json(others) if others else {})


def _parse_content(message: Mapping[str, Any], *, has_calls: bool) -> str:
    """Return the text of a message, whose content may be a text, or parts of type text."""
    content = message.get("content", "" if has_calls else None)
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise UserError(
            f"a chat message must have a text as content, got {content!r:.80} in {message!r:.80}"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise UserError(
                f"content has a part of type {kind}: {part!r:.60}; models here read parts of type "
                "text only, each with a text"
            )
        texts.append(text)
    return "".join(texts)


def _parse_call(call: Any) -> dict[str, Any]:
    """Convert a tool call, whose arguments may be a JSON text, as OpenAI's API returns them."""
    call = _parse_json(call)
    function = _parse_json(call.get("function", call)) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"a tool call must have a function with a name, got {call!r:.80}")
    name, *further = [key for key in _ARGUMENTS if function.get(key)] or ["arguments"]
    unread = [*further, *(key for each in (call, function) for key in _unread_of_call(each))]
    if unread:
        raise UserError(
            f"the call of {function['name']} has {', '.join(sorted({*unread}))} next to {name}, "
            "which would have no effect; remove it"
        )
    given = function.get(name)
    if isinstance(given, str):
        given = _parse_json(given) if given.strip() else None
    arguments = {} if given is None else given
    if not isinstance(arguments, dict):
        raise UserError(
            f"the arguments of {function['name']} must be an object or its JSON text, got "
            f"{function[name]!r:.80}"
        )
    others = {key: call[key] for key in ("id", "index") if call.get(key) is not None}
    function = {"name": function["name"], "arguments": arguments}
    return others | {"type": "function", "function": function}


def _unread_of_call(call: Mapping[str, Any]) -> list[str]:
    known = ("id", "index", "type", "function", "name", *_ARGUMENTS)
    return [key for key, one in call.items() if key not in known and changes_training(key, one)]


def _from_sharegpt(message: Message) -> Message:
    """Convert `{"from": ..., "value": ...}`; a `function_call` is a message with tool calls."""
    sender, value = message["from"], message.get("value", message.get("content"))
    if sender not in SHAREGPT_ROLES:
        raise UserError(f"from must be one of {', '.join(SHAREGPT_ROLES)}, got {sender!r:.40}")
    others = {key: one for key, one in message.items() if key not in ("from", "value")}
    if sender != "function_call":
        return others | {"role": SHAREGPT_ROLES[sender], "content": value}
    calls = _parse_json(value)
    calls = calls if isinstance(calls, list) else [calls]
    return others | {"role": "assistant", "tool_calls": calls}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if not isinstance(arguments, str) or not arguments.strip():
        function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
    return call | {"function": function}


def _parse_json(value: Any) -> Any:
    """Parse a text that stands for a structure, as in columns of type `Json`, or in CSV."""
    if not isinstance(value, str):
        return value
    try:
        return clean(json.loads(value))
    except ValueError as error:
        raise UserError(f"{value!r:.80} is not JSON: {error}") from None


def _parse_object(value: Any) -> Any:
    """Parse the JSON text of an object; other texts stay, and are refused as what they are."""
    return _parse_json(value) if isinstance(value, str) and value.lstrip()[:1] == "{" else value


def _as_json(value: Any) -> Any:
    """Convert to JSON types, such as dates to texts."""
    return json.loads(json.dumps(value, default=str))
