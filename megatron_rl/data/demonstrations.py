"""Conversations that are trained as they are: prompt, the assistant's tokens, what is between.

Each trained message of the assistant is in the context in which the policy would write it: the
tokens of the messages before it with the generation prompt. Where a template writes earlier turns
differently later on (most drop their thinking), the next turn therefore begins another sequence
of the same response, as an agent's replaced history does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_rl.data.rendering import Chat, render, tokenize_messages
from megatron_rl.data.text_tokens import (
    hide_control_tokens,
    puts_space,
    tokenize_after,
    tokenize_texts,
)
from megatron_rl.data.tokenizer import Template
from megatron_rl.errors import UserError
from megatron_rl.fields import changes_training
from megatron_rl.messages import Message, unread_keys
from megatron_rl.rewards.thinking import ends_inside_thinking, has_end
from megatron_rl.types import Demonstration


@dataclass(frozen=True)
class WrittenConversation:
    """A conversation as texts: what precedes each trained answer, and the answer.

    A text continues what was written before it, or else replaces all of it.
    """

    turns: tuple[tuple[str, str, bool], ...]  # text, answer, whether the text continues
    ready: tuple[list[int], Demonstration] | None = None  # the tokens, where they are known


def _join_turns(
    turns: Sequence[tuple[list[int], list[int], bool]],
) -> tuple[list[int], Demonstration]:
    (prompt_ids, first, _), *others = turns
    tokens, observed, restarts = [*first], [], []
    for between, answer, continues in others:
        restarts += [] if continues else [len(tokens)]
        observed.append((len(tokens), len(tokens) + len(between)))
        tokens += [*between, *answer]
    return prompt_ids, Demonstration(tuple(tokens), tuple(observed), tuple(restarts))


@dataclass(frozen=True)
class ConversationTokenizer:
    """Turns conversations into prompts and demonstrations.

    turns: the assistant's messages that are trained. stop: tokens that end a response.
    """

    tokenizer: Any
    turns: Literal["all", "last"] = "all"
    stop: Sequence[int] = ()
    template: Template = "chat"
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def tokenize(self, chat: Chat) -> tuple[list[int], Demonstration]:
        """Return the tokens of the first trained message's prompt, and what follows them.

        Raises UserError where a message cannot be trained as it is.
        """
        (found,) = self.join([self.write(chat)])
        return found

    def write(self, chat: Chat) -> WrittenConversation:
        """Write a conversation as texts, of which `join` tokenizes many together: it is faster.

        Raises UserError where a message cannot be trained as it is.
        """
        messages, tools = chat
        places = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if self.turns == "last":
            places = places[-1:]
        if places[0] == 0:
            raise UserError(
                "begins with a message of the assistant, which has no prompt; remove it, or put "
                "a message before it"
            )
        self._refuse_unread(messages, places, tools)
        if self.template == "raw":
            return WrittenConversation((), self._tokenize_raw(messages, places))
        messages = hide_control_tokens(messages, self.tokenizer)
        turns, text = [], ""
        for place in places:
            prompt = self._write(messages[:place], tools)
            answer = self._write_answer(messages, place, prompt, tools)
            continues = prompt.startswith(text)
            turns.append((prompt[len(text) :] if continues else prompt, answer, continues))
            text = prompt + answer
        return WrittenConversation(tuple(turns))

    def _refuse_unread(
        self, messages: Sequence[Message], places: Sequence[int], tools: Any
    ) -> None:
        """Raise UserError for a key of a trained message that would be left out of training."""
        for place in places:
            message = messages[place]
            if not (message["content"].strip() or message.get("tool_calls")):
                raise UserError(
                    f"message {place + 1}, of the assistant, has no text, and would be trained as "
                    "the end of a response; give it a text, or leave the row out"
                )
            for key in unread_keys(message, ""):
                if changes_training(key, value := message[key]) and not self._writes(
                    key, messages[: place + 1], tools
                ):
                    raise UserError(
                        f"message {place + 1} has {key}={value!r:.60}, which neither the chat "
                        "template nor training reads; leave such messages out, write it into the "
                        "content, or remove the key"
                    )

    def _writes(self, key: str, messages: Sequence[Message], tools: Any) -> bool:
        """Return True if the template writes something else without a key of the last message."""
        template = "" if self.template == "raw" else str(self.tokenizer.chat_template)
        if unread_keys({key: messages[-1][key]}, template):
            return False
        rest = {name: value for name, value in messages[-1].items() if name != key}
        forms = [*messages[:-1], rest], messages
        without, whole = (self._write(form, tools, generate=False) for form in forms)
        return without != whole

    def join(self, written: Sequence[WrittenConversation]) -> list[tuple[list[int], Demonstration]]:
        """Return the prompt's tokens, and what follows them, of each conversation."""
        if puts_space(self.tokenizer):
            return [one.ready or _join_turns(self._tokenize_turns(one)) for one in written]
        texts = [text for one in written for *pair, _ in one.turns for text in pair]
        ids = iter(tokenize_texts(texts, self.tokenizer))
        return [
            one.ready or _join_turns([(next(ids), next(ids), turn[2]) for turn in one.turns])
            for one in written
        ]

    def _tokenize_turns(
        self, written: WrittenConversation
    ) -> list[tuple[list[int], list[int], bool]]:
        """Return the turns in tokens, each text as it is where it follows those before it."""
        turns, text, known = [], "", list[int]()
        for *pair, continues in written.turns:
            if not continues:
                text, known = "", []
            found = []
            for piece in pair:
                ids = tokenize_after(text, piece, self.tokenizer, ids=known)
                text, known = text + piece, known + ids
                found.append(ids)
            turns.append((found[0], found[1], continues))
        return turns

    def _write(self, messages: Sequence[Message], tools: Any, *, generate: bool = True) -> str:
        return render(messages, tools, self.tokenizer, arguments=self.arguments, generate=generate)

    def _write_answer(
        self, messages: Sequence[Message], place: int, prompt: str, tools: Any
    ) -> str:
        """Return what follows the generation prompt, up to the token that ends the turn.

        The template's own text if it has the whole message, else the message itself.
        """
        message = messages[place]
        content = message["content"].strip()
        whole = self._write(messages[: place + 1], tools, generate=False)
        body = whole.removeprefix(prompt)
        if whole == body:  # a template may leave out or move a system message
            last = messages[place - 1]["content"].strip()
            begin = prompt[prompt.rfind(last) :] if last in prompt else prompt
            body = whole.rpartition(begin)[2] if begin.removeprefix(last).strip() else whole
        if whole == body or content not in body:
            if message.get("tool_calls"):
                raise UserError(
                    f"message {place + 1}: the chat template writes its tool calls otherwise than "
                    "after the generation prompt, so the policy could not write them; repair "
                    "chat_template.jinja or set data.template_arguments"
                )
            return self._write_plainly(messages, place, prompt)
        ends = [self.tokenizer.decode([token]) for token in self.stop]
        self._refuse_early_end(content + json.dumps(message, ensure_ascii=False), ends, place)
        behind = body.find(content) + len(content)  # generation stops at the first end
        found = [body.find(end, behind) + len(end) for end in ends if end in body[behind:]]
        return body[: min(found)] if found else body + self._end_of_text

    def _write_plainly(self, messages: Sequence[Message], place: int, prompt: str) -> str:
        """Return a message's text after the prompt, which may have opened its thinking."""
        content: str = messages[place]["content"]
        if ends_inside_thinking(prompt, last_message=messages[place - 1]["content"]):
            content = content[_overlap(prompt, content) :]
            if not has_end(content):
                raise UserError(
                    f"message {place + 1}: the chat template opens the assistant's thinking, and "
                    "the message does not end it; write the thinking before the answer, up to its "
                    "end mark such as </think>, or set data.template_arguments"
                )
        self._refuse_early_end(content, [self._end_of_text], place)
        return content + self._end_of_text

    @property
    def _end_of_text(self) -> str:
        text: str = self.tokenizer.decode([self.tokenizer.eos_token_id])
        return text

    def _refuse_early_end(self, content: str, ends: Sequence[str], place: int) -> None:
        if found := [end for end in ends if end in content]:
            raise UserError(
                f"message {place + 1} contains {found[0]!r}, which ends a response; remove it"
            )

    def _tokenize_raw(
        self, messages: Sequence[Message], places: Sequence[int]
    ) -> tuple[list[int], Demonstration]:
        if len(places) > 1 or places[-1] != len(messages) - 1:
            raise UserError(
                "has several messages of the assistant, which data.template=raw cannot tell apart; "
                "use a chat template, or sft.turns=last"
            )
        prompt = tokenize_messages(
            messages[:-1], self.tokenizer, template="raw", arguments=self.arguments
        )
        content = messages[-1]["content"]
        self._refuse_early_end(content, [self._end_of_text], places[-1])
        text = "\n\n".join(message["content"] for message in messages[:-1])
        answer = [*tokenize_after(text, content, self.tokenizer), self.tokenizer.eos_token_id]
        return prompt, Demonstration(tuple(answer))


def _overlap(prompt: str, content: str) -> int:
    """Return the length of the longest end of the prompt that begins the content."""
    lengths = range(min(len(prompt), len(content)), 0, -1)
    return next((n for n in lengths if prompt.endswith(content[:n])), 0)
