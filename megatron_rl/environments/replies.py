"""Replies of the endpoint, in the forms of chat completions and of vLLM's token generation."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.environments.call_formats import CallFormat, ToolCall
from megatron_rl.environments.interface import TurnTokens

Message = dict[str, Any]
_CALL_TAG = "<tool_call>"
_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


@dataclass(frozen=True)
class Turn:
    """A turn of the policy, with the tokens before it; without tokens if they are unknown."""

    text: str
    prompt: list[int]
    tokens: TurnTokens | None
    number: int  # from 0

    def message(self, calls: Sequence[ToolCall], *, call_format: CallFormat) -> Message:
        """Build the message of an assistant, with valid calls of tools apart."""
        valid = [call for call in calls if not call.problem]
        if not valid:
            return {"role": "assistant", "content": self.text}
        content = self.text.partition(_CALL_TAG)[0] if call_format == "hermes" else ""
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
                choice["message"] = message | {
                    "prompt_token_ids": self.prompt,
                    "generation_token_ids": self.tokens.sampled,
                    "generation_log_probs": self.tokens.logprobs,
                }
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


def error_reply(status: int, text: str) -> tuple[int, Message]:
    """Build the reply of a refused request: its HTTP status and JSON."""
    return status, {"error": {"message": text, "type": "invalid_request_error", "code": status}}


def as_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, whose content may be text, parts or null."""
    content = message.get("content") or ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def readable(message: Message) -> Message:
    """Return a message for a chat template: content as a text, arguments of calls as objects."""
    kept = {key: value for key, value in message.items() if key not in _TOKEN_FIELDS}
    kept["content"] = as_text(message)
    if message.get("tool_calls"):
        kept["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return kept


def _with_parsed_arguments(call: Mapping[str, Any]) -> Message:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}
