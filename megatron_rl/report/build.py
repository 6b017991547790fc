"""The report on some runs: one page and its pictures, and a bundle to be sent."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.report.page import render_page
from megatron_rl.report.pictures import draw_pictures
from megatron_rl.report.positions import gate_by_position, ratios_by_position
from megatron_rl.report.runs import (
    Group,
    Run,
    find_runs,
    first_shown,
    group_runs,
    show_value,
    title_of,
)
from megatron_rl.report.series import (
    best_scores,
    centered_mean,
    default_threshold,
    first_passage,
    progress,
    score_keys,
)
from megatron_rl.report.tokens import build_life, describe_objective
from megatron_rl.report.traces import objective_of, spread_out, traced_steps, why_unjudged
from megatron_rl.runs.rows import PHASES

REPORT = "report.html"
CURVES = {
    "policy/entropy": "Entropy (nats a token)",
    "response/length_mean": "Response length (tokens)",
    "response/truncated_fraction": "Truncated responses (fraction)",
    "gate/acceptance": "Tokens left alone by the constraint (fraction)",
    "gate/rejected_below_positive": "Rejected from below, of positive advantage (fraction)",
    "ratio/prefix_mean_log_std": "Drift: std of log w",
    "ratio/kl_to_behavior": "KL to the behavior policy (nats a token)",
    "weight/effective_sample_fraction": "Effective samples (fraction)",
    "grad/norm": "Gradient norm",
    "advantage/zero_groups_fraction": "Groups that teach nothing (fraction)",
}
NUMBERS = 40_000  # in the curves of a page, and about as many in the tables of positions
MOST_STEPS = 16  # of which positions are shown singly, or traces read


def write_report(
    paths: Sequence[str | Path],
    *,
    output: str | Path | None = None,
    threshold: float | None = None,
    megabytes: float = 4.0,
    bundle: bool = False,
) -> list[Path]:
    """Write `report.html` and PNGs about the runs in these folders; returns what was written.

    output: a folder, by default that of the one path that is given. threshold: of the reward whose
    time is told. megabytes: what traced responses may add to the page. bundle: also a zip of it
    all, with every run's metrics and config. Raises ValueError where there is nothing to report.
    """
    runs = find_runs(paths)
    groups = group_runs(runs)
    folder = _output(paths, output)
    if megabytes < 0:
        raise ValueError(f"--megabytes {megabytes:g}: give 0, for no traced responses, or more")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output {folder} cannot be made: {error}; name a folder that can be written"
        ) from error
    data = collect(groups, threshold=threshold, megabytes=megabytes)
    page = folder / REPORT
    page.write_text(render_page(data), encoding="utf-8")
    written = [page, *draw_pictures(data, folder)]
    if bundle:
        written.append(_bundle(folder / "report.zip", written, runs))
    return written


def _output(paths: Sequence[str | Path], output: str | Path | None) -> Path:
    if output is not None:
        return Path(output)
    if len(paths) > 1:
        raise ValueError(
            f"{len(paths)} folders were given: say by --output where their report belongs"
        )
    return Path(paths[0])


def collect(
    groups: Sequence[Group], *, threshold: float | None, megabytes: float
) -> dict[str, Any]:
    """All that the page shows, as plain values."""
    runs = [run for group in groups for run in group.runs]
    scores = score_keys(runs)
    each = max(2, min(MOST_STEPS, NUMBERS // (200 * len(groups))))
    bins = 64 if len(groups) <= 6 else 24 if len(groups) <= 20 else 12
    first = first_shown(groups)
    threshold = default_threshold(runs) if threshold is None else threshold
    return {
        "title": _title(runs),
        "groups": [
            {
                "label": group.label,
                "named": [*group.named.values()],
                "runs": [runs.index(run) for run in group.runs],
                "best": {k: v and vars(v) for k, v in best_scores(group, scores).items()},
                "ratios": ratios_by_position(
                    group, most_steps=max(1, each // len(group.runs)), most_bins=bins
                ),
                "gate": gate_by_position(group, most_steps=each),
                "bounds": _bounds(group),
            }
            for group in groups
        ],
        "naming": [title_of(key) for key in groups[0].named],
        "first": first,
        "differs": groups[0].differs,
        "settings": _settings(runs),
        "scores": scores,
        "curves": CURVES,
        "phases": list(PHASES),
        "threshold": threshold,
        "runs": [_run(run, scores, threshold, of=len(runs)) for run in runs],
        "life": build_life(runs, megabytes=megabytes, order=_one_of_each(groups, runs, first)),
        "traced": sum(bool(traced_steps(run)) for run in runs),
    }


def _one_of_each(groups: Sequence[Group], runs: Sequence[Run], first: Sequence[int]) -> list[int]:
    """Places of the runs, one of each group before the second of any, those shown first first."""
    order = sorted(range(len(groups)), key=lambda place: (place not in first, place))
    rank = {id(run): at for group in groups for at, run in enumerate(group.runs)}
    members = [run for place in order for run in groups[place].runs]
    return [runs.index(run) for run in sorted(members, key=lambda run: rank[id(run)])]


def _settings(runs: Sequence[Run]) -> dict[str, dict[str, list[Any]]]:
    """Each setting's values, and which of them each run has; `of` is empty where all have one."""
    every = [run.axes | {key: show_value(v) for key, v in run.settings.items()} for run in runs]
    table: dict[str, dict[str, list[Any]]] = {}
    for key in dict.fromkeys(key for settings in every for key in settings):
        column = [settings.get(key) for settings in every]
        values = list(dict.fromkeys(column))
        of = [values.index(value) for value in column] if len(values) > 1 else []
        table[key] = {"values": values, "of": of}
    return table


