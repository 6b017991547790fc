"""Files of `offline.rollouts`, and the check of their columns."""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.columns import COLUMNS
from megatron_rl.config import ConfigError
from megatron_rl.messages import SYSTEMS, TOOLS

ROWS_AT_ONCE = 64
NEEDED = ("prompt", "response", "reward")
# Further columns that are read, and those that a run writes for its readers alone.
READ = {
    *NEEDED, "prompt_index", "prompt_token_ids", "ground_truth", "data_source", "reason",
    "extracted", "finish_reason", "rewards", "observed", "restarts", "messages", "turn_rewards",
    TOOLS, *SYSTEMS, *(column.name for column in COLUMNS if column.from_files),
}  # fmt: skip
WRITTEN = {
    "sample_index", "prompt_text", "weight_version", "weight_versions", "sampled", "place",
    *(column.name for column in COLUMNS),
}  # fmt: skip


def find_rollout_files(path: Path) -> list[Path]:
    """Find the parquet files of a run, a folder or a file; ConfigError without any."""
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    files = [folder] if folder.is_file() else sorted(folder.glob("*.parquet"))
    if not files:
        raise ConfigError(
            f"offline.rollouts: {path} has no parquet file; name a run directory, its rollouts/, "
            "or a .parquet file"
        )
    return files


def check_rollout_files(path: Path) -> None:
    """Raise ConfigError if a file is not parquet or lacks a column; reads only the footers."""
    for file in find_rollout_files(path):
        try:
            names = pq.read_schema(file).names
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(
                f"offline.rollouts: {file} cannot be read as parquet: {error}; write it again"
            ) from None
        if missing := [name for name in NEEDED if name not in names]:
            raise ConfigError(
                f"offline.rollouts: {file} has no column {', '.join(missing)}; it needs "
                f"{', '.join(NEEDED)} and has {', '.join(names)}"
            )


def describe_unread(path: Path, *, further: Collection[str] = ()) -> str:
    """Name the columns that nothing reads, with their numbers of rows; empty without any.

    further: columns that the objective takes besides.
    """
    counts: Counter[str] = Counter()
    for file in find_rollout_files(path):
        metadata = pq.read_metadata(file)
        names = {*pq.read_schema(file).names} - READ - WRITTEN - {*further}
        counts.update(dict.fromkeys(names, metadata.num_rows))
    if not counts:
        return ""
    named = ", ".join(f"{name} ({count})" for name, count in counts.most_common(12))
    return f"; {path}: columns that nothing reads, with their rows: {named}"


def have_prompt_tokens(path: Path) -> bool:
    """Return True if every file has the column of the prompts' token ids."""
    return all(
        "prompt_token_ids" in pq.read_schema(file).names for file in find_rollout_files(path)
    )


def read_rows(file: Path, numbers: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of ascending `numbers` with them; a few rows are in memory at once."""
    try:
        with pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as parquet:
            start, wanted = 0, deque(numbers)
            for group in range(parquet.num_row_groups):
                end = start + parquet.metadata.row_group(group).num_rows
                if not wanted or wanted[0] >= end:
                    start = end
                    continue
                for batch in parquet.iter_batches(ROWS_AT_ONCE, row_groups=[group]):
                    places = []
                    while wanted and wanted[0] < start + len(batch):
                        places.append(wanted.popleft() - start)
                    rows = batch.take(pa.array(places, pa.int64())).to_pylist()
                    yield from zip((start + place for place in places), rows, strict=True)
                    start += len(batch)
                start = end
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"offline.rollouts: {file} cannot be read as parquet: {error}") from None
