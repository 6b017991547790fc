"""A server of OpenAI's chat completions, with one address per conversation.

It runs in the environment's process, on the loopback interface only, and a path that contains a
random token. It has no model: a request waits for the turn that the engine samples.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from megatron_rl.environments.call_formats import PARSERS, CallFormat

Message = dict[str, Any]
_CALL_TAG = "<tool_call>"


class RewrittenHistoryError(Exception):
    """A request that changes what was written before."""


class Session:
    """One conversation: `messages` so far, and at most one request that waits for a turn."""

    def __init__(self, url: str, messages: Sequence[Message], *, call_format: CallFormat) -> None:
        self.url, self.messages = url, list(messages)
        self._call_format = call_format
        self._requests: asyncio.Queue[list[Message] | Exception] = asyncio.Queue()
        self._turn: asyncio.Future[Message] | None = None
        self._has_tools = self._is_closed = False
        self._turns = 0

    async def next_messages(self) -> list[Message]:
        """Wait for the next request; return the messages that it adds, or raise why it cannot."""
        request = await self._requests.get()
        if isinstance(request, Exception):
            raise request
        return request

    def answer(self, text: str) -> None:
        """Answer the request that waits with a turn of the policy."""
        assert self._turn is not None, "a request comes first"
        calls = [call for call in PARSERS[self._call_format](text) if not call.problem]
        message: Message = {"role": "assistant", "content": text}
        if self._has_tools and calls:
            content = text.partition(_CALL_TAG)[0] if self._call_format == "hermes" else ""
            functions = [
                {"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls
            ]
            message |= {
                "content": content or None,
                "tool_calls": [
                    {"id": f"call_{self._turns}_{number}", "type": "function", "function": function}
                    for number, function in enumerate(functions)
                ],
            }
        self._turns += 1
        self.messages.append(message)
        turn, self._turn = self._turn, None
        if not turn.done():  # its client may have closed the connection
            turn.set_result(message)

    def close(self) -> None:
        """Refuse the request that waits, and further ones: the conversation is over."""
        self._is_closed = True
        if self._turn is not None and not self._turn.done():
            self._turn.cancel()

    async def complete(self, body: Mapping[str, Any]) -> tuple[int, Message]:
        """Serve one request; return its HTTP status and JSON."""
        problem = self._problem(body)
        if problem is not None:
            return problem
        added = body["messages"][len(self.messages) :]
        self.messages += added
        self._has_tools = bool(body.get("tools"))
        turn = self._turn = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(added)
        try:
            message = await turn
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            return _error(410, "the conversation is over: it reached a limit of the run")
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return 200, {
            "id": f"turn-{self._turns}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model", "policy"),
            "choices": [choice],
            "usage": usage,  # tokens are counted where they are: in the engine's process
        }

    def _problem(self, body: Mapping[str, Any]) -> tuple[int, Message] | None:
        if self._is_closed:
            return _error(410, "the conversation is over: it reached a limit of the run")
        if body.get("stream") or body.get("n", 1) != 1:
            return _error(
                400, "stream=true and n above 1 are not supported; ask for one whole turn"
            )
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
            return _error(400, "messages must be a list of objects with role and content")
        if self._turn is not None:
            return _error(409, "an earlier request of this conversation waits for its turn")
        known = len(self.messages)
        different = [
            place
            for place, one in enumerate(self.messages)
            if place >= len(messages) or _essence(messages[place]) != _essence(one)
        ]
        if any(one.get("role") == "assistant" for one in messages[known:]):
            different.append(known)
        if not different:
            return None
        text = (
            f"message {different[0] + 1} of the request is not that of the conversation, whose "
            f"first {known} messages are fixed: the policy is trained on the tokens that it "
            "sampled in them; send them unchanged, also the thinking, and new ones after them"
        )
        self._requests.put_nowait(RewrittenHistoryError(text))
        return _error(409, text)


class Endpoint:
    """The server of this process, started for its first conversation."""

    _of_this_process: ClassVar["asyncio.Task[Endpoint] | None"] = None

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._address = ""

    @classmethod
    async def of_this_process(cls) -> "Endpoint":
        """Return the server, running."""
        if cls._of_this_process is None:
            cls._of_this_process = asyncio.create_task(cls().start())
        return await asyncio.shield(cls._of_this_process)

    async def start(self) -> "Endpoint":
        """Start to serve, on a port that the system chooses."""
        import uvicorn
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # signals of the job are the trainer's

        async def serve(request: Request) -> JSONResponse:
            session = self._sessions.get(request.path_params["token"])
            if session is None:
                status, content = _error(404, "no conversation has this address")
            else:
                try:
                    status, content = await session.complete(await request.json())
                except ValueError as error:
                    status, content = _error(400, f"the request is not valid JSON: {error}")
            # OpenAI's client would send a request with status 409 again.
            return JSONResponse(content, status, headers={"x-should-retry": "false"})

        route = Route("/{token}/v1/chat/completions", serve, methods=["POST"])
        config = uvicorn.Config(
            Starlette(routes=[route]), host="127.0.0.1", port=0, log_level="error", lifespan="off"
        )
        self._server = server = Server(config)
        self._task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        return self

    async def close(self) -> None:
        """Stop to serve and close the port; the server of a process also ends with it."""
        self._server.should_exit = True
        await self._task

    def open(self, messages: Sequence[Message], *, call_format: CallFormat) -> Session:
        """Open a conversation at an address of its own."""
        token = secrets.token_urlsafe(16)
        url = f"{self._address}/{token}/v1"
        session = self._sessions[token] = Session(url, messages, call_format=call_format)
        return session


def _error(status: int, text: str) -> tuple[int, Message]:
    return status, {"error": {"message": text, "type": "invalid_request_error", "code": status}}


def _essence(message: Message) -> tuple[Any, ...]:
    """Return what of a message must not change: role, text and tool calls."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append((function.get("name"), json.dumps(arguments, sort_keys=True)))
    return message.get("role"), content, tuple(calls)
