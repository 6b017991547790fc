"""Python functions as tools: their JSON schemas, calling them, and a ready environment."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from megatron_rl.environments.call_formats import PARSERS, CallFormat, ToolCall
from megatron_rl.environments.interface import Answer, InfrastructureError
from megatron_rl.errors import UserError

MAX_CALLS = 16  # in one turn
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class Tool:
    """A function that the policy may call.

    Types and defaults of its parameters come from the signature, descriptions from the docstring: a
    first part, then `Args:` with one `name: description` per parameter. A parameter named `row`
    gets the row of the conversation and is not visible to the policy.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.name = function, function.__name__
        parameters = inspect.signature(function, eval_str=True).parameters
        self._wants_row = "row" in parameters
        for parameter in parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise UserError(f"tool {self.name}: parameter {parameter} cannot be passed by name")
            if parameter.annotation is parameter.empty and parameter.name != "row":
                raise UserError(
                    f"tool {self.name}: parameter {parameter.name} has no type; annotate it, as "
                    f"{parameter.name}: int"
                )
        fields: dict[str, Any] = {
            name: (one.annotation, ... if one.default is one.empty else one.default)
            for name, one in parameters.items()
            if name != "row"
        }
        self._arguments: type[BaseModel] = create_model(
            self.name, __config__=ConfigDict(extra="forbid"), **fields
        )

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI's protocol take it."""
        description, of_arguments = _read_docstring(inspect.getdoc(self.function) or "")
        if not description:
            raise UserError(
                f"tool {self.name} has no docstring; the policy reads it to choose tools"
            )
        schema = _without_titles(self._arguments.model_json_schema())
        for name, one in schema["properties"].items():
            if name not in of_arguments:
                raise UserError(
                    f"tool {self.name}: its docstring does not describe {name}; add a line "
                    f"`{name}: description` under `Args:`"
                )
            one["description"] = of_arguments[name]
        schema.pop("additionalProperties", None)
        function = {"name": self.name, "description": description, "parameters": schema}
        return {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
        """Check the arguments and call the function; raises ValidationError for wrong ones."""
        checked = self._arguments.model_validate(dict(arguments))
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        value = self.function(**values, **({"row": row} if self._wants_row else {}))
        return await value if inspect.isawaitable(value) else value


class ToolEnvironment:
    """An environment of tools: derive a class with `tools`, and `reward` unless a verifier grades.

    A turn with calls is answered with one message of role `tool` per call; every error of a call is
    such a message, so that the policy can correct it. The first turn without a call ends the
    conversation. Tools keep no state, so a replay does not call them again.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    call_format: ClassVar[CallFormat] = "hermes"
    max_result_characters: ClassVar[int] = 8000

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        self.row, self.seed = row, seed
        self._tools = {tool.name: tool for tool in map(Tool, self.tools)}

    def reward(self, text: str) -> float | None:
        """Grade the final turn; None leaves that to `reward.verifier`."""
        return None

    @classmethod
    def describe_tools(cls) -> list[dict[str, Any]]:
        """Return the schemas of the tools, which the chat template shows to the policy."""
        return [Tool(function).schema for function in cls.tools]

    async def step(self, message: str) -> Answer:
        """Make the calls of a turn, or grade the final turn."""
        calls = PARSERS[self.call_format](message)
        if not calls:
            return Answer(reward=self.reward(message), done=True, reason="answered")
        messages = [_message(call, await self._result(call)) for call in calls[:MAX_CALLS]]
        if len(calls) > MAX_CALLS:
            messages.append(_message(calls[MAX_CALLS], f"error: more than {MAX_CALLS} calls"))
        return Answer(messages)

    def timed_out(self, message: str) -> Answer:
        """Answer a turn whose calls took too long."""
        calls = PARSERS[self.call_format](message)[:MAX_CALLS]
        return Answer([_message(call, "error: timed out") for call in calls])

    def replay(self, turns: Sequence[tuple[str, Answer]]) -> None:
        """Restore the state after `turns`; there is none."""

    async def _result(self, call: ToolCall) -> str:
        if call.problem:
            return f"error: {call.problem}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: no tool is named {call.name}; there are: {', '.join(self._tools)}"
        try:
            value = await tool.call(call.arguments, self.row)
            return self._shorten(
                value if isinstance(value, str) else json.dumps(value, default=str)
            )
        except InfrastructureError:
            raise
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            return self._shorten(f"error: {'; '.join(wrong)}")
        except Exception as error:  # noqa: BLE001 - the policy reads it
            return self._shorten(f"error: {type(error).__name__}: {error}")

    def _shorten(self, text: str) -> str:
        most = self.max_result_characters
        return text if len(text) <= most else f"{text[:most]} [cut: {len(text):,} characters]"


def _message(call: ToolCall, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": call.name, "content": content}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its description and the descriptions of the arguments."""
    description, _, rest = text.partition("\nArgs:\n")
    arguments: dict[str, str] = {}
    indent = len(rest) - len(rest.lstrip())  # of the first argument; deeper lines continue one
    for line in filter(str.strip, rest.splitlines()):
        depth = len(line) - len(line.lstrip())
        found = _ARGUMENT.match(line)
        if depth < indent:  # `Returns:` or another part
            break
        if depth == indent and found:
            arguments[found[1]] = found[2].strip()
        elif arguments:
            name = next(reversed(arguments))
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return re.split(r"\n(?:Returns|Raises):", description)[0].strip(), arguments


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove pydantic's titles, which repeat the names."""
    properties = {
        name: {key: value for key, value in one.items() if key not in ("title", "default")}
        for name, one in schema.get("properties", {}).items()
    }
    return {key: value for key, value in schema.items() if key != "title"} | {
        "properties": properties
    }
