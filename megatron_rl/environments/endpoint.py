"""A server of OpenAI's chat completions and vLLM's generation from token ids, for one conversation.

It runs in the conversation's process, on the loopback interface only, under a path that contains a
random token. It has no model: a request waits for the turn that the engine samples.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import h11

from megatron_rl.environments.call_formats import CallFormat, ToolCall, parse_calls
from megatron_rl.environments.interface import Answer, TurnTokens, is_token_list
from megatron_rl.errors import UserError
from megatron_rl.messages import in_order_of_calls, parse_message, parse_tools

Message = dict[str, Any]
Reply = tuple[int, Message]  # an HTTP status and JSON

# Fields of a request that have an effect; those that nothing here depends on, because the run
# decides (its sampling, and what ends a turn) or because they are labels; and values of others that
# ask for nothing. Whatever else a request asks for is refused.
_USED = {
    "messages", "tools", "model", "n", "stream", "logprobs", "parallel_tool_calls",
    "return_tokens_as_token_ids", "return_token_ids", "token_ids", "sampling_params", "request_id",
    "features", "content_parts",
}  # fmt: skip
_IGNORED = {
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens",
    "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "stop_token_ids",
    "ignore_eos", "reasoning_effort", "verbosity", "user", "metadata", "store", "service_tier",
    "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "cache_salt", "priority",
    "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "timeout",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"), "function_call": ("auto", "none"), "top_logprobs": (0,),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "length_penalty": (1,),
    "add_generation_prompt": (True,), "include_reasoning": (True,),
    **dict.fromkeys(
        ("echo", "use_beam_search", "continue_final_message", "add_special_tokens",
         "include_stop_str_in_output"), (False,)),
}  # fmt: skip
_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class RewrittenHistoryError(Exception):
    """A request that changes what was written before."""


def error_reply(status: int, text: str) -> Reply:
    """Build the reply of a refused request."""
    return status, {"error": {"message": text, "type": "invalid_request_error", "code": status}}


_OVER = error_reply(410, "the conversation is over: it reached a limit of the run")


@dataclass(frozen=True)
class ServedTurn:
    """A turn of the policy, with the tokens before it; without tokens if they are unknown."""

    text: str
    prompt: list[int]
    tokens: TurnTokens | None
    number: int  # from 0

    def message(self, calls: Sequence[ToolCall]) -> Message:
        """Build an assistant's message: valid calls as `tool_calls`, invalid calls in its text."""
        valid = [call for call in calls if not call.problem]
        if not valid:
            return {"role": "assistant", "content": self.text}
        content = self.text.partition(valid[0].written)[0]
        if len(valid) < len(calls):
            content = self.text
            for call in valid:
                content = content.replace(call.written, "", 1)
        functions = [{"name": one.name, "arguments": json.dumps(one.arguments)} for one in valid]
        return {
            "role": "assistant",
            "content": content or None,
            "tool_calls": [
                {"id": f"call_{self.number}_{place}", "type": "function", "function": function}
                for place, function in enumerate(functions)
            ],
        }

    def completion(self, message: Message, body: Mapping[str, Any]) -> Message:
        """Build a reply of chat completions with `message`, as the request `body` asks.

        `logprobs` names tokens by their ids, as vLLM does with `return_tokens_as_token_ids`. With
        that or `return_token_ids` the message has NeMo-Gym's three fields, and with the latter the
        reply also has vLLM's two.
        """
        reason = "tool_calls" if message.get("tool_calls") else self._finish_reason
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        reply = self._reply(body, id=f"turn-{self.number + 1}", object="chat.completion")
        if self.tokens is not None:
            if body.get("logprobs"):
                choice["logprobs"] = {"content": self._logprobs()}
            if body.get("return_tokens_as_token_ids") or body.get("return_token_ids"):
                fields = (self.prompt, self.tokens.sampled, self.tokens.logprobs)
                choice["message"] = message | dict(zip(_TOKEN_FIELDS, fields, strict=True))
            if body.get("return_token_ids"):
                choice["token_ids"] = self.tokens.sampled
                reply["prompt_token_ids"] = self.prompt
        return reply | {"choices": [choice]}

    def generation(self, body: Mapping[str, Any]) -> Message:
        """Build a reply of vLLM's `/inference/v1/generate`."""
        assert self.tokens is not None, "an agent receives the tokens of every turn"
        sampling = body.get("sampling_params") or {}
        has_logprobs = sampling.get("logprobs") is not None
        choice = {
            "index": 0,
            "token_ids": self.tokens.sampled,
            "finish_reason": self._finish_reason,
            "logprobs": {"content": self._logprobs()} if has_logprobs else None,
        }
        name = body.get("request_id") or f"turn-{self.number + 1}"
        reply = self._reply(body, request_id=name) | {"choices": [choice]}
        return reply | ({"prompt_token_ids": self.prompt} if body.get("return_token_ids") else {})

    def _reply(self, body: Mapping[str, Any], **fields: Any) -> Message:
        prompt = len(self.prompt)
        sampled = len(self.tokens.sampled) if self.tokens is not None else 0
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled}
        return fields | {
            "created": int(time.time()),
            "model": body.get("model") or "policy",
            "usage": usage | {"total_tokens": prompt + sampled},
        }

    @property
    def _finish_reason(self) -> str:
        return "stop" if self.tokens is None or self.tokens.is_complete else "length"

    def _logprobs(self) -> list[Message]:
        """List the tokens by id: as a number, as vLLM 0.32 does, and in a text, as before."""
        assert self.tokens is not None
        return [
            {
                "token": f"token_id:{token}",
                "token_id": token,
                "logprob": logprob,
                "bytes": None,
                "top_logprobs": [],
            }
            for token, logprob in zip(self.tokens.sampled, self.tokens.logprobs, strict=True)
        ]


