"""Tokens of a text that a chat template wrote, or that continues another text.

A control token (`<|im_end|>`) that a message has as plain text would become that token if the whole
were tokenized at once, and whoever writes a prompt or a tool's result could end a turn. So such
texts are hidden while the template writes, and are tokenized as the text that they are.

Some tokenizers put a space before a text (Llama 2, Mistral 7B). A text in the middle of another has
none, so it is tokenized with what precedes it.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.messages import Message

_FIRST, _LAST = 0xF0000, 0xFFFFD  # of private use: each stands for the text of a control token
_HIDDEN = re.compile(f"([{chr(_FIRST)}-{chr(_LAST)}])")
_NEUTRAL = ("\n", ".")  # texts after which others have no space of their own


@lru_cache(maxsize=8)
def control_tokens(tokenizer: Any) -> dict[str, str]:
    """Return the character that stands for each control token; the longest tokens first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {token.content for token in added if token.special}
    special |= set(getattr(tokenizer, "all_special_tokens", ()))
    ordered = sorted((one for one in special if one.strip()), key=lambda one: (-len(one), one))
    return {token: chr(_FIRST + number) for number, token in enumerate(ordered)}


@lru_cache(maxsize=8)
def _pattern(tokenizer: Any) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, control_tokens(tokenizer))) or r"(?!)")


def find_control_token(messages: Sequence[Message], tokenizer: Any) -> str | None:
    """Return a control token that a message has as plain text, if one does."""
    texts = (one["content"] for one in messages if isinstance(one.get("content"), str))
    found = (_pattern(tokenizer).search(text) for text in texts)
    return next((match[0] for match in found if match), None)


def hide_control_tokens(messages: Sequence[Message], tokenizer: Any) -> list[Message]:
    """Return messages with a private character for each control token in a text.

    The assistant's stay as they are: a policy writes control tokens.
    """
    return [
        message | {"content": _hide(message["content"], tokenizer)}
        if message.get("role") != "assistant" and isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _hide(text: str, tokenizer: Any) -> str:
    if _HIDDEN.search(text):
        raise UserError(
            f"a message has a character between U+{_FIRST:X} and U+{_LAST:X}, which are of private "
            "use; remove it"
        )
    return _pattern(tokenizer).sub(lambda match: control_tokens(tokenizer)[match[0]], text)


def tokenize_texts(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return the tokens of texts; hidden tokens are tokenized as texts."""
    found = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
    return [
        _tokenize_parts(text, tokenizer) if _HIDDEN.search(text) else ids
        for text, ids in zip(texts, found, strict=True)
    ]


def tokenize_after(
    before: str, text: str, tokenizer: Any, *, ids: Sequence[int] | None = None
) -> list[int]:
    """Return the tokens of a text as they are where it follows `before`, whose tokens are `ids`.

    Those of both at once are the truth. Where a token has characters of both, as a line break and
    another one, `before` keeps its tokens, because these are the prompt that the policy continues;
    the text is then tokenized as in the middle of another.
    """
    if not puts_space(tokenizer):  # a text has the same tokens wherever it is
        return tokenize_texts([text], tokenizer)[0]
    for one in (before, *_NEUTRAL):
        known, whole = tokenize_texts([one, one + text], tokenizer)
        known = list(ids) if ids is not None and one is before else known
        if whole[: len(known)] == known:
            return whole[len(known) :]
    return tokenize_texts([text], tokenizer)[0]


@lru_cache(maxsize=8)
def puts_space(tokenizer: Any) -> bool:
    """Return True if a text by itself has other tokens than after a line break."""
    alone, mark, both = tokenizer(["ab", "\n", "\nab"], add_special_tokens=False)["input_ids"]
    return bool(both != mark + alone)


def _tokenize_parts(text: str, tokenizer: Any) -> list[int]:
    tokens = {character: token for token, character in control_tokens(tokenizer).items()}
    ids: list[int] = []
    for number, part in enumerate(_HIDDEN.split(text)):
        if number % 2:
            ids += _tokenize_plainly(tokens[part], tokenizer)
        elif part:
            ids += (
                tokenize_after("\n", part, tokenizer)
                if number
                else tokenizer(part, add_special_tokens=False)["input_ids"]
            )
    return ids


def _tokenize_plainly(token: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a control token's text, none of which is a control token."""
    mark = "\n" if puts_space(tokenizer) else ""
    control = set(tokenizer.convert_tokens_to_ids(list(control_tokens(tokenizer))))
    for parts, plain in (([token], {"split_special_tokens": True}), (list(token), {})):
        ids: list[int] = []
        for part in parts:
            known, whole = (
                tokenizer(text, add_special_tokens=False, **plain)["input_ids"]
                for text in (mark, mark + part)
            )
            ids += whole[len(known) :]
        if control.isdisjoint(ids):
            return ids
    raise UserError(f"{token!r} in a message cannot be written as plain text; remove it")
