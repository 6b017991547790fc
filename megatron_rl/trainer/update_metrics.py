"""The metrics of one step's optimizer updates, and their table by lag and position of tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch

from megatron_rl.actor.training import UpdateResult
from megatron_rl.objectives import Statistics
from megatron_rl.objectives.statistics import DECILES, class_metrics, class_rows, class_sums
from megatron_rl.rollouts.batch_metrics import routing_metrics

# Metrics of each epoch, over the whole rollout batch and by tenth of t/L.
BY_EPOCH = ("gate/", "ratio/", "weight/effective_sample_fraction", "mismatch/", "routing/")
BY_EPOCH_AND_FRACTION = (
    "/acceptance", "/prefix_mean_log_std", "/prefix_mean_log_q05", "/prefix_mean_log_median",
    "/prefix_mean_log_q95", "/effective_sample_fraction",
)  # fmt: skip


@dataclass
class UpdateMetrics:
    """Collects update results; nothing is copied to the host until `metrics()`."""

    results: list[UpdateResult] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)  # of each result, from 1
    lags: Sequence[int] = ()  # of the classes that results report apart
    final: Mapping[str, float] = field(default_factory=dict)  # measured after the last update

    @property
    def count(self) -> int:
        """Updates so far."""
        return len(self.results)

    def add(self, result: UpdateResult, *, epoch: int) -> None:
        """Keep one update's result."""
        self.results.append(result)
        self.epochs.append(epoch)

    def made(self, minibatches: int) -> list[int]:
        """Number of updates made on each minibatch."""
        done = [result.done for result in self.results]
        return [sum(done[place::minibatches]) for place in range(minibatches)]

    def metrics(self) -> dict[str, float]:
        """Statistics over all updates and by epoch; losses and gradient norms as means.

        `ratio/first_minibatch_max_deviation` is exactly 0 when behavior log-probs come from the
        packs and the weights that the first update trains on.
        """
        done = [result for result in self.results if result.done]
        stopped = sum(result.stopped is not None for result in self.results)
        counts: dict[str, float] = {
            "train/updates": len(done),
            "train/updates_skipped": self.count - len(done) - stopped,
            "train/early_stopped": stopped,
        }
        if not done:  # results of skipped updates must not be averaged
            return counts
        metrics = {**_merge(done).to_metrics(), **_changed_routes(done), **self.final}
        for key in (key for key in metrics if key.startswith("loss/")):
            metrics[key] /= len(done)  # each update's loss is a sum over its minibatch
        if self.results[0].done:
            first = self.results[0].statistics.to_metrics()
            metrics["ratio/first_minibatch_max_deviation"] = first["ratio/max_deviation"]
        metrics |= {
            # How far the engine computes from the actor: |behavior - rollout| log-probs.
            "mismatch/logprob_abs_diff_mean": metrics.get(
                "mismatch/logprob_abs_diff_mean", math.nan
            ),
            "grad/norm": sum(result.grad_norm for result in done) / len(done),
            "grad/norm_max": max(result.grad_norm for result in done),
            "optimizer/learning_rate": done[-1].learning_rate,
        } | counts
        for epoch in sorted(set(self.epochs)):
            pairs = zip(self.results, self.epochs, strict=True)
            own = [result for result, of in pairs if of == epoch and result.done]
            values = _merge(own).to_metrics() | _changed_routes(own) if own else {}
            metrics |= {f"epoch_{epoch}/{k}": v for k, v in values.items() if _is_by_epoch(k)}
            metrics |= self._by_lag(own, epoch=epoch)
        return metrics

    def _by_lag(self, results: Sequence[UpdateResult], *, epoch: int) -> dict[str, float]:
        """Metrics of one epoch by lag of the tokens: over all of them, and by tenth of t/L."""
        if not results or results[0].statistics.classes is None:
            return {}
        table = class_rows([result.statistics for result in results]).sum(dim=0)
        table = torch.cat(
            (table.sum(dim=1, keepdim=True), table), dim=1
        )  # [C, all and tenths, ...]
        parts = ["", *(f"by_fraction/{tenth / DECILES:.1f}/" for tenth in range(1, DECILES + 1))]
        return {
            f"epoch_{epoch}/lag_{lag}/{part}{key}": value
            for key, values in class_metrics(table).items()
            for lag, row in zip(self.lags, values.tolist(), strict=True)
            for part, value in zip(parts, row, strict=True)
            if not math.isnan(value) and (key != "tokens" or value)
        }


