"""The run directory: a stable interface that reports, studies and people read.

runs/NAME/config.yaml        the resolved config
          id                 drawn once; its checkpoints name it
          changes.jsonl      what a resumed run changed in it, after which step
          models.json        fingerprints of the models that it names
          schedule.jsonl     when the groups that each step trained were generated
          metrics.jsonl      one JSON object per step; step 0 is the evaluation before training
          rollouts/          one parquet file per step: every rollout with its log-probs
          updates/           one per step: what each update saw, by age and position of tokens
          traces/            one per step: a few rollouts' log-probs at each of their updates
          generated/         what was generated since the last checkpoint, as training takes it
          checkpoints/       step_NNNNNN/, complete or absent
          eval/              one parquet file per set and step
          faults/            rollouts of the steps in which updates were skipped, and why
          stalls/            one file for each time that the ranks of a node hung: who, where
          model/             the trained model as a Hugging Face folder
          log.txt curves.png tensorboard/
"""

import json
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.config import Config, ConfigError, dump_config, load_config, with_absolute_paths
from megatron_rl.models.fingerprint import model_fingerprint
from megatron_rl.runs.checkpoints import CheckpointFolders
from megatron_rl.runs.files import write_atomically, written_whole
from megatron_rl.runs.generated import GeneratedGroups
from megatron_rl.runs.lock import LOCK, take_lock
from megatron_rl.runs.rows import read_metrics, read_rows
from megatron_rl.types import Rollout

# A resumed run may change these: none can make what is there already wrong. Every change is kept in
# changes.jsonl. Anything else would make it another experiment.
RESUMABLE_CHANGES = (
    "run.", "trainer.steps", "trainer.checkpoint_every", "trainer.keep_checkpoints",
    "trainer.keep_best", "trainer.milestones", "trainer.self_test_every", "trainer.stall_seconds",
    "trainer.skipped_updates",
    "trainer.tokens_per_micro_batch", "trainer.recompute", "eval.", "logging.", "resharding.",
    "reward.workers", "reward.time_limit_seconds", "reward.on_error", "reward.environment",
    "parallel.", "rollout.tensor", "rollout.expert_parallel", "rollout.memory_fraction",
    "rollout.max_sequences", "rollout.kv_cache_mib", "rollout.time_limit_seconds",
    "rollout.stall_seconds", "optimizer.learning_rate", "optimizer.min_learning_rate",
    "optimizer.clip_grad", "optimizer.decay", "model.transformer_engine",
)  # fmt: skip
MODELS = ("model.path", "model.reference")  # compared by content: a folder may move


