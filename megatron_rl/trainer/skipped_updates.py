"""Updates without a usable gradient: skipped on all ranks, recorded, and limited in number."""

import json
from dataclasses import dataclass

from megatron_rl.actor.actor import UpdateResult
from megatron_rl.distributed.agreement import sync_errors_across_ranks
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.telemetry.console import Console


@dataclass
class SkippedUpdates:
    """Counts skipped updates on every rank and writes their batches on rank 0."""

    directory: RunDirectory | None
    console: Console
    limit: int  # consecutive skipped updates that end the run
    in_a_row: int = 0
    _kept: int = -1  # the step whose rollouts were kept last

    def record(self, result: UpdateResult, batch: RolloutBatch, *, step: int, update: int) -> None:
        """Record the result of an update; raises FloatingPointError after too many skipped ones.

        update: within the step, from 1. Collective.
        """
        if result.skipped is None:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self.console.echo(f"step {step}, update {update} is skipped: {result.skipped}")
        with sync_errors_across_ranks(doing="writing the batch of a skipped update"):
            if self.directory is not None:
                if self._kept != step:
                    self.directory.write_rollouts(
                        step,
                        batch.rollouts,
                        advantages=batch.advantages.flatten().tolist(),
                        turn_advantages=batch.turn_advantages,
                        behavior_logprobs=batch.behavior_logprobs,
                        lag=batch.lag(step),
                        folder=self.directory.skipped_updates,
                    )
                with (self.directory.skipped_updates / "skipped_updates.jsonl").open(
                    "a", encoding="utf-8"
                ) as file:
                    row = {"step": step, "update": update, "reason": result.skipped}
                    file.write(json.dumps(row) + "\n")
        self._kept = step
        if self.in_a_row >= self.limit:
            raise FloatingPointError(
                f"{self.in_a_row} consecutive updates had no usable gradient, the last one because "
                f"{result.skipped}; the weights are those before them. The rollouts are in "
                "skipped_updates/ of the run directory. Resume with a lower "
                "optimizer.learning_rate or optimizer.max_grad_norm (run.resume=auto allows "
                "both), or allow more by trainer.max_consecutive_skipped_updates"
            )
