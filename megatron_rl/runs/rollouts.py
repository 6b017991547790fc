"""Recorded rollouts: parquet tables, complete or thinned, and their text for a terminal.

The column `sampled` of a complete file marks the rows that remain when it is thinned. A thinned
file contains only these rows, and their original positions in the column `place`.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_rl.columns import Column
from megatron_rl.errors import UserError
from megatron_rl.runs.files import atomic_write
from megatron_rl.types import REPLACES_HISTORY, Response, Rollout, columns_of

SAMPLED, PLACE = "sampled", "place"
PROMPT_TEXT = "prompt_text"  # decoded from prompt_token_ids; `prompt` is the text of a message
BATCH = 64  # rows in memory at once while a file is thinned, or read again


def thin(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """Return the sampled rows of a step, with their positions in the step."""
    kept, start = [], 0
    for batch in batches:
        places = pa.array(np.arange(start, start + len(batch)), pa.int32())
        table = pa.Table.from_batches([batch]).append_column(PLACE, places)
        kept.append(table.filter(batch.column(SAMPLED)))
        start += len(batch)
    return pa.concat_tables(kept)


def thin_file(file: Path) -> None:
    """Replace a step's file by its sampled rows; a file without a sample is left unchanged."""
    with pq.ParquetFile(file) as parquet:
        names = parquet.schema_arrow.names
        if PLACE in names or SAMPLED not in names:
            return
        table = thin(parquet.iter_batches(batch_size=BATCH))
    write_table(table, file)


def is_thinned(metadata: pq.FileMetaData) -> bool:
    """Return True if a file contains only a sample of its step; `thin` appends the last column."""
    if not metadata.num_row_groups:
        return PLACE in metadata.schema.names
    # A schema refers to its metadata and back: of many files, gigabytes would wait to be collected.
    return metadata.row_group(0).column(metadata.num_columns - 1).path_in_schema == PLACE


def count_rows(files: Sequence[Path]) -> list[tuple[int, bool] | None]:
    """Return the rows of each file, and whether they are a sample; None of a damaged file."""

    def count(file: Path) -> tuple[int, bool] | None:
        try:
            metadata = pq.read_metadata(file)
        except (OSError, ValueError):  # raised by pyarrow
            return None
        return metadata.num_rows, is_thinned(metadata)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(count, files))


def count_thinned(files: Iterable[Path]) -> int:
    """Count the files that contain only a sample of their step."""
    return sum(is_thinned(pq.read_metadata(file)) for file in files)


def write_table(table: pa.Table, file: Path) -> None:
    """Write a table atomically, and create its folder if needed."""
    file.parent.mkdir(exist_ok=True)
    with atomic_write(file) as partial:
        pq.write_table(table, partial, compression="zstd", row_group_size=BATCH)


def build_rollout_table(rollouts: Sequence[Rollout]) -> pa.Table:
    """Build the columns that training and evaluation share."""

    def column(get: Callable[[Rollout], Any], kind: pa.DataType) -> pa.Array:
        return pa.array([get(rollout) for rollout in rollouts], kind)

    table = pa.table(
        {
            "prompt_index": column(lambda r: r.prompt.index, pa.int64()),
            "sample_index": column(lambda r: r.response.sample_index, pa.int32()),
            "prompt": column(lambda r: r.prompt.messages[-1]["content"], pa.string()),
            PROMPT_TEXT: column(lambda r: r.prompt.text, pa.string()),
            "prompt_token_ids": column(lambda r: r.prompt.token_ids, pa.list_(pa.int32())),
            "ground_truth": column(lambda r: r.prompt.ground_truth, pa.string()),
            "data_source": column(lambda r: r.prompt.data_source, pa.string()),
            "response": column(lambda r: r.response.text, pa.string()),
            "reward": column(lambda r: r.grade_result.reward, pa.float32()),
            "reason": column(lambda r: r.grade_result.reason, pa.string()),
            "extracted": column(lambda r: r.grade_result.extracted, pa.string()),
            "finish_reason": column(lambda r: r.response.finish_reason, pa.string()),
            "weight_version": column(lambda r: r.response.weight_version, pa.int64()),
            "weight_versions": column(_version_ranges, VERSIONS),
        }
    )
    for one in columns_of(rollout.response for rollout in rollouts):
        rows = [_array(rollout.response, one) for rollout in rollouts]
        has_rows = any(row is not None and len(row) for row in rows)
        if one.in_rollout_files and one.by == "engine" and (has_rows or not one.optional):
            if one.name in table.column_names:
                raise UserError(
                    f"{one.name} is another column of rollouts; rename that of the engine"
                )
            kind = pa.list_(pa.from_numpy_dtype(np.dtype(one.dtype)))
            table = table.append_column(one.name, pa.array(rows, kind))
    if any(rollout.response.messages for rollout in rollouts):
        table = table.append_column(OBSERVED, column(_observed_ranges, RANGES))
        table = table.append_column(
            RESTARTS, column(lambda r: r.response.restarts, pa.list_(pa.int32()))
        )
        table = table.append_column(
            MESSAGES, column(lambda r: json.dumps(r.response.messages), pa.string())
        )
        table = table.append_column(
            TURN_REWARDS, column(lambda r: r.grade_result.turn_rewards, pa.list_(pa.float64()))
        )
    names = sorted({name for rollout in rollouts for name in rollout.grade_result.rewards})
    if not names:
        return table
    kind = pa.struct({name: pa.float64() for name in names})
    return table.append_column("rewards", column(lambda r: r.grade_result.rewards or None, kind))


