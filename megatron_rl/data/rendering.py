"""Chat messages as text, by the chat template or without one, and as tokens; text between turns."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rl.data.rows import name_row
from megatron_rl.data.text_tokens import hide_control_tokens, tokenize_after, tokenize_texts
from megatron_rl.data.tokenizer import Template
from megatron_rl.errors import UserError
from megatron_rl.messages import Message, with_text_arguments

Chat = tuple[Sequence[Message], Sequence[dict[str, Any]]]  # messages and tools


def raise_error(error: UserError) -> None:
    """Raise an error, where a caller may also count it."""
    raise error


def tokenize_messages(
    messages: Sequence[Message],
    tokenizer: Any,
    *,
    template: Template = "chat",
    arguments: Mapping[str, Any],
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """The tokens of one prompt; ValueError where the chat template refuses it."""
    return tokenize_chats(
        {0: (messages, tools)},
        tokenizer, path=Path("prompt"), template=template, arguments=arguments,
    )[0]  # fmt: skip


def tokenize_chats(
    chats: Mapping[int, Chat],
    tokenizer: Any,
    *,
    path: Path,
    template: Template,
    arguments: Mapping[str, Any],
    refused: Callable[[UserError], object] = raise_error,
) -> dict[int, list[int]]:
    """The tokens of prompts by their numbers, without those that the template refuses.

    refused: receives why a prompt is, with the name of its row; raises it by default.
    """
    texts: dict[int, str] = {}
    for number, chat in chats.items():
        try:
            if template == "raw":
                texts[number] = _join(chat)
            else:
                hidden = hide_control_tokens(chat[0], tokenizer)
                texts[number] = render(hidden, chat[1], tokenizer, arguments=arguments)
        except UserError as error:
            named = UserError(f"{name_row(path, number)}: {error}")
            named.__cause__ = error.__cause__
            refused(named)
    if template == "raw":  # a plain text gets what the tokenizer adds, and has control tokens
        found = tokenizer([*texts.values()])["input_ids"] if texts else []
    else:
        found = tokenize_texts([*texts.values()], tokenizer)
    token_ids = dict(zip(texts, found, strict=True))
    for index in [index for index, ids in token_ids.items() if not ids]:
        del token_ids[index]
        refused(
            UserError(
                f"{name_row(path, index)}: the prompt has no tokens; give it a text, or leave the "
                "row out"
            )
        )
    return token_ids


def _join(chat: Chat) -> str:
    messages, tools = chat
    if tools or any(message.get("tool_calls") for message in messages):
        raise UserError(
            "has tools or tool calls, which data.template=raw would leave out; use a chat "
            "template, or remove them"
        )
    return "\n\n".join(message["content"] for message in messages)


def render(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    tokenizer: Any,
    *,
    arguments: Mapping[str, Any],
    generate: bool = True,
) -> str:
    """Apply the chat template; raise UserError if it refuses a part of the prompt or leaves it out.

    generate: with the generation prompt, by which the assistant's next message begins; without it,
    some templates leave out messages before the last one, which is then no error.

    Most templates take the arguments of tool calls as objects, some as texts: such messages are
    tried next.
    """
    if tools and arguments.get("tools"):
        raise UserError(
            "has tools, but the environment or data.template_arguments gives the template others; "
            "remove one of them"
        )
    given = dict(arguments) | ({"tools": list(tools)} if tools else {})
    forms = [list(messages)]
    if any(message.get("tool_calls") for message in messages):
        forms.append(with_text_arguments(messages))
    problems: list[UserError] = []
    for form in forms:
        try:
            text = tokenizer.apply_chat_template(
                form, tokenize=False, add_generation_prompt=generate, **given
            )
        except Exception as error:  # noqa: BLE001 - a template is a program and may raise anything
            problem = UserError(
                f"the chat template refuses these messages: {error}; repair the row, the template "
                "(chat_template.jinja) or data.template_arguments"
            )
            problem.__cause__ = error
        else:
            needed = messages if generate else messages[-1:]
            if (missing := _find_missing(needed, tools if generate else (), text)) is None:
                return str(text)
            problem = UserError(
                f"the chat template leaves out {missing}; remove it from the rows, or repair the "
                "template (chat_template.jinja)"
            )
        problems.append(problem)
    raise problems[0]


def _find_missing(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], text: str
) -> str | None:
    """Name what a rendered text lacks: a message not of the assistant, a tool call or a tool.

    Messages follow each other in the text, except system messages, which some templates move.
    """
    end = 0  # of what was found
    for place, message in enumerate(messages, start=1):
        role, content = message.get("role"), message.get("content")
        # Templates drop the thinking of earlier turns, and some write results of tools as JSON.
        if role != "assistant" and isinstance(content, str):
            plain = content.strip()
            written = json.dumps(plain, ensure_ascii=False)[1:-1]
            is_moved = role in ("system", "developer")
            start = 0 if is_moved else end
            found = max(text.find(plain, start), text.find(written, start))
            if found < 0:
                return f"message {place}, of role {role}"
            end = end if is_moved else found + len(plain)
        for call in message.get("tool_calls") or ():
            name = (call.get("function") or {}).get("name") or ""
            found = text.find(name, end)
            if found < 0:
                return f"the call of {name} in message {place}"
            end = found + len(name)
    names = [tool["function"]["name"] for tool in tools]
    return next((f"the tool {name}" for name in names if name not in text), None)


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

        tools: the prompt's tools, which some templates write late. With the template `raw` these
        are the tokens of the observation's text alone. Raises UserError if the template refuses the
        messages, or leaves out a role or the turn before.
        """
        if self.template == "raw":
            text = "\n\n".join(message["content"] for message in observation)
        else:
            hidden = hide_control_tokens(observation, self.tokenizer)
            text = self._after_turn(prompt, hidden, tools)
        return self._tokenize(text)

    def begin(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Return the tokens of messages that replace a conversation, rendered like a prompt.

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
        if not turn or turn[-1] not in stop:
            return list(tokens)
        first = self._skip_blank(tokens)
        is_end = first < len(tokens) and tokens[first] in (turn[-1], self._end)
        return list(tokens[first + 1 :]) if is_end else list(tokens)

    def _skip_blank(self, tokens: Sequence[int]) -> int:
        """Return the place of the first token that is no white space, which may precede an end."""
        written = (self.tokenizer.decode([token]).replace("\u2581", " ") for token in tokens)
        return next((place for place, text in enumerate(written) if text.strip()), len(tokens))

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
        further, last = (ids[self._skip_blank(ids) :] for ids in (further, last))
        if not further or further[0] not in special or further[:1] == begin:
            return None
        return further[0] if further[:1] == last[:1] or further[1:2] == begin else None

    def _tokenize(self, text: str) -> list[int]:
        return tokenize_after("\n", text, self.tokenizer)

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