def _bounds(group: Group) -> dict[str, Any]:
    """Those of log w_t where they depend on t / L alone; else `missing` says why there are none."""
    objective = describe_objective(objective_of(group.runs[0]))
    if objective is None:
        return {"missing": why_unjudged(group.runs[0])}
    bounds = objective["bounds"]
    if bounds is None or (bounds["low"] is None and bounds["high"] is None):
        return {"missing": "its constraint bounds no weight"}
    if objective["weight"] != "prefix_mean":
        return {"missing": f"its bounds are of another weight, {objective['weight']}"}
    if bounds["scale"] == "t^p":
        return {"missing": "its bounds depend on t, not on t / L"}
    return bounds


def _title(runs: Sequence[Run]) -> str:
    studies = {run.folder.parents[1].name for run in runs if run.axes}
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return studies.pop() if len(studies) == 1 else name


def _run(run: Run, scores: Sequence[str], threshold: float | None, *, of: int) -> dict[str, Any]:
    smooth = centered_mean([row.get("reward/mean") for row in run.rows])
    # A step with a score stays; of the others as many as there is room for.
    most = max(20, NUMBERS // (of * (len(CURVES) + 6)))
    places = {place for place, row in enumerate(run.rows) if any(key in row for key in scores)}
    kept = sorted(places | set(spread_out(range(len(run.rows)), most=most)))
    rows = [run.rows[place] for place in kept]
    spent = progress(run.rows)
    seconds = {phase: sum(row.get(f"time/{phase}") or 0.0 for row in run.rows) for phase in PHASES}
    return {
        "name": run.name,
        "seed": run.config.get("seed"),
        "thinned": len(kept) < len(run.rows),
        "spent": {name: [column[place] for place in kept] for name, column in spent.items()},
        "reward": [row.get("reward/mean") for row in rows],
        "smooth": [smooth[place] for place in kept],
        "scores": {key: [row.get(key) for row in rows] for key in scores},
        "curves": {key: [row.get(key) for row in rows] for key in CURVES},
        "seconds": seconds,
        "steps": len(run.steps),
        "passage": None if threshold is None else first_passage(run, threshold),
    }


def _bundle(file: Path, written: Sequence[Path], runs: Sequence[Run]) -> Path:
    """What was written, and the metrics and config of every run that it is about."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in written:
            archive.write(path, path.name)
        for run in runs:
            for name in ("metrics.jsonl", "config.yaml"):
                if (run.folder / name).is_file():
                    archive.write(run.folder / name, f"runs/{run.name}/{name}")
    return file
