"""Progress of a step: what a checkpoint inside it contains, when its reuse ends, skipped updates.

`early_stopping` is evaluated before each update from the second epoch on, when its gradient is
computed: the update that would cross a bound is not made, and the next rollout batch follows. The
first epoch is never stopped.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.actor.training import StopRule, Update, UpdateResult
from megatron_rl.config import Config
from megatron_rl.config.sections import EarlyStoppingSection
from megatron_rl.distributed.agreement import sync_errors_across_ranks
from megatron_rl.objectives.statistics import Statistics
from megatron_rl.objectives.values import ValueStatistics
from megatron_rl.rollouts.rollout_batch import RolloutBatch, restore_traces
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.telemetry.console import Console
from megatron_rl.trainer.update_metrics import UpdateMetrics
from megatron_rl.types import Minibatch, TokenBatch


@dataclass
class StepProgress:
    """State of a step from the selection of its rollout batch until it is recorded."""

    step: int
    first_update: int  # optimizer updates before it
    generated: Mapping[str, float]  # metrics of what was generated for it
    batch: RolloutBatch | None = None  # None after loading, until it is packed again
    updates: UpdateMetrics = field(default_factory=UpdateMetrics)
    traces: Mapping[int, np.ndarray] = field(default_factory=dict)  # of the batch that was saved
    # of the critic's updates so far
    critic_results: list[Update[ValueStatistics]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.batch is not None:
            self.updates.lags = self.batch.lags

    def attach(self, batch: RolloutBatch) -> None:
        """Attach the batch, packed again, on which the completed updates were made."""
        self.batch, self.updates.lags = batch, batch.lags
        restore_traces(batch.packs, self.traces)

    @property
    def done(self) -> int:
        """Updates so far of critic and policy."""
        return len(self.critic_results) + self.updates.count

    def critic_metrics(self) -> dict[str, float]:
        """Return the metrics of the critic's updates in this step; empty without a critic."""
        made = [result for result in self.critic_results if result.done]
        if not made:
            return {}
        merged = reduce(ValueStatistics.merge, (one.statistics for one in made))
        metrics = dict(merged.to_metrics())
        metrics["critic/loss"] /= len(made)  # each update's loss is a sum over its minibatch
        return metrics | {
            "critic/grad_norm": sum(one.grad_norm for one in made) / len(made),
            "critic/learning_rate": made[-1].learning_rate,
            "critic/updates": len(made),
        }

    def is_trained(self, updates_per_step: int) -> bool:
        """True if no update is left: all are done, or early stopping ended them."""
        is_stopped = any(result.stopped is not None for result in self.updates.results)
        return is_stopped or self.updates.count == updates_per_step

    def remaining_packs(self, config: Config) -> list[TokenBatch]:
        """Packs that further updates train, this rank's; none after the last update."""
        if self.batch is None or self.is_trained(config.updates_per_step):
            return []
        return self.batch.packs

    def remaining(
        self, minibatches: Sequence[Minibatch], *, epochs: int
    ) -> Iterator[tuple[int, Minibatch]]:
        """Remaining updates in order: (epoch from 1, minibatch); none after early stopping."""
        if self.is_trained(epochs * len(minibatches)):
            return iter(())
        every = ((epoch, one) for epoch in range(1, epochs + 1) for one in minibatches)
        return itertools.islice(every, self.updates.count, None)

    def gather(self) -> dict[str, Any]:
        """Return everything except the batch as plain data, with exact numbers; collective."""
        assert self.batch is not None, "a checkpoint inside a step needs its batch"
        return {
            "step": self.step,
            "first_update": self.first_update,
            "generated": dict(self.generated),
            "epochs": self.updates.epochs,
            "final": dict(self.updates.final),
            "results": [
                {"sums": one.statistics.sums.cpu(), "maxima": one.statistics.maxima.cpu(),
                 "classes": None if (known := one.statistics.classes) is None else known.cpu(),
                 "grad_norm": one.grad_norm, "learning_rate": one.learning_rate,
                 "skipped": one.skipped, "stopped": one.stopped,
                 "routes": None if one.routes is None else one.routes.cpu()}
                for one in self.updates.results
            ],
            "critic": [
                {"sums": one.statistics.sums.cpu(), "grad_norm": one.grad_norm,
                 "learning_rate": one.learning_rate, "skipped": one.skipped}
                for one in self.critic_results
            ],
            "traces": {k: torch.from_numpy(v.copy()) for k, v in self.batch.traces().items()},
        }  # fmt: skip

    @classmethod
    def load(cls, file: Path, *, device: torch.device) -> StepProgress:
        """Load the result of `gather` from a file of torch, with statistics on `device`."""
        state: dict[str, Any] = torch.load(file, weights_only=True)
        results = [
            UpdateResult(
                Statistics(
                    one.pop("sums").to(device),
                    one.pop("maxima").to(device),
                    None if (known := one.pop("classes")) is None else known.to(device),
                ),
                routes=None if (routes := one.pop("routes")) is None else routes.to(device),
                **one,
            )
            for one in state["results"]
        ]
        return cls(
            state["step"],
            state["first_update"],
            state["generated"],
            updates=UpdateMetrics(results, state["epochs"], final=state["final"]),
            critic_results=[
                Update(ValueStatistics(one.pop("sums").to(device)), **one)
                for one in state.get("critic", [])
            ],
            traces={place: rows.numpy() for place, rows in state["traces"].items()},
        )


