"""Run directory: a stable layout that reports, studies and people read.

runs/NAME/config.yaml        the resolved config
          id                 random id of the run, stored in its checkpoints
          starts.jsonl       time, releases, command and finished steps of every start
          saves.jsonl        step of every checkpoint that was saved or could not be, and of resumes
          changes.jsonl      settings and inputs that a resumed run changed, after which step
          inputs.json        digests of prompts, user code and models at the last start
          schedule.jsonl     steps at which the groups trained in each step were generated
          timeline.jsonl     per step, what the first rank of each group of ranks did when
          metrics.jsonl      one JSON object per step; step 0 is the evaluation before training
          rollouts/          one parquet file per step: every rollout with its log-probs, or a
                             sample of them (`logging.keep_rollouts`)
          updates/           one file per step: statistics of each update by token age and position
          traces/            one file per step: log-probs of a few rollouts at each of their updates
          prompts/           the prompt sets with their tokens, while the run works
          generated/         rollouts generated since the last checkpoint
          answers/           answers of environments since the last checkpoint
          checkpoints/       step_NNNNNN/, complete or absent
          eval/              one parquet file per set and step
          skipped_updates/   rollouts of the steps in which updates were skipped, and the reasons
          stalls/            one file per hang of a node: the stalled ranks and all stacks
          model/             the trained model as a Hugging Face folder
          log.txt curves.png tensorboard/
          *_is_behind        last step that a failing logger has received
"""

import contextlib
import math
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from megatron_rl.columns import ARRAYS
from megatron_rl.config import Config, ConfigError, dump_config, load_config, with_absolute_paths
from megatron_rl.config.sections import AFTER_THINKING, MATH_ANSWER
from megatron_rl.errors import UserError
from megatron_rl.runs import inputs
from megatron_rl.runs.checkpoints import CheckpointFolders
from megatron_rl.runs.files import (
    LOCK,
    TIMELINE,
    append_row,
    atomic_write_text,
    changed_releases,
    describe_start,
    drop_rows,
    evaluation_scores,
    flush_to_disk,
    iterate_rows,
    last_step,
    lock_owner,
    read_rows,
    try_lock,
)
from megatron_rl.runs.group_file import GeneratedGroups
from megatron_rl.runs.rollouts import (
    SAMPLED,
    TURN_ADVANTAGES,
    build_rollout_table,
    count_rows,
    thin,
    thin_file,
    write_table,
)
from megatron_rl.types import Rollout

# Settings that a resumed run may change, because they do not invalidate what is recorded already.
# Every change is recorded in changes.jsonl. Any other change would make it another experiment.
RESUMABLE_CHANGES = (
    "run.", "trainer.steps", "trainer.checkpoint_every", "trainer.keep_checkpoints",
    "trainer.keep_best", "trainer.keep_every", "trainer.self_test_every", "trainer.stall_seconds",
    "trainer.tokens_per_micro_batch", "trainer.share_prompts", "trainer.recompute", "eval.",
    "logging.", "resharding.",
    "reward.workers", "reward.time_limit_seconds", "reward.on_error", "workers.",
    "environment.time_limit_seconds", "environment.on_error", "parallel.", "rollout.tensor",
    "rollout.expert_parallel", "rollout.gpu_memory_utilization", "rollout.max_num_seqs",
    "rollout.kv_cache_mib", "rollout.stall_seconds", "optimizer.learning_rate",
    "optimizer.min_learning_rate", "optimizer.max_grad_norm", "optimizer.decay",
    "critic.learning_rate", "model.transformer_engine",
)  # fmt: skip


