"""Lossless storage of prompt groups: one parquet row per response."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.columns import COLUMNS, OF_GROUP, Column, array_columns
from megatron_rl.runs.files import atomic_write
from megatron_rl.types import (
    ARRAY_NAMES,
    GradeResult,
    Prompt,
    PromptGroup,
    PromptSlot,
    Response,
    Rollout,
    columns_of,
)

ABOUT = b"about"  # key of the file's metadata, a JSON text
_KINDS = {"int32": pa.int32(), "int64": pa.int64(), "float32": pa.float32(),
          "float64": pa.float64()}  # fmt: skip
_IN_FILE = tuple(column for column in COLUMNS if column.in_group_files)
ROWS_AT_ONCE = 64  # in memory as rows while a file is written or read


def _kind(column: Column) -> pa.DataType:
    kind = _KINDS[column.dtype]
    return kind if column.unit in ("response", "group") else pa.list_(kind)


def _schema(further: Iterable[Column]) -> pa.Schema:
    """Fields of a group are repeated in each of its rows; float64 stores a Python float exactly."""
    return pa.schema(
        {
            "slot": pa.list_(pa.int64(), 2),
            "prompt": pa.string(),  # JSON of a Prompt
            "sample_index": pa.int64(),
            "text": pa.string(),
            "finish_reason": pa.string(),
            "weight_version": pa.int64(),
            "later_versions": pa.list_(pa.list_(pa.int64(), 2)),
            "observed": pa.list_(pa.list_(pa.int64(), 2)),
            "restarts": pa.list_(pa.int64()),
            "messages": pa.string(),  # JSON
            "verdict": pa.string(),  # JSON of a GradeResult
            **{column.name: _kind(column) for column in (*_IN_FILE, *further)},
        }
    )


def write_groups(
    file: Path, groups: Iterable[PromptGroup], about: Mapping[str, Any] | None = None
) -> None:
    """Write groups with all fields that training needs, and metadata about them."""
    groups = list(groups)
    responses = [rollout.response for group in groups for rollout in group.rollouts]
    arrays = [column for column in columns_of(responses) if column.in_group_files]
    further = [column for column in arrays if column.name not in ARRAY_NAMES]
    rows = [
        {
            "slot": list(group.slot),
            **{column.name: getattr(group, column.name) for column in OF_GROUP},
            "prompt": json.dumps(dataclasses.asdict(rollout.prompt)),
            "sample_index": rollout.response.sample_index,
            **{column.name: _array(rollout.response, column) for column in arrays},
            "text": rollout.response.text,
            "finish_reason": rollout.response.finish_reason,
            "weight_version": rollout.response.weight_version,
            "later_versions": [list(each) for each in rollout.response.later_versions],
            "observed": [list(each) for each in rollout.response.observed],
            "restarts": list(rollout.response.restarts),
            "messages": json.dumps(rollout.response.messages),
            "verdict": json.dumps(dataclasses.asdict(rollout.grade_result)),
            "advantage": advantage,
            "turn_advantages": by_turn,
        }
        for group in groups
        for rollout, advantage, by_turn in zip(
            group.rollouts,
            group.advantages,
            group.turn_advantages or [None] * len(group.rollouts),
            strict=True,
        )
    ]
    schema = _schema(further).with_metadata({ABOUT: json.dumps(about or {})})
    with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
        for start in range(0, len(rows), ROWS_AT_ONCE):
            writer.write_table(pa.Table.from_pylist(rows[start : start + ROWS_AT_ONCE], schema))


def _array(response: Response, column: Column) -> np.ndarray | None:
    row = response.row(column.name)
    return None if row is None else np.asarray(row, column.dtype)


def read_metadata(file: Path) -> dict[str, Any]:
    """Read the metadata of a file written by `write_groups`."""
    return dict(json.loads((pq.read_schema(file).metadata or {})[ABOUT]))


def read_groups(file: Path, *, rank: int = 0, world_size: int = 1) -> list[PromptGroup]:
    """Read groups written by `write_groups`, bit for bit; raises OSError if the file is damaged.

    Of several ranks each owns every world_size-th group; its arrays and texts are there and on rank
    0 (`types.Response`). A few rows are in memory at once.
    """
    grouped = itertools.groupby(_rows(file), key=lambda row: row["slot"])
    if world_size == 1:
        return [_group(list(members), owner=-1) for _, members in grouped]
    return [
        _group(list(members), owner=place % world_size,
               has_arrays=rank in (0, place % world_size))
        for place, (_, members) in enumerate(grouped)
    ]  # fmt: skip


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
        arrays = _arrays_of(parquet.schema_arrow.names)
        for batch in parquet.iter_batches(ROWS_AT_ONCE):
            rows: list[dict[str, Any]] = batch.drop_columns([c.name for c in arrays]).to_pylist()
            for column in arrays:
                for row, value in zip(rows, batch[column.name], strict=True):
                    row[column.name] = (
                        value.values.to_numpy().astype(column.dtype) if value.is_valid else None
                    )
            yield from rows


def _arrays_of(names: Iterable[str]) -> list[Column]:
    """Columns of arrays in a file; one of an earlier release lacks those that are newer."""
    plain = {*_schema(()).names} - ARRAY_NAMES
    given = set(names) - plain
    return [column for column in array_columns(given) if column.name in given]


def _group(rows: list[dict[str, Any]], *, owner: int, has_arrays: bool = True) -> PromptGroup:
    return PromptGroup(
        slot=PromptSlot(*rows[0]["slot"]),
        rollouts=tuple(_rollout(row, owner=owner, has_arrays=has_arrays) for row in rows),
        advantages=np.array([row["advantage"] for row in rows], np.float32),
        # missing in a file that an earlier release wrote
        turn_advantages=tuple(
            np.array(row["turn_advantages"], np.float32)
            for row in rows
            if row.get("turn_advantages") is not None
        ),
        **{column.name: rows[0][column.name] for column in OF_GROUP},
    )


def _rollout(row: dict[str, Any], *, owner: int, has_arrays: bool) -> Rollout:
    prompt = json.loads(row["prompt"])
    # tools: missing in a file that an earlier release wrote
    prompt |= {name: tuple(prompt.get(name, ())) for name in ("messages", "token_ids", "tools")}
    arrays = {column.name: row[column.name] for column in _arrays_of(row)}
    response = Response(
        prompt_index=prompt["index"],
        sample_index=row["sample_index"],
        token_ids=arrays.pop("token_ids"),
        rollout_logprobs=arrays.pop("rollout_logprobs"),
        text=row["text"],
        finish_reason=row["finish_reason"],
        weight_version=row["weight_version"],
        later_versions=tuple((start, version) for start, version in row["later_versions"]),
        # missing in a file that an earlier release wrote
        observed=tuple((first, end) for first, end in row.get("observed", ())),
        restarts=tuple(row.get("restarts", ())),
        messages=tuple(json.loads(row.get("messages", "[]"))),
        owner=owner,
    ).with_rows(arrays)
    if not has_arrays:
        response = response.without_arrays()
    return Rollout(Prompt(**prompt), response, GradeResult(**json.loads(row["verdict"])))


class GeneratedGroups:
    """Folder `generated/` of a run directory, with one file per step, complete or absent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, step: int) -> Path:
        """Return the file that keeps a step's groups until a checkpoint makes it unnecessary."""
        return self.path / f"step_{step:06d}.parquet"

    def write(self, step: int, groups: Iterable[PromptGroup], about: Mapping[str, Any]) -> None:
        """Write the groups that a step generated, and metadata about them."""
        self.path.mkdir(exist_ok=True)
        with atomic_write(self.file(step)) as partial:
            write_groups(partial, groups, about)

    def forget(self, step: int) -> None:
        """Delete the files up to `step`, which has a checkpoint."""
        self._keep(lambda other: other > step)

    def rewind(self, step: int) -> None:
        """Keep only the groups generated by the weights after `step`."""
        self._keep(lambda other: other == max(step, 0) + 1)

    def _keep(self, is_kept: Any) -> None:
        for file in self.path.glob("*.parquet"):
            if not is_kept(int(file.stem.rsplit("_", 1)[-1])):
                file.unlink()
