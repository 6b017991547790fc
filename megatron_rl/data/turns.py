"""Rendering of what comes between two turns of the policy: an observation in the chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.data.prompts import tokenize_messages
from megatron_rl.data.tokenizer import Template
from megatron_rl.errors import UserError

Message = dict[str, Any]
_MARK = "\u2063turn of the policy\u2063"  # stands for the text of a turn; never tokenized


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
        UserError if the template refuses the messages or leaves out the turn before them.
        """
        if self.template == "raw":
            text = "\n\n".join(message["content"] for message in observation)
        else:
            text = self._after_turn(prompt, observation, tools)
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

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
        try:
            text = self.tokenizer.apply_chat_template(
                [*prompt, turn, *observation],
                tokenize=False,
                add_generation_prompt=True,
                **self.arguments,
                **({"tools": list(tools)} if tools else {}),
            )
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
        return str(after)


def without_repeated_end(
    tokens: Sequence[int], *, turn: Sequence[int], stop: Sequence[int]
) -> list[int]:
    """Drop the end of turn from the rendered `tokens` if the policy sampled it itself.

    It is then in the conversation once, as a decision of the policy. A turn that was cut at its
    limit gets it from the template, as part of the observation.
    """
    if tokens and turn and tokens[0] == turn[-1] and tokens[0] in stop:
        return list(tokens[1:])
    return list(tokens)