@dataclass(eq=False)
class _Exchange:
    """A request that was accepted, and its reply."""

    body: Message
    is_chat: bool
    reply: "asyncio.Future[Reply]"
    is_delivered: bool = False


class Session:
    """One conversation: `messages` and `token_ids` so far, and at most one request that waits."""

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        call_format: CallFormat,
        max_rewrites: int = 0,
    ) -> None:
        self.messages, self._rewrites_left = list(messages), max_rewrites
        self.token_ids: list[int] = []  # as the engine has them
        self._tokens: TurnTokens | None = None  # of the next turn
        self._call_format = call_format
        self._requests: asyncio.Queue[Answer | Exception] = asyncio.Queue()
        self._last: _Exchange | None = None
        self._is_closed = False
        self._turns = 0

    async def next_request(self) -> Answer:
        """Wait for the next request; return what it adds, or raise why it cannot."""
        request = await self._requests.get()
        if isinstance(request, Exception):
            raise request
        return request

    def receive(self, tokens: TurnTokens | None) -> None:
        """Take the tokens of the next turn, and the tokens before it; None: they are unknown."""
        self._tokens = tokens
        if tokens is not None:
            self.token_ids = [*([] if tokens.restarts else self.token_ids), *tokens.context]

    def answer(self, text: str) -> None:
        """Answer the request that waits with a turn of the policy."""
        assert self._last is not None and not self._last.reply.done(), "a request comes first"
        body, is_chat = self._last.body, self._last.is_chat
        made = ServedTurn(text, list(self.token_ids), self._tokens, self._turns)
        self._turns += 1
        self.token_ids += self._tokens.sampled if self._tokens is not None else []
        in_thinking = self._tokens is not None and self._tokens.in_thinking
        calls, tools = [], parse_tools(body.get("tools"))
        if is_chat and tools and body.get("tool_choice") != "none":
            calls = parse_calls(text, self._call_format, in_thinking=in_thinking, tools=tools)
        if body.get("parallel_tool_calls") is False:  # as vLLM: the first one
            calls = [one for one in calls if not one.problem][:1]
        message = made.message(calls)
        self.messages.append(_readable(message))
        reply = made.completion(message, body) if is_chat else made.generation(body)
        self._last.reply.set_result((200, reply))

    def close(self) -> None:
        """Refuse the waiting request and all later requests: the conversation is over."""
        self._is_closed = True
        if self._last is not None and not self._last.reply.done():
            self._last.reply.set_result(_OVER)

    async def complete(self, body: Message, *, is_retry: bool = False) -> Reply:
        """Serve a request of chat completions.

        is_retry: its client sends it again, and gets the same reply.
        """
        if (again := self._same_request(body, True, is_retry=is_retry)) is not None:
            return await asyncio.shield(again.reply)
        if (problem := self._problem(body, body)) is not None:
            return problem
        try:
            parse_tools(body.get("tools"))
            messages = _read_messages(body)
        except UserError as error:
            return error_reply(400, str(error))
        change = self._changed_messages(messages)
        if change and (not messages or messages[-1]["role"] == "assistant"):
            return self._refuse(
                f"{change}; a changed history must end with what the policy answers"
            )
        if change and not self._may_restart():
            return self._refuse(change + self._advice)
        added = messages if change else messages[len(self.messages) :]
        self.messages = list(messages)
        return await self._wait(Answer(added, restarts=change is not None), body, is_chat=True)

    async def generate(self, body: Message, *, is_retry: bool = False) -> Reply:
        """Serve a request with token ids, as vLLM's."""
        if (again := self._same_request(body, False, is_retry=is_retry)) is not None:
            return await asyncio.shield(again.reply)
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            return error_reply(400, "sampling_params must be an object")
        problem = self._problem(body, sampling) or _malformed_tokens(body)
        if problem is not None:
            return problem
        tokens = body["token_ids"]
        change = self._changed_tokens(tokens)
        if change and not self._may_restart():
            return self._refuse(change + self._advice)
        request = Answer(token_ids=tokens[0 if change else len(self.token_ids) :])
        added = replace(request, restarts=change is not None)
        return await self._wait(added, body, is_chat=False)

    def mark_delivered(self, body: Message) -> None:
        """Record that the client has received the reply to this request."""
        if self._last is not None and self._last.body is body:
            self._last.is_delivered = True

    async def _wait(self, added: Answer, body: Message, *, is_chat: bool) -> Reply:
        """Wait for the turn that answers a request, also while its client asks again."""
        self._last = _Exchange(body, is_chat, asyncio.get_running_loop().create_future())
        self._requests.put_nowait(added)
        return await asyncio.shield(self._last.reply)

    def _same_request(self, body: Message, is_chat: bool, *, is_retry: bool) -> _Exchange | None:
        """Return the last request if this is the same: a client's own timeout made it ask again."""
        last = self._last
        if last is None or (last.body, last.is_chat) != (body, is_chat):
            return None
        if last.reply.done() and last.is_delivered and not is_retry:
            return None
        last.body = body  # its delivery counts
        return last

    def _problem(self, body: Mapping[str, Any], settings: Mapping[str, Any]) -> Reply | None:
        """Return why a request is refused; settings: the part of it that has those of sampling."""
        if self._is_closed:
            return _OVER
        if body.get("stream") or settings.get("n") not in (None, 1):
            return error_reply(
                400, "stream=true and n above 1 are not supported; ask for one whole turn"
            )
        if (field := _without_effect(body) or _without_effect(settings)) is not None:
            what = f"{field} would have no effect here, so the reply is not what it asks for"
            return error_reply(400, f"{what}; leave it out")
        if self._last is not None and not self._last.reply.done():
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
        if any(one["role"] == "assistant" for one in added) or (added and not self._turns):
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

    def _refuse(self, text: str) -> Reply:
        self._requests.put_nowait(RewrittenHistoryError(text))
        return error_reply(409, text)