class RunDirectory:
    """Paths and writers of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.rollouts = self.path / "rollouts"
        self.updates = self.path / "updates"
        self.traces = self.path / "traces"
        self.generated = GeneratedGroups(self.path / "generated")
        self.checkpoints = CheckpointFolders(self.path / "checkpoints")
        self.evaluations = self.path / "eval"
        self.faults = self.path / "faults"
        self.stalls = self.path / "stalls"
        self.model = self.path / "model"
        self.config_file = self.path / "config.yaml"
        self.models_file = self.path / "models.json"
        self.log_file = self.path / "log.txt"
        self.schedule_file = self.path / "schedule.jsonl"

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
        changed = [
            f"{key}: {before!r} -> {now!r}"
            for key, (before, now) in self._changes(config).items()
            if not (key.startswith(RESUMABLE_CHANGES) or self._is_moved(key, config))
            # Megatron keeps one optimizer at 1, and one more for experts beyond: neither reads
            # the other's checkpoint.
            or (key == "parallel.expert" and 1 in (before, now))
        ]
        if changed:
            raise ConfigError(
                f"{self.path} was started with other settings and cannot be continued with these; "
                "restore them or choose another run.name:\n  " + "\n  ".join(changed)
            )
        self.check_checkpoints(load_config(self.config_file))

    def _changes(self, config: Config) -> dict[str, tuple[object, object]]:
        """The settings that differ from those of the last start: key -> (before, now)."""
        earlier = with_absolute_paths(load_config(self.config_file))
        before = _flatten(earlier.model_dump())
        now = _flatten(with_absolute_paths(config).model_dump())
        return {
            key: (before.get(key), now.get(key))
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        }

    def _is_moved(self, key: str, config: Config) -> bool:
        """Whether a model's path changed and the model did not."""
        folder = _flatten(config.model_dump()).get(key)
        kept = self._kept_models().get(key)
        if key not in MODELS or kept is None or not (Path(str(folder)) / "config.json").is_file():
            return False
        return model_fingerprint(str(folder)) == kept

    def _kept_models(self) -> dict[str, str]:
        return json.loads(self.models_file.read_text()) if self.models_file.is_file() else {}

    def _has_begun(self) -> bool:
        """Whether there is anything to lose; a start that failed leaves a log and a config."""
        is_saved = self.checkpoints.steps() or self.checkpoints.damaged()
        return self.config_file.exists() and bool(is_saved or read_metrics(self.path))

    def new_stalls(self) -> Callable[[], Path | None]:
        """What finds the newest report of a stall that was not there yet."""
        before = set(self.stalls.glob("*.txt"))
        return lambda: max(set(self.stalls.glob("*.txt")) - before, default=None)

    def lock(self) -> None:
        """Hold the directory, made where it is missing, for as long as this process lives.

        Raises ConfigError that names the process holding it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / LOCK).open("a+")
        if not take_lock(file):
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise ConfigError(
                f"{self.path} is in use by {holder}; wait until it has ended or end it, or choose "
                "another run.name"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._lock = file  # closing it would let go

    def check_checkpoints(self, config: Config) -> None:
        """Refuse to continue where checkpoints are lost: rewinding would delete what came after.

        A damaged one is set aside later, and the run goes on from the one before it.
        """
        sound = self.checkpoints.sound_steps()
        done = max(sound, default=0)
        recorded = max((row["step"] for row in read_metrics(self.path)), default=0)
        found = [
            f"{self.checkpoints.folder(step)}: {problem}"
            for step in self.checkpoints.steps()
            if (problem := self.checkpoints.problem(step)) is not None
        ]
        found += [str(folder) for folder in self.checkpoints.damaged()]
        if found and sound:
            return
        if found or recorded - done > config.trainer.checkpoint_every:
            raise ConfigError(
                f"{self.path} recorded {recorded} steps, but its newest sound checkpoint is of "
                f"step {done}: later ones are lost, and continuing would delete those steps; put "
                "a sound checkpoint back, or choose another run.name"
                + "".join(f"\n  damaged: {one}" for one in found)
            )

    def create(self, config: Config) -> None:
        """Make the folders; write the config, what it changes, and which models it names."""
        for folder in (self.rollouts, self.checkpoints.path, self.evaluations):
            folder.mkdir(parents=True, exist_ok=True)
        if not self.checkpoints.run_file.exists():
            write_atomically(self.checkpoints.run_file, uuid.uuid4().hex + "\n")
        if self._has_begun():
            self._note_changes(config)
        models = {
            key: model_fingerprint(str(path))
            for key, path in _flatten(config.model_dump()).items()
            if key in MODELS and path and (Path(str(path)) / "config.json").is_file()
        }
        write_atomically(self.models_file, json.dumps(models, indent=1) + "\n")
        write_atomically(self.config_file, dump_config(config))

    def _note_changes(self, config: Config) -> None:
        step = max(self.checkpoints.sound_steps(), default=0)
        stamp = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "after_step": step}
        with (self.path / "changes.jsonl").open("a") as file:
            for key, (before, now) in self._changes(config).items():
                if not key.startswith("run."):
                    file.write(json.dumps(stamp | {"key": key, "from": before, "to": now}) + "\n")

    def rewind(self, step: int, *, updates: int = 0) -> None:
        """Drop everything recorded after `step`, which a resumed run will write again.

        updates: of the step after it, which are done.
        """
        rows = [row for row in read_metrics(self.path) if row["step"] <= step]
        write_atomically(
            self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
        )
        for folder in (self.rollouts, self.updates, self.traces, self.evaluations):
            for file in folder.glob("*.parquet"):
                if int(file.stem.rsplit("_", 1)[-1]) > step:
                    file.unlink()
        self.generated.rewind(step)
        for journal in (self.faults / "faults.jsonl", self.schedule_file):
            if journal.is_file():
                last = (step + 1, updates)
                kept = [row for row in read_rows(journal)
                        if (row["step"], row.get("update", math.inf)) <= last]  # fmt: skip
                write_atomically(journal, "".join(json.dumps(row) + "\n" for row in kept))

    def append_schedule(self, row: dict[str, Any]) -> None:
        """Keep which groups a step trained, and when they were generated."""
        with self.schedule_file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def write_rollouts(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        *,
        advantages: Sequence[float],
        behavior_logprobs: Sequence[np.ndarray | None],
        lag: Sequence[int] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Keep one step's rollouts: texts, token ids, rewards, log-probs, weight versions.

        Behavior log-probs are null where they were not computed. lag: steps since each rollout's
        generation. folder: elsewhere than in `rollouts/`.
        """
        table = _rollout_table(rollouts)
        table = table.append_column("advantage", pa.array(advantages, pa.float32()))
        table = table.append_column("lag", pa.array(lag or [0] * len(rollouts), pa.int32()))
        table = table.append_column(
            "behavior_logprobs", pa.array(behavior_logprobs, pa.list_(pa.float32()))
        )
        _write_table(table, (folder or self.rollouts) / f"step_{step:06d}.parquet")

    def write_updates(self, step: int, columns: Mapping[str, Any]) -> None:
        """Keep one step's table of updates."""
        if columns:
            whole = {name: pa.int64() for name, one in columns.items() if one.dtype == object}
            table = pa.table({k: pa.array(v, whole.get(k)) for k, v in columns.items()})
            _write_table(table, self.updates / f"step_{step:06d}.parquet")

    def write_traces(self, step: int, traces: Mapping[int, np.ndarray]) -> None:
        """Keep log-probs [updates, L] of rollouts, by their place in the step's rollouts."""
        if not traces:
            return
        places, kind = sorted(traces), pa.list_(pa.list_(pa.float32()))
        values = pa.array([[*traces[place]] for place in places], kind)
        table = pa.table({"rollout": pa.array(places, pa.int32()), "policy_logprobs": values})
        _write_table(table, self.traces / f"step_{step:06d}.parquet")

    def write_evaluation(self, name: str, step: int, rollouts: Sequence[Rollout]) -> None:
        """Keep the responses of one evaluation."""
        _write_table(_rollout_table(rollouts), self.evaluations / f"{name}_{step:06d}.parquet")


