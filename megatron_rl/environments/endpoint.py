"""A server of OpenAI's chat completions and vLLM's generation from token ids.

Every conversation has an address of its own.

It runs in the environment's process, on the loopback interface only, and a path that contains a
random token. It has no model: a request waits for the turn that the engine samples.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from megatron_rl.environments.call_formats import PARSERS, CallFormat
from megatron_rl.environments.interface import Answer, TurnTokens, is_token_list
from megatron_rl.environments.replies import Message, Turn, as_text, error_reply, readable

_OVER = error_reply(410, "the conversation is over: it reached a limit of the run")


class RewrittenHistoryError(Exception):
    """A request that changes what was written before."""


class Session:
    """One conversation: `messages` and `token_ids` so far, and at most one request that waits."""

    def __init__(
        self,
        url: str,
        messages: Sequence[Message],
        *,
        call_format: CallFormat,
        max_rewrites: int = 0,
    ) -> None:
        self.url, self.messages, self._rewrites_left = url, list(messages), max_rewrites
        self.token_ids: list[int] = []  # as the engine has them
        self._tokens: TurnTokens | None = None  # of the next turn
        self._call_format = call_format
        self._requests: asyncio.Queue[Answer | Exception] = asyncio.Queue()
        self._turn: asyncio.Future[Turn] | None = None
        self._is_closed = False
        self._turns = 0

    async def next_request(self) -> Answer:
        """Wait for the next request; return what it adds, or raise why it cannot."""
        request = await self._requests.get()
        if isinstance(request, Exception):
            raise request
        return request

    def receive(self, tokens: TurnTokens | None) -> None:
        """Take the tokens of the next turn, and those before it; None: they are unknown."""
        self._tokens = tokens
        if tokens is not None:
            self.token_ids = [*([] if tokens.restarts else self.token_ids), *tokens.context]

    def answer(self, text: str) -> None:
        """Answer the request that waits with a turn of the policy."""
        assert self._turn is not None, "a request comes first"
        made = Turn(text, list(self.token_ids), self._tokens, self._turns)
        self._turns += 1
        self.token_ids += self._tokens.sampled if self._tokens is not None else []
        turn, self._turn = self._turn, None
        self.messages.append({"role": "assistant", "content": text})
        if not turn.done():  # its client may have closed the connection
            turn.set_result(made)

    def close(self) -> None:
        """Refuse the request that waits, and further ones: the conversation is over."""
        self._is_closed = True
        if self._turn is not None and not self._turn.done():
            self._turn.cancel()

    async def complete(self, body: Mapping[str, Any]) -> tuple[int, Message]:
        """Serve a request of chat completions; return its HTTP status and JSON."""
        problem = self._problem(body, n=body.get("n", 1)) or _malformed_messages(body)
        if problem is not None:
            return problem
        messages = body["messages"]
        change = self._changed_messages(messages)
        if change and (not messages or messages[-1].get("role") == "assistant"):
            return self._refuse(
                f"{change}; a changed history must end with what the policy answers"
            )
        if change and not self._may_restart():
            return self._refuse(change + self._advice)
        request = Answer(messages[len(self.messages) :])
        if change:
            request = Answer([readable(message) for message in messages], restarts=True)
        self.messages = list(messages)
        made = await self._wait(request)
        if made is None:
            return _OVER
        calls = PARSERS[self._call_format](made.text) if body.get("tools") else []
        message = made.message(calls, call_format=self._call_format)
        self.messages[-1] = message
        return 200, made.completion(message, body)

    async def generate(self, body: Mapping[str, Any]) -> tuple[int, Message]:
        """Serve a request with token ids, as vLLM's; return its HTTP status and JSON."""
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            return error_reply(400, "sampling_params must be an object")
        problem = self._problem(body, n=sampling.get("n", 1)) or _malformed_tokens(body)
        if problem is not None:
            return problem
        tokens = body["token_ids"]
        change = self._changed_tokens(tokens)
        if change and not self._may_restart():
            return self._refuse(change + self._advice)
        request = Answer(token_ids=tokens[0 if change else len(self.token_ids) :])
        made = await self._wait(replace(request, restarts=change is not None))
        return _OVER if made is None else (200, made.generation(body))

    async def _wait(self, added: Answer) -> Turn | None:
        """Wait for the turn that answers a request; None if the conversation is over."""
        turn = self._turn = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(added)
        try:
            return await turn
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            return None

    def _problem(self, body: Mapping[str, Any], *, n: Any) -> tuple[int, Message] | None:
        if self._is_closed:
            return _OVER
        if body.get("stream") or n != 1:
            return error_reply(
                400, "stream=true and n above 1 are not supported; ask for one whole turn"
            )
        if self._turn is not None:
            return error_reply(409, "an earlier request of this conversation waits for its turn")
        return None

    def _may_restart(self) -> bool:
        """Count a request that changes what was before, unless it must be refused."""
        if not self._turns or self._rewrites_left < 1:
            return False
        self._rewrites_left -= 1
        return True

    @property
    def _advice(self) -> str:
        """The end of a refusal; the first request never changes anything, whatever is allowed."""
        return ", or raise environment.max_rewrites" if self._turns else ""

    def _changed_messages(self, messages: Sequence[Message]) -> str | None:
        """Return which earlier message a request changes, as a sentence; None if none."""
        known = len(self.messages)
        different = [
            place
            for place, one in enumerate(self.messages)
            if place >= len(messages) or _essence(messages[place]) != _essence(one)
        ]
        added = messages[known:]
        if any(one.get("role") == "assistant" for one in added) or (added and not self._turns):
            different.append(known)
        if not different:
            return None
        return (
            f"message {different[0] + 1} of the request is not that of the conversation, whose "
            f"first {known} messages are fixed: the policy is trained on the tokens that it "
            "sampled in them; send them unchanged, also the thinking, and new ones after them"
        )

    def _changed_tokens(self, tokens: Sequence[int]) -> str | None:
        """Return why token ids do not extend the conversation; None if they do."""
        known, is_first = self.token_ids, not self._turns
        if tokens[: len(known)] == known and not (is_first and len(tokens) > len(known)):
            return None
        return (
            f"token_ids are not those of the conversation, whose first {len(known)} are fixed: "
            + ("they are the prompt of the row" if is_first else "the policy sampled some of them")
            + "; send them unchanged, and new ones after them"
        )

    def _refuse(self, text: str) -> tuple[int, Message]:
        self._requests.put_nowait(RewrittenHistoryError(text))
        return error_reply(409, text)


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
                status, content = error_reply(404, "no conversation has this address")
            else:
                is_chat = request.url.path.endswith("/chat/completions")
                try:
                    body = await request.json()
                except ValueError as error:
                    status, content = error_reply(400, f"the request is not valid JSON: {error}")
                else:
                    if not isinstance(body, dict):
                        return JSONResponse(
                            error_reply(400, "the request must be an object")[1], 400
                        )
                    serve_one = session.complete if is_chat else session.generate
                    status, content = await serve_one(body)
            # OpenAI's client would send a request with status 409 again.
            return JSONResponse(content, status, headers={"x-should-retry": "false"})

        routes = [
            Route("/{token}/" + path, serve, methods=["POST"])
            for path in ("v1/chat/completions", "inference/v1/generate")
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), host="127.0.0.1", port=0, log_level="error", lifespan="off"
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

    def open(
        self, messages: Sequence[Message], *, call_format: CallFormat, max_rewrites: int = 0
    ) -> Session:
        """Open a conversation at an address of its own."""
        token = secrets.token_urlsafe(16)
        url = f"{self._address}/{token}/v1"
        session = Session(url, messages, call_format=call_format, max_rewrites=max_rewrites)
        self._sessions[token] = session
        return session


def _malformed_messages(body: Mapping[str, Any]) -> tuple[int, Message] | None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return error_reply(400, "messages must be a list of objects with role and content")
    return None


def _malformed_tokens(body: Mapping[str, Any]) -> tuple[int, Message] | None:
    tokens = body.get("token_ids")
    if not is_token_list(tokens) or not tokens:
        return error_reply(400, "token_ids must be a list of integers from 0 on, and not empty")
    if body.get("features") or body.get("content_parts"):
        return error_reply(400, "features and content_parts are not supported; send token_ids")
    return None


def _essence(message: Message) -> tuple[Any, ...]:
    """Return what of a message must not change: role, text and tool calls."""
    content = as_text(message)
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append((function.get("name"), json.dumps(arguments, sort_keys=True)))
    return message.get("role"), content, tuple(calls)
