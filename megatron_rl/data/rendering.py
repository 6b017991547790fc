"""Chat messages as text, by the chat template or without one, and as tokens."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.data.rows import name_row
from megatron_rl.data.tokenizer import Template
from megatron_rl.errors import UserError
from megatron_rl.messages import Message, with_text_arguments

Chat = tuple[Sequence[Message], Sequence[dict[str, Any]]]  # messages and tools


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
) -> dict[int, list[int]]:
    if template == "raw":
        texts = [_join(chat, name_row(path, number)) for number, chat in chats.items()]
    else:
        texts = _apply_template(chats, tokenizer, path=path, arguments=arguments)
    # A chat template writes special tokens itself; a plain text gets what the tokenizer adds.
    found = tokenizer(texts, add_special_tokens=template == "raw")["input_ids"]
    token_ids = dict(zip(chats, found, strict=True))
    for index, ids in token_ids.items():
        if not ids:
            raise UserError(
                f"{name_row(path, index)}: the prompt has no tokens; give it a text, or leave the "
                "row out"
            )
    return token_ids


def _join(chat: Chat, where: str) -> str:
    messages, tools = chat
    if tools or any(message.get("tool_calls") for message in messages):
        raise UserError(
            f"{where}: has tools or tool calls, which data.template=raw would leave out; use a "
            "chat template, or remove them"
        )
    return "\n\n".join(message["content"] for message in messages)


def _apply_template(
    chats: Mapping[int, Chat], tokenizer: Any, *, path: Path, arguments: Mapping[str, Any]
) -> list[str]:
    texts = []
    for number, (messages, tools) in chats.items():
        try:
            texts.append(render(messages, tools, tokenizer, arguments=arguments))
        except UserError as error:
            raise UserError(f"{name_row(path, number)}: {error}") from error.__cause__
    return texts


def render(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    tokenizer: Any,
    *,
    arguments: Mapping[str, Any],
    generate: bool = True,
) -> str:
    """Apply the chat template; raise UserError if it refuses a part of the prompt or leaves it out.

    generate: with the generation prompt, by which the assistant's next message begins.

    Most templates take the arguments of tool calls as objects, some as texts: those are tried next.
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
            if (missing := _find_missing(messages, tools, text)) is None:
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
            start = 0 if role in ("system", "developer") else end
            found = max(text.find(plain, start), text.find(written, start))
            if found < 0:
                return f"message {place}, of role {role}"
            end = max(end, found + len(plain)) if start == end else end
        for call in message.get("tool_calls") or ():
            name = (call.get("function") or {}).get("name") or ""
            found = text.find(name, end)
            if found < 0:
                return f"the call of {name} in message {place}"
            end = found + len(name)
    names = [tool["function"]["name"] for tool in tools]
    return next((f"the tool {name}" for name in names if name not in text), None)
