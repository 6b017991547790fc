"""Report on runs: a self-contained HTML page, PNG figures and an optional zip archive."""

import base64
import gzip
import hashlib
import html
import json
import time
import zipfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rl.apps.report.pictures import draw_pictures
from megatron_rl.apps.report.responses import SHARE, build_responses
from megatron_rl.apps.report.runs import (
    Run,
    RunGroup,
    best_scores,
    centered_mean,
    default_threshold,
    find_runs,
    first_passage,
    first_shown,
    group_runs,
    progress,
    score_keys,
    show_value,
    title_of,
)
from megatron_rl.apps.report.traces import (
    build_histories,
    describe_objective,
    gate_by_position,
    objective_of,
    ratios_by_position,
    reason_no_decisions,
    spread_out,
    traced_steps,
)
from megatron_rl.errors import UserError
from megatron_rl.runs.files import (
    PHASES,
    TIMELINE,
    atomic_write_text,
    changed_releases,
    read_last_rows,
)

MAX_TIMELINE_STEPS = 20
NEARLY = 0.001  # seconds; a resumed run leaves a longer gap between two steps
WAITS = ("rollout", "eval")  # phases in which trainers wait for engines on ranks of their own


def build_timeline(run: Run, *, most: int) -> dict[str, Any] | None:
    """Return the intervals of a run's last steps, at most `most`; None if none is recorded.

    `steps`: numbers of the steps. `ends`: the start of the first step, which is 0, then the end of
    each, in seconds. `ranks`: for each group of ranks the intervals [index in PHASES, start,
    seconds] of its first rank, in order and inside of these steps; what lies between them is
    waiting. Steps before a resume are left out.
    """
    rows = read_last_rows(run.folder / TIMELINE, most=most)
    for place in range(len(rows) - 1, 0, -1):
        before, row = rows[place - 1], rows[place]
        if abs(before["start"] + before["seconds"] - row["start"]) > NEARLY:
            rows = rows[place:]
            break
    if not rows:
        return None
    zero = rows[0]["start"]
    ends = [0.0, *(row["start"] + row["seconds"] - zero for row in rows)]
    ranks: dict[str, list[list[Any]]] = {name: [] for row in rows for name in row["ranks"]}
    for row in rows:
        for name, intervals in row["ranks"].items():
            for phase, start, seconds in intervals:
                begin = max(row["start"] - zero + start, 0.0)
                length = min(row["start"] - zero + start + seconds, ends[-1]) - begin
                is_waiting = name == "trainers" and phase in WAITS
                if length > 0 and phase in PHASES and not is_waiting:
                    ranks[name].append([PHASES.index(phase), begin, length])
    return {
        "steps": [row["step"] for row in rows],
        "ends": ends,
        "ranks": {name: sorted(one, key=lambda each: each[1]) for name, one in ranks.items()},
    }


MAX_LISTED = 3  # values of several runs that are listed


