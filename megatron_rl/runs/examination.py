"""What a run directory holds, and what of it is sound; nothing is changed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from megatron_rl.config import ConfigError, load_config
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.lock import LOCK, take_lock
from megatron_rl.runs.rows import evaluation_scores, read_metrics


@dataclass(frozen=True)
class Part:
    """One thing that a run directory holds."""

    name: str
    found: str
    problem: str | None = None


def examine_run(path: str | Path) -> list[Part]:
    """Every part of a run directory; each file of a checkpoint is read.

    Raises ConfigError where there is no run.
    """
    directory = RunDirectory(path)
    if not directory.config_file.is_file():
        raise ConfigError(f"{path} is no run directory: it has no {directory.config_file.name}")
    looks: tuple[Callable[[RunDirectory], Iterator[Part]], ...] = (
        _settings, _metrics, _rollouts, _checkpoints, _incidents, _model, _resuming,
    )  # fmt: skip
    parts: list[Part] = []
    for look in looks:
        try:
            parts += look(directory)
        except (OSError, ValueError) as error:  # a file that cannot be read says so itself
            parts.append(Part(look.__name__.strip("_"), "cannot be read", str(error)))
    return parts


def _settings(run: RunDirectory) -> Iterator[Part]:
    config = load_config(run.config_file)
    changes = run.path / "changes.jsonl"
    count = len(changes.read_text().splitlines()) if changes.is_file() else 0
    changed = f", {count} changed since the start" if count else ""
    yield Part("settings", f"{config.objective.name}, {config.trainer.steps} steps{changed}")
    if (holder := _holder(run.path / LOCK)) is not None:
        yield Part("in use", f"by {holder}: what follows may change")


def _holder(lock: Path) -> str | None:
    """Who runs in the directory now."""
    if not lock.is_file():
        return None
    with lock.open("a+") as file:
        if not take_lock(file):
            file.seek(0)
            return file.read().strip()
    return None


def _metrics(run: RunDirectory) -> Iterator[Part]:
    steps = [row["step"] for row in read_metrics(run.path)]
    if not steps:
        yield Part("metrics", "nothing recorded")
        return
    wanted = list(range(steps[0], steps[0] + len(steps)))
    wrong = [step for step, expected in zip(steps, wanted, strict=True) if step != expected]
    problem = f"rows are missing or doubled from step {wrong[0]} on" if wrong else None
    scores = evaluation_scores(run.path)
    best = max(scores, key=lambda step: scores[step], default=None)
    told = "" if best is None else f", best evaluation {100 * scores[best]:.1f} at step {best}"
    yield Part("metrics", f"steps {steps[0]} to {steps[-1]}{told}", problem)


def _rollouts(run: RunDirectory) -> Iterator[Part]:
    files = {int(file.stem.rsplit("_", 1)[-1]): file for file in run.rollouts.glob("*.parquet")}
    rows, damaged = 0, []
    for step, file in sorted(files.items()):
        try:
            rows += pq.read_metadata(file).num_rows
        except (OSError, ValueError):  # pyarrow's errors are such
            damaged.append(str(step))
    recorded = {row["step"] for row in read_metrics(run.path)} - {0}
    missing = [str(step) for step in sorted(recorded - files.keys())]
    problems = [
        f"{what}: step {', '.join(steps)}"
        for what, steps in (("cannot be read", damaged), ("missing", missing))
        if steps
    ]
    yield Part("rollouts", f"{rows} of {len(files)} steps", "; ".join(problems) or None)


def _checkpoints(run: RunDirectory) -> Iterator[Part]:
    for step in run.checkpoints.steps():
        folder = run.checkpoints.folder(step)
        problem = run.checkpoints.problem(step, share=(0, 1))
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        yield Part(f"checkpoint {step}", f"{size / 2**20:,.1f} MiB", problem)
    for folder in run.checkpoints.damaged():
        reason = folder / "damage.txt"
        why = reason.read_text().strip() if reason.is_file() else "no reason is kept"
        yield Part(folder.name, f"set aside: {why}")
    for folder in sorted(run.checkpoints.path.glob(".step_*")):
        yield Part(folder.name, "not complete; the next start removes it")


def _incidents(run: RunDirectory) -> Iterator[Part]:
    journal = run.faults / "faults.jsonl"
    if journal.is_file():
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        if lines:
            last = f"step {lines[-1]['step']}, {lines[-1]['reason']}"
            yield Part("faults", f"{len(lines)} updates skipped, the last in {last}")
    for file in sorted(run.stalls.glob("*.txt")):
        yield Part("stall", f"{file.name}: {file.read_text().splitlines()[0]}")


def _model(run: RunDirectory) -> Iterator[Part]:
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
    yield Part("model", f"{tensors} tensors", problem)


def _resuming(run: RunDirectory) -> Iterator[Part]:
    try:
        run.check_checkpoints(load_config(run.config_file))
    except ConfigError as error:
        yield Part("resuming", "refused", str(error))
        return
    sound = run.checkpoints.sound_steps()
    yield Part("resuming", f"after step {sound[-1]}" if sound else "from the beginning")