# Only where the sampler removed tokens: the ids that it kept when it drew each token, one token
# after the other, and the number of each token's.
MASKS = ("mask_ids", "mask_counts")
# Columns of conversations: the ranges of token_ids that an environment wrote, while rollout and
# behavior log-probs are of the other tokens only; the places in token_ids from which an observation
# replaces everything before it; the messages after those of the prompt; and the rewards of turns.
# Only with `advantage.credit=turn`: the advantages of turns.
OBSERVED, RESTARTS, MESSAGES = "observed", "restarts", "messages"
TURN_REWARDS, TURN_ADVANTAGES = "turn_rewards", "turn_advantages"
RANGES = pa.list_(pa.struct({"first": pa.int32(), "end": pa.int32()}))


def read_observed(row: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return the observed ranges of a row as `Response.observed`; empty without the column."""
    return tuple((one["first"], one["end"]) for one in row.get(OBSERVED) or ())


def read_restarts(row: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the restarts of a row as `Response.restarts`; empty without the column."""
    return tuple(row.get(RESTARTS) or ())


def _observed_ranges(rollout: Rollout) -> list[dict[str, int]]:
    return [{"first": first, "end": end} for first, end in rollout.response.observed]


VERSIONS = pa.list_(pa.struct({"token": pa.int32(), "version": pa.int64()}))


def _version_ranges(rollout: Rollout) -> list[dict[str, int]]:
    """Return the first token of each range generated by one version of the weights."""
    return [{"token": token, "version": version} for token, version in rollout.response.versions]


def _array(response: Response, column: Column) -> np.ndarray | None:
    """Return a response's array; None for log-probs of the engine that are unknown."""
    if column.name == "rollout_logprobs" and not response.has_engine_logprobs:
        return None
    row: np.ndarray | None = response.row(column.name)
    return row


Row = dict[str, Any]
COLUMNS = (
    "prompt_index", "sample_index", "prompt", PROMPT_TEXT, "ground_truth", "data_source",
    "response", "reward", "reason", "extracted", "finish_reason", "weight_version", "advantage",
    "lag", PLACE, MESSAGES,
)  # fmt: skip  # without per-token columns
ENDINGS = {"length": "cut at the limit", "lost": "its environment was lost"}
# Control characters, and characters that are invisible or change the direction of text.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps of a run directory with recorded rollouts; UserError if there are none."""
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; give the folder of a run, as runs/NAME")
    files = (folder / "rollouts").glob("step_*.parquet")
    if steps := sorted(int(file.stem.rpartition("_")[2]) for file in files):
        return steps
    raise UserError(
        f"{folder} has no rollouts (rollouts/step_*.parquet): give the folder of a run that has "
        "trained a step, as runs/NAME"
    )


def read_rollouts(folder: Path, step: int) -> list[Row]:
    """Read the rollouts of one step in order, without per-token columns.

    Raises UserError if the step is not recorded or its file is damaged.
    """
    steps, file = recorded_steps(folder), folder / "rollouts" / f"step_{step:06d}.parquet"
    if step not in steps:
        raise UserError(
            f"{folder} has no rollouts of step {step}; choose one of its {len(steps)} recorded "
            f"steps from {steps[0]} to {steps[-1]}"
        )
    try:
        present = set(pq.read_schema(file).names)
        table = pq.read_table(
            file, columns=[name for name in (*COLUMNS, "token_ids", OBSERVED) if name in present]
        )
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} is damaged: {error}; choose another step") from error
    index = table.column_names.index("token_ids")
    lengths = pc.list_value_length(table.column("token_ids"))
    rows = table.set_column(index, "tokens", lengths).to_pylist()
    return [_with_messages(row) if OBSERVED in row else row for row in rows]


