"""Writes a step down: metrics, rollouts, the line a person reads; at the end the summary."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from megatron_rl.config import Config
from megatron_rl.console import Console
from megatron_rl.distributed.agreement import raised_together
from megatron_rl.report.curves import CURVES, draw_curves
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.rows import PHASES, read_metrics, read_rows
from megatron_rl.trainer.background import BackgroundWriter
from megatron_rl.trainer.learning_check import describe_no_learning
from megatron_rl.trainer.metrics import MetricLog, PhaseClock
from megatron_rl.trainer.rollout_batch import RolloutBatch
from megatron_rl.trainer.step_under_way import StepUnderWay
from megatron_rl.trainer.update_metrics import UpdateMetrics
from megatron_rl.trainer.update_table import build_update_table
from megatron_rl.types import Rollout


@dataclass
class Recorder:
    """Records on the writing rank; elsewhere only the collectives inside run.

    Files are written by a thread. What fails there, a full disk for instance, is raised on every
    rank: when the next step is recorded, at the next checkpoint, or at the end.
    """

    config: Config
    directory: RunDirectory | None
    log: MetricLog | None
    console: Console
    clock: PhaseClock
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)
    first_updates: dict[int, int] = field(default_factory=dict)  # of each step: those before it

    def open(self, done: int, under_way: StepUnderWay | None = None) -> None:
        """Begin to record after step `done`, dropping what a stopped run wrote past it.

        Of the step that is under way the updates that are done stay recorded.
        """
        is_new = done == 0 and under_way is None
        with raised_together(doing="opening the run directory"):
            if self.directory is not None and self.log is not None:
                updates = under_way.updates.count if under_way else 0
                self.directory.rewind(-1 if is_new else done, updates=updates)
                # Not before: what was recorded is checked against the settings that recorded it.
                self.directory.create(self.config)
                self.log.open(first_step=0 if is_new else done + 1)
                rows = read_rows(self.directory.schedule_file)
                self.first_updates = {row["step"]: row["updates"] for row in rows}

    def record(
        self,
        metrics: dict[str, float],
        batch: RolloutBatch | None = None,
        schedule: dict[str, Any] | None = None,
        updates: UpdateMetrics | None = None,
    ) -> None:
        """Write one step; rollouts first, so that a metrics row always has its rollouts.

        With a batch, the clock's step ends here; `schedule` says when its groups were generated,
        `updates` what training them did. Collective.
        """
        traces: dict[int, np.ndarray] = {}
        if batch is not None:
            traces = batch.traces()
            metrics = metrics | self.clock.metrics()
        with raised_together(doing=f"recording up to step {int(metrics['step'])}"):
            if self.directory is not None:
                table = self._table(batch, schedule, updates)
                self.writer.submit(partial(self._write, metrics, batch, schedule, traces, table))
        self.console.say(self._line(metrics))
        warning = describe_no_learning(batch, self.config) if batch is not None else None
        if warning is not None:
            self.console.say(warning)

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
        self, under_way: StepUnderWay, fresh: Sequence[RolloutBatch], *, layout: str
    ) -> None:
        """Write down what was generated for a step before it is trained on. Collective.

        layout: of the actor that computed its behavior log-probs.
        """
        groups = [group for batch in fresh for group in batch.groups]
        about = {"layout": layout, "metrics": dict(under_way.generated)}
        with raised_together(doing=f"keeping the rollouts of step {under_way.step}"):
            if self.directory is not None and groups:
                write = partial(self.directory.generated.write, under_way.step, groups, about)
                self.writer.submit(write)

    def record_evaluation(self, name: str, step: int, rollouts: Sequence[Rollout]) -> None:
        """Keep the responses of one evaluation of a step that is recorded later. Collective."""
        with raised_together(doing=f"recording the evaluation of step {step}"):
            if self.directory is not None:
                self.writer.submit(partial(self.directory.write_evaluation, name, step, rollouts))

    def _write(
        self,
        metrics: dict[str, float],
        batch: RolloutBatch | None,
        schedule: dict[str, Any] | None,
        traces: dict[int, np.ndarray],
        updates: dict[str, Any],
    ) -> None:
        assert self.directory is not None
        assert self.log is not None
        if schedule is not None:
            self.directory.append_schedule(schedule)
        if batch is not None:
            self.directory.write_rollouts(
                int(metrics["step"]),
                batch.rollouts,
                advantages=batch.advantages.flatten().tolist(),
                behavior_logprobs=batch.behavior_logprobs,
                lag=batch.lag(int(metrics["step"])),
            )
            self.directory.write_traces(int(metrics["step"]), traces)
            self.directory.write_updates(int(metrics["step"]), updates)
        self.log.append(metrics)

    def wait(self) -> None:
        """Return when all that was recorded is on disk; raises what failed. Not collective."""
        self.writer.wait()

    def draw(self) -> None:
        """Begin to draw the curves, while the model is exported for instance."""
        with raised_together(doing="drawing the curves"):
            if self.directory is not None:
                self.writer.submit(partial(draw_curves, self.directory.path))

    def finish(self) -> None:
        """Say what was learned and where everything is; all of it is on disk then. Collective."""
        with raised_together(doing="recording the run"):
            self.writer.wait()
        if self.directory is None or self.log is None:
            return
        self.log.close()
        rows = read_metrics(self.directory.path)
        self.console.say()
        self.console.say(f"Trained {self.directory.path.name}: {rows[-1]['step']} rollout batches")
        for key in (key for key in rows[-1] if key.startswith("eval/") and "avg@" in key):
            scores = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            first, last = scores[0], scores[-1]
            best = max(scores, key=lambda score: score[1])
            self.console.say(
                f"  {key.removeprefix('eval/')}: {100 * first[1]:.1f} before -> "
                f"{100 * last[1]:.1f} after ({100 * (last[1] - first[1]):+.1f} points; "
                f"best {100 * best[1]:.1f} at step {best[0]})"
            )
        seconds = {p: sum(row.get(f"time/{p}") or 0 for row in rows) for p in PHASES}
        spent = [f"{phase} {total:.0f}" for phase, total in seconds.items() if total >= 0.5]
        self.console.say("  seconds: " + ", ".join(spent))
        self.console.say(f"  run directory: {self.directory.path}")
        self.console.say(f"  curves:        {self.directory.path / CURVES}")
        self.console.say(f"  model:         {self.directory.model}  (Hugging Face format)")

    def _line(self, metrics: dict[str, float]) -> str:
        scores = "".join(
            f"  {key.removeprefix('eval/')} {100 * value:.1f}"
            for key, value in metrics.items()
            if key.startswith("eval/") and "avg@" in key
        )
        if "reward/mean" not in metrics:
            return f"step {int(metrics['step']):>4}/{self.config.trainer.steps}{scores}"
        times = " ".join(
            f"{phase} {metrics[f'time/{phase}']:.1f}"
            for phase in PHASES
            if metrics.get(f"time/{phase}", 0) >= 0.05
        )
        return (
            f"step {int(metrics['step']):>4}/{self.config.trainer.steps}"
            f"  reward {metrics['reward/mean']:.3f}"
            f"  length {metrics['response/length_mean']:.0f}"
            f" ({100 * metrics['response/truncated_fraction']:.0f}% cut)"
            f"  acceptance {metrics.get('gate/acceptance', math.nan):.3f}"
            f"  {metrics.get('rollout/tokens_per_second', 0) / 1000:.1f}k tok/s"
            f"  seconds {metrics['time/step']:.1f} ({times}){scores}"
        )