class RunDirectory:
    """Paths of one run, and methods that write to them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.rollouts = self.path / "rollouts"
        self.updates = self.path / "updates"
        self.traces = self.path / "traces"
        self.prompts = self.path / "prompts"
        self.generated = GeneratedGroups(self.path / "generated")
        self.answers = self.path / "answers"
        self.checkpoints = CheckpointFolders(self.path / "checkpoints")
        self.evaluations = self.path / "eval"
        self.skipped_updates = self.path / "skipped_updates"
        self.stalls = self.path / "stalls"
        self.model = self.path / "model"
        self.adapter = self.path / "adapter"
        self.config_file = self.path / "config.yaml"
        self.inputs_file = self.path / "inputs.json"
        self.log_file = self.path / "log.txt"
        self.schedule_file = self.path / "schedule.jsonl"
        self.timeline_file = self.path / TIMELINE
        self.saves_file = self.path / "saves.jsonl"
        self._lock: IO[str] | None = None

    @classmethod
    def of(cls, config: Config) -> "RunDirectory":
        """Return the run directory that the config names."""
        if config.run.name is None:
            raise ConfigError(
                "run.name: missing; torchrun and srun jobs need a name, as run.name=my-run"
            )
        return cls(Path(config.run.dir) / config.run.name)

    def check_usable(self, config: Config) -> None:
        """Raise ConfigError if the config would overwrite a run or resume it incompatibly."""
        if not self.has_started():
            return
        if config.run.resume == "never":
            raise ConfigError(
                f"{self.path} already contains a run; set run.resume=auto to continue it, "
                "or choose another run.name"
            )
        self._check_critic(config)
        changed = [
            f"{key}: {before!r} -> {now!r}"
            for key, (before, now) in self.changes(config).items()
            if not (key.startswith(RESUMABLE_CHANGES) or self._is_moved(key, config))
            # Megatron uses one optimizer if expert=1, and a second one for experts otherwise;
            # their checkpoints are incompatible.
            or (key == "parallel.expert" and 1 in (before, now))
        ]
        if changed:
            raise ConfigError(
                f"{self.path} was started with other settings and cannot be continued with these; "
                "restore them or choose another run.name:\n  " + "\n  ".join(changed)
            )
        self.checkpoints.check_formats()
        self.check_checkpoints(self._saved_config())

    def _check_critic(self, config: Config) -> None:
        """Raise ConfigError if the run began with a critic and has none now, or the reverse."""
        steps = self.checkpoints.steps()
        began = self._saved_config().critic is not None
        where = f"{self.path} was started"
        if steps:
            began = self.checkpoints.has_critic(steps[-1])
            where = f"{self.checkpoints.folder(steps[-1])} was saved"
        if began and config.critic is None:
            raise ConfigError(
                f"{where} with a critic, but critic is null; a run keeps the critic that it began "
                f"with: restore the section critic from {self.config_file}, or choose another "
                "run.name"
            )
        if config.critic is not None and not began:
            raise ConfigError(
                f"{where} without a critic, but critic is set; a run keeps the form that it began "
                f"with: set critic to null, or choose another run.name and start it from this "
                f"run's model, model.path={self.model}"
            )

    def changes(self, config: Config) -> dict[str, tuple[object, object]]:
        """Return the settings that differ from the last start: key -> (before, now)."""
        saved = with_absolute_paths(self._saved_config())
        before = flatten(saved.model_dump())
        now = flatten(with_absolute_paths(config).model_dump())
        return {
            key: (before.get(key), now.get(key))
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
            and not (now.get(key) is None and _is_kept(key, before.get(key)))
        }

    def _is_moved(self, key: str, config: Config) -> bool:
        """Return True if the path of an input changed but its content did not."""
        name = key.removesuffix(".path") if key.startswith("data.mix.") else key
        saved, now = (found.get(name) for found in self._inputs(config))
        return saved is not None and now is not None and now.has_content_of(saved)

    def check_inputs(self, config: Config) -> list[str]:
        """Return a line for each accepted change of an input; raise ConfigError for any other."""
        accepted, run = config.run.accept_changes, str(self.path)
        if not self.has_started() or config.run.resume == "never":
            if accepted:
                inputs.check_names(accepted, inputs.read_inputs(config))
            return []
        before, now = self._inputs(config)
        lines = inputs.check_changes(before, now, accepted=accepted, run=run)
        return lines + inputs.describe_renamed(before, now)

    def _inputs(self, config: Config) -> tuple[inputs.Inputs, inputs.Inputs]:
        return inputs.load_inputs(self.inputs_file), inputs.read_inputs(config)

    def has_started(self) -> bool:
        """Return True if the run has results; a failed start leaves only a log and a config."""
        is_saved = self.checkpoints.steps() or self.checkpoints.damaged()
        return self.config_file.exists() and bool(is_saved or last_step(self.path) is not None)

    def new_stalls(self) -> Callable[[], Path | None]:
        """Return a function that finds the newest stall report written after this call."""
        before = set(self.stalls.glob("*.txt"))
        return lambda: max(set(self.stalls.glob("*.txt")) - before, default=None)

    def check_free(self) -> None:
        """Raise ConfigError if another process uses the directory, naming that process."""
        if (holder := lock_owner(self.path / LOCK)) is not None:
            raise ConfigError(
                f"{self.path} is in use by {holder}; wait for that process or stop it, or choose "
                "another run.name"
            )

    def lock(self) -> None:
        """Lock the directory until this process exits, and create it if it is missing."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / LOCK).open("a+", encoding="utf-8")
        if not try_lock(file):
            file.close()
            self.check_free()
        self._owner = f"process {os.getpid()} on {socket.gethostname()}\n{uuid.uuid4().hex}\n"
        file.truncate(0)
        file.write(self._owner)
        file.flush()
        self._lock = file  # closing the file would release the lock

    def check_owner(self) -> None:
        """Raise UserError if another start has taken the directory since `lock`.

        It may where a file system has no locks, or has ended the lease of a node that it did not
        reach. The later start goes on: no clock decides.
        """
        if self._lock is None:
            return
        try:
            # Through the locked file: closing another one would release the lock.
            now = os.pread(self._lock.fileno(), 1 << 12, 0).decode(errors="replace")
            is_there = os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.path / LOCK))
        except OSError:  # so NFS reports a lock that it has lost; or somebody removed the file
            is_there = False
        if not is_there:
            self._lock.close()
            self._lock = (self.path / LOCK).open("a+", encoding="utf-8")
            is_ours = try_lock(self._lock)
            self._lock.seek(0)
            now = self._lock.read()
            if is_ours and not now:
                self._lock.write(self._owner)
                self._lock.flush()
                now = self._owner
        if now != self._owner:
            other = now.splitlines()[0] if now else "another start"
            raise UserError(
                f"{self.path} was taken over by {other}; this process records nothing more: let "
                "that one go on, or stop it and resume"
            )

    def check_checkpoints(self, config: Config) -> None:
        """Raise ConfigError if lost checkpoints would make a resume delete recorded steps.

        Damaged checkpoints are quarantined later, and the run resumes from an earlier checkpoint.
        Checkpoints that could not be saved are not lost: their steps are trained again.
        """
        intact = self.checkpoints.intact_steps()
        done = max(intact, default=0)
        recorded = last_step(self.path) or 0
        saves = [row["step"] for row in self._saves() if "error" not in row]
        is_newest = saves[-1:] == [done]
        damaged = [
            f"{self.checkpoints.folder(step)}: {problem}"
            for step in self.checkpoints.steps()
            if (problem := self.checkpoints.problem(step)) is not None
        ]
        damaged += [str(folder) for folder in self.checkpoints.damaged()]
        if damaged and intact:
            return
        is_lost = recorded - done > config.trainer.checkpoint_every and not is_newest
        if damaged or is_lost:
            raise ConfigError(
                f"{self.path} recorded {recorded} steps, but its newest intact checkpoint is of "
                f"step {done}: later ones are lost, and resuming would delete those steps; restore "
                "an intact checkpoint, or choose another run.name"
                + "".join(f"\n  damaged: {text}" for text in damaged)
            )

    def record_save(self, step: int, *, error: str | None = None) -> None:
        """Record that the checkpoint of a step was saved, or why it could not be.

        A full disk may have no room for the record either. Without it the next start expects the
        checkpoint before, which exists.
        """
        row = {"step": step} | ({} if error is None else {"error": error})
        with contextlib.suppress(OSError):
            append_row(self.saves_file, row)

    def describe_unsaved(self, step: int) -> str | None:
        """Describe which recorded steps a resume after `step` repeats, and why, if any."""
        recorded = last_step(self.path) or 0
        if recorded <= step:
            return None
        last = f"step {step + 1}" if recorded == step + 1 else f"steps {step + 1} to {recorded}"
        failed = [row for row in self._saves() if "error" in row and row["step"] > step]
        why = f"; step {failed[-1]['step']} was not saved: {failed[-1]['error']}" if failed else ""
        return f"{last} had no checkpoint and will be trained again{why}"

    def _saves(self) -> list[dict[str, Any]]:
        return read_rows(self.saves_file)

    def create(self, config: Config) -> None:
        """Create the folders; write the config, its changes, and the digests of its inputs."""
        for folder in (self.rollouts, self.checkpoints.path, self.evaluations):
            folder.mkdir(parents=True, exist_ok=True)
        if not self.checkpoints.run_file.exists():
            atomic_write_text(self.checkpoints.run_file, uuid.uuid4().hex + "\n")
        if self.has_started():
            self._record_changes(config)
        atomic_write_text(self.inputs_file, inputs.dump_inputs(inputs.read_inputs(config)))
        step = max(self.checkpoints.steps(), default=0)
        self.record_save(step)
        append_row(self.path / "starts.jsonl", describe_start(after_step=step))
        atomic_write_text(self.config_file, dump_config(config))

    def describe_releases(self) -> str | None:
        """Describe how the installed releases differ from the last start's, if they do."""
        starts = read_rows(self.path / "starts.jsonl")
        changed = changed_releases(starts[-1], describe_start(after_step=0)) if starts else {}
        if not changed:
            return None
        text = ", ".join(f"{name} {change}" for name, change in sorted(changed.items()))
        return f"other releases than at the last start: {text} (starts.jsonl)"

    def _saved_config(self) -> Config:
        """Load the settings of the last start; ConfigError names the file if it is damaged."""
        try:
            return load_config(self.config_file)
        except ConfigError as error:
            is_empty = not self.config_file.read_bytes().strip()
            what = "is empty" if is_empty else f"is damaged, or has what is refused now: {error}"
            raise ConfigError(
                f"{self.config_file}, which has the settings of the run, {what}; restore it, or "
                "choose another run.name"
            ) from None

    def _record_changes(self, config: Config) -> None:
        step = max(self.checkpoints.intact_steps(), default=0)
        stamp = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "after_step": step}
        rows = [
            {"key": key, "from": before, "to": now}
            for key, (before, now) in self.changes(config).items()
            if not key.startswith("run.")
        ]
        changed = inputs.changed_inputs(*self._inputs(config)).items()
        contents: list[dict[str, object]] = [{"key": key, "content": one} for key, one in changed]
        for row in rows + contents:
            append_row(self.path / "changes.jsonl", stamp | row)

    def rewind(self, step: int, *, updates: int = 0) -> None:
        """Drop everything recorded after `step`; a resumed run writes it again.

        updates: number of finished updates of the following step, which are kept.
        """
        metrics = self.path / "metrics.jsonl"
        if not metrics.is_file():
            atomic_write_text(metrics, "")
        drop_rows(metrics, until=lambda row: row["step"] <= step)
        for folder in (self.rollouts, self.updates, self.traces, self.evaluations):
            for file in folder.glob("*.parquet"):
                if int(file.stem.rsplit("_", 1)[-1]) > step:
                    file.unlink()
        self.generated.rewind(step)
        last = (step + 1, updates)
        for journal in self._journals:
            drop_rows(journal, until=lambda row: (row["step"], row.get("update", math.inf)) <= last)

    def forget(self, step: int) -> None:
        """Delete rollouts and answers up to `step`, which has a checkpoint.

        Its evaluation comes after the checkpoint, so the answers of that stay until the next one.
        """
        self.generated.forget(step)
        for folder in self.answers.glob("*_*"):
            kind, _, number = folder.name.rpartition("_")
            if int(number) < step + (kind == "step"):
                # Another node may still have a file open, which NFS then keeps until the next call.
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def _journals(self) -> tuple[Path, ...]:
        journal = self.skipped_updates / "skipped_updates.jsonl"
        return self.schedule_file, self.timeline_file, journal

    def flush(self) -> None:
        """Flush appended rows, so that they survive a power cut."""
        for journal in (self.path / "metrics.jsonl", *self._journals):
            if journal.is_file():
                flush_to_disk(journal)

    def append_schedule(self, row: dict[str, Any]) -> None:
        """Record which groups a step trained, and when they were generated."""
        append_row(self.schedule_file, row)

    def write_rollouts(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        *,
        advantages: Sequence[float],
        turn_advantages: Sequence[np.ndarray] = (),
        lag: Sequence[int] | None = None,
        sampled: Sequence[bool] | None = None,
        whole: bool = True,
        folder: Path | None = None,
    ) -> None:
        """Write one step's rollouts: texts, token ids, rewards, log-probs, weight versions.

        What the trainer did not compute is null. lag: steps since each rollout was
        generated. sampled: rollouts that remain when the step is thinned. whole: False thins the
        step now. folder: folder to write. Default: `rollouts/`.
        """
        table = build_rollout_table(rollouts)
        table = table.append_column("advantage", pa.array(advantages, pa.float32()))
        if turn_advantages:
            rows = pa.array(turn_advantages, pa.list_(pa.float32()))
            table = table.append_column(TURN_ADVANTAGES, rows)
        table = table.append_column("lag", pa.array(lag or [0] * len(rollouts), pa.int32()))
        for column in ARRAYS:
            if column.by == "trainer" and column.in_rollout_files:
                values = [rollout.response.row(column.name) for rollout in rollouts]
                table = table.append_column(column.name, pa.array(values, pa.list_(pa.float32())))
        if sampled is not None:
            table = table.append_column(SAMPLED, pa.array(sampled, pa.bool_()))
            table = table if whole else thin(table.to_batches())
        write_table(table, (folder or self.rollouts) / f"step_{step:06d}.parquet")

    def thin_rollouts(self, steps: Iterable[int]) -> None:
        """Keep only the sampled groups of these steps; thinned steps are left unchanged."""
        for step in steps:
            if (file := self.rollouts / f"step_{step:06d}.parquet").is_file():
                thin_file(file)

    def write_updates(self, step: int, columns: Mapping[str, Any]) -> None:
        """Write one step's table of updates."""
        if columns:
            whole = {name: pa.int64() for name, one in columns.items() if one.dtype == object}
            table = pa.table({k: pa.array(v, whole.get(k)) for k, v in columns.items()})
            write_table(table, self.updates / f"step_{step:06d}.parquet")

    def write_traces(self, step: int, traces: Mapping[int, np.ndarray]) -> None:
        """Write log-probs [updates, L] of rollouts, by their index in the step's rollouts."""
        if not traces:
            return
        places, kind = sorted(traces), pa.list_(pa.list_(pa.float32()))
        values = pa.array([[*traces[place]] for place in places], kind)
        table = pa.table({"rollout": pa.array(places, pa.int32()), "policy_logprobs": values})
        write_table(table, self.traces / f"step_{step:06d}.parquet")

    def write_evaluation(self, name: str, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write the responses of one evaluation."""
        write_table(build_rollout_table(rollouts), self.evaluations / f"{name}_{step:06d}.parquet")


def _is_kept(key: str, before: object) -> bool:
    """Return True if null keeps this value, which the run itself chose at its first start."""
    return key == "data.date" or (
        key == "reward.verifier" and before in (MATH_ANSWER, AFTER_THINKING)
    )


def flatten(values: dict, prefix: str = "") -> dict[str, object]:
    """Return nested settings as one dict with keys such as `trainer.steps`."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@dataclass(frozen=True)
class ExaminedPart:
    """Part of a run directory, with a description and, if it is corrupted, the problem."""

    name: str
    found: str
    problem: str | None = None


def examine_run(path: str | Path) -> list[ExaminedPart]:
    """Check every part of a run directory; reads each file of every checkpoint.

    Raises ConfigError if the folder is not a run directory.
    """
    directory = RunDirectory(path)
    if not directory.config_file.is_file():
        raise ConfigError(
            f"{path} is not a run directory: it has no {directory.config_file.name}; give runs/NAME"
        )
    checks: tuple[Callable[[RunDirectory], Iterator[ExaminedPart]], ...] = (
        _settings, _records, _checkpoints, _incidents, _model, _resuming,
    )  # fmt: skip
    parts: list[ExaminedPart] = []
    for check in checks:
        try:
            parts += check(directory)
        except (OSError, ValueError) as error:  # the message names the file
            parts.append(ExaminedPart(check.__name__.strip("_"), "cannot be read", str(error)))
    return parts


def _settings(run: RunDirectory) -> Iterator[ExaminedPart]:
    config = load_config(run.config_file)
    changes = run.path / "changes.jsonl"
    count = len(changes.read_text(encoding="utf-8").splitlines()) if changes.is_file() else 0
    changed = f", {count} changed since the start" if count else ""
    yield ExaminedPart(
        "settings", f"{config.objective.name}, {config.trainer.steps} steps{changed}"
    )
    if (holder := lock_owner(run.path / LOCK)) is not None:
        yield ExaminedPart("in use", f"by {holder}: the parts below may change")


_PARSED_BLOCK = 8 << 20  # bytes of metrics.jsonl that are parsed at once, more than a row has


def _steps(file: Path) -> list[int]:
    """Read the step of each complete row; Arrow parses every row with all cores, and keeps none.

    UserError names a damaged row.
    """
    if not file.is_file():
        return []
    options = pj.ParseOptions(pa.schema([("step", pa.int64())]), unexpected_field_behavior="ignore")
    blocks = pj.ReadOptions(block_size=_PARSED_BLOCK)
    steps: list[int | None] = []
    try:
        for batch in pj.open_json(file, read_options=blocks, parse_options=options):
            steps += batch.column("step").to_pylist()
    except pa.ArrowInvalid:  # also an incomplete last row, which is left out
        steps = [None]
    if None in steps:
        steps = [row.get("step") for row in iterate_rows(file)]
    if None in steps:
        raise UserError(f"{file}: a row has no step; repair it")
    return [step for step in steps if step is not None]


def _records(run: RunDirectory) -> Iterator[ExaminedPart]:
    """Examine metrics.jsonl, and the rollouts of its steps."""
    try:
        steps = _steps(run.path / "metrics.jsonl")
    except (OSError, ValueError) as error:
        steps = []
        yield ExaminedPart("metrics", "cannot be read", str(error))
    else:
        yield _metrics(run, steps)
    yield _rollouts(run, steps)


def _metrics(run: RunDirectory, steps: Sequence[int]) -> ExaminedPart:
    if not steps:
        return ExaminedPart("metrics", "nothing recorded")
    expected_steps = range(steps[0], steps[0] + len(steps))
    wrong = [step for step, expected in zip(steps, expected_steps, strict=True) if step != expected]
    problem = f"rows are missing or duplicated from step {wrong[0]} on" if wrong else None
    scores = evaluation_scores(run.path)
    best = max(scores, key=lambda step: scores[step], default=None)
    score = "" if best is None else f", best evaluation {100 * scores[best]:.1f} at step {best}"
    return ExaminedPart("metrics", f"steps {steps[0]} to {steps[-1]}{score}", problem)


def _rollouts(run: RunDirectory, recorded: Sequence[int]) -> ExaminedPart:
    files = {int(file.stem.rsplit("_", 1)[-1]): file for file in run.rollouts.glob("*.parquet")}
    counts = dict(zip(files, count_rows(list(files.values())), strict=True))
    rows = sum(count[0] for count in counts.values() if count)
    damaged = [step for step, count in counts.items() if count is None]
    missing = set(recorded) - {0} - files.keys()
    problems = [
        f"{what}: step {_ranges(steps)}"
        for what, steps in (("cannot be read", damaged), ("missing", missing))
        if steps
    ]
    thinned = sum(count[1] for count in counts.values() if count)
    sample = f", of {thinned} a sample (logging.keep_rollouts)" if thinned else ""
    return ExaminedPart(
        "rollouts", f"{rows} of {len(files)} steps{sample}", "; ".join(problems) or None
    )


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers in order, as "1, 3 to 5"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join(" to ".join(map(str, one)) for one in ranges)


def _checkpoints(run: RunDirectory) -> Iterator[ExaminedPart]:
    for step in run.checkpoints.steps():
        folder = run.checkpoints.folder(step)
        problem = run.checkpoints.problem(step, share=(0, 1))
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        yield ExaminedPart(f"checkpoint {step}", f"{size / 2**20:,.1f} MiB", problem)
    for folder in run.checkpoints.damaged():
        reason = folder / "damage.txt"
        why = (
            reason.read_text(encoding="utf-8").strip() if reason.is_file() else "no reason recorded"
        )
        yield ExaminedPart(folder.name, f"quarantined: {why}")
    for folder in sorted(run.checkpoints.path.glob(".step_*")):
        yield ExaminedPart(folder.name, "incomplete; the next start removes it")


def _incidents(run: RunDirectory) -> Iterator[ExaminedPart]:
    if rows := read_rows(run.skipped_updates / "skipped_updates.jsonl"):
        last = f"step {rows[-1]['step']}, {rows[-1]['reason']}"
        yield ExaminedPart("skipped_updates", f"{len(rows)} updates skipped, the last in {last}")
    for file in sorted(run.stalls.glob("*.txt")):
        yield ExaminedPart(
            "stall", f"{file.name}: {file.read_text(encoding='utf-8').splitlines()[0]}"
        )


def _model(run: RunDirectory) -> Iterator[ExaminedPart]:
    if not run.model.is_dir():
        return
    from safetensors import SafetensorError, safe_open

    tensors, problem = 0, None
    for file in sorted(run.model.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as weights:
                tensors += len(weights.keys())
        except (SafetensorError, OSError) as error:
            problem = f"{file.name}: {error}"
    if not (run.model / "config.json").is_file():
        problem = problem or "config.json is missing"
    yield ExaminedPart("model", f"{tensors} tensors", problem)


def _resuming(run: RunDirectory) -> Iterator[ExaminedPart]:
    try:
        run.check_checkpoints(load_config(run.config_file))
    except ConfigError as error:
        yield ExaminedPart("resuming", "refused", str(error))
        return
    intact = run.checkpoints.intact_steps()
    yield ExaminedPart("resuming", f"after step {intact[-1]}" if intact else "from the beginning")