@dataclass(frozen=True)
class EarlyStopping:
    """The bounds of `early_stopping`."""

    bounds: EarlyStoppingSection

    @classmethod
    def of(cls, config: Config) -> EarlyStopping | None:
        """Build from a config; None if no bound is set."""
        bounds = config.early_stopping
        return None if bounds.acceptance is None and bounds.kl is None else cls(bounds)

    def rule(self, epoch: int) -> StopRule | None:
        """Return the rule for the updates of an epoch, from 1; None in the first."""
        return self._crossed_bound if epoch > 1 else None

    def _crossed_bound(self, statistics: Statistics) -> str | None:
        """Describe the bound that an update with these statistics would cross, if any."""
        bounds, metrics = self.bounds, statistics.to_metrics()
        acceptance, kl = metrics["gate/acceptance"], metrics["ratio/kl_to_behavior"]
        if bounds.acceptance is not None and acceptance < bounds.acceptance:
            return f"acceptance {acceptance:.4f} is below {bounds.acceptance:g}"
        if bounds.kl is not None and kl > bounds.kl:
            return f"the KL to behavior, {kl:.3g}, is above {bounds.kl:g}"
        return None


# Consecutive skipped updates that end the run. One may be a single bad batch; several in a row
# have one cause, which further updates do not remove.
MOST_SKIPPED = 3


@dataclass
class SkippedUpdates:
    """Counts skipped updates on every rank and writes their batches on rank 0.

    in_a_row: of each model, whose updates alternate with those of the other one.
    """

    directory: RunDirectory | None
    console: Console
    in_a_row: dict[str, int] = field(default_factory=lambda: {"policy": 0, "critic": 0})
    _kept: int = -1  # the step whose rollouts were kept last

    def record(
        self,
        result: Update[Any],
        batch: RolloutBatch,
        *,
        step: int,
        update: int,
        model: str = "policy",
    ) -> None:
        """Record the result of an update; raises FloatingPointError after too many skipped updates.

        update: of either model within the step, from 1. Collective.
        """
        if result.skipped is None:
            self.in_a_row[model] = 0
            return
        self.in_a_row[model] += 1
        named = f"update {update}" + (" (critic)" if model == "critic" else "")
        self.console.echo(f"step {step}, {named} is skipped: {result.skipped}")
        with sync_errors_across_ranks(doing="writing the batch of a skipped update"):
            if self.directory is not None:
                if self._kept != step:
                    self.directory.write_rollouts(
                        step,
                        batch.rollouts,
                        advantages=batch.advantages.flatten().tolist(),
                        turn_advantages=batch.turn_advantages,
                        lag=batch.lag(step),
                        folder=self.directory.skipped_updates,
                    )
                with (self.directory.skipped_updates / "skipped_updates.jsonl").open(
                    "a", encoding="utf-8"
                ) as file:
                    row = {"step": step, "update": update, "reason": result.skipped, "model": model}
                    file.write(json.dumps(row) + "\n")
        self._kept = step
        if (count := self.in_a_row[model]) >= MOST_SKIPPED:
            rate = "critic" if model == "critic" else "optimizer"
            raise FloatingPointError(
                f"{count} consecutive updates of the {model} had no usable gradient, the last one "
                f"because {result.skipped}; the weights are those before them. The rollouts are in "
                f"skipped_updates/ of the run directory. Resume with a lower {rate}.learning_rate "
                "or optimizer.max_grad_norm (run.resume=auto allows both)"
            )
