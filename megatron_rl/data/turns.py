"""Rendering of what comes between two turns of the policy: an observation in the chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_rl.data.rendering import tokenize_messages
from megatron_rl.data.tokenizer import Template
from megatron_rl.errors import UserError

Message = dict[str, Any]
_MARK = "\u2063turn of the policy\u2063"  # stands for the text of a turn; never tokenized
_PROBE = "text of a message"  # the same, also for templates that write JSON


def as_messages(observation: str | Sequence[Message]) -> list[Message]:
    """Return the messages of an observation; a text is a message of the user."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return list(observation)


@dataclass(frozen=True)
class TurnRenderer:
    """Tokens that follow a turn: its end, the observation, and the beginning of the next turn.

    What the policy sampled is never tokenized again, so its log-probs stay those of its tokens. A
    template that removes or changes earlier turns, as some do with thinking, has no effect on them
    here: the policy continues exactly what it wrote.
    """

    tokenizer: Any
    template: Template = "chat"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    _known_roles: set[Any] = field(default_factory=set)  # that the template writes

    def render(
        self,
        prompt: Sequence[Message],
        observation: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Return the tokens that the template puts after a turn of a conversation.

        tools: those of the prompt, which some templates write late.
        With the template `raw` these are the tokens of the observation's text alone. Raises
        UserError if the template refuses the messages, or leaves out a role or the turn before.
        """
        if self.template == "raw":
            text = "\n\n".join(message["content"] for message in observation)
        else:
            text = self._after_turn(prompt, observation, tools)
        return self._tokenize(text)

    def begin(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Return the tokens of messages that replace a conversation, as those of a prompt.

        Raises UserError if the template refuses them or writes nothing.
        """
        try:
            return tokenize_messages(
                messages,
                self.tokenizer,
                template=self.template,
                arguments=self.arguments,
                tools=tools,
            )
        except Exception as error:  # a template is a program and may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(
                f"the chat template refuses a history with messages of {roles}: {error}; replace "
                "the history by other messages, or repair chat_template.jinja"
            ) from error

    def without_repeated_end(
        self, tokens: Sequence[int], *, turn: Sequence[int], stop: Sequence[int]
    ) -> list[int]:
        """Drop the end of turn from the rendered `tokens` if the policy has ended the turn itself.

        An end is then in the conversation once, as a decision of the policy, also if the template's
        is another token (gpt-oss: `<|return|>` and `<|end|>`). A turn that was cut at its limit
        gets it from the template, as part of the observation.
        """
        if not tokens or not turn or turn[-1] not in stop:
            return list(tokens)
        is_end = tokens[0] == turn[-1] or tokens[0] == self._end
        return list(tokens[1:]) if is_end else list(tokens)

    @cached_property
    def _end(self) -> int | None:
        """The special token by which the template ends a turn that others follow, if any.

        A first token after a turn may also begin the next message. It is an end if it also follows
        a last turn, or is itself followed by the token that begins messages.
        """
        special = set(getattr(self.tokenizer, "added_tokens_decoder", ()))
        question, turn = as_messages(_PROBE), [{"role": "assistant", "content": _MARK}]
        try:
            asked, prompt = self._write(question), self._write(question, add_generation_prompt=True)
            last, further = (
                self._tokenize(self._write([*question, *turn, *more]).partition(_MARK)[2])
                for more in ([], question)
            )
        except Exception:  # noqa: BLE001 - a template is a program and may refuse these messages
            return None
        begin = self._tokenize(prompt.removeprefix(asked))[:1]
        if not further or further[0] not in special or further[:1] == begin:
            return None
        return further[0] if further[:1] == last[:1] or further[1:2] == begin else None

    def _tokenize(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def _write(self, messages: Sequence[Message], **arguments: Any) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, **self.arguments, **arguments
        )
        return text

    def _refuse_left_out(
        self, prompt: Sequence[Message], observation: Sequence[Message], **further: Any
    ) -> None:
        """Raise UserError if the template leaves out messages of a role."""
        turn = {"role": "assistant", "content": _MARK}
        for message in observation:
            role = message.get("role")
            if role not in self._known_roles:
                probe = [*prompt, turn, message | {"content": _PROBE}]
                if _PROBE not in self._write(probe, **further).partition(_MARK)[2]:
                    raise UserError(
                        f"the chat template leaves out an observation with the role {role}; return "
                        "messages of another role, or repair chat_template.jinja"
                    )
                self._known_roles.add(role)

    def _after_turn(
        self,
        prompt: Sequence[Message],
        observation: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> str:
        mark = _MARK
        while any(mark in str(message.get("content")) for message in (*prompt, *observation)):
            mark += _MARK
        turn = {"role": "assistant", "content": mark}
        further = {"tools": list(tools)} if tools else {}
        try:
            text = self._write([*prompt, turn, *observation], add_generation_prompt=True, **further)
        except Exception as error:  # a template is a program and may raise anything
            roles = ", ".join(str(message.get("role")) for message in observation)
            raise UserError(
                f"the chat template refuses an observation with messages of {roles}: {error}; "
                "return other messages from the environment, or repair chat_template.jinja"
            ) from error
        _, found, after = text.partition(mark)
        if not found:
            raise UserError(
                "the chat template leaves out the text of an assistant's message that others "
                "follow, so turns cannot follow each other; repair chat_template.jinja"
            )
        self._refuse_left_out(prompt, observation, **further)
        return after
