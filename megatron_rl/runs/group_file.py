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

from megatron_rl.runs.files import atomic_write
from megatron_rl.types import (
    TOKEN_COLUMNS,
    GradeResult,
    Prompt,
    PromptGroup,
    PromptSlot,
    RemoteRow,
    Response,
    Rollout,
    no_ids,
)

# Fields of a group, repeated in each of its rows; float64 stores a Python float exactly.
GROUP = {"entropy": pa.float64(), "generated_at_step": pa.int64(), "updates": pa.int64(),
         "first_trained_at_step": pa.int64(), "times_trained": pa.int64(),
                  "num_updates": pa.int64()}  # fmt: skip
ABOUT = b"about"  # key of the file's metadata, a JSON text
SCHEMA = pa.schema(
    {
        "slot": pa.list_(pa.int64(), 2),
        **GROUP,
        "prompt": pa.string(),  # JSON of a Prompt
        "sample_index": pa.int64(),
        "token_ids": pa.list_(pa.int32()),
        "rollout_logprobs": pa.list_(pa.float32()),
        "mask_ids": pa.list_(pa.int32()),
        "mask_counts": pa.list_(pa.int32()),
        "text": pa.string(),
        "finish_reason": pa.string(),
        "weight_version": pa.int64(),
        "later_versions": pa.list_(pa.list_(pa.int64(), 2)),
        "observed": pa.list_(pa.list_(pa.int64(), 2)),
        "restarts": pa.list_(pa.int64()),
        "messages": pa.string(),  # JSON
        "verdict": pa.string(),  # JSON of a GradeResult
        "advantage": pa.float32(),
        "turn_advantages": pa.list_(pa.float32()),
        "behavior_logprobs": pa.list_(pa.float32()),
        "values": pa.list_(pa.float32()),
    }
)


def write_groups(
    file: Path, groups: Iterable[PromptGroup], about: Mapping[str, Any] | None = None
) -> None:
    """Write groups with all fields that training needs, and metadata about them."""
    rows = [
        {
            "slot": list(group.slot),
            **{name: getattr(group, name) for name in GROUP},
            "prompt": json.dumps(dataclasses.asdict(rollout.prompt)),
            "sample_index": rollout.response.sample_index,
            "token_ids": np.asarray(rollout.response.token_ids, np.int32),
            "rollout_logprobs": np.asarray(rollout.response.rollout_logprobs, np.float32),
            "mask_ids": np.asarray(rollout.response.mask_ids, np.int32),
            "mask_counts": np.asarray(rollout.response.mask_counts, np.int32),
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
            "behavior_logprobs": logprobs,
            "values": values,
        }
        for group in groups
        for rollout, advantage, by_turn, logprobs, values in zip(
            group.rollouts,
            group.advantages,
            group.turn_advantages or [None] * len(group.rollouts),
            group.behavior_logprobs,
            group.values or [None] * len(group.rollouts),
            strict=True,
        )
    ]
    schema = SCHEMA.with_metadata({ABOUT: json.dumps(about or {})})
    with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
        for start in range(0, len(rows), ROWS_AT_ONCE):
            writer.write_table(pa.Table.from_pylist(rows[start : start + ROWS_AT_ONCE], schema))


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
    groups = []
    for place, (_, members) in enumerate(grouped):
        owner = place % world_size
        strip = _without_arrays if rank not in (0, owner) else dict
        groups.append(_group([strip(row) for row in members], owner=owner))
    return groups


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
        for batch in parquet.iter_batches(ROWS_AT_ONCE):
            # an earlier release wrote no sampling masks
            arrays = {name: kind for name, kind in ARRAYS.items() if name in batch.schema.names}
            rows: list[dict[str, Any]] = batch.drop_columns(list(arrays)).to_pylist()
            for name, kind in arrays.items():
                for row, value in zip(rows, batch[name], strict=True):
                    row[name] = None if not value.is_valid else value.values.to_numpy().astype(kind)
            yield from rows


def _without_arrays(row: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: row[name] for name in ARRAYS if row.get(name) is not None}
    lengths = {name: RemoteRow(len(value)) for name, value in known.items()}
    return {**row, **lengths, "text": "", "messages": "[]"}


ROWS_AT_ONCE = 64  # in memory as rows while a file is written or read
ARRAYS = {**TOKEN_COLUMNS, "behavior_logprobs": "float32", "values": "float32"}


def _group(rows: list[dict[str, Any]], *, owner: int) -> PromptGroup:
    return PromptGroup(
        slot=PromptSlot(*rows[0]["slot"]),
        rollouts=tuple(_rollout(row, owner=owner) for row in rows),
        advantages=np.array([row["advantage"] for row in rows], np.float32),
        behavior_logprobs=tuple(row["behavior_logprobs"] for row in rows),
        values=tuple(row["values"] for row in rows if row.get("values") is not None),
        # missing in a file that an earlier release wrote
        turn_advantages=tuple(
            np.array(row["turn_advantages"], np.float32)
            for row in rows
            if row.get("turn_advantages") is not None
        ),
        **{name: rows[0][name] for name in GROUP},
    )


def _rollout(row: dict[str, Any], *, owner: int) -> Rollout:
    prompt = json.loads(row["prompt"])
    # tools: missing in a file that an earlier release wrote
    prompt |= {name: tuple(prompt.get(name, ())) for name in ("messages", "token_ids", "tools")}
    response = Response(
        prompt_index=prompt["index"],
        sample_index=row["sample_index"],
        token_ids=row["token_ids"],
        rollout_logprobs=row["rollout_logprobs"],
        mask_ids=row.get("mask_ids", no_ids()),
        mask_counts=row.get("mask_counts", no_ids()),
        text=row["text"],
        finish_reason=row["finish_reason"],
        weight_version=row["weight_version"],
        later_versions=tuple((start, version) for start, version in row["later_versions"]),
        # missing in a file that an earlier release wrote
        observed=tuple((first, end) for first, end in row.get("observed", ())),
        restarts=tuple(row.get("restarts", ())),
        messages=tuple(json.loads(row.get("messages", "[]"))),
        owner=owner,
    )
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
