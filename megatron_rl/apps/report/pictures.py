"""PNG figures of a report."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rl.telemetry.curves import SECONDS, style_axis

TIMELINE_STEPS = 3  # of a picture
Data = Mapping[str, Any]
# The page uses the same colors.
COLORS = ("#2f6db3", "#d9822b", "#2e9268", "#b3477d", "#7457b0", "#7a838f", "#b29500", "#2b9db0",
          "#9a5b3f", "#5b6770", "#d1495b", "#4d7c0f", "#17365d", "#d67ab1")  # fmt: skip
SPENT = {"hours": "wall time (h)", "batches": "rollout batches", "tokens": "generated tokens",
         "updates": "optimizer updates", "simulated": "simulated time (epochs)"}  # fmt: skip
COMPARED = ("updates", "tokens", "simulated")  # on which reuse and no reuse are compared
SCALES = {"local": r"local $\ell_t$", "cumulative": r"cumulative $S_t$",
          "sequence": r"sequence $S_L/L$", "prefix": r"prefix $S_t/t = \log w_t$"}  # fmt: skip


def draw_pictures(data: Data, folder: Path) -> list[Path]:
    """Draw the figures that have data; return the files in page order.

    If there are many groups, draws the groups that the page shows initially, labeled by their
    differences.
    """
    from matplotlib.figure import Figure  # seconds to import

    shown, caption = _initial_groups(data)
    drawn = []
    for name, ((width, height, each), draw) in _PICTURES.items():
        more = max(0, len(shown["groups"]) - 4)
        figure = Figure(figsize=(width, height + each * more), layout="constrained")
        if draw(figure, shown):
            if caption:
                figure.supxlabel(caption, fontsize=8, color="#5f6b7a", x=0.01, ha="left")
            drawn.append(folder / f"{name}.png")
            figure.savefig(drawn[-1], dpi=130)
    return drawn


def _initial_groups(data: Data) -> tuple[Data, str]:
    """Return the data of the initially shown groups, and a caption."""
    groups = [data["groups"][index] for index in data["first"]]
    if len(groups) == len(data["groups"]):
        return data, ""
    parts = [[part for _, part in group["named"]] for group in groups]
    differs = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    named = [
        " · ".join(p for p, differ in zip(row, differs, strict=True) if differ) for row in parts
    ]
    labelled = [group | {"label": name} for group, name in zip(groups, named, strict=True)]
    common = [part for part, differ in zip(parts[0], differs, strict=True) if not differ]
    left = len(data["groups"]) - len(groups)
    return dict(data) | {"groups": labelled}, " · ".join(
        [*common, f"{left} more settings are on the page"]
    )


def _draw_learning(figure: Any, data: Data) -> bool:
    axes = figure.subplots(1, 2)
    for place, group in enumerate(data["groups"]):
        runs = [data["runs"][index] for index in group["runs"]]
        color, label = COLORS[place % len(COLORS)], group["label"]
        _band(axes[0], runs, _macro, color=color, label=label, marker="o")
        _band(axes[1], runs, lambda run: run["reward"], color=color, alpha=0.25, fill=False)
        _band(axes[1], runs, lambda run: run["smooth"], color=color, label=label)
    style_axis(axes[0], "Held-out score, mean of the sets (%)", "rollout batches")
    style_axis(axes[1], "Mean rollout reward, raw and smoothed over 11 steps", "rollout batches")
    _legend(axes[1], data)
    return True


def _draw_costs(figure: Any, data: Data) -> bool:
    if not any(run["steps"] for run in data["runs"]):
        return False
    has_scores = any(run["scores"] for run in data["runs"])
    axes = figure.subplots(1 + has_scores, len(COMPARED), sharey="row", squeeze=False)
    rows = [(_macro, "Held-out score (%)", "o")] * has_scores
    rows.append((lambda run: run["smooth"], "Mean reward, smoothed", ""))
    for row, (read, title, marker) in zip(axes, rows, strict=True):
        for axis, unit in zip(row, COMPARED, strict=True):
            for place, group in enumerate(data["groups"]):
                runs = [data["runs"][index] for index in group["runs"]]
                _band(axis, runs, read, color=COLORS[place % len(COLORS)], label=group["label"],
                      marker=marker, unit=unit)  # fmt: skip
            style_axis(axis, title, SPENT[unit])
    _legend(axes[0][0], data)
    return True


def _macro(run: Data) -> list[float | None]:
    columns = list(run["scores"].values())
    rows = zip(*columns, strict=True) if columns else ((None,) for _ in run["reward"])
    return [100 * fmean(row) if all(v is not None for v in row) else None for row in rows]


def _band(
    axis: Any, runs: Sequence[Data], read: Callable[[Data], Sequence[float | None]], *,
    color: str, label: str | None = None, marker: str = "", alpha: float = 1.0, fill: bool = True,
    unit: str = "batches",
) -> None:  # fmt: skip
    """Plot the mean over runs after each rollout batch, with a band from minimum to maximum.

    unit: the cost on the x-axis, as a mean over these runs.
    """
    table: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        spent = run["spent"]
        for batch, cost, value in zip(spent["batches"], spent[unit], read(run), strict=True):
            if value is not None:
                table.setdefault(batch, []).append((cost, value))
    columns = [tuple(zip(*table[step], strict=True)) for step in sorted(table)]
    places = [fmean(costs) for costs, _ in columns]
    means = [fmean(values) for _, values in columns]
    axis.plot(places, means, color=color, label=label, marker=marker, markersize=4, alpha=alpha)
    if fill and len(runs) > 1:
        low, high = [min(values) for _, values in columns], [max(values) for _, values in columns]
        axis.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)


def _draw_time(figure: Any, data: Data) -> bool:
    if data["threshold"] is None:
        return False
    reached = [run["passage"]["hours"] for run in data["runs"] if run["passage"]]
    minutes = max(reached, default=0) < 2
    figure.suptitle(f"Cost until the smoothed reward first reached {data['threshold']:g}")
    for axis, (unit, title) in zip(
        figure.subplots(1, len(SPENT), sharey=True), SPENT.items(), strict=True
    ):
        for place, group in enumerate(data["groups"]):
            passages = [data["runs"][index]["passage"] for index in group["runs"]]
            scale = 60 if minutes and unit == "hours" else 1
            spent = [scale * passage[unit] for passage in passages if passage]
            color = COLORS[place % len(COLORS)]
            if spent:
                axis.barh(place, fmean(spent), color=color, alpha=0.8)
                axis.plot(spent, [place] * len(spent), "o", color="#16202c", markersize=3)
            axis.text(0, place, f" {len(spent)}/{len(passages)}", va="center", fontsize=8)
        axis.set_yticks(range(len(data["groups"])), [group["label"] for group in data["groups"]])
        style_axis(axis, title.replace("(h)", "(min)") if minutes else title, "", grid="x")
        axis.set_ylim(len(data["groups"]) - 0.5, -0.5)
    return True


def _draw_ratios(figure: Any, data: Data) -> bool:
    groups = [(p, g["ratios"]) for p, g in enumerate(data["groups"]) if g["ratios"]]
    if not groups:
        return False
    figure.suptitle("Log-ratios of traced responses in their last epoch: median, 5% to 95%, ± std")
    for axis, (name, title) in zip(figure.subplots(1, 4), SCALES.items(), strict=True):
        for place, ratios in groups:
            color, scale = COLORS[place % len(COLORS)], ratios["scales"][name]
            x, last = ratios["positions"], {key: rows[-1] for key, rows in scale.items()}
            axis.fill_between(x, last["q05"], last["q95"], color=color, alpha=0.15, linewidth=0)
            axis.plot(x, last["median"], color=color, label=data["groups"][place]["label"])
            for sign in (1, -1):
                axis.plot(x, [sign * v for v in last["std"]], color=color, ls="--", lw=0.9)
        style_axis(axis, title, "position t")
    _legend(axis, data)
    return True


def _draw_gate(figure: Any, data: Data) -> bool:
    groups = [(p, g["gate"]["all"]) for p, g in enumerate(data["groups"]) if g["gate"]]
    if not groups:
        return False
    axes = figure.subplots(1, 2)
    tenths = [(tenth + 0.5) / 10 for tenth in range(10)]
    for axis, name in zip(axes, ("acceptance", "prefix_mean_log_std"), strict=True):
        for place, tables in groups:
            for epoch, row in enumerate(tables[name]):
                last = epoch == len(tables[name]) - 1
                axis.plot(
                    tenths, [float("nan") if v is None else v for v in row],
                    color=COLORS[place % len(COLORS)],
                    alpha=0.3 + 0.7 * (epoch + 1) / len(tables[name]),
                    lw=2 if last else 1, label=data["groups"][place]["label"] if last else None,
                )  # fmt: skip
    style_axis(axes[0], "Accepted tokens (fraction), darker for later epochs", "t / L")
    style_axis(axes[1], "std of log w, darker for later epochs", "t / L")
    _legend(axes[1], data)
    return True


def _draw_seconds(figure: Any, data: Data) -> bool:
    axis = figure.subplots()
    for place, group in enumerate(data["groups"]):
        runs, left = [data["runs"][index] for index in group["runs"]], 0.0
        steps = max(sum(run["steps"] for run in runs), 1)
        for phase, color in zip(data["phases"], SECONDS, strict=True):
            value = sum(run["seconds"][phase] for run in runs) / steps
            label = phase if place == 0 else None
            axis.barh(place, value, left=left, color=color, label=label)
            left += value
    axis.set_yticks(range(len(data["groups"])), [group["label"] for group in data["groups"]])
    style_axis(axis, "Seconds per rollout batch, by phase", "s", grid="x")
    axis.set_ylim(len(data["groups"]) - 0.5, -0.5)
    figure.legend(loc="outside lower center", ncols=len(data["phases"]), frameon=False, fontsize=8)
    return True


def _draw_timeline(figure: Any, data: Data) -> bool:
    """Draw the last steps of each group's first run that has a timeline."""
    axis, names, used = figure.subplots(), list[str](), set[int]()
    for group in data["groups"]:
        lines = (data["runs"][index]["timeline"] for index in group["runs"])
        if (line := next(filter(None, lines), None)) is None:
            continue
        ends = line["ends"][-TIMELINE_STEPS - 1 :]
        for ranks, intervals in line["ranks"].items():
            whole = [(0, ends[-1] - ends[0])]
            axis.broken_barh(whole, (len(names) - 0.4, 0.8), color="#f4f6f8", hatch="///",
                             edgecolor="#d5dbe3", linewidth=0)  # fmt: skip
            for phase, start, seconds in intervals:
                left = max(start, ends[0])
                if (width := start + seconds - left) > 0:
                    place = (len(names) - 0.4, 0.8)
                    axis.broken_barh([(left - ends[0], width)], place, color=SECONDS[phase])
                    used.add(phase)
            for end in ends[1:-1]:
                at = (len(names) - 0.45, len(names) + 0.45)
                axis.plot([end - ends[0]] * 2, at, color="#16202c", linewidth=0.9)
            names.append(f"{group['label']}: {ranks}")
    if not names:
        return False
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    title = "Timeline of the last steps of one run; hatched: waits, lines: ends of steps"
    style_axis(axis, title, "s", grid="x")
    for phase in sorted(used):
        axis.broken_barh([], (0, 0), color=SECONDS[phase], label=data["phases"][phase])
    figure.legend(loc="outside lower center", ncols=len(used), frameon=False, fontsize=8)
    return True


# Width, height, and additional height per line after the fourth.
_PICTURES: dict[str, tuple[tuple[float, float, float], Callable[[Any, Data], bool]]] = {
    "learning": ((11, 4, 0), _draw_learning),
    "costs": ((13, 6.5, 0), _draw_costs),
    "time_to_reward": ((14, 2.8, 0.25), _draw_time),
    "log_ratios": ((14, 3.6, 0), _draw_ratios),
    "gate": ((11, 3.8, 0), _draw_gate),
    "seconds": ((11, 2.8, 0.25), _draw_seconds),
    "timeline": ((11, 2.8, 0.5), _draw_timeline),
}


def _legend(axis: Any, data: Data) -> None:
    """Add a legend inside the chart, or outside if it has many lines."""
    if len(data["groups"]) > 6:
        lines, names = axis.get_legend_handles_labels()
        columns = -(-len(names) // 18)
        axis.figure.legend(
            lines, names, loc="outside right upper", ncols=columns, fontsize=8, frameon=False
        )
    elif len(data["groups"]) > 1:
        axis.legend(fontsize=8, frameon=False)
