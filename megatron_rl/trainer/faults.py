"""Updates that had no usable gradient: skipped by all ranks, kept for a look, bounded in a row."""

import json
from dataclasses import dataclass

from megatron_rl.actor.step import UpdateResult
from megatron_rl.console import Console
from megatron_rl.distributed.agreement import raised_together
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.trainer.rollout_batch import RolloutBatch


@dataclass
class Faults:
    """Counts skipped updates on every rank and keeps their batches on the writing one."""

    directory: RunDirectory | None
    console: Console
    limit: int  # skipped updates in a row that end the run
    in_a_row: int = 0
    _kept: int = -1  # the step whose rollouts were kept last

    def note(self, result: UpdateResult, batch: RolloutBatch, *, step: int, update: int) -> None:
        """Take an update's result; raises FloatingPointError after too many skipped ones.

        update: within the step, from 1. Collective.
        """
        if result.skipped is None:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self.console.say(f"step {step}, update {update} is skipped: {result.skipped}")
        with raised_together(doing="keeping the batch of a skipped update"):
            if self.directory is not None:
                if self._kept != step:
                    self.directory.write_rollouts(
                        step,
                        batch.rollouts,
                        advantages=batch.advantages.flatten().tolist(),
                        behavior_logprobs=batch.behavior_logprobs,
                        lag=batch.lag(step),
                        folder=self.directory.faults,
                    )
                with (self.directory.faults / "faults.jsonl").open("a") as file:
                    row = {"step": step, "update": update, "reason": result.skipped}
                    file.write(json.dumps(row) + "\n")
        self._kept = step
        if self.in_a_row >= self.limit:
            raise FloatingPointError(
                f"{self.in_a_row} updates in a row had no usable gradient, the last one because "
                f"{result.skipped}; the weights are those before them. The rollouts are in faults/ "
                "of the run directory. Continue with a lower optimizer.learning_rate or "
                "optimizer.clip_grad (run.resume=auto allows both), or allow more by "
                "trainer.skipped_updates"
            )
