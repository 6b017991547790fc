"""Table of the updates of a step: statistics by lag and position of the tokens.

`updates/` of a run directory; `docs/policy-lag.md` names the columns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rl.objectives.statistics import DECILES, class_metrics, class_rows, class_sums
from megatron_rl.trainer.update_metrics import UpdateMetrics


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
