"""Read-only integrity check of a run directory."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from megatron_rl.config import ConfigError, load_config
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.files import LOCK, evaluation_scores, lock_owner, read_metrics
from megatron_rl.runs.rollouts import count_thinned


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
        _settings, _metrics, _rollouts, _checkpoints, _incidents, _model, _resuming,
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


def _metrics(run: RunDirectory) -> Iterator[ExaminedPart]:
    steps = [row["step"] for row in read_metrics(run.path)]
    if not steps:
        yield ExaminedPart("metrics", "nothing recorded")
        return
    expected_steps = range(steps[0], steps[0] + len(steps))
    wrong = [step for step, expected in zip(steps, expected_steps, strict=True) if step != expected]
    problem = f"rows are missing or duplicated from step {wrong[0]} on" if wrong else None
    scores = evaluation_scores(run.path)
    best = max(scores, key=lambda step: scores[step], default=None)
    score = "" if best is None else f", best evaluation {100 * scores[best]:.1f} at step {best}"
    yield ExaminedPart("metrics", f"steps {steps[0]} to {steps[-1]}{score}", problem)


def _rollouts(run: RunDirectory) -> Iterator[ExaminedPart]:
    files = {int(file.stem.rsplit("_", 1)[-1]): file for file in run.rollouts.glob("*.parquet")}
    rows, damaged = 0, []
    for step, file in sorted(files.items()):
        try:
            rows += pq.read_metadata(file).num_rows
        except (OSError, ValueError):  # raised by pyarrow
            damaged.append(str(step))
    recorded = {row["step"] for row in read_metrics(run.path)} - {0}
    missing = [str(step) for step in sorted(recorded - files.keys())]
    problems = [
        f"{what}: step {', '.join(steps)}"
        for what, steps in (("cannot be read", damaged), ("missing", missing))
        if steps
    ]
    thinned = count_thinned(file for step, file in files.items() if str(step) not in damaged)
    sample = f", of {thinned} a sample (logging.keep_rollouts)" if thinned else ""
    yield ExaminedPart(
        "rollouts", f"{rows} of {len(files)} steps{sample}", "; ".join(problems) or None
    )


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
    journal = run.skipped_updates / "skipped_updates.jsonl"
    if journal.is_file():
        lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
        if lines:
            last = f"step {lines[-1]['step']}, {lines[-1]['reason']}"
            yield ExaminedPart(
                "skipped_updates", f"{len(lines)} updates skipped, the last in {last}"
            )
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
