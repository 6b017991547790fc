"""Tools of an MCP server (https://modelcontextprotocol.io) as an environment."""

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from megatron_rl.environments.call_formats import ToolCall
from megatron_rl.environments.tools import ToolEnvironment
from megatron_rl.errors import UserError

# A server that hangs does not notice that this process was killed, so the kernel ends it.
_START = """
import os, sys
from megatron_rl.runtime.interruption import end_with_parent
end_with_parent(int(sys.argv[1]))
os.execvp(sys.argv[2], sys.argv[2:])
"""


class McpEnvironment(ToolEnvironment):
    """Derive a class with `server`: the command of a server on standard input and output.

    Python functions may be added as `tools`. One server runs per environment process and answers
    all its conversations, so its tools must keep no state. After a call that ended it or exceeded
    the time limit, the next call starts another; calls in progress on one that ended fail too.
    """

    server: ClassVar[Sequence[str]] = ()
    _session: ClassVar["asyncio.Future[Any] | None"] = None
    _tasks: ClassVar[list["asyncio.Task[None]"]] = []  # of all servers, until the process ends

    @classmethod
    def describe_tools(cls) -> list[dict[str, Any]]:
        """Return the schemas of the functions and of the server's tools."""
        return [*super().describe_tools(), *asyncio.run(cls._list_tools())]

    @classmethod
    async def _list_tools(cls) -> list[dict[str, Any]]:
        functions: list[dict[str, Any]] = []

        async def read(session: Any) -> None:
            for tool in (await session.list_tools()).tools:
                one = tool.model_dump(by_alias=True)
                function = {"name": one["name"], "description": one["description"] or ""}
                functions.append(function | {"parameters": one["inputSchema"]})

        await cls._connect(read)
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
        arguments = ["-c", _START, str(os.getpid()), *cls.server]
        environment = dict(os.environ)
        started = StdioServerParameters(command=sys.executable, args=arguments, env=environment)
        async with stdio_client(started) as (source, sink), ClientSession(source, sink) as session:
            await session.initialize()
            await use(session)

    async def _result(self, call: ToolCall) -> str:
        if call.problem or call.name in self._tools:
            return await super()._result(call)
        try:
            session = await self._open()
            result = await session.call_tool(call.name, dict(call.arguments))
        except asyncio.CancelledError:  # over the time limit: the server may hang
            type(self)._session = None
            raise
        except Exception as error:  # noqa: BLE001 - the policy's arguments may have ended the server
            type(self)._session = None
            return self._shorten(f"error: {type(error).__name__}: {error}")
        fields = result.model_dump(by_alias=True)
        text = "\n".join(part.get("text") or f"[{part['type']}]" for part in fields["content"])
        return self._shorten(f"error: {text}" if fields.get("isError") else text)

    @classmethod
    async def _open(cls) -> Any:
        """Return the session of this process; starts the server if none runs."""
        if cls._session is None:
            ready = cls._session = asyncio.get_running_loop().create_future()

            async def keep(session: Any) -> None:
                ready.set_result(session)
                await asyncio.Event().wait()

            task = asyncio.create_task(cls._connect(keep))
            task.add_done_callback(lambda task: _pass_on(task, ready))
            cls._tasks.append(task)
        return await asyncio.shield(cls._session)


def _pass_on(task: "asyncio.Task[None]", ready: "asyncio.Future[Any]") -> None:
    if not task.cancelled() and task.exception() is not None and not ready.done():
        ready.set_exception(task.exception() or RuntimeError("the server ended"))
