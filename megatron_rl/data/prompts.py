"""Prompt sets in the schema of DAPO-Math-17k, and the order in which a run goes through them.

A prompt set is a parquet file with the columns `prompt` (a list of chat messages),
`reward_model` (a struct with `ground_truth`) and `data_source`; others are ignored.
Schema: https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.seeds import derive_seed
from megatron_rl.types import Prompt

COLUMNS = ("prompt", "reward_model", "data_source")


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a Hugging Face model folder.

    Raises ValueError if there is none, or if it lacks what training needs: a chat template, which
    turns messages into a prompt, and an end-of-sequence token, which ends a response.
    """
    from transformers import AutoTokenizer  # seconds to import, and not needed by PromptOrder

    if not Path(folder).is_dir():
        raise ValueError(f"model folder {folder} does not exist")
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


def load_prompts(path: str | Path, tokenizer: Any, *, max_prompt_tokens: int) -> list[Prompt]:
    """The distinct prompts of a parquet file, tokenized with the chat template.

    Rows that repeat an earlier row's messages and answer are left out: the published DAPO-Math-17k
    holds each of its 17 thousand problems about a hundred times. `index` is the row in the file.

    Raises ValueError if the file is missing, not parquet, empty or without the columns, if a row
    is malformed, and if a prompt has more than `max_prompt_tokens` tokens; the message names the
    row.
    """
    check_tokenizer(tokenizer)
    table = _read_table(Path(path))
    rows = _distinct_rows(table, where=str(path))
    chats = {index: messages for index, (messages, _, _) in rows.items()}
    token_ids = _tokenize(chats, tokenizer, where=str(path))
    _check_lengths(token_ids, max_prompt_tokens, where=str(path))
    return [
        Prompt(
            index=index,
            messages=messages,
            token_ids=tuple(token_ids[index]),
            ground_truth=ground_truth,
            data_source=data_source,
        )
        for index, (messages, ground_truth, data_source) in rows.items()
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


def _read_table(path: Path) -> pa.Table:
    if not path.is_file():
        raise ValueError(f"prompt file {path} does not exist")
    try:
        names = pq.read_schema(path).names
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            raise ValueError(
                f"{path} has no column {', '.join(missing)}; it has {', '.join(names)}, and "
                f"needs {', '.join(COLUMNS)} (the schema of DAPO-Math-17k)"
            )
        table = pq.read_table(path, columns=list(COLUMNS))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error
    if table.num_rows == 0:
        raise ValueError(f"{path} holds no prompts")
    return table


Row = tuple[tuple[dict[str, str], ...], str, str]  # messages, ground truth, data source


def _distinct_rows(table: pa.Table, *, where: str) -> dict[int, Row]:
    """Parsed rows by their number, without those that repeat an earlier one."""
    rows: dict[int, Row] = {}
    seen: set[tuple[Any, ...]] = set()
    numbers = itertools.count()
    for batch in table.to_batches(max_chunksize=4096):  # a whole large file as objects is too much
        for plain, number in zip(batch.to_pylist(), numbers, strict=False):
            row = _parse_row(plain, where=f"{where}, row {number}")
            key = (row[1], *(text for message in row[0] for text in message.values()))
            if key not in seen:
                seen.add(key)
                rows[number] = row
    return rows


def _parse_row(row: dict[str, Any], *, where: str) -> Row:
    messages = row["prompt"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: prompt must be a list of chat messages, got {messages!r:.80}")
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(
                f"{where}: a chat message must have the texts role and content, got {message!r:.80}"
            )
    reward_model = row["reward_model"]
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        truth = str(truth)
    if not isinstance(truth, str) or not truth.strip():
        raise ValueError(
            f"{where}: reward_model.ground_truth must be a non-empty text, got {truth!r:.80}"
        )
    if not isinstance(row["data_source"], str):
        raise ValueError(f"{where}: data_source must be a text, got {row['data_source']!r:.80}")
    kept = tuple({"role": message["role"], "content": message["content"]} for message in messages)
    return kept, truth, row["data_source"]


def _tokenize(
    chats: dict[int, tuple[dict[str, str], ...]], tokenizer: Any, *, where: str
) -> dict[int, list[int]]:
    # The template writes the special tokens itself, so the tokenizer must not add its own.
    texts = []
    for index, chat in chats.items():
        try:
            texts.append(
                tokenizer.apply_chat_template(
                    list(chat), tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:  # a template is a program and may raise anything
            raise ValueError(
                f"{where}, row {index}: the chat template refuses these messages: {error}"
            ) from error
    token_ids = dict(
        zip(chats, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True)
    )
    for index, ids in token_ids.items():
        if not ids:
            raise ValueError(f"{where}, row {index}: the prompt has no tokens")
    return token_ids


def _check_lengths(token_ids: dict[int, list[int]], limit: int, *, where: str) -> None:
    longer = {index: len(ids) for index, ids in token_ids.items() if len(ids) > limit}
    if longer:
        index, length = next(iter(longer.items()))
        raise ValueError(
            f"{where}, row {index}: the prompt has {length} tokens, more than "
            f"max_prompt_tokens={limit} (so have {len(longer)} of {len(token_ids)} prompts, the "
            f"longest {max(longer.values())}); raise the limit or remove the rows"
        )
