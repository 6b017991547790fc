"""Load and tokenize prompt sets, and order their prompts over a run."""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_rl.data.rows import (
    BAD_ROW_CURE,
    Columns,
    PlainRow,
    Row,
    name_row,
    parse_row,
    read_rows,
)
from megatron_rl.data.tokenizer import Template, check_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import Prompt


def load_prompts(
    path: str | Path,
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    columns: Columns | None = None,
    too_long: Literal["error", "skip"] = "error",
    bad_rows: Literal["error", "skip"] = "error",
    template: Template = "chat",
    template_arguments: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    first: int | None = None,
    echo: Callable[[str], object] = lambda text: None,
) -> list[Prompt]:
    """Load and tokenize the distinct prompts of a parquet, JSON lines or CSV file.

    Rows that repeat an earlier row's messages and answer are left out: the published DAPO-Math-17k
    contains each of its 17 thousand problems about 100 times. `index` is the row in the file.

    too_long: whether a prompt of more than `max_prompt_tokens` tokens is an error or left out;
    bad_rows: whether a malformed row is; `say` gets how many are. template: by the chat template,
    with template_arguments next to the messages, or `raw`: the messages' texts alone.
    system_prompt: before the messages of every row. first: read this many rows only; None: all.
    Raises ValueError if the file cannot be read, is empty or without the columns, if a row is
    malformed, and if a prompt is too long; the message names the row.
    """
    path = Path(path)
    check_tokenizer(tokenizer, template=template)
    rows = _distinct_rows(
        itertools.islice(read_rows(path, columns := columns or Columns()), first),
        columns, path=path, bad_rows=bad_rows, system_prompt=system_prompt, echo=echo,
    )  # fmt: skip
    chats = {number: row.messages for number, (row, _) in rows.items()}
    token_ids = _tokenize(
        chats, tokenizer, path=path, template=template, arguments=template_arguments or {}
    )
    longer = {number: len(ids) for number, ids in token_ids.items() if len(ids) > max_prompt_tokens}
    if longer:
        echo(_refuse_or_tell(longer, len(rows), max_prompt_tokens, too_long, path=path))
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
    """The prompts of each step, a function of (size, seed, step), so that resuming needs no state.

    Every epoch is a new permutation, split into whole steps. Prompts left over at its end are
    skipped in that epoch, so that no step contains the same prompt twice.
    """

    size: int  # prompts in the set
    seed: int

    def indices(self, step: int, count: int) -> list[int]:
        """Indices of the `count` different prompts of `step` (from 0).

        Raises ValueError if the set is smaller than one step.
        """
        if not 1 <= count <= self.size:
            raise UserError(
                f"a step of {count} prompts cannot be drawn from a set of {self.size} without "
                "repeating one; use fewer rollout.prompts_per_step or a larger set"
            )
        epoch, step_in_epoch = divmod(step, self.size // count)
        order = _permutations(self.size, self.seed)(epoch)
        return order[step_in_epoch * count : (step_in_epoch + 1) * count].tolist()


@lru_cache(maxsize=64)  # one for each set of a mix
def _permutations(size: int, seed: int) -> Callable[[int], np.ndarray]:
    """The permutation of each epoch of one order, of which the two used last are kept."""

    @lru_cache(maxsize=2)
    def permutation(epoch: int) -> np.ndarray:
        # Sorting random keys, not Generator.permutation: NumPy keeps the bit stream of PCG64
        # forever, but may change what its methods make of it.
        keys = np.random.PCG64(derive_seed(seed, "prompt order", epoch)).random_raw(size)
        return np.argsort(keys, kind="stable")

    return permutation


def _distinct_rows(
    numbered: Iterable[tuple[int, PlainRow]],
    columns: Columns,
    *,
    path: Path,
    bad_rows: str,
    system_prompt: str | None,
    echo: Callable[[str], object],
) -> dict[int, tuple[Row, str]]:
    """Rows by their number, parsed and as JSON, without those that repeat an earlier one."""
    rows: dict[int, tuple[Row, str]] = {}
    seen: set[tuple[str, str]] = set()
    bad: list[ValueError] = []
    for number, plain in numbered:
        try:
            row = parse_row(plain, columns, path=path, number=number, system_prompt=system_prompt)
        except ValueError as error:
            if bad_rows == "error":
                raise UserError(f"{error}; {BAD_ROW_CURE}") from None
            bad.append(error)
            continue
        key = (row.ground_truth, json.dumps(row.messages, sort_keys=True))
        if key not in seen:
            seen.add(key)
            rows[number] = row, json.dumps(plain, default=str)
    if bad:
        echo(
            f"{path}: {len(bad)} malformed rows left out (data.bad_rows=skip); the first: {bad[0]}"
        )
    if not rows:
        raise UserError(f"{path} holds no prompts: all of its rows are malformed")
    return rows


def tokenize_messages(
    messages: Sequence[dict[str, Any]],
    tokenizer: Any,
    *,
    template: Template = "chat",
    arguments: Mapping[str, Any],
) -> list[int]:
    """The tokens of one prompt; ValueError where the chat template refuses it."""
    return _tokenize(
        {0: tuple(messages)}, tokenizer, path=Path("prompt"), template=template, arguments=arguments
    )[0]


def _tokenize(
    chats: dict[int, tuple[dict[str, Any], ...]],
    tokenizer: Any,
    *,
    path: Path,
    template: Template,
    arguments: Mapping[str, Any],
) -> dict[int, list[int]]:
    if template == "raw":
        texts = ["\n\n".join(one["content"] for one in chat) for chat in chats.values()]
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


def _apply_template(
    chats: dict[int, tuple[dict[str, Any], ...]],
    tokenizer: Any,
    *,
    path: Path,
    arguments: Mapping[str, Any],
) -> list[str]:
    texts = []
    for index, chat in chats.items():
        try:
            texts.append(
                tokenizer.apply_chat_template(
                    list(chat), tokenize=False, add_generation_prompt=True, **arguments
                )
            )
        except Exception as error:  # a template is a program and may raise anything
            raise UserError(
                f"{name_row(path, index)}: the chat template refuses these messages: {error}; "
                "repair the row, the template (chat_template.jinja) or data.template_arguments"
            ) from error
    return texts


def _refuse_or_tell(
    longer: dict[int, int], count: int, limit: int, too_long: str, *, path: Path
) -> str:
    """Describe skipped prompts above the maximum length, or raise UserError."""
    number, length = next(iter(longer.items()))
    if too_long == "skip":
        return (
            f"{path}: {len(longer)} of {count} prompts have more than data.max_prompt_tokens="
            f"{limit} tokens, the longest {max(longer.values())}: left out (data.too_long=skip)"
        )
    raise UserError(
        f"{name_row(path, number)}: the prompt has {length} tokens, more than "
        f"data.max_prompt_tokens={limit} (so have {len(longer)} of {count} prompts, the longest "
        f"{max(longer.values())}); raise the limit, or leave them out by data.too_long=skip"
    )
