"""Writes a step down: metrics, rollouts, the line a person reads; at the end the summary."""

from dataclasses import dataclass

import numpy as np

from megatron_rl.config import Config
from megatron_rl.console import Console
from megatron_rl.distributed.agreement import raised_together
from megatron_rl.report.curves import draw_curves
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.rows import PHASES, read_metrics
from megatron_rl.trainer.metrics import MetricLog
from megatron_rl.trainer.rollout_batch import RolloutBatch


@dataclass
class Recorder:
    """Records on the writing rank; elsewhere only the collectives inside run.

    What fails on the writing rank, a full disk for instance, is raised on every rank.
    """

    config: Config
    directory: RunDirectory | None
    log: MetricLog | None
    console: Console

    def open(self, done: int) -> None:
        """Begin to record after step `done`, dropping what a stopped run wrote past it."""
        with raised_together(doing="opening the run directory"):
            if self.directory is not None and self.log is not None:
                self.directory.rewind(done if done else -1)
                # Not before: what was recorded is checked against the settings that recorded it.
                self.directory.create(self.config)
                self.log.open(first_step=done + 1 if done else 0)

    def record(self, metrics: dict[str, float], batch: RolloutBatch | None = None) -> None:
        """Write one step; rollouts first, so that a metrics row always has its rollouts."""
        behavior_logprobs = batch.behavior_logprobs_by_rollout() if batch is not None else []
        with raised_together(doing=f"recording step {int(metrics['step'])}"):
            self._write(metrics, batch, behavior_logprobs)

    def _write(
        self,
        metrics: dict[str, float],
        batch: RolloutBatch | None,
        behavior_logprobs: list[np.ndarray],
    ) -> None:
        if self.directory is None or self.log is None:
            return
        if batch is not None:
            self.directory.write_rollouts(
                int(metrics["step"]),
                batch.rollouts,
                advantages=batch.advantages.tolist(),
                behavior_logprobs=behavior_logprobs,
            )
        self.log.append(metrics)
        self.console.say(self._line(metrics))

    def finish(self) -> None:
        """Draw the curves and say what was learned and where everything is."""
        if self.directory is None or self.log is None:
            return
        self.log.close()
        rows = read_metrics(self.directory.path)
        picture = draw_curves(self.directory.path)
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
        self.console.say(
            "  seconds: " + ", ".join(f"{phase} {total:.0f}" for phase, total in seconds.items())
        )
        self.console.say(f"  run directory: {self.directory.path}")
        self.console.say(f"  curves:        {picture}")
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
            f"  acceptance {metrics['gate/acceptance']:.3f}"
            f"  {metrics['rollout/tokens_per_second'] / 1000:.1f}k tok/s"
            f"  seconds {metrics['time/step']:.1f} ({times}){scores}"
        )