def describe_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """List each setting that identifies these runs: name, values, and number of further values."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in _describe(run).items():
            found.setdefault(name, {}).setdefault(value)
    if len(runs) > 1 and len(found.get("Command", {})) > 1:
        del found["Command"]  # every run has its own; the settings list what differs
    return [
        {
            "name": name,
            "values": list(values)[:MAX_LISTED],
            "more": max(0, len(values) - MAX_LISTED),
        }
        for name, values in found.items()
    ]


def _describe(run: Run) -> dict[str, str]:
    config, start = run.config, run.starts[0] if run.starts else {}
    model, data = config.get("model") or {}, config.get("data") or {}
    verifier = (config.get("reward") or {}).get("verifier")
    environment = (config.get("environment") or {}).get("name")
    graded = f"played in {environment}" if environment else f"graded by {verifier}"
    mixed = [each["path"] for each in (data.get("mix") or {}).values()]
    files = [data["train"]] if data.get("train") else mixed
    task = [f"prompts of {', '.join(map(_short, files))}"] if files else []
    task += [graded] if environment or verifier else []
    sets = ", ".join((config.get("eval") or {}).get("sets") or {})
    task += [f"held-out sets {sets}"] if sets else []
    written = run.folder / "metrics.jsonl"
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(written.stat().st_mtime))
    command = start.get("command") or f"megatron-rl train --config {run.folder / 'config.yaml'}"
    return {
        "Progress": describe_progress(run),
        **({"Model": _short(model["path"])} if model.get("path") else {}),
        **({"Task": ", ".join(task)} if task else {}),
        "Started" if start else "Last written": start.get("time", date),
        "Version": _describe_releases(run.starts),
        "Command": command,
    }


def _describe_releases(starts: Sequence[Mapping[str, Any]]) -> str:
    """List the releases of the first start, and each change at a later one with its step."""
    first = starts[0] if starts else {}
    own = {"megatron_rl": first.get("version", "not recorded")}
    releases = first.get("releases") or own
    parts = [", ".join(f"{name} {release}" for name, release in releases.items())]
    for before, now in pairwise(starts):
        if changed := changed_releases(before, now):
            text = ", ".join(f"{name} {change}" for name, change in sorted(changed.items()))
            parts.append(f"after step {now.get('after_step', 0)} {text}")
    return "; ".join(parts)


RECENT = 10  # steps whose mean time gives the remaining time


def describe_progress(run: Run) -> str:
    """Return how far a run is, and the time left at the pace of its last steps."""
    done = max((row["step"] for row in run.rows), default=0)
    total = (run.config.get("trainer") or {}).get("steps")
    if not total or done > total:
        return f"{done} steps"
    text = f"step {done} of {total} ({done / total:.0%})"
    seconds = [row["time/step"] for row in run.steps[-RECENT:] if row.get("time/step")]
    if done < total and seconds:
        left = timedelta(seconds=round((total - done) * fmean(seconds)))
        text += f", {left} left at {fmean(seconds):.3g} s a step"
    if done < total:
        written = time.gmtime((run.folder / "metrics.jsonl").stat().st_mtime)
        text += time.strftime("; last step written %Y-%m-%d %H:%M:%S UTC", written)
    return text


def is_finished(run: Run) -> bool:
    """Return whether all steps of a run are done."""
    total = (run.config.get("trainer") or {}).get("steps")
    return total is not None and max((row["step"] for row in run.rows), default=0) >= total


def _short(path: str) -> str:
    """Return the last two parts of a path: a folder and its parent name a model or a file."""
    return "/".join(Path(path).parts[-2:])


SCRIPTS = (
    "uplot.js", "dom.js", "glossary.js", "charts.js", "figures.js", "life.js", "responses.js",
    "main.js",
)  # fmt: skip
STYLES = ("uplot.css", "style.css")


def render_page(data: Mapping[str, Any], *, reload: float | None = None) -> str:
    """Render the page for `data`, which may contain arbitrary text.

    reload: seconds after which a browser reads the file again.
    A content security policy allows only these scripts, by their hashes, and no network requests.
    The data is base64 until the scripts unpack it and insert it as text nodes.
    """
    library, *own = map(_asset, SCRIPTS)
    script = "\n".join((library, "(async () => {", *own, "})();"))
    style = "\n".join(_asset(name) for name in STYLES)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            *([f'<meta http-equiv="refresh" content="{reload:g}">'] if reload else []),
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(data['title'])}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            "<noscript>This report needs JavaScript.</noscript>",
            f'<script type="text/plain" id="data">{pack(data)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        )
    )


def pack(data: Mapping[str, Any]) -> str:
    """Encode data as JSON with five-digit floats, gzip and base64."""
    text = json.dumps(_rounded(data), separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}") if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def _asset(name: str) -> str:
    return (files("megatron_rl.apps.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


REPORT = "report.html"
CURVES = {
    "policy/entropy": "Entropy of the computed tokens (nats per token)",
    "rollout/entropy": "Entropy of all sampled tokens, estimated (nats per token)",
    "response/length_mean": "Response length (tokens)",
    "response/truncated_fraction": "Truncated responses (fraction)",
    "gate/acceptance": "Tokens accepted by the constraint (fraction)",
    "gate/rejected_below_positive": "Rejected below the lower bound, positive advantage (fraction)",
    "ratio/prefix_mean_log_std": "Drift: std of log w",
    "ratio/kl_to_behavior": "KL to the behavior policy (nats per token)",
    "weight/effective_sample_fraction": "Effective sample fraction",
    "grad/norm": "Gradient norm",
    "advantage/zero_groups_fraction": "Groups with zero advantage (fraction)",
}
CONVERSATION_CURVES = {
    "conversation/turns_mean": "Turns of a conversation",
    "conversation/observed_fraction": "Tokens written by the environment (fraction)",
    "conversation/timed_out_fraction": "Conversations over the time limit (fraction)",
    "conversation/failed_fraction": "Conversations whose environment failed (fraction)",
    "environment/seconds_mean": "Environment's answer (seconds)",
    "environment/cached_fraction": "Context from the prefix cache (fraction)",
}
CRITIC_CURVES = {
    "critic/explained_variance": "Critic: explained variance of the returns",
    "critic/value_mean": "Critic: mean value",
    "critic/return_mean": "Critic: mean return",
    "critic/loss": "Critic: value loss",
    "critic/clipped_fraction": "Critic: values moved beyond the clip (fraction)",
    "critic/grad_norm": "Critic: gradient norm",
}
MAX_TURNS = 8  # with a curve of their own
# Quantity limited by an objective's bounds; the chart shows the prefix mean.
WEIGHTS = {
    "token": "the ratio of each token",
    "prefix_min": "the smallest ratio up to each token, times the token's ratio",
    "prefix_product": "the product of the ratios up to each token",
    "sequence_mean": "the mean over the whole response",
    "sequence_product": "the product over the whole response",
    "one": "no weight",
}
NOT_SHOWN = "and this chart shows the mean up to each position"
KEEP_ROLLOUTS = "logging.keep_rollouts"
NUMBERS = 40_000  # limit for curves, and approximately for tables of positions
MAX_STEPS = 16  # steps with tables of positions, or whose traces are read


def write_report(
    paths: Sequence[str | Path],
    *,
    output: str | Path | None = None,
    threshold: float | None = None,
    megabytes: float = 4.0,
    bundle: bool = False,
    reload: float | None = None,
) -> list[Path]:
    """Write `report.html` and PNGs about the runs in these folders; return the written files.

    output: the output folder, by default the only path. threshold: reward of the time-to-reward
    section. reload: seconds after which browsers read the page again, which is written without
    figures then. megabytes: maximum size of recorded responses in it. bundle: also write a zip with
    the report and every run's metrics and config. Raises UserError if there is nothing to report.
    """
    runs = find_runs(paths)
    groups = group_runs(runs)
    folder = _output(paths, output)
    if megabytes < 0:
        raise UserError(f"--megabytes {megabytes:g}: give 0, for no traced responses, or more")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output {folder} cannot be created: {error}; choose a writable folder"
        ) from error
    data = collect(groups, threshold=threshold, megabytes=megabytes)
    page = folder / REPORT
    atomic_write_text(page, render_page(data, reload=reload))  # a browser may read it at any time
    if reload is not None:
        return [page]
    written = [page, *draw_pictures(data, folder)]
    if bundle:
        written.append(_bundle(folder / "report.zip", written, runs))
    return written


def _output(paths: Sequence[str | Path], output: str | Path | None) -> Path:
    if output is not None:
        return Path(output)
    if len(paths) > 1:
        raise UserError(
            f"{len(paths)} folders were given: set --output to the folder for their report"
        )
    return Path(paths[0])


def collect(
    groups: Sequence[RunGroup], *, threshold: float | None, megabytes: float
) -> dict[str, Any]:
    """Collect the contents of the page as plain values."""
    runs = [run for group in groups for run in group.runs]
    scores, curves = score_keys(runs), _curves(runs)
    max_steps = max(2, min(MAX_STEPS, NUMBERS // (200 * len(groups))))
    bins = 64 if len(groups) <= 6 else 24 if len(groups) <= 20 else 12
    first = first_shown(groups)
    threshold = default_threshold(runs) if threshold is None else threshold
    order = _round_robin(groups, runs, first)
    return {
        "title": _title(runs),
        "about": describe_runs(runs),
        "groups": [
            {
                "label": group.label,
                "named": [*group.named.values()],
                "runs": [runs.index(run) for run in group.runs],
                "best": {k: v and vars(v) for k, v in best_scores(group, scores).items()},
                "ratios": ratios_by_position(
                    group, most_steps=max(1, max_steps // len(group.runs)), most_bins=bins
                ),
                "gate": gate_by_position(group, most_steps=max_steps),
                "bounds": _bounds(group),
            }
            for group in groups
        ],
        "naming": [title_of(key) for key in groups[0].named],
        "first": first,
        "differs": groups[0].differs,
        "settings": _settings(runs),
        "scores": scores,
        "curves": curves,
        "phases": list(PHASES),
        "threshold": threshold,
        "runs": [_run(run, scores, threshold, curves, of=len(runs)) for run in runs],
        "life": build_histories(runs, megabytes=(1 - SHARE) * megabytes, order=order),
        "responses": build_responses(runs, megabytes=megabytes, order=order),
        "sampled": [run.name for run in runs if run.settings.get(KEEP_ROLLOUTS, "all") != "all"],
        "traced": sum(bool(traced_steps(run)) for run in runs),
    }


def _round_robin(
    groups: Sequence[RunGroup], runs: Sequence[Run], first: Sequence[int]
) -> list[int]:
    """Return run indices: one of each group before the second of any, visible groups first."""
    order = sorted(range(len(groups)), key=lambda index: (index not in first, index))
    rank = {id(run): index for group in groups for index, run in enumerate(group.runs)}
    members = [run for index in order for run in groups[index].runs]
    return [runs.index(run) for run in sorted(members, key=lambda run: rank[id(run)])]


def _settings(runs: Sequence[Run]) -> dict[str, dict[str, list[Any]]]:
    """Return each setting's values and their index per run; `of` is empty if all are equal."""
    settings_of_runs = [
        run.axes | {key: show_value(v) for key, v in run.settings.items()} for run in runs
    ]
    table: dict[str, dict[str, list[Any]]] = {}
    for key in dict.fromkeys(key for settings in settings_of_runs for key in settings):
        column = [settings.get(key) for settings in settings_of_runs]
        values = list(dict.fromkeys(column))
        of = [values.index(value) for value in column] if len(values) > 1 else []
        table[key] = {"values": values, "of": of}
    return table


