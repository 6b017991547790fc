"""Recording of steps: metrics, rollouts, the progress line, and the summary at the end.

On the console rewards are plain numbers; scores are percentages and carry a percent sign.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.distributed.agreement import run_on_rank_0, sync_errors_across_ranks
from megatron_rl.rollouts.rollout_batch import RolloutBatch, choose_sampled
from megatron_rl.rollouts.source import StepInput
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.files import PHASES, append_row, iterate_metric, iterate_rows, read_rows
from megatron_rl.runs.rollouts import Row, describe_rollout, rollout_row
from megatron_rl.runtime.interruption import RunInterrupted
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.telemetry.console import Console
from megatron_rl.telemetry.curves import CURVES, draw_curves
from megatron_rl.telemetry.metrics import (
    HOST_FREE,
    BackgroundWriter,
    HostMemoryTrend,
    MetricLog,
    PhaseClock,
    SlowRanks,
)
from megatron_rl.trainer.learning_check import LearningCheck
from megatron_rl.trainer.step_progress import StepProgress
from megatron_rl.trainer.update_metrics import UpdateMetrics, build_update_table
from megatron_rl.types import Rollout

ZERO_FRACTION = "advantage/zero_fraction"
SAMPLE_CHARACTERS = 600  # longest prompt or response that a sample on the console shows whole


@dataclass
class Recorder:
    """Writes on rank 0; on other ranks only the collectives run.

    A thread writes the files. Its errors, for instance a full disk, are raised on every rank: when
    the next step is recorded, at the next checkpoint, or at the end.
    """

    config: Config
    directory: RunDirectory | None
    log: MetricLog | None
    console: Console
    clock: PhaseClock
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)
    first_updates: dict[int, int] = field(default_factory=dict)  # of each step: those before it
    thinned: int = 0  # the last step whose rollouts are known to be thinned
    recent: deque[float] = field(default_factory=partial(deque, maxlen=10))  # seconds of steps
    check: LearningCheck = field(init=False)
    trend: HostMemoryTrend = field(init=False)
    slow_engine: SlowRanks = field(default_factory=partial(SlowRanks, "generate"))
    slow_replica: SlowRanks = field(default_factory=partial(SlowRanks, "train"))

    def __post_init__(self) -> None:
        self.check = LearningCheck(self.config)
        self.trend = HostMemoryTrend(steps=self.config.trainer.steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close the loggers; after an error soon, because the launcher waits for its cause."""
        if kind is not None and self.log is not None:
            self.log.close(seconds=20.0 if issubclass(kind, RunInterrupted) else 2.0)

    def open(self, done: int, step_progress: StepProgress | None = None) -> None:
        """Start recording after step `done`; drop records that a stopped run wrote after it.

        Records of the completed updates of a step in progress stay.
        """
        is_new = done == 0 and step_progress is None
        with sync_errors_across_ranks(doing="opening the run directory"):
            if self.directory is not None and self.log is not None:
                updates = step_progress.done if step_progress else 0
                self.directory.rewind(-1 if is_new else done, updates=updates)
                if (changed := self.directory.describe_releases()) is not None:
                    self.console.echo(changed)
                # Only now: `rewind` checks the records against the settings that wrote them.
                self.directory.create(self.config)
                self.log.open(first_step=0 if is_new else done + 1)
                rows = read_rows(self.directory.schedule_file)
                self.first_updates = {row["step"]: row["updates"] for row in rows}
        self.check.has_learned = run_on_rank_0(self._has_learned, doing="reading the metrics")

    def _has_learned(self) -> bool:
        """Return True if a recorded step had advantages; reads up to the first such step."""
        if self.directory is None:
            return False
        return any(one < 1 for one in iterate_metric(self.directory.path, ZERO_FRACTION))

    def record(
        self,
        metrics: dict[str, float],
        batch: RolloutBatch | None = None,
        schedule: dict[str, Any] | None = None,
        updates: UpdateMetrics | None = None,
        pace: Mapping[tuple[int, ...], float] | None = None,
    ) -> None:
        """Write one step, rollouts first: each metrics row has its rollouts.

        schedule: when the groups of the batch were generated; updates: their metrics; pace: seconds
        that ranks needed to train. With a batch, the clock's step ends here. Collective.
        """
        traces: dict[int, np.ndarray] = {}
        timeline: dict[str, Any] = {}
        if batch is not None:
            traces = batch.traces()
            metrics = metrics | self.clock.metrics()
            is_apart = self.config.parallel.engine_ranks is not None
            timeline = self.clock.pop_timeline(has_engine_ranks=is_apart)
            timeline = {"step": int(metrics["step"])} | timeline
        sample = self._sample(metrics, batch)
        with sync_errors_across_ranks(doing=f"recording up to step {int(metrics['step'])}"):
            if self.directory is not None:
                table = self._table(batch, schedule, updates)
                write = partial(
                    self._write, metrics, batch, schedule, timeline, traces, table, sample
                )
                self.writer.submit(write)
        found: list[str | None] = []
        if batch is not None:
            found = [
                self.slow_engine.warning(self._by_ranks(batch.engine_seconds)),
                self.slow_replica.warning(pace or {}),
            ]
            self.recent.append(metrics["time/step"])
            found.insert(0, self.trend.warning(int(metrics["step"]), metrics[HOST_FREE]))
        steps = self.config.trainer.steps
        is_sft = self.config.sft is not None
        self.console.echo(step_line(metrics, steps=steps, recent=self.recent, sft=is_sft))
        if sample is not None:
            text = describe_rollout(sample, most=SAMPLE_CHARACTERS, indent="    ")
            self.console.echo(f"  a sample of step {int(metrics['step'])}:\n{text}")
        for warning in self.check.warnings(metrics, batch) if batch is not None else ():
            self.console.echo(warning)
        for warning in filter(None, found):
            self.console.echo(warning)

    def _by_ranks(self, engine_seconds: Sequence[float]) -> dict[tuple[int, ...], float]:
        """Return the seconds of each engine by its ranks, which are the last ones."""
        processes = dist.get_world_size() if dist.is_initialized() else 1
        each = self.config.rollout.tensor
        starts = range(processes - self.config.sides(processes)[1], processes, each)
        ranks = (tuple(range(start, start + each)) for start in starts)
        return dict(zip(ranks, engine_seconds, strict=False))

    def _sample(self, metrics: dict[str, float], batch: RolloutBatch | None) -> Row | None:
        """Rollout drawn by the seed of the run, if this step shows one."""
        step, every = int(metrics["step"]), self.config.logging.sample_every
        if batch is None or every == 0 or (step > 1 and step % every):
            return None
        rollouts = batch.rollouts
        return rollout_row(rollouts[derive_seed(self.config.seed, "sample", step) % len(rollouts)])

    def _table(
        self,
        batch: RolloutBatch | None,
        schedule: dict[str, Any] | None,
        updates: UpdateMetrics | None,
    ) -> dict[str, Any]:
        if batch is None or schedule is None or updates is None:
            return {}
        self.first_updates[schedule["step"]] = schedule["updates"]
        return build_update_table(
            updates,
            schedule,
            minibatches=len(batch.minibatches),
            first_updates=self.first_updates,
        )

    def keep_generated(
        self, step_progress: StepProgress, generated: StepInput, *, layout: str
    ) -> None:
        """Write the groups that were generated for a step, if they are restorable. Collective.

        layout: of the actor that computed their behavior log-probs.
        """
        groups = generated.groups if generated.is_restorable else []
        about = {"layout": layout, "metrics": dict(step_progress.generated)}
        with sync_errors_across_ranks(doing=f"writing the rollouts of step {step_progress.step}"):
            if self.directory is not None and groups:
                write = partial(self.directory.generated.write, step_progress.step, groups, about)
                self.writer.submit(write)

    def record_evaluation(self, name: str, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write the responses of an evaluation; its step is recorded later. Collective."""
        with sync_errors_across_ranks(doing=f"recording the evaluation of step {step}"):
            if self.directory is not None:
                self.writer.submit(partial(self.directory.write_evaluation, name, step, rollouts))

    def _write(
        self,
        metrics: dict[str, float],
        batch: RolloutBatch | None,
        schedule: dict[str, Any] | None,
        timeline: dict[str, Any],
        traces: dict[int, np.ndarray],
        updates: dict[str, Any],
        sample: Row | None,
    ) -> None:
        assert self.directory is not None
        assert self.log is not None
        self.directory.check_owner()
        if schedule is not None:
            self.directory.append_schedule(schedule)
        if batch is not None:
            append_row(self.directory.timeline_file, timeline)
            self.directory.write_rollouts(
                int(metrics["step"]),
                batch.rollouts,
                advantages=batch.advantages.flatten().tolist(),
                turn_advantages=batch.turn_advantages,
                lag=batch.lag(int(metrics["step"])),
                sampled=choose_sampled(
                    batch.groups,
                    batch.traced,
                    count=self.config.logging.traced_responses,
                    seed=self.config.seed,
                ),
                whole=self.config.logging.keep_rollouts != "sampled",
            )
            self._thin(int(metrics["step"]))
            self.directory.write_traces(int(metrics["step"]), traces)
            self.directory.write_updates(int(metrics["step"]), updates)
        self.log.append(metrics, sample=sample)

    def _thin(self, step: int) -> None:
        """Thin the steps that `logging.keep_rollouts` no longer keeps whole after `step`."""
        keep = self.config.logging.keep_rollouts
        if keep != "all":
            last = step if keep == "sampled" else step - keep
            # Once per start from the first step: a resumed run may keep fewer than before.
            assert self.directory is not None
            self.directory.thin_rollouts(range(self.thinned + 1, last + 1))
            self.thinned = last

    def wait(self) -> None:
        """Wait until all records are on disk; raise errors of writing. Not collective."""
        self.writer.wait()

    def draw(self) -> None:
        """Start drawing the curves in the background, for instance during the export."""
        with sync_errors_across_ranks(doing="drawing the curves"):
            if self.directory is not None:
                self.writer.submit(partial(self._draw, self.directory.path))

    def _draw(self, folder: Path) -> None:
        """Draw the curves; a library of figures that fails is no loss after weeks of training."""
        try:
            draw_curves(folder)
        except OSError:  # a full disk
            raise
        except Exception as error:  # noqa: BLE001 - printed
            self.console.echo(
                f"warning: {CURVES} could not be drawn ({type(error).__name__}: {error}); "
                "megatron-rl report draws the same curves"
            )

    def finish(self) -> None:
        """Wait until everything is on disk, and print the summary. Collective."""
        with sync_errors_across_ranks(doing="recording the run"):
            self.writer.wait()
        if self.directory is None or self.log is None:
            return
        self.log.close()  # first: its warnings
        rows = iterate_rows(self.directory.path / "metrics.jsonl")
        for line in ("", *closing_lines(self.directory, rows)):
            self.console.echo(line)


def percent(score: float | None) -> str:
    """Format a score as a percentage of a reward of 1; large scores with three digits."""
    if score is None or math.isnan(score):
        return "none"
    return f"{100 * score:.1f}%" if abs(score) < 1000 else f"{100 * score:.3g}%"


def duration(seconds: float) -> str:
    """Format an estimated duration in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def seconds_text(seconds: float) -> str:
    """Format seconds with two digits, from ten on as whole numbers."""
    return f"{seconds:.0f}" if seconds >= 9.95 else f"{seconds:.2g}"


def step_line(
    metrics: Mapping[str, Any], *, steps: int, recent: Sequence[float] = (), sft: bool = False
) -> str:
    """Progress line of one step.

    recent: seconds of the last steps, for the remaining time. sft: of given answers, whose loss
    stands in place of reward and acceptance.
    """
    step = int(metrics["step"])
    losses = [key for key in metrics if key.startswith("eval/") and key.endswith("/loss")]
    scores = "".join(f"  {_name(key)} {metrics[key]:.4f}" for key in losses)
    scores += "".join(f"  {_name(key)} {percent(metrics[key])}" for key in _score_keys(metrics))
    if "reward/mean" not in metrics:
        return f"step {step:>4}/{steps}{scores}"
    times = " ".join(
        f"{phase} {metrics[f'time/{phase}']:.1f}"
        for phase in PHASES
        if metrics.get(f"time/{phase}", 0) >= 0.05
    )
    left = ""
    if recent and step < steps:
        each = sum(recent) / len(recent)
        left = f"  {duration((steps - step) * each)} left at {seconds_text(each)} s a step"
    spent = f"  {metrics['time/step']:.1f} s ({times}){left}{scores}"
    if sft:
        loss, length = metrics.get("loss/policy", math.nan), metrics["response/length_mean"]
        return f"step {step:>4}/{steps}  loss {loss:.4f}  length {length:.0f}{spent}"
    reward = metrics["reward/mean"]
    return (
        f"step {step:>4}/{steps}"
        f"  reward {f'{reward:.3f}' if abs(reward) < 1000 else f'{reward:.3g}'}"
        f"  length {metrics['response/length_mean']:.0f}"
        f" ({100 * metrics['response/truncated_fraction']:.0f}% cut)"
        f"  acceptance {metrics.get('gate/acceptance', math.nan):.3f}"
        f"  {metrics.get('rollout/tokens_per_second', 0) / 1000:.1f}k tok/s"
        f"{spent}"
    )


def _score_keys(metrics: Iterable[str]) -> list[str]:
    """Return the keys of avg@n and, after each, pass@n with the same n, if there are several."""
    present, keys = set(metrics), []
    for key in metrics:
        if key.startswith("eval/") and "/avg@" in key:
            solved = key.replace("/avg@", "/pass@")
            keys += [key, *([solved] if solved in present else [])]
    return keys


def _name(key: str) -> str:
    return key.removeprefix("eval/")


def closing_lines(directory: RunDirectory, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Summary of a run: scores, time by phase, paths and the commands that show more.

    rows: metrics of all steps, of which none is kept.
    """
    scores: dict[str, list[tuple[int, float]]] = {}
    seconds, batches = dict.fromkeys((*PHASES, "step"), 0.0), 0
    for row in rows:
        batches = row["step"]
        for key in (key for key in row if key.startswith("eval/")):
            found = scores.setdefault(key, [])
            if row[key] is not None:
                found.append((batches, row[key]))
        for phase in seconds:
            seconds[phase] += row.get(f"time/{phase}") or 0
    path, here = directory.path, Path.cwd()
    path = path.relative_to(here) if path.is_relative_to(here) else path
    lines = [f"Trained {path.name}: {batches} rollout batch{'es' if batches != 1 else ''}"]
    for key in _score_keys(scores):
        if scores[key]:
            first, last = scores[key][0][1], scores[key][-1][1]
            best = max(scores[key], key=lambda score: score[1])
            points = percent(last - first).removesuffix("%")
            lines.append(
                f"  {_name(key)}: {percent(first)} before -> {percent(last)} after "
                f"({'' if points.startswith('-') else '+'}{points} points; best {percent(best[1])} "
                f"at step {best[0]})"
            )
    total = seconds.pop("step")
    spent = ", ".join(f"{p} {seconds_text(s)}" for p, s in seconds.items() if s >= 0.01 * total > 0)
    adapter = [f"  adapter:       {path / directory.adapter.name}  (PEFT format)"]
    if not directory.adapter.exists():
        adapter = []
    return [
        *lines,
        f"  seconds: {seconds_text(total)} ({spent})",
        f"  run directory: {path}",
        f"  curves:        {path / CURVES}",
        f"  model:         {path / directory.model.name}  (Hugging Face format)",
        *adapter,
        f"  report:        megatron-rl report {path}",
        f"  responses:     megatron-rl rollouts {path}",
    ]
