"""Comparison of a loaded tokenizer with the tokenizer.json of its folder, on a few texts.

transformers chooses a class for a folder, and a class may replace the rules by which tokenizer.json
splits and joins texts (https://github.com/huggingface/transformers/issues/45488).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError

TEXTS = (
    "Hello world, how are you?",
    " a leading space, and a trailing one ",
    "two  spaces,   three,\ttabs\t\tand\n\nempty lines\r\n  indented\n",
    "I don't, we've, they'LL; it's 'quoted' , with spaces before . commas !",
    "1 22 333 4444 55555, 3.14159, 1,000,000, -7, 2^10, x_1",
    "def f(x: int) -> str:\n    return f\"{x!r}\\n\"  # {'a': [1, 2]}\n",
    "$$\\frac{1}{2} \\le \\sqrt{x}$$ and \\boxed{42}",
    "Größe, déjà vu, Привет мир, Γειά σου, مرحبا بالعالم, שלום, नमस्ते, สวัสดี, 안녕 하세요",  # noqa: RUF001
    "你好，世界！今天是２０２５年。 こんにちは世界 𝒙²",  # noqa: RUF001
    "😀 👩‍👩‍👧 🇩🇪 ∀x∈ℕ ½ “quotes” … — €5",  # noqa: RUF001
)


def check_tokenizer_files(tokenizer: Any, folder: Path) -> None:
    """Raise UserError if the tokenizer encodes or decodes otherwise than its folder's files.

    The reference is tokenizer.json, read by the library `tokenizers`. Without that file every text
    must be what its tokens decode to, and every added token one token with the id that
    tokenizer_config.json gives it.
    """
    file = folder / "tokenizer.json"
    problems = _differences(tokenizer, file) if file.is_file() else _losses(tokenizer)
    if problem := next(problems, None):
        raise UserError(f"{folder}: {problem}")


def _differences(tokenizer: Any, file: Path) -> Iterator[str]:
    """Yield how the tokenizer differs from tokenizer.json."""
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(file))
    reference.no_truncation()  # as transformers does, unless it is asked to cut or pad
    reference.no_padding()
    name = type(tokenizer).__name__
    cure = (
        "; the policy would get other tokens than those it was trained with: correct what "
        "changes them in tokenizer_config.json (added_tokens_decoder, split_special_tokens, ...), "
        "or copy tokenizer.json and tokenizer_config.json again from the published model"
    )
    tokens = _tokens_to_compare(tokenizer, reference)
    for text in (*TEXTS, *(f"{token} a {token}\n{token}b" for token in tokens)):
        for whole in (False, True):  # with what the tokenizer adds to a text, such as BOS
            theirs = reference.encode(text, add_special_tokens=whole).ids
            ours = tokenizer(text, add_special_tokens=whole)["input_ids"]
            if ours != theirs:
                yield f"{name} encodes {text!r} to {ours}, but tokenizer.json to {theirs}{cure}"
        for skip in (False, True):
            expected = reference.decode(theirs, skip_special_tokens=skip)
            found = tokenizer.decode(theirs, skip_special_tokens=skip)
            if found != expected:
                yield (
                    f"{name} decodes {theirs} to {found!r}, but tokenizer.json to {expected!r}"
                    f"{cure}"
                )


def _tokens_to_compare(tokenizer: Any, reference: Any) -> list[str]:
    """Return the added tokens that are in the chat template, or not the same in both tokenizers."""
    theirs = reference.get_added_tokens_decoder()
    ours = tokenizer.added_tokens_decoder
    added = {token.content for token in theirs.values()}
    used = {token for token in added if token in str(tokenizer.chat_template)}
    changed = {
        token.content
        for number, token in (*ours.items(), *theirs.items())
        if repr(ours.get(number)) != repr(theirs.get(number))
    }
    named = added.intersection(tokenizer.all_special_tokens)
    # padding and unknown tokens are no part of a prompt, and may be missing in tokenizer.json
    return sorted((used | changed | named) - {tokenizer.pad_token, tokenizer.unk_token})


def _losses(tokenizer: Any) -> Iterator[str]:
    """Yield what a tokenizer without tokenizer.json loses."""
    name = type(tokenizer).__name__
    cure = "; copy the tokenizer's files again from the published model, if it has one with "
    cure += "tokenizer.json"
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = tokenizer.decode(ids, skip_special_tokens=False)
        if found != text:
            yield f"{name} encodes {text!r} to {ids}, which it decodes to {found!r}{cure}"
    declared = tokenizer.init_kwargs.get("added_tokens_decoder") or {}
    numbers = {str(token): int(number) for number, token in declared.items()}
    for token, number in {**_added_tokens(tokenizer), **numbers}.items():
        ids = tokenizer(token, add_special_tokens=False)["input_ids"]
        if ids != [number]:
            yield f"{name} encodes the token {token!r} to {ids}, but its id is {number}{cure}"


def _added_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the tokens that are not split, such as those of the chat template."""
    named = {
        token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens
    }
    return {**named, **tokenizer.get_added_vocab()}