def _bounds(group: RunGroup) -> dict[str, Any]:
    """Return bounds of log w_t that depend only on t / L, or the reason in `missing`."""
    objective = describe_objective(objective_of(group.runs[0]))
    if objective is None:
        return {"missing": reason_no_decisions(group.runs[0])}
    bounds = objective["bounds"]
    if bounds is None or (bounds["low"] is None and bounds["high"] is None):
        return {"missing": "its constraint sets no lower or upper bound on a weight"}
    if objective["weight"] != "prefix_mean":
        return {"missing": f"they limit {WEIGHTS[objective['weight']]}, {NOT_SHOWN}"}
    if bounds["scale"] == "t^p":
        return {"missing": "they depend on the position t, and this chart shows t / L"}
    return bounds


def _title(runs: Sequence[Run]) -> str:
    studies = {run.folder.parents[1].name for run in runs if run.axes}
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return studies.pop() if len(studies) == 1 else name


def _curves(runs: Sequence[Run]) -> dict[str, str]:
    """Titles of the curves by metric: of a critic and conversations only if a run has them."""
    keys = {key for run in runs for row in run.rows for key in row}
    by_turns = {
        f"reward_by_turns/{turns}": f"Reward of conversations of {turns} turn{'s'[: turns > 1]}"
        for turns in range(1, MAX_TURNS + 1)
    }
    of_turn = {
        f"reward_of_turn/{turn}": f"Reward that the environment gave after turn {turn}"
        for turn in range(1, MAX_TURNS + 1)
    }
    further = CRITIC_CURVES | CONVERSATION_CURVES | by_turns | of_turn
    return CURVES | {key: title for key, title in further.items() if key in keys}


