"""Prompt sets, tokenized, and the order in which a run goes through them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_rl.data.rows import Columns, Row, name_row, parse_row, read_rows
from megatron_rl.seeds import derive_seed
from megatron_rl.types import Prompt


def find_tokenizer(folder: str | Path) -> None:
    """ValueError if a model folder holds no tokenizer: transformers would make up an empty one."""
    if not any(list(Path(folder).glob(name)) for name in ("tokenizer*", "vocab*", "*.model")):
        raise ValueError(
            f"{folder} has no tokenizer (no tokenizer.json, tokenizer_config.json, ...); copy "
            "the tokenizer's files of the model that its weights come from"
        )


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a Hugging Face model folder.

    Raises ValueError if there is none, or if it lacks what training needs: a chat template, which
    turns messages into a prompt, and an end-of-sequence token, which ends a response.
    """
    from transformers import AutoTokenizer  # seconds to import, and not needed by PromptOrder

    if not Path(folder).is_dir():
        raise ValueError(f"model folder {folder} does not exist")
    find_tokenizer(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{folder} holds no tokenizer that can be loaded: {error}") from error
    check_tokenizer(tokenizer, name=str(folder))
    return tokenizer


def check_tokenizer(tokenizer: Any, *, name: str = "the tokenizer") -> None:
    """ValueError if `tokenizer` has no chat template or no end-of-sequence token."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"{name}: no chat template; add chat_template.jinja, or use the instruct model's"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{name}: no eos_token, so a response could never end; name one")


def load_prompts(
    path: str | Path,
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    columns: Columns | None = None,
    too_long: Literal["error", "skip"] = "error",
    bad_rows: Literal["error", "skip"] = "error",
    template_arguments: Mapping[str, Any] | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> list[Prompt]:
    """The distinct prompts of a parquet or JSON lines file, tokenized with the chat template.

    Rows that repeat an earlier row's messages and answer are left out: the published DAPO-Math-17k
    holds each of its 17 thousand problems about a hundred times. `index` is the row in the file.

    too_long: whether a prompt of more than `max_prompt_tokens` tokens is an error or left out;
    bad_rows: whether a malformed row is; `say` is told how many are. template_arguments: of the
    chat template, beside the messages.
    Raises ValueError if the file cannot be read, is empty or without the columns, if a row is
    malformed, and if a prompt is too long; the message names the row.
    """
    path = Path(path)
    check_tokenizer(tokenizer)
    rows = _distinct_rows(path, columns or Columns(), bad_rows=bad_rows, say=say)
    chats = {number: row.messages for number, (row, _) in rows.items()}
    token_ids = _tokenize(chats, tokenizer, path=path, arguments=template_arguments or {})
    longer = {number: len(ids) for number, ids in token_ids.items() if len(ids) > max_prompt_tokens}
    if longer:
        say(_refuse_or_tell(longer, len(rows), max_prompt_tokens, too_long, path=path))
    return [
        Prompt(
            index=number,
            messages=row.messages,
            token_ids=tuple(token_ids[number]),
            ground_truth=row.ground_truth,
            data_source=row.data_source,
            row=whole,
        )
        for number, (row, whole) in rows.items()
        if number not in longer
    ]


@dataclass(frozen=True)
class PromptOrder:
    """Which prompts each step uses; a function of (size, seed, step), so resuming needs no state.

    Every epoch is a new permutation, cut into whole steps. What is left at its end, fewer
    prompts than a step takes, sits that epoch out: no step holds the same prompt twice.
    """

    size: int  # prompts in the set
    seed: int

    def indices(self, step: int, count: int) -> list[int]:
        """Indices of the `count` different prompts of `step` (from 0).

        Raises ValueError if the set is smaller than one step.
        """
        if not 1 <= count <= self.size:
            raise ValueError(
                f"a step of {count} prompts cannot be drawn from a set of {self.size} without "
                "repeating one; use fewer rollout.prompts or a larger set"
            )
        epoch, step_in_epoch = divmod(step, self.size // count)
        order = _permutation(self.size, self.seed, epoch)
        return order[step_in_epoch * count : (step_in_epoch + 1) * count].tolist()


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    # Sorting random keys, not Generator.permutation: NumPy keeps the bit stream of PCG64 forever,
    # but may change what its methods make of it.
    keys = np.random.PCG64(derive_seed(seed, "prompt order", epoch)).random_raw(size)
    return np.argsort(keys, kind="stable")


def _distinct_rows(
    path: Path, columns: Columns, *, bad_rows: str, say: Callable[[str], object]
) -> dict[int, tuple[Row, str]]:
    """Rows by their number, parsed and as JSON, without those that repeat an earlier one."""
    rows: dict[int, tuple[Row, str]] = {}
    seen: set[tuple[Any, ...]] = set()
    bad: list[ValueError] = []
    for number, plain in read_rows(path, columns):
        try:
            row = parse_row(plain, columns, path=path, number=number)
        except ValueError as error:
            if bad_rows == "error":
                raise ValueError(f"{error}; repair it, or leave such rows out by "
                                 "data.bad_rows=skip") from None  # fmt: skip
            bad.append(error)
            continue
        key = (row.ground_truth, *(text for one in row.messages for text in one.values()))
        if key not in seen:
            seen.add(key)
            rows[number] = row, json.dumps(plain, default=str)
    if bad:
        say(f"{path}: {len(bad)} malformed rows left out (data.bad_rows=skip); the first: {bad[0]}")
    if not rows:
        raise ValueError(f"{path} holds no prompts: all of its rows are malformed")
    return rows


def tokenize_messages(
    messages: Sequence[dict[str, str]], tokenizer: Any, *, arguments: Mapping[str, Any]
) -> list[int]:
    """The tokens of one prompt, by the chat template; ValueError where that refuses it."""
    return _tokenize({0: tuple(messages)}, tokenizer, path=Path("prompt"), arguments=arguments)[0]


def _tokenize(
    chats: dict[int, tuple[dict[str, str], ...]],
    tokenizer: Any,
    *,
    path: Path,
    arguments: Mapping[str, Any],
) -> dict[int, list[int]]:
    # The template writes the special tokens itself, so the tokenizer must not add its own.
    texts = []
    for index, chat in chats.items():
        try:
            texts.append(
                tokenizer.apply_chat_template(
                    list(chat), tokenize=False, add_generation_prompt=True, **arguments
                )
            )
        except Exception as error:  # a template is a program and may raise anything
            raise ValueError(
                f"{name_row(path, index)}: the chat template refuses these messages: {error}"
            ) from error
    token_ids = dict(
        zip(chats, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True)
    )
    for index, ids in token_ids.items():
        if not ids:
            raise ValueError(f"{name_row(path, index)}: the prompt has no tokens")
    return token_ids


def _refuse_or_tell(
    longer: dict[int, int], count: int, limit: int, too_long: str, *, path: Path
) -> str:
    """What is said of prompts that are too long where they are left out; else ValueError."""
    number, length = next(iter(longer.items()))
    if too_long == "skip":
        return (
            f"{path}: {len(longer)} of {count} prompts have more than data.max_prompt_tokens="
            f"{limit} tokens, the longest {max(longer.values())}: left out (data.too_long=skip)"
        )
    raise ValueError(
        f"{name_row(path, number)}: the prompt has {length} tokens, more than "
        f"data.max_prompt_tokens={limit} (so have {len(longer)} of {count} prompts, the longest "
        f"{max(longer.values())}); raise the limit, or leave them out by data.too_long=skip"
    )
