"""The run directory: a stable interface that reports, studies and people read.

runs/NAME/config.yaml        the resolved config
          metrics.jsonl      one JSON object per step; step 0 is the evaluation before training
          rollouts/          one parquet file per step: every rollout with its log-probs
          checkpoints/       step_NNNNNN/, complete or absent
          eval/              one parquet file per set and step
          model/             the trained model as a Hugging Face folder
          log.txt curves.png tensorboard/
"""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.config import Config, ConfigError, dump_config, load_config
from megatron_rl.runs.rows import read_metrics
from megatron_rl.types import Rollout

CHECKPOINT_NAME = re.compile(r"step_(\d{6})$")
TRAINER_STATE = "trainer.json"
# A resumed run may change these; anything else would make it another experiment.
RESUMABLE_CHANGES = (
    "run.", "trainer.steps", "trainer.checkpoint_every", "trainer.keep_checkpoints",
    "trainer.tokens_per_micro_batch", "trainer.recompute", "eval.", "logging.", "resharding.",
    "reward.workers", "parallel.", "rollout.tensor", "rollout.memory_fraction",
    "rollout.max_sequences", "rollout.kv_cache_mib", "rollout.time_limit_seconds",
)  # fmt: skip


class RunDirectory:
    """Paths and writers of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self.evaluations = self.path / "eval"
        self.model = self.path / "model"
        self.config_file = self.path / "config.yaml"
        self.log_file = self.path / "log.txt"

    @classmethod
    def of(cls, config: Config) -> "RunDirectory":
        """The run directory that the config names."""
        if config.run.name is None:
            raise ConfigError(
                "run.name: missing; torchrun and srun jobs need a name, as run.name=my-run"
            )
        return cls(Path(config.run.dir) / config.run.name)

    def check_usable(self, config: Config) -> None:
        """Refuse to overwrite another run, or to continue one under changed settings.

        Raises ConfigError with the setting to change.
        """
        if not self._has_begun():
            return
        if config.run.resume == "never":
            raise ConfigError(
                f"{self.path} already holds a run; set run.resume=auto to continue it, "
                "or choose another run.name"
            )
        earlier = load_config(self.config_file)
        before, now = _flatten(earlier.model_dump()), _flatten(config.model_dump())
        changed = [
            f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and not key.startswith(RESUMABLE_CHANGES)
        ]
        if config.trainer.steps != earlier.trainer.steps and config.optimizer.decay != "constant":
            changed.append(
                f"trainer.steps: {earlier.trainer.steps} -> {config.trainer.steps}, where the "
                f"{config.optimizer.decay} decay of the learning rate ends"
            )
        if changed:
            raise ConfigError(
                f"{self.path} was started with other settings and cannot be continued with these; "
                "restore them or choose another run.name:\n  " + "\n  ".join(changed)
            )
        self._check_checkpoints(earlier)

    def _has_begun(self) -> bool:
        """Whether there is anything to lose; a start that failed leaves a log and a config."""
        is_saved = any(self.checkpoints.glob("step_*"))
        return self.config_file.exists() and (is_saved or bool(read_metrics(self.path)))

    def lock(self) -> None:
        """Hold the directory, made where it is missing, for as long as this process lives.

        The kernel lets go of it however the process ends, an NFS server too. Raises ConfigError
        that names the process holding it. File systems without locks are left unlocked.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / ".lock").open("a+")
        try:
            # A record lock: what this process forks does not inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise ConfigError(
                f"{self.path} is in use by {holder}; wait until it has ended or end it, or choose "
                "another run.name"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._lock = file  # closing it would let go

    def _check_checkpoints(self, config: Config) -> None:
        """Refuse to continue where a checkpoint is lost: rewinding would delete what came after."""
        for folder in self.checkpoints.glob("step_*"):
            if not (folder / TRAINER_STATE).is_file():
                raise ConfigError(
                    f"checkpoint {folder} is incomplete: it has no {TRAINER_STATE}; restore it, or "
                    "delete the folder to continue from the one before it"
                )
        newest = self.latest_checkpoint()
        if newest is not None:
            self.check_checkpoint(newest[1])
        done = newest[0] if newest else 0
        recorded = max((row["step"] for row in read_metrics(self.path)), default=0)
        if recorded - done > config.trainer.checkpoint_every:
            raise ConfigError(
                f"{self.path} recorded {recorded} steps, but its newest checkpoint is of step "
                f"{done}: later ones are lost, and continuing would delete those steps; put the "
                "checkpoint back, or choose another run.name"
            )

    def create(self, config: Config) -> None:
        """Make the folders and write the resolved config."""
        for folder in (self.rollouts, self.checkpoints, self.evaluations):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.config_file, dump_config(config))

    def complete_checkpoints(self) -> list[tuple[int, Path]]:
        """Step and folder of every complete checkpoint, oldest first."""
        return sorted(
            (int(match.group(1)), folder)
            for folder in self.checkpoints.glob("step_*")
            if (match := CHECKPOINT_NAME.search(folder.name)) and (folder / TRAINER_STATE).is_file()
        )

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Step and folder of the newest complete checkpoint."""
        return max(self.complete_checkpoints(), default=None)

    def checkpoint_folder(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.checkpoints / f"step_{step:06d}"

    def complete_checkpoint(self, partial: Path, step: int) -> None:
        """Give a written checkpoint its list of files, then its final name."""
        files = {
            str(file.relative_to(partial)): file.stat().st_size
            for file in sorted(partial.rglob("*"))
            if file.is_file()
        }
        state = json.dumps({"step": step, "files": files}, indent=1)
        write_atomically(partial / TRAINER_STATE, state)
        partial.rename(self.checkpoint_folder(step))

    def check_checkpoint(self, folder: Path) -> None:
        """ConfigError if a file of a complete checkpoint is missing or was cut short since."""
        try:
            files = json.loads((folder / TRAINER_STATE).read_text())["files"]
        except (json.JSONDecodeError, KeyError) as error:
            raise ConfigError(
                f"checkpoint {folder} is damaged: {TRAINER_STATE} cannot be read; delete the "
                "folder to continue from the one before it"
            ) from error
        for name, size in files.items():
            file = folder / name
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} of {size} bytes"
                raise ConfigError(
                    f"checkpoint {folder} is damaged: {name} {state}; delete the folder to "
                    "continue from the one before it"
                )

    def prune_checkpoints(self, *, keep: int) -> None:
        """Delete all but the newest `keep` complete checkpoints, and all that are not complete."""
        for _step, folder in self.complete_checkpoints()[:-keep]:
            shutil.rmtree(folder)
        self.remove_partial_checkpoints()

    def remove_partial_checkpoints(self) -> None:
        """Delete what kills and full disks left half-written."""
        for folder in self.checkpoints.glob(".step_*.partial"):
            shutil.rmtree(folder)

    def rewind(self, step: int) -> None:
        """Drop everything recorded after `step`, which a resumed run will write again."""
        rows = [row for row in read_metrics(self.path) if row["step"] <= step]
        write_atomically(
            self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
        )
        for file in [*self.rollouts.glob("*.parquet"), *self.evaluations.glob("*.parquet")]:
            if int(file.stem.rsplit("_", 1)[-1]) > step:
                file.unlink()

    def write_rollouts(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        *,
        advantages: Sequence[float],
        behavior_logprobs: Sequence[np.ndarray | None],
    ) -> None:
        """Keep one step's rollouts: texts, token ids, rewards, log-probs, weight versions.

        Behavior log-probs are null where they were not computed.
        """
        table = _rollout_table(rollouts)
        table = table.append_column("advantage", pa.array(advantages, pa.float32()))
        table = table.append_column(
            "behavior_logprobs", pa.array(behavior_logprobs, pa.list_(pa.float32()))
        )
        _write_table(table, self.rollouts / f"step_{step:06d}.parquet")

    def write_evaluation(self, name: str, step: int, rollouts: Sequence[Rollout]) -> None:
        """Keep the responses of one evaluation."""
        _write_table(_rollout_table(rollouts), self.evaluations / f"{name}_{step:06d}.parquet")


def write_atomically(file: Path, text: str) -> None:
    """Replace a file's text so that a kill leaves the old or the new one, never a part."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)


