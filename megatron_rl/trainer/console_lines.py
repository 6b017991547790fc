"""Console lines of a run: one per step, and the summary at its end.

Rewards are plain numbers; scores are percentages and carry a percent sign.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.files import PHASES
from megatron_rl.telemetry.curves import CURVES


def percent(score: float | None) -> str:
    """Format a score as a percentage of a reward of 1; large ones with three digits."""
    if score is None or math.isnan(score):
        return "none"
    return f"{100 * score:.1f}%" if abs(score) < 1000 else f"{100 * score:.3g}%"


def duration(seconds: float) -> str:
    """Format an estimated duration in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def seconds_text(seconds: float) -> str:
    """Format seconds with two digits, from ten on as whole numbers."""
    return f"{seconds:.0f}" if seconds >= 9.95 else f"{seconds:.2g}"


def step_line(
    metrics: Mapping[str, Any], *, steps: int, recent: Sequence[float] = (), sft: bool = False
) -> str:
    """Progress line of one step.

    recent: seconds of the last steps, for the remaining time. sft: of given answers, whose loss
    stands in place of reward and acceptance.
    """
    step = int(metrics["step"])
    losses = [key for key in metrics if key.startswith("eval/") and key.endswith("/loss")]
    scores = "".join(f"  {_name(key)} {metrics[key]:.4f}" for key in losses)
    scores += "".join(f"  {_name(key)} {percent(metrics[key])}" for key in _score_keys(metrics))
    if "reward/mean" not in metrics:
        return f"step {step:>4}/{steps}{scores}"
    times = " ".join(
        f"{phase} {metrics[f'time/{phase}']:.1f}"
        for phase in PHASES
        if metrics.get(f"time/{phase}", 0) >= 0.05
    )
    left = ""
    if recent and step < steps:
        each = sum(recent) / len(recent)
        left = f"  {duration((steps - step) * each)} left at {seconds_text(each)} s a step"
    spent = f"  {metrics['time/step']:.1f} s ({times}){left}{scores}"
    if sft:
        loss, length = metrics.get("loss/policy", math.nan), metrics["response/length_mean"]
        return f"step {step:>4}/{steps}  loss {loss:.4f}  length {length:.0f}{spent}"
    reward = metrics["reward/mean"]
    return (
        f"step {step:>4}/{steps}"
        f"  reward {f'{reward:.3f}' if abs(reward) < 1000 else f'{reward:.3g}'}"
        f"  length {metrics['response/length_mean']:.0f}"
        f" ({100 * metrics['response/truncated_fraction']:.0f}% cut)"
        f"  acceptance {metrics.get('gate/acceptance', math.nan):.3f}"
        f"  {metrics.get('rollout/tokens_per_second', 0) / 1000:.1f}k tok/s"
        f"{spent}"
    )


def _score_keys(metrics: Iterable[str]) -> list[str]:
    """Return the keys of avg@n and, after each, pass@n with the same n, if there are several."""
    present, keys = set(metrics), []
    for key in metrics:
        if key.startswith("eval/") and "/avg@" in key:
            solved = key.replace("/avg@", "/pass@")
            keys += [key, *([solved] if solved in present else [])]
    return keys


def _name(key: str) -> str:
    return key.removeprefix("eval/")


def closing_lines(directory: RunDirectory, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Summary of a run: scores, time by phase, paths and the commands that show more."""
    path, batches, here = directory.path, rows[-1]["step"], Path.cwd()
    path = path.relative_to(here) if path.is_relative_to(here) else path
    lines = [f"Trained {path.name}: {batches} rollout batch{'es' if batches != 1 else ''}"]
    for key in _score_keys(dict.fromkeys(key for row in rows for key in row)):
        scores = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if scores:
            first, last = scores[0][1], scores[-1][1]
            best = max(scores, key=lambda score: score[1])
            points = percent(last - first).removesuffix("%")
            lines.append(
                f"  {_name(key)}: {percent(first)} before -> {percent(last)} after "
                f"({'' if points.startswith('-') else '+'}{points} points; best {percent(best[1])} "
                f"at step {best[0]})"
            )
    seconds = {p: sum(row.get(f"time/{p}") or 0 for row in rows) for p in PHASES}
    total = sum(row.get("time/step") or 0 for row in rows)
    spent = ", ".join(f"{p} {seconds_text(s)}" for p, s in seconds.items() if s >= 0.01 * total > 0)
    adapter = [f"  adapter:       {path / directory.adapter.name}  (PEFT format)"]
    if not directory.adapter.exists():
        adapter = []
    return [
        *lines,
        f"  seconds: {seconds_text(total)} ({spent})",
        f"  run directory: {path}",
        f"  curves:        {path / CURVES}",
        f"  model:         {path / directory.model.name}  (Hugging Face format)",
        *adapter,
        f"  report:        megatron-rl report {path}",
        f"  responses:     megatron-rl rollouts {path}",
    ]