def _is_by_epoch(key: str) -> bool:
    if key.startswith("by_fraction/"):
        return key.endswith(BY_EPOCH_AND_FRACTION)
    return key.startswith(BY_EPOCH)


def _changed_routes(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Fraction of tokens whose set of experts differs from the recorded one."""
    counts = [result.routes for result in results if result.routes is not None]
    return routing_metrics(counts, "changed_fraction")


def _merge(results: Sequence[UpdateResult]) -> Statistics:
    return reduce(Statistics.merge, (result.statistics for result in results))


def build_update_table(
    updates: UpdateMetrics,
    schedule: Mapping[str, Any],
    *,
    minibatches: int,
    first_updates: Mapping[int, int],
) -> dict[str, Any]:
    """Columns of equal length: a row for each update, lag and tenth of t/L that has tokens.

    schedule: the step's line of schedule.jsonl; first_updates: of each step so far, the updates
    before its first. Skipped updates have no rows. Synchronizes with the device once.
    """
    kept = [place for place, one in enumerate(updates.results) if one.skipped is None]
    if not kept:
        return {}
    results = [updates.results[place] for place in kept]
    rows = class_rows([one.statistics for one in results])
    lags: list[int | None] = [*updates.lags] or [None]
    before = np.cumsum([0, *(one.done for one in updates.results)])
    at = [None if lag is None else first_updates.get(schedule["step"] - lag) for lag in lags]

    def of_update(values: Sequence[Any] | np.ndarray) -> np.ndarray:
        return np.repeat(np.array(values), len(lags) * DECILES)

    def of_lag(values: Sequence[Any]) -> np.ndarray:
        return np.tile(np.repeat(np.array(values, object), DECILES), len(kept))

    places = np.array(kept)
    ages = [
        None if then is None else schedule["updates"] + int(before[place]) - then
        for place in kept
        for then in at
    ]
    columns: dict[str, Any] = {
        "step": of_update([schedule["step"]] * len(kept)),
        "update": of_update(places + 1),
        "epoch": of_update([updates.epochs[place] for place in kept]),
        "minibatch": of_update(places % minibatches + 1),
        "is_made": of_update([one.done for one in results]),
        "reuse": of_update(_reuse(updates, schedule["uses"], kept, minibatches=minibatches)),
        "learning_rate": of_update([one.learning_rate for one in results]),
        "grad_norm": of_update([one.grad_norm for one in results]),
        "lag": of_lag(lags),
        "lag_updates": np.repeat(np.array(ages, object), DECILES),
        "tenth": np.tile(np.arange(1, DECILES + 1), len(kept) * len(lags)),
    }
    output = class_sums(rows) | class_metrics(rows)
    columns |= {name: values.flatten().numpy() for name, values in output.items()}
    some = columns["tokens"] > 0
    return {name: values[some] for name, values in columns.items()}


def _reuse(
    updates: UpdateMetrics, uses: Sequence[int], kept: Sequence[int], *, minibatches: int
) -> list[float]:
    """Mean number of earlier updates on the groups of each kept update's minibatch."""
    size = len(uses) // minibatches
    means = []
    for place in kept:
        one = place % minibatches
        earlier = [result.done for result in updates.results[one:place:minibatches]]
        means.append(float(np.mean(uses[one * size : (one + 1) * size])) + sum(earlier))
    return means
