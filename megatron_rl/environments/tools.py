"""Environments of tools: Python functions, with their JSON schemas, and MCP servers."""

import asyncio
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from megatron_rl.environments.call_formats import (
    TEXT_VALUES,
    CallFormat,
    ToolCall,
    parse_calls,
    with_types,
)
from megatron_rl.environments.interface import Answer, InfrastructureError, TurnTokens
from megatron_rl.errors import UserError

MAX_CALLS = 16  # in one turn
LIST_SECONDS = 60.0  # for an MCP server to start and name its tools; half of a module's start
_MOST_PAGES = 100  # of a server's list of tools
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class Tool:
    """A function that the policy may call.

    Types and defaults of its parameters come from the signature, descriptions from the docstring: a
    first part, then `Args:` with one `name: description` per parameter. A parameter named `row`
    gets the row of the conversation and is not visible to the policy.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        # Every conversation's process imports this module, and few have tools.
        from pydantic import ConfigDict, create_model

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
        self._arguments = create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)

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
        """Check the arguments and call the function; raises ValidationError for wrong arguments."""
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
        self._in_thinking = False

    def reward(self, text: str) -> float | None:
        """Grade the final turn; None leaves that to `reward.verifier`."""
        return None

    @classmethod
    def describe_tools(cls) -> list[dict[str, Any]]:
        """Return the schemas of the tools, which the chat template shows to the policy."""
        return [Tool(function).schema for function in cls.tools]

    def receive_tokens(self, tokens: TurnTokens) -> None:
        """Keep whether the next turn begins inside thinking, where a call is none."""
        self._in_thinking = tokens.in_thinking

    async def step(self, message: str) -> Answer:
        """Make the calls of a turn, or grade the final turn."""
        calls = self._calls(message)
        if not calls:
            return Answer(reward=self.reward(message), done=True, reason="answered")
        messages = [_message(call, await self._result(call)) for call in calls[:MAX_CALLS]]
        if len(calls) > MAX_CALLS:
            messages.append(_message(calls[MAX_CALLS], f"error: more than {MAX_CALLS} calls"))
        return Answer(messages)

    def timed_out(self, message: str) -> Answer:
        """Answer a turn whose calls took too long."""
        calls = self._calls(message)[:MAX_CALLS]
        return Answer([_message(call, "error: timed out") for call in calls])

    def replay(self, turns: Sequence[tuple[str, Answer]]) -> None:
        """Restore the state after `turns`; there is none."""

    def _calls(self, message: str) -> list[ToolCall]:
        return parse_calls(message, self.call_format, in_thinking=self._in_thinking)

    async def _result(self, call: ToolCall) -> str:
        from pydantic import ValidationError

        if call.problem:
            return f"error: {call.problem}"
        tool = self._tools.get(call.name)
        if tool is not None and self.call_format in TEXT_VALUES:
            call = with_types(call, tool.schema["function"]["parameters"])
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


class McpEnvironment(ToolEnvironment):
    """Derive a class with `server`: the command of an MCP server on standard input and output.

    See https://modelcontextprotocol.io. Python functions may be added as `tools`. Every
    conversation has a server of its own, from its first call on; after a call that ended it, the
    next call starts another.
    """

    server: ClassVar[Sequence[str]] = ()

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        super().__init__(row, seed)
        self._session: asyncio.Future[Any] | None = None
        self._server: asyncio.Task[None] | None = None

    @classmethod
    def describe_tools(cls) -> list[dict[str, Any]]:
        """Return the schemas of the functions and of the server's tools."""
        return [*super().describe_tools(), *asyncio.run(cls._list_tools())]

    @classmethod
    async def _list_tools(cls) -> list[dict[str, Any]]:
        listed: list[Any] = []

        async def read(session: Any) -> None:
            listed.extend(await _all_tools(session))

        command = " ".join(cls.server)
        try:
            async with asyncio.timeout(LIST_SECONDS):
                await cls._connect(read)
        except TimeoutError:
            raise UserError(
                f"{cls.__name__}.server ({command}) did not name its tools in {LIST_SECONDS:.0f} "
                "s; start it by hand to see what it waits for"
            ) from None
        except Exception as error:
            cause = _first(error)
            if isinstance(cause, UserError):
                raise cause from None
            raise UserError(
                f"{cls.__name__}.server ({command}) did not name its tools: "
                f"{type(cause).__name__}: {cause}; start it by hand to see what it prints"
            ) from error
        functions = []
        for tool in listed:
            one = tool.model_dump(by_alias=True)
            function = {"name": one["name"], "description": one["description"] or ""}
            functions.append(function | {"parameters": one["inputSchema"]})
        return [{"type": "function", "function": function} for function in functions]

    @classmethod
    async def _connect(cls, use: Callable[[Any], Any]) -> None:
        """Start the server, and call `use(session)` in the task that closes the connection."""
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        if not cls.server or shutil.which(cls.server[0]) is None:
            raise UserError(
                f"{cls.__name__}.server is {cls.server!r}, which starts no program here; set it to "
                "the command of an installed MCP server"
            )
        started = StdioServerParameters(
            command=cls.server[0], args=list(cls.server[1:]), env=dict(os.environ),
            encoding_error_handler="replace",  # else one stray byte ends the reader, unnoticed
        )  # fmt: skip
        async with stdio_client(started) as (source, sink), ClientSession(source, sink) as session:
            await session.initialize()
            await use(session)

    async def _result(self, call: ToolCall) -> str:
        if call.problem or call.name in self._tools:
            return await super()._result(call)
        try:
            session = await self._open()
            if self.call_format in TEXT_VALUES:
                listed = await _all_tools(session)
                schemas = [one.model_dump(by_alias=True) for one in listed if one.name == call.name]
                call = with_types(call, schemas[0]["inputSchema"] if schemas else {})
            result = await session.call_tool(call.name, dict(call.arguments))
        except Exception as error:  # noqa: BLE001 - the policy's arguments may have ended the server
            self._session = None
            return self._shorten(f"error: {type(error).__name__}: {error}")
        fields = result.model_dump(by_alias=True)
        text = "\n".join(map(_text_of, fields["content"]))
        if not fields["content"] and fields.get("structuredContent") is not None:
            text = json.dumps(fields["structuredContent"])
        return self._shorten(f"error: {text}" if fields.get("isError") else text)

    async def _open(self) -> Any:
        """Return the connection to the server; starts the server if none runs."""
        if self._session is None:
            ready = self._session = asyncio.get_running_loop().create_future()

            async def keep(session: Any) -> None:
                ready.set_result(session)
                await asyncio.Event().wait()

            def pass_on(task: "asyncio.Task[None]") -> None:
                if not task.cancelled() and task.exception() is not None and not ready.done():
                    ready.set_exception(task.exception() or RuntimeError("the server ended"))

            self._server = asyncio.create_task(self._connect(keep))
            self._server.add_done_callback(pass_on)
        return await asyncio.shield(self._session)


async def _all_tools(session: Any) -> list[Any]:
    """Read a server's list of tools, page by page."""
    from mcp.types import PaginatedRequestParams

    page = await session.list_tools()
    tools, seen = list(page.tools), set[str]()
    while (cursor := page.next_cursor) is not None:
        if cursor in seen or len(seen) == _MOST_PAGES:
            raise UserError(f"the list of tools has no end: page {cursor!r} came again")
        seen.add(cursor)
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        tools += page.tools
    return tools


def _text_of(part: Mapping[str, Any]) -> str:
    """Text of a part of a result; what has none is named by its type."""
    return part.get("text") or (part.get("resource") or {}).get("text") or f"[{part['type']}]"


def _first(group: BaseException) -> BaseException:
    """The first error in nested groups of errors."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


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