def _with_messages(row: Row) -> Row:
    """Parse the messages of a conversation; `tokens` are then those that the policy sampled."""
    ranges = read_observed(row)
    row["tokens"] -= sum(end - first for first, end in ranges)
    del row[OBSERVED]
    return row | {"turns": len(ranges) + 1, MESSAGES: json.loads(row[MESSAGES])}


def rollout_row(rollout: Rollout) -> Row:
    """Build the row that `describe_rollout` formats from a rollout in memory."""
    response, grade_result = rollout.response, rollout.grade_result
    return {
        "prompt_index": rollout.prompt.index,
        "sample_index": response.sample_index,
        "prompt": rollout.prompt.messages[-1]["content"] if rollout.prompt.messages else "",
        PROMPT_TEXT: rollout.prompt.text,
        "ground_truth": rollout.prompt.ground_truth,
        "response": response.text,
        "reward": grade_result.reward,
        "reason": grade_result.reason,
        "extracted": grade_result.extracted,
        "finish_reason": response.finish_reason,
        "tokens": response.length,
        **(
            {"turns": response.turns, MESSAGES: list(response.messages)}
            if response.messages
            else {}
        ),
    }


def choose_rollouts(rows: Sequence[Row], *, order: str, count: int, seed: int) -> list[Row]:
    """Return the rollouts with the highest or lowest reward, or a random sample drawn by `seed`."""
    if order == "random":
        return random.Random(seed).sample(rows, min(count, len(rows)))
    return sorted(rows, key=lambda row: row["reward"], reverse=order == "best")[:count]


def printable(text: object) -> str:
    """Replace characters that are invisible, move the cursor or reorder text by their code."""
    return _UNSEEN.sub(lambda match: f"<{ord(match[0]):04x}>", str(text).replace("\r\n", "\n"))


def shorten(text: str, most: int) -> str:
    """Cut the middle out of a text that is longer than `most` characters."""
    if len(text) <= most:
        return text
    head = most // 2
    left_out = len(text) - most
    return f"{text[:head]} [... {left_out} characters ...] {text[len(text) - (most - head) :]}"


def prompt_text(row: Mapping[str, Any]) -> str:
    """Return what the engine got: the decoded tokens of the prompt, special tokens included.

    Earlier runs recorded only the text of the last message.
    """
    return row.get(PROMPT_TEXT) or f"{row['prompt']} (the last message; tokens were not decoded)"


def response_text(row: Mapping[str, Any]) -> str:
    """Return the response, or a whole conversation with the role before each message."""
    messages = _messages(row)
    return "\n".join(f"{role}: {text}" for role, text in messages) or row["response"]


def _messages(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return role and text of each message of a conversation; empty without an environment.

    The role of the first message of a history that replaces everything before it begins with `new`.
    """
    return [
        ("new " * (REPLACES_HISTORY in one) + str(one.get("role")), str(one.get("content")))
        for one in row.get(MESSAGES, ())
    ]


def describe_rollout(row: Mapping[str, Any], *, most: int, indent: str = "  ") -> str:
    """Format one line with reward, reason and length, then prompt, response and answer."""
    lines = [
        f"{indent}prompt {row['prompt_index']}, response {row['sample_index'] + 1}: "
        f"reward {row['reward']:g} ({printable(row['reason'])}), {row['tokens']} tokens"
        + (f" in {row['turns']} turns, " if MESSAGES in row else ", ")
        + ENDINGS.get(row["finish_reason"], "ended by itself")
    ]
    parts = [("prompt", prompt_text(row))]
    parts += _messages(row) or [("response", row["response"])]
    if row["extracted"] is not None:
        parts.append(("extracted", row["extracted"]))
    parts.append(("truth", row["ground_truth"]))
    for name, text in parts:
        for number, line in enumerate(shorten(printable(text), most).split("\n")):
            lines.append(f"{indent}  {name if number == 0 else '':<9} | {line}".rstrip())
    return "\n".join(lines)
