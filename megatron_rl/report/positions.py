"""By position in a response: the four log-ratios of the paper's first figure, and the gate."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.report.runs import Group
from megatron_rl.report.traces import read_traced_groups, spread_out, traced_steps

SCALES = ("local", "cumulative", "sequence", "prefix")
QUANTILES = {"q05": 0.05, "median": 0.5, "q95": 0.95}
FEWEST_TOKENS = 8
TENTHS = tuple(f"{tenth / 10:.1f}" for tenth in range(1, 11))
BAND = ("acceptance", "prefix_mean_log_std", "prefix_mean_log_q05", "prefix_mean_log_median",
        "prefix_mean_log_q95")  # fmt: skip


def four_log_ratios(log_ratio: np.ndarray) -> dict[str, np.ndarray]:
    """Local l_t, cumulative S_t, sequence S_L / L, prefix S_t / t; [updates, L] each, as given."""
    total = log_ratio.cumsum(axis=1)
    position = np.arange(1, log_ratio.shape[1] + 1)
    sequence = np.broadcast_to(total[:, -1:] / log_ratio.shape[1], log_ratio.shape)
    return {
        "local": log_ratio, "cumulative": total, "sequence": sequence, "prefix": total / position
    }  # fmt: skip


def ratios_by_position(group: Group, *, most_steps: int, most_bins: int) -> dict[str, Any] | None:
    """Spread and quantiles of the four log-ratios over a group's traced responses.

    By position t in bins of equal width, and by update of a response: its epoch of reuse. Bins of
    fewer than FEWEST_TOKENS tokens are left out. None where nothing was traced.
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
                for place in range(-(-line.size // width)):
                    part = line[place * width : (place + 1) * width]
                    cells.setdefault((name, epoch, place), []).append(part)
    joined = {cell: np.concatenate(parts) for cell, parts in cells.items()}
    sizes = {cell: values.size for cell, values in joined.items()}
    places = [
        place
        for place in range(bins)
        if min(sizes.get(("local", e, place), 0) for e in range(epochs)) >= FEWEST_TOKENS
    ]

    def table(name: str, compute: Any) -> list[list[float]]:
        return [[float(compute(joined[name, e, p])) for p in places] for e in range(epochs)]

    return {
        "responses": len(traced),
        "positions": [p * width + (width + 1) / 2 for p in places],
        "epochs": epochs,
        "scales": {
            name: {"std": table(name, np.std)}
            | {key: table(name, lambda x, q=q: np.quantile(x, q)) for key, q in QUANTILES.items()}
            for name in SCALES
        },
    }


def gate_by_position(group: Group, *, most_steps: int) -> dict[str, Any] | None:
    """Acceptance, spread and quantiles of log w_t in every tenth of t / L, by epoch of reuse.

    From the metrics of whole rollout batches, as means over the group's runs: of every step
    together, and of some single ones. None where no run has them.
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
    """[epochs][tenths] of each of BAND; None where no row has it."""

    def mean(epoch: int, tenth: str, name: str) -> float | None:
        key = f"epoch_{epoch}/by_fraction/{tenth}/{name}"
        values = [row[key] for row in rows if row.get(key) is not None]
        return sum(values) / len(values) if values else None

    return {
        name: [[mean(epoch, tenth, name) for tenth in TENTHS] for epoch in range(1, epochs + 1)]
        for name in BAND
    }
