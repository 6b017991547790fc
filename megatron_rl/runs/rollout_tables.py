"""Parquet tables of rollouts, one row each, complete or thinned to a sample of groups.

The column `sampled` of a complete file marks the rows that remain when it is thinned. A thinned
file contains only these rows, and their original positions in the column `place`.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.runs.files import written_whole
from megatron_rl.types import Rollout

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


def count_thinned(files: Iterable[Path]) -> int:
    """Count the files that contain only a sample of their step."""
    return sum(PLACE in pq.read_schema(file).names for file in files)


def write_table(table: pa.Table, file: Path) -> None:
    """Write a table atomically, and create its folder if needed."""
    file.parent.mkdir(exist_ok=True)
    with written_whole(file) as partial:
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
            "token_ids": column(lambda r: r.response.token_ids, pa.list_(pa.int32())),
            "rollout_logprobs": column(_engine_logprobs, pa.list_(pa.float32())),
        }
    )
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


def _engine_logprobs(rollout: Rollout) -> np.ndarray | None:
    response = rollout.response
    return response.rollout_logprobs if response.has_engine_logprobs else None
