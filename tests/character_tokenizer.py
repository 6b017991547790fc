"""Tokenizer of one token per character, with a chat template of one token."""

from typing import Any

PADDING, END, ANSWER = "<|pad|>", "<|end|>", ":"
PIECES = [PADDING, END, ANSWER, *"+-*=?|,;>.0123456789abcdefghijklmnopqrstuvwxyz"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ANSWER + "' }}{% endif %}"
)


def build_tokenizer(max_length: int) -> Any:
    """Build a tokenizer with one token per character, plus padding and end.

    Transformers loads the tokenizer of every `qwen2` folder as byte-level BPE regardless of its
    files, so this is a byte-level BPE without merges.
    """
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(
        vocab={piece: index for index, piece in enumerate(PIECES)},
        merges=[],
        unk_token=None,
        eos_token=END,
        pad_token=PADDING,
        model_max_length=max_length,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == len(PIECES), "a token is missing from the vocabulary"
    return tokenizer