def _write_table(table: pa.Table, file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    with written_whole(file) as partial:
        pq.write_table(table, partial, compression="zstd")


def _rollout_table(rollouts: Sequence[Rollout]) -> pa.Table:
    def column(get: Callable[[Rollout], Any], kind: pa.DataType) -> pa.Array:
        return pa.array([get(rollout) for rollout in rollouts], kind)

    return pa.table(
        {
            "prompt_index": column(lambda r: r.prompt.index, pa.int64()),
            "sample_index": column(lambda r: r.response.sample_index, pa.int32()),
            "prompt": column(lambda r: r.prompt.messages[-1]["content"], pa.string()),
            "prompt_token_ids": column(lambda r: r.prompt.token_ids, pa.list_(pa.int32())),
            "ground_truth": column(lambda r: r.prompt.ground_truth, pa.string()),
            "data_source": column(lambda r: r.prompt.data_source, pa.string()),
            "response": column(lambda r: r.response.text, pa.string()),
            "reward": column(lambda r: r.verdict.reward, pa.float32()),
            "reason": column(lambda r: r.verdict.reason, pa.string()),
            "extracted": column(lambda r: r.verdict.extracted, pa.string()),
            "finish_reason": column(lambda r: r.response.finish_reason, pa.string()),
            "weight_version": column(lambda r: r.response.weight_version, pa.int64()),
            "weight_versions": column(_version_ranges, VERSIONS),
            "token_ids": column(lambda r: r.response.token_ids, pa.list_(pa.int32())),
            "rollout_logprobs": column(_engine_logprobs, pa.list_(pa.float32())),
        }
    )


VERSIONS = pa.list_(pa.struct({"token": pa.int32(), "version": pa.int64()}))


def _version_ranges(rollout: Rollout) -> list[dict[str, int]]:
    """The first token of each range that one version of the weights generated."""
    return [{"token": token, "version": version} for token, version in rollout.response.versions]


def _engine_logprobs(rollout: Rollout) -> np.ndarray | None:
    response = rollout.response
    return response.rollout_logprobs if response.has_engine_logprobs else None


def _flatten(values: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
