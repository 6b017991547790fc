"""Files of `offline.rollouts`, and the check of their columns."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.config import ConfigError

NEEDED = ("prompt", "response", "reward")


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
