"""The process of one conversation: its environment, and one call at a time.

Forked by `megatron_rl.workers.template`. A request is a line of JSON with one of "make" (the row),
"replay" (pairs of message and answer), "step" and "late" (a message) or "close"; a reply has an
"answer", or a "failure" with its text and traceback.
"""

import asyncio
import inspect
import json
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

from megatron_rl.environments import interface
from megatron_rl.environments.agent import AgentEnvironment
from megatron_rl.environments.endpoint import RewrittenHistoryError
from megatron_rl.environments.interface import (
    Answer,
    InfrastructureError,
    TurnTokens,
    load_environment,
    read_answer,
)
from megatron_rl.errors import UserError
from megatron_rl.texts import clean
from megatron_rl.workers.template import LONGEST_LINE, describe_error, ending_forks

Message = dict[str, Any]


def load(settings: Message) -> tuple[Message, Callable[[socket.socket], None]]:
    """Load the environment of the settings; returns its description and what a fork runs."""
    make = load_environment(settings["name"])
    description = {
        "tools": list(make.describe_tools()) if hasattr(make, "describe_tools") else [],
        "call_format": getattr(make, "call_format", None),
        "answers_late": hasattr(make, "timed_out"),
        "takes_tokens": hasattr(make, "receive_tokens"),
    }
    return description, lambda channel: Worker(make, settings).run(channel)


class Worker:
    """One conversation's environment."""

    def __init__(self, make: Any, settings: Message) -> None:
        self._make, self._settings = make, settings
        self._environment: Any = None
        self._sink: asyncio.StreamWriter | None = None
        self._request: Message = {}

    def run(self, channel: socket.socket) -> None:
        """Serve requests until the conversation is over."""
        own = channel.dup()
        try:
            asyncio.run(self._serve_all(channel))
        except BaseException as error:  # noqa: BLE001 - an exit in a task of the environment's own
            reply = self._failure(error) | {"number": self._request.get("number", 0)}
            own.sendall(b"\n" + json.dumps(reply).encode() + b"\n")

    async def _serve_all(self, channel: socket.socket) -> None:
        source, self._sink = await asyncio.open_connection(sock=channel, limit=LONGEST_LINE)
        task: asyncio.Task[None] | None = None
        while line := await source.readline():
            request = self._request = json.loads(line)
            if "close" in request:
                if task is not None and not task.done():
                    task.cancel()
                    await asyncio.wait({task})
                await self._close(request)
            task = asyncio.create_task(self._reply_to(request))
            task.add_done_callback(_end_unless_replied)

    async def _close(self, request: Message) -> None:
        try:
            if hasattr(self._environment, "close"):
                value = self._environment.close()
                if inspect.isawaitable(value):
                    await value
        except BaseException:  # noqa: BLE001 - the conversation is over
            traceback.print_exc()
        await self._send(request, {})
        os._exit(0)

    async def _reply_to(self, request: Message) -> None:
        try:
            reply = await self._serve(request)
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) and task.cancelling():
                raise  # the conversation was ended
            reply = self._failure(error)
        except BaseException as error:  # noqa: BLE001 - it ends this conversation, and nothing else
            reply = self._failure(error)
        await self._send(request, reply)

    async def _send(self, request: Message, reply: Message) -> None:
        assert self._sink is not None
        # After a new line: its code may have written to the socket.
        self._sink.write(b"\n" + json.dumps(reply | {"number": request["number"]}).encode() + b"\n")
        await self._sink.drain()

    async def _serve(self, request: Message) -> Message:
        if "make" in request:
            row, seed = json.loads(request["make"]), request["seed"]
            self._environment = await self._call(self._make, row, seed)
            if isinstance(self._environment, AgentEnvironment):
                self._environment.max_rewrites = self._settings["max_rewrites"]
            return {"replays": hasattr(self._environment, "replay")}
        if "replay" in request:
            turns = [(message, Answer(**answer)) for message, answer in request["replay"]]
            await self._call(self._environment.replay, turns)
            return {}
        if request["tokens"] is not None:
            self._environment.receive_tokens(TurnTokens(**request["tokens"]))
        name = "step" if "step" in request else "timed_out"
        value = await self._call(getattr(self._environment, name), request["message"])
        return {"answer": read_answer(value, name=self._settings["name"])}

    async def _call(self, function: Any, *arguments: Any) -> Any:
        with ending_forks():
            value = function(*arguments)
            return await value if inspect.isawaitable(value) else value

    def _failure(self, error: BaseException) -> Message:
        kind = "lost" if isinstance(error, InfrastructureError) else "failed"
        kind = "rewritten" if isinstance(error, RewrittenHistoryError) else kind
        text, trace = describe_error(error, memory_gib=self._settings["memory_gib"])
        if isinstance(error, UserError):
            text = str(error)
        elif place := _place(error):
            text = f"{type(error).__name__}: {text} ({place})"
        return {"failure": kind, "text": clean(text), "trace": trace}


def _place(error: BaseException) -> str:
    """Return the line of the environment's code; nothing for `read_answer`, which names a rule."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    if not frames or frames[0].filename in (__file__, interface.__file__):
        return ""
    return f"{frames[0].filename}, line {frames[0].lineno}"


def _end_unless_replied(task: "asyncio.Task[None]") -> None:
    """End the process if no reply could be made: its code has changed what that needs."""
    if not task.cancelled() and task.exception() is not None:
        try:
            traceback.print_exception(task.exception())
        finally:
            os._exit(1)