class Endpoint:
    """The server of a conversation, at `url` once it is started."""

    def __init__(self, session: Session) -> None:
        self._session, self._token = session, secrets.token_urlsafe(16)
        self.url = ""

    async def start(self) -> "Endpoint":
        """Start to serve, on a port that the system chooses."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/{self._token}/v1"
        return self

    def close(self) -> None:
        """Stop to serve and close the port; the server also ends with its process."""
        self._server.close()

    async def _serve(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            try:
                while await self._serve_one(connection, source, sink):
                    connection.start_next_cycle()
            except h11.RemoteProtocolError as error:
                if connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    reply = error_reply(error.error_status_hint, f"the request is no HTTP: {error}")
                    await _send(connection, sink, reply)
        sink.close()

    async def _serve_one(
        self, connection: h11.Connection, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> bool:
        """Serve one request; returns whether the connection can serve another one."""
        request, text = None, bytearray()
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                if connection.they_are_waiting_for_100_continue:
                    sink.write(
                        connection.send(h11.InformationalResponse(status_code=100, headers=[]))
                    )
                connection.receive_data(await source.read(1 << 16))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                text += event.data
            else:
                return False
        assert request is not None
        body: Message = {}
        work = asyncio.ensure_future(self._reply(request, bytes(text), body))
        while not work.done():
            more = asyncio.ensure_future(source.read(1 << 16))
            await asyncio.wait({work, more}, return_when=asyncio.FIRST_COMPLETED)
            more.cancel()
            await asyncio.wait({more})
            if more.cancelled():
                break
            if not more.result():  # its client has given up; the turn is kept for a retry
                work.cancel()
                return False
            connection.receive_data(more.result())
        await _send(connection, sink, work.result())
        self._session.mark_delivered(body)
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE

    async def _reply(self, request: h11.Request, text: bytes, body: Message) -> Reply:
        """Serve a request, whose JSON is put into `body`."""
        chat, tokens = (
            f"/{self._token}/v1/chat/completions",
            f"/{self._token}/inference/v1/generate",
        )
        target = request.target.decode("latin-1").partition("?")[0]
        if request.method != b"POST" or target not in (chat, tokens):
            return error_reply(
                404, "no conversation has this address; it takes POST of <url>/chat/completions"
            )
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            return error_reply(400, f"the request is not valid JSON: {error}")
        if not isinstance(value, dict):
            return error_reply(400, "the request must be an object")
        body |= value
        retries = dict(request.headers).get(b"x-stainless-retry-count", b"0")
        serve = self._session.complete if target == chat else self._session.generate
        return await serve(body, is_retry=retries != b"0")


async def _send(connection: h11.Connection, sink: asyncio.StreamWriter, reply: Reply) -> None:
    data = json.dumps(reply[1]).encode()
    headers = [("content-type", "application/json"), ("content-length", str(len(data)))]
    headers.append(("x-should-retry", "false"))  # OpenAI's client repeats status 409
    sink.write(connection.send(h11.Response(status_code=reply[0], headers=headers)) or b"")
    sink.write(connection.send(h11.Data(data=data)) or b"")
    sink.write(connection.send(h11.EndOfMessage()) or b"")
    await sink.drain()


def _read_messages(body: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a request as chat templates take them; raises UserError."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise UserError("messages must be a list of objects with role and content")
    read = []
    for place, message in enumerate(messages, start=1):
        try:
            read.append(_readable(message))
        except UserError as error:
            raise UserError(f"message {place}: {error}") from None
        except RecursionError:
            raise UserError(f"message {place} is nested too deep") from None
    return in_order_of_calls(read)


def _readable(message: Any) -> Message:
    """Return a message whose content is a text and whose calls have objects as arguments."""
    if isinstance(message, dict):
        message = {key: value for key, value in message.items() if key not in _TOKEN_FIELDS}
        message["content"] = message.get("content") or ""
    return parse_message(message)


def _without_effect(body: Mapping[str, Any]) -> str | None:
    """Return a field of a request, with its value, that asks for what is not done."""
    for name, value in body.items():
        is_empty = value is None or (value in ("", [], {}) and value is not False)
        if name in _USED or name in _IGNORED or is_empty or value in _NEUTRAL.get(name, ()):
            continue
        return f"{name}={json.dumps(value)[:80]}"
    return None


def _malformed_tokens(body: Mapping[str, Any]) -> Reply | None:
    tokens = body.get("token_ids")
    if not is_token_list(tokens) or not tokens:
        return error_reply(400, "token_ids must be a list of integers from 0 on, and not empty")
    if body.get("features") or body.get("content_parts"):
        return error_reply(400, "features and content_parts are not supported; send token_ids")
    return None


def _essence(message: Message) -> tuple[Any, ...]:
    """Return what of a message must not change: role, text and tool calls."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(one["name"], json.dumps(one["arguments"], sort_keys=True)) for one in functions]
    return message["role"], message["content"], tuple(calls)