def _run(
    run: Run, scores: Sequence[str], threshold: float | None, curves: Mapping[str, str], *, of: int
) -> dict[str, Any]:
    smooth = centered_mean([row.get("reward/mean") for row in run.rows])
    # Keep every step with a score, and as many others as fit.
    max_rows = max(20, NUMBERS // (of * (len(curves) + 6)))
    scored = {i for i, row in enumerate(run.rows) if any(key in row for key in scores)}
    kept = sorted(scored | set(spread_out(range(0, len(run.rows), run.every), most=max_rows)))
    rows = [run.rows[i] for i in kept]
    spent = progress(run, run.rows)
    seconds = {phase: sum(row.get(f"time/{phase}") or 0.0 for row in run.rows) for phase in PHASES}
    return {
        "name": run.name,
        "seed": run.config.get("seed"),
        "thinned": len(kept) < len(run.rows),
        "spent": {name: [column[i] for i in kept] for name, column in spent.items()},
        "reward": [row.get("reward/mean") for row in rows],
        "smooth": [smooth[i] for i in kept],
        "scores": {key: [row.get(key) for row in rows] for key in scores},
        "curves": {key: [row.get(key) for row in rows] for key in curves},
        "seconds": seconds,
        "timeline": build_timeline(run, most=max(2, min(MAX_TIMELINE_STEPS, 200 // of))),
        "steps": len(run.steps),
        "passage": None if threshold is None else first_passage(run, threshold),
    }


def _bundle(file: Path, written: Sequence[Path], runs: Sequence[Run]) -> Path:
    """Write a zip archive of the report and every run's metrics and config."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in written:
            archive.write(path, path.name)
        for run in runs:
            for name in ("metrics.jsonl", "config.yaml"):
                if (run.folder / name).is_file():
                    archive.write(run.folder / name, f"runs/{run.name}/{name}")
    return file
