"""What ends a response, besides its limit."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StopRule:
    """A response ends with one of these tokens, or where its text holds one of these texts."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...] = ()

    def describe(self, tokenizer: Any) -> str:
        """For the person who starts the run."""
        names = tokenizer.convert_ids_to_tokens(list(self.token_ids)) if tokenizer else []
        tokens = ", ".join(
            f"{token} {name}" for token, name in zip(self.token_ids, names, strict=False)
        )
        texts = "".join(f", or the text {text!r}" for text in self.texts)
        return f"a response ends with token {tokens or self.token_ids}{texts}"


def find_stop_rule(
    model_folder: str | Path,
    tokenizer: Any,
    *,
    vocab_size: int,
    token_ids: Sequence[int] = (),
    texts: Sequence[str] = (),
) -> StopRule:
    """The rule of a model: every end that any of its files names, and those that are added.

    `eos_token_id` of generation_config.json and of config.json, and the tokenizer's: chat models
    often name the end of a turn in one of them only, and a response would then never stop.
    Raises ValueError when nothing names one, and for a token outside the vocabulary.
    """
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = Path(model_folder) / name
        value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if value is not None:
            found += value if isinstance(value, list) else [value]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    found += token_ids
    if not found:
        raise ValueError(
            f"{model_folder}: neither its configs nor its tokenizer name an end of text "
            "(eos_token_id), so a response would never end; set rollout.stop_token_ids"
        )
    if outside := [token for token in found if not 0 <= token < vocab_size]:
        raise ValueError(f"stop token {outside[0]} is outside the vocabulary 0..{vocab_size - 1}")
    return StopRule(tuple(dict.fromkeys(found)), tuple(texts))
