"""Whether the disk holds what a run will write, given what it has written already."""

import math
import os
import shutil
from pathlib import Path

from megatron_rl.config import Config, ConfigError
from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.runs.directory import RunDirectory

# float32 weight, Adam's two moments and the master weight
CHECKPOINT_BYTES_PER_PARAMETER = 16
EXPORT_BYTES_PER_PARAMETER = 4
# Of rollouts/: a token id and two log-probs, before compression; of the longest allowed response
# a quarter is written on average, until a run's own files say how much.
ROLLOUT_BYTES_PER_TOKEN = 12
AVERAGE_LENGTH = 0.25


def check_disk(config: Config, run: RunDirectory, shape: ModelShape) -> None:
    """Raise ConfigError if the run directory cannot be written, or the disk is too small for it.

    Checkpoints that the run has already take no more space: the oldest goes when a new one is
    complete.
    """
    folder = find_writable(run.path, key="run.dir")
    parameters = sum(math.prod(size) for size in tensor_shapes(shape).values())
    # one more than kept: the newest is complete before the oldest goes
    checkpoints = parameters * CHECKPOINT_BYTES_PER_PARAMETER
    trainer = config.trainer
    milestones = trainer.steps // trainer.milestones if trainer.milestones else 0
    kept = trainer.keep_checkpoints + bool(trainer.keep_best) + milestones
    checkpoints *= kept + 1
    there = _size_of(run.checkpoints.path)
    export = parameters * EXPORT_BYTES_PER_PARAMETER
    rollouts = _rollouts_to_come(config, run)
    needed = max(checkpoints - there, 0) + export + rollouts
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"{folder} has {describe_size(free)} free but the run needs {describe_size(needed)} "
            f"more: {describe_size(checkpoints)} for {kept} + 1 "
            f"checkpoints ({describe_size(there)} are there), {describe_size(export)} for the "
            f"model, about {describe_size(rollouts)} for rollouts to come; free some, lower "
            "trainer.keep_checkpoints, or set run.dir to another disk"
        )


def find_writable(path: Path, *, key: str) -> Path:
    """The folder, there already, in which `path` would be made; ConfigError if it cannot be."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{key}: {folder} is not a folder that can be written; choose another")
    return folder


def describe_size(size: float) -> str:
    """Bytes as a person reads them: 640 bytes, 12.3 MiB."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:,.1f} {unit}"
    return f"{size:.0f} bytes"


def _rollouts_to_come(config: Config, run: RunDirectory) -> float:
    """Bytes, from the run's own files where it has some."""
    files = list(run.rollouts.glob("*.parquet"))
    steps = max(config.trainer.steps - len(files), 0)
    if files:
        return steps * sum(file.stat().st_size for file in files) / len(files)
    rollout = config.rollout
    tokens = rollout.prompts * rollout.responses_per_prompt * rollout.max_response_tokens
    return steps * tokens * AVERAGE_LENGTH * ROLLOUT_BYTES_PER_TOKEN


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
