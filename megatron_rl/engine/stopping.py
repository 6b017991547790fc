"""Stop tokens and stop strings that end a response before its token limit."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.models.shape import text_model


@dataclass(frozen=True)
class StopCriterion:
    """Tokens and texts that end a response; a text does so wherever it occurs."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...] = ()

    def describe(self, tokenizer: Any) -> str:
        """Describe in one line what ends a response."""
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
) -> StopCriterion:
    """Collect the stop tokens of a model and add the given tokens.

    Reads `eos_token_id` from generation_config.json, config.json and the tokenizer: chat models
    often name the end-of-turn token in only one of them, and a response would then never stop.
    Raises ValueError if there is none, or if a token is outside the vocabulary.
    """
    stop_tokens: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = Path(model_folder) / name
        value = _read_eos(path) if path.is_file() else None
        if value is not None:
            stop_tokens += value if isinstance(value, list) else [value]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        stop_tokens.append(tokenizer.eos_token_id)
    stop_tokens += token_ids
    if wrong := [one for one in stop_tokens if isinstance(one, bool) or not isinstance(one, int)]:
        raise UserError(
            f"{model_folder}: eos_token_id has {wrong[0]!r}, which is no number of a token; "
            "correct it in generation_config.json or config.json"
        )
    if not stop_tokens:
        raise UserError(
            f"{model_folder}: neither its configs nor its tokenizer name an end of text "
            "(eos_token_id), so a response would never end; set rollout.stop_token_ids"
        )
    if outside := [token for token in stop_tokens if not 0 <= token < vocab_size]:
        raise UserError(
            f"{model_folder}: stop token {outside[0]} is outside the vocabulary "
            f"0..{vocab_size - 1}; correct eos_token_id of its configs and tokenizer, or "
            "rollout.stop_token_ids"
        )
    return StopCriterion(tuple(dict.fromkeys(stop_tokens)), tuple(texts))


# Values of a generation config that change nothing, but for some of certain names.
_NEUTRAL: tuple[Any, ...] = (None, False, True, 0, -1, 1, "", [], {})
_NOT_NEUTRAL = (("top_k", 1), ("temperature", 0), ("frequency_penalty", 1), ("presence_penalty", 1))


def describe_generation_config(model_folder: str | Path, rollout: Any) -> str | None:
    """Name what a model's generation config has for sampling and training does not read.

    Whoever serves the model takes it: vLLM and transformers do by default. rollout: settings of
    the sampler, by the same names.
    """
    path = Path(model_folder) / "generation_config.json"
    if not path.is_file():
        return None
    _read_eos(path)  # raises for what is no object
    unread = [
        f"{name}={value!r}"
        for name, value in sorted(json.loads(path.read_text(encoding="utf-8")).items())
        if not name.endswith(("_token_id", "_token_ids", "_version", "_implementation"))
        and not name.startswith("_")
        and (value not in _NEUTRAL or (name, value) in _NOT_NEUTRAL)
        and value != getattr(rollout, name, None)
    ]
    if not unread:
        return None
    return (
        f"{path} has {', '.join(unread)}: training samples by rollout.* alone, but vLLM and "
        "transformers use these where the trained model is served"
    )


def _read_eos(path: Path) -> Any:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return text_model(config)[0].get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a JSON object ({error}); download it again") from None
