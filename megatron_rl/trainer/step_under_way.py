"""How far a step has come: what a checkpoint inside of it keeps, so that resuming goes on there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.actor.actor import UpdateResult
from megatron_rl.objectives import Statistics
from megatron_rl.trainer.rollout_batch import RolloutBatch
from megatron_rl.trainer.traces import restore_traces
from megatron_rl.trainer.update_metrics import UpdateMetrics
from megatron_rl.types import Minibatch


@dataclass
class StepUnderWay:
    """A step from the moment its rollout batch is there until it is recorded."""

    step: int
    first_update: int  # optimizer updates before it
    generated: Mapping[str, float]  # metrics of what was generated for it
    batch: RolloutBatch | None = None  # what it trains; None where it is still to be packed again
    updates: UpdateMetrics = field(default_factory=UpdateMetrics)
    traces: Mapping[int, np.ndarray] = field(default_factory=dict)  # of the batch that was saved

    def __post_init__(self) -> None:
        if self.batch is not None:
            self.updates.lags = self.batch.lags

    def take(self, batch: RolloutBatch) -> None:
        """Go on with the batch, packed again, of the updates that are done."""
        self.batch, self.updates.lags = batch, batch.lags
        restore_traces(batch.packs, self.traces)

    def remaining(
        self, minibatches: Sequence[Minibatch], *, epochs: int
    ) -> Iterator[tuple[int, Minibatch]]:
        """The updates that are not done: (epoch from 1, minibatch), in order.

        None after one that ended the reuse of the batch.
        """
        if any(result.stopped is not None for result in self.updates.results):
            return iter(())
        every = ((epoch, one) for epoch in range(1, epochs + 1) for one in minibatches)
        return itertools.islice(every, self.updates.count, None)

    def gather(self) -> dict[str, Any]:
        """All of it but the batch, every number exact, as plain data; collective."""
        assert self.batch is not None, "a checkpoint inside of a step is saved with its batch"
        return {
            "step": self.step,
            "first_update": self.first_update,
            "generated": dict(self.generated),
            "epochs": self.updates.epochs,
            "results": [
                {"sums": one.statistics.sums.cpu(), "maxima": one.statistics.maxima.cpu(),
                 "classes": None if (known := one.statistics.classes) is None else known.cpu(),
                 "grad_norm": one.grad_norm, "learning_rate": one.learning_rate,
                 "skipped": one.skipped, "stopped": one.stopped}
                for one in self.updates.results
            ],
            "traces": {k: torch.from_numpy(v.copy()) for k, v in self.batch.traces().items()},
        }  # fmt: skip

    @classmethod
    def load(cls, file: Path, *, device: torch.device) -> StepUnderWay:
        """What `gather` gave, saved by torch, its statistics on a device."""
        state: dict[str, Any] = torch.load(file, weights_only=True)
        results = [
            UpdateResult(
                Statistics(
                    one.pop("sums").to(device),
                    one.pop("maxima").to(device),
                    None if (known := one.pop("classes")) is None else known.to(device),
                ),
                **one,
            )
            for one in state["results"]
        ]
        return cls(
            state["step"],
            state["first_update"],
            state["generated"],
            updates=UpdateMetrics(results, state["epochs"]),
            traces={place: rows.numpy() for place, rows in state["traces"].items()},
        )