def _write_table(table: pa.Table, file: Path) -> None:
    partial = file.with_name(f".{file.name}.partial")
    pq.write_table(table, partial, compression="zstd")
    os.replace(partial, file)


def _rollout_table(rollouts: Sequence[Rollout]) -> pa.Table:
    def column(get: Callable[[Rollout], Any], kind: pa.DataType) -> pa.Array:
        return pa.array([get(rollout) for rollout in rollouts], kind)

    return pa.table(
        {
            "prompt_index": column(lambda r: r.prompt.index, pa.int64()),
            "sample_index": column(lambda r: r.response.sample_index, pa.int32()),
            "prompt": column(lambda r: r.prompt.messages[-1]["content"], pa.string()),
            "ground_truth": column(lambda r: r.prompt.ground_truth, pa.string()),
            "data_source": column(lambda r: r.prompt.data_source, pa.string()),
            "response": column(lambda r: r.response.text, pa.string()),
            "reward": column(lambda r: r.verdict.reward, pa.float32()),
            "reason": column(lambda r: r.verdict.reason, pa.string()),
            "extracted": column(lambda r: r.verdict.extracted, pa.string()),
            "finish_reason": column(lambda r: r.response.finish_reason, pa.string()),
            "weight_version": column(lambda r: r.response.weight_version, pa.int64()),
            "token_ids": column(lambda r: r.response.token_ids, pa.list_(pa.int32())),
            "rollout_logprobs": column(
                lambda r: r.response.rollout_logprobs, pa.list_(pa.float32())
            ),
        }
    )


def _flatten(values: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
