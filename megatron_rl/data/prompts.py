"""Load and tokenize prompt sets, and order their prompts over a run."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from megatron_rl.data.tokenizer import Template, check_raw, check_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import Prompt

ROWS_AT_ONCE = 4096  # tokenized together


def load_prompts(path: str | Path, tokenizer: Any, **options: Any) -> list[Prompt]:
    """Load all prompts that `read_prompts` yields, with its options."""
    return list(read_prompts(path, tokenizer, **options))


def read_prompts(
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
) -> Iterator[Prompt]:
    """Yield the distinct prompts of a parquet, JSON lines or CSV file with their tokens, in order.

    Rows that repeat an earlier row's messages and answer are left out: the published DAPO-Math-17k
    contains each of its 17 thousand problems about 100 times. `index` is the row in the file.

    too_long: whether a prompt of more than `max_prompt_tokens` tokens is an error or left out;
    bad_rows: whether a malformed row is; `echo` gets how many are. template: by the chat template,
    with template_arguments next to the messages, or `raw`: the messages' texts alone.
    system_prompt: before the messages of every row. first: read this many rows only; None: all.
    Raises ValueError if the file cannot be read, is empty or without the columns, if a row is
    malformed, and at the end if a prompt is too long; the message names the row. Some thousand rows
    are in memory at once.
    """
    path = Path(path)
    check_tokenizer(tokenizer, template=template)
    if template == "raw":
        check_raw(tokenizer)
    rows = _distinct_rows(
        itertools.islice(read_rows(path, columns := columns or Columns()), first),
        columns, path=path, bad_rows=bad_rows, system_prompt=system_prompt, echo=echo,
    )  # fmt: skip
    longer = _TooLong(max_prompt_tokens)
    while block := list(itertools.islice(rows, ROWS_AT_ONCE)):
        token_ids = _tokenize(
            {number: row.messages for number, row, _ in block},
            tokenizer, path=path, template=template, arguments=template_arguments or {},
        )  # fmt: skip
        texts = tokenizer.batch_decode(list(token_ids.values()), skip_special_tokens=False)
        for (number, row, whole), text in zip(block, texts, strict=True):
            ids = token_ids[number]
            if not longer.count_if(number, len(ids)):
                yield Prompt(
                    index=number,
                    messages=row.messages,
                    token_ids=tuple(ids),
                    ground_truth=row.ground_truth,
                    data_source=row.data_source,
                    row=whole,
                    text=text,
                )
    if longer.count:
        echo(longer.refuse_or_describe(too_long, path=path))


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
) -> Iterator[tuple[int, Row, str]]:
    """Yield each row's number, and it parsed and as JSON, unless it repeats an earlier one."""
    seen: set[bytes] = set()
    bad, first_bad = 0, None
    for number, plain in numbered:
        try:
            row = parse_row(plain, columns, path=path, number=number, system_prompt=system_prompt)
        except ValueError as error:
            if bad_rows == "error":
                raise UserError(f"{error}; {BAD_ROW_CURE}") from None
            bad, first_bad = bad + 1, first_bad or error
            continue
        key = json.dumps([row.ground_truth, row.messages], sort_keys=True)
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            yield number, row, json.dumps(plain, default=str)
    if bad:
        echo(f"{path}: {bad} malformed rows left out (data.bad_rows=skip); the first: {first_bad}")
    if not seen:
        raise UserError(f"{path} holds no prompts: all of its rows are malformed")


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


@dataclass
class _TooLong:
    """Counts prompts above the maximum length."""

    limit: int
    rows: int = 0  # prompts that were checked
    count: int = 0
    longest: int = 0
    first: tuple[int, int] = (0, 0)  # its row, and its tokens

    def count_if(self, number: int, length: int) -> bool:
        """Count one prompt; True if it is too long."""
        self.rows += 1
        if length <= self.limit:
            return False
        self.first = self.first if self.count else (number, length)
        self.count, self.longest = self.count + 1, max(self.longest, length)
        return True

    def refuse_or_describe(self, too_long: str, *, path: Path) -> str:
        """Describe the skipped prompts, or raise UserError."""
        if too_long == "skip":
            return (
                f"{path}: {self.count} of {self.rows} prompts have more than "
                f"data.max_prompt_tokens={self.limit} tokens, the longest {self.longest}: left out "
                "(data.too_long=skip)"
            )
        number, length = self.first
        raise UserError(
            f"{name_row(path, number)}: the prompt has {length} tokens, more than "
            f"data.max_prompt_tokens={self.limit} (so have {self.count} of {self.rows} prompts, "
            f"the longest {self.longest}); raise the limit, or leave them out by "
            "data.too_long=skip"
        )
