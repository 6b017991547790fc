"""Log-ratios (the paper's first figure) and gate metrics by position in a response."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.apps.report.runs import RunGroup
from megatron_rl.apps.report.traces import read_traced_groups, spread_out, traced_steps

SCALES = ("local", "cumulative", "sequence", "prefix")
QUANTILES = {"q05": 0.05, "median": 0.5, "q95": 0.95}
MIN_TOKENS = 8
TENTHS = tuple(f"{tenth / 10:.1f}" for tenth in range(1, 11))
BAND = ("acceptance", "prefix_mean_log_std", "prefix_mean_log_q05", "prefix_mean_log_median",
        "prefix_mean_log_q95")  # fmt: skip


def four_log_ratios(log_ratio: np.ndarray) -> dict[str, np.ndarray]:
    """Compute local l_t, cumulative S_t, sequence S_L / L and prefix S_t / t; [updates, L] each."""
    total = log_ratio.cumsum(axis=1)
    position = np.arange(1, log_ratio.shape[1] + 1)
    sequence = np.broadcast_to(total[:, -1:] / log_ratio.shape[1], log_ratio.shape)
    return {
        "local": log_ratio, "cumulative": total, "sequence": sequence, "prefix": total / position
    }  # fmt: skip


def ratios_by_position(
    group: RunGroup, *, most_steps: int, most_bins: int
) -> dict[str, Any] | None:
    """Compute spread and quantiles of the four log-ratios over a group's traced responses.

    Values are binned by position t in bins of equal width, and by epoch of reuse. Bins with fewer
    than MIN_TOKENS tokens are omitted. Returns None if no response was traced.
    """
    traced = [
        response.log_ratio
        for run in group.runs
        for step in spread_out(traced_steps(run), most=most_steps)
        for responses in read_traced_groups(run, step)
        for response in responses
        if response.policy is not None and response.behavior.size
    ]
    if not traced:
        return None
    epochs = max(len(rows) for rows in traced)
    longest = max(rows.shape[1] for rows in traced)
    width = -(-longest // most_bins)
    bins = -(-longest // width)
    cells: dict[tuple[str, int, int], list[np.ndarray]] = {}
    for rows in traced:
        for name, values in four_log_ratios(rows).items():
            for epoch, line in enumerate(values):
                for b in range(-(-line.size // width)):
                    part = line[b * width : (b + 1) * width]
                    cells.setdefault((name, epoch, b), []).append(part)
    joined = {cell: np.concatenate(parts) for cell, parts in cells.items()}
    sizes = {cell: values.size for cell, values in joined.items()}
    filled = [
        b
        for b in range(bins)
        if min(sizes.get(("local", e, b), 0) for e in range(epochs)) >= MIN_TOKENS
    ]

    def table(name: str, compute: Any) -> list[list[float]]:
        return [[float(compute(joined[name, e, b])) for b in filled] for e in range(epochs)]

    return {
        "responses": len(traced),
        "positions": [b * width + (width + 1) / 2 for b in filled],
        "epochs": epochs,
        "scales": {
            name: {"std": table(name, np.std)}
            | {key: table(name, lambda x, q=q: np.quantile(x, q)) for key, q in QUANTILES.items()}
            for name in SCALES
        },
    }


def gate_by_position(group: RunGroup, *, most_steps: int) -> dict[str, Any] | None:
    """Compute acceptance, spread and quantiles of log w_t per tenth of t / L and epoch of reuse.

    Values are means of the runs' metrics, over all steps and for some single steps. Returns None
    if no run has these metrics.
    """
    rows = [row for run in group.runs for row in run.steps]
    epochs = max((int(key[6 : key.index("/")]) for row in rows for key in row
                  if key.startswith("epoch_") and "/by_fraction/" in key), default=0)  # fmt: skip
    if not epochs:
        return None
    steps = spread_out(sorted({row["step"] for row in rows}), most=most_steps)
    return {
        "epochs": epochs,
        "steps": steps,
        "all": _gate_tables(rows, epochs),
        "each": [_gate_tables([r for r in rows if r["step"] == step], epochs) for step in steps],
    }


def _gate_tables(rows: Sequence[dict[str, Any]], epochs: int) -> dict[str, list]:
    """Return an [epochs][tenths] table for each of BAND; None for missing values."""

    def mean(epoch: int, tenth: str, name: str) -> float | None:
        key = f"epoch_{epoch}/by_fraction/{tenth}/{name}"
        values = [row[key] for row in rows if row.get(key) is not None]
        return sum(values) / len(values) if values else None

    return {
        name: [[mean(epoch, tenth, name) for tenth in TENTHS] for epoch in range(1, epochs + 1)]
        for name in BAND
    }
