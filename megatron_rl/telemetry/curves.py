"""Figure of a run's training curves, drawn from its run directory."""

import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.runs.files import PHASES, thin_metrics

CURVES = "curves.png"
MOST_POINTS = 1000  # of a curve: more than its pixels
MOST_BARS = 200  # each is drawn by itself, for every phase: thousands take minutes on a busy host
# Legends of metrics that share a chart; docs/metrics.md defines each average.
LABELS = {
    "reward/mean": "all prompts",
    "policy/entropy": "computed tokens, from whole distributions",
    "rollout/entropy": "all tokens, estimated from those sampled",
    "response/truncated_fraction": "responses cut at the length limit",
    "advantage/zero_groups_fraction": "groups in which every advantage is 0",
}
BLUE, ORANGE, GREY = "#2f6db3", "#d9822b", "#8a8f98"
GREEN, VIOLET, RED, BROWN = "#7fb069", "#b0a8d8", "#c8553d", "#8c6d5a"
LINES = (BLUE, ORANGE, GREEN, RED, VIOLET, GREY)
SECONDS = (
    BLUE, GREEN, "#e3c567", VIOLET, BROWN, "#4f9d9d", ORANGE, RED, GREY, "#5b6770", "#c9ccd1"
)  # fmt: skip


def draw_curves(run_folder: str | Path) -> Path:
    """Draw `curves.png` next to the run's metrics.jsonl; returns its path.

    Charts over rollout batches: held-out score; reward (by data source if there are several);
    entropy; acceptance of the constraint by epoch of reuse; drift of the policy from the behavior
    policy; gradient norm; response length; fraction of responses cut and of groups without
    advantage; seconds per phase. Of a long run they have every n-th step, and all held-out scores.
    Raises UserError if the folder has no metrics.
    """
    from matplotlib.figure import Figure  # seconds to import, and only needed at the end

    folder = Path(run_folder)
    evaluated, every = thin_metrics(
        folder,
        most=MOST_POINTS,
        wanted=lambda key: "/by_" not in key,  # no bands of positions
    )
    if not evaluated:
        raise UserError(f"{folder} has no metrics in a metrics.jsonl; give the folder of a run")
    rows = [row for row in evaluated if (row["step"] - evaluated[0]["step"]) % every == 0]
    figure = Figure(figsize=(12, 9.3))
    axes = figure.subplots(3, 3)
    # Places by hand: a layout engine draws everything twice, to find the same.
    figure.subplots_adjust(left=0.05, right=0.99, top=0.92, bottom=0.05, hspace=0.24, wspace=0.16)
    title = folder.name if every == 1 else f"{folder.name}, every {every} steps"
    figure.suptitle(title, fontsize=13, fontweight="bold")
    keys = _keys(evaluated)
    scores = [key for key in keys if key.startswith("eval/") and "avg@" in key]
    sources = [key for key in keys if key.startswith("reward_by_source/")]
    epochs = [key for key in keys if re.fullmatch(r"epoch_\d+/gate/acceptance", key)]
    _draw(axes[0, 0], evaluated, scores, title="Held-out score (%)", scale=100, marker="o")
    rewards = ["reward/mean", *(sources if len(sources) > 1 else [])]
    _draw(axes[0, 1], rows, rewards, title="Mean rollout reward")
    _draw(axes[0, 2], rows, ["policy/entropy", "rollout/entropy"], title="Entropy (nats a token)")
    _draw(axes[1, 0], rows, epochs, title="Accepted tokens (fraction), by epoch of reuse")
    axes[1, 0].set_ylim(0, 1.05)
    drift = "Drift: std of the prefix-mean log-ratio"
    _draw(axes[1, 1], rows, ["ratio/prefix_mean_log_std"], title=drift)
    _draw(axes[1, 2], rows, ["grad/norm"], title="Gradient norm")
    _draw(axes[2, 0], rows, ["response/length_mean"], title="Response length (tokens)")
    idle = ["response/truncated_fraction", "advantage/zero_groups_fraction"]
    _draw(axes[2, 1], rows, idle, title="Cut responses, groups without advantage (fraction)")
    axes[2, 1].set_ylim(-0.02, 1.05)
    fewer = -(-len(rows) // MOST_BARS)
    _draw_seconds(axes[2, 2], rows[::fewer], width=0.85 * every * fewer)
    for axis in axes[2]:
        axis.set_xlabel("rollout batches")
    path = folder / CURVES
    figure.savefig(path, dpi=110)
    return path


def _keys(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _points(rows: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def label_of(key: str) -> str:
    """Return the legend of a metric."""
    if match := re.fullmatch(r"epoch_(\d+)/gate/acceptance", key):
        return f"epoch {match[1]}"
    return LABELS.get(key) or key.removeprefix("eval/").removeprefix("reward_by_source/")


def _draw(
    axis: Any,
    rows: Sequence[dict[str, Any]],
    keys: Sequence[str],
    *,
    title: str,
    scale: float = 1.0,
    marker: str = "",
) -> None:
    for key, color in zip(keys, cycle(LINES)):
        steps, values = _points(rows, key)
        shown = [scale * value for value in values]
        label = label_of(key)
        axis.plot(
            steps, shown, color=color, marker=marker, markersize=4, linewidth=1.8, label=label
        )
        if marker and shown:
            _label(axis, (steps[0], shown[0]), color, side="left")
            if len(shown) > 1:
                _label(axis, (steps[-1], shown[-1]), color, side="right")
    if len(keys) > 1:
        axis.legend(fontsize=8, frameon=False)
    _style_step_axis(axis, title)


def _label(axis: Any, point: tuple[float, float], color: str, *, side: str) -> None:
    """Print the value next to a curve's first point or above its last one."""
    axis.annotate(
        f"{point[1]:.1f}",
        point,
        textcoords="offset points",
        xytext=(8, -3) if side == "left" else (4, 6),
        ha=side,
        color=color,
        fontsize=9,
    )


def _style_step_axis(axis: Any, title: str) -> None:
    axis.locator_params(axis="x", integer=True)
    axis.margins(y=0.12)
    style_axis(axis, title)


def _draw_seconds(axis: Any, rows: Sequence[dict[str, Any]], *, width: float) -> None:
    steps = [row["step"] for row in rows if row.get("time/step") is not None]
    bottom = [0.0] * len(steps)
    for phase, color in zip(PHASES, SECONDS, strict=True):
        values = [row.get(f"time/{phase}") or 0.0 for row in rows if row.get("time/step")]
        if not any(values):  # most runs have no reference
            continue
        axis.bar(steps, values, bottom=bottom, color=color, width=width, label=phase)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    if any(bottom):
        axis.set_ylim(0, 1.35 * max(bottom))
        axis.legend(fontsize=8, ncols=3, frameon=False, loc="upper center")
    _style_step_axis(axis, "Seconds per step, by phase")


def style_axis(axis: Any, title: str, below: str = "", *, grid: str = "y") -> None:
    """Set title, label and grid, and hide the top and right edges of the frame."""
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel(below)
    axis.grid(axis=grid, color="#e6e8eb", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
