"""Runs of a report, grouped by settings, and their series: smoothed rewards, costs, best scores."""

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from megatron_rl.errors import UserError
from megatron_rl.runs.files import ROLLOUT_COST, ROLLOUT_COST_METADATA, read_metrics, read_rows

# Settings that may differ within a group: the seed, and settings that do not affect results.
IGNORED_SETTINGS = (
    "seed", "run.", "logging.", "resharding.", "reward.workers", "trainer.checkpoint_every",
    "trainer.keep_checkpoints", "rollout.gpu_memory_utilization", "rollout.kv_cache_mib",
)  # fmt: skip
SHORT = {
    "axis/objective": "{}",
    "objective.name": "{}", "optimizer.learning_rate": "lr {}", "trainer.epochs": "{} epochs",
    "rollout.max_response_tokens": "{} tokens",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Run:
    """Contents of one run directory that all figures use."""

    folder: Path
    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]  # of metrics.jsonl, by step
    axes: dict[str, str] = field(default_factory=dict)  # its values of the study's axes
    rollout_cost: float = ROLLOUT_COST  # its study's, in epochs
    starts: list[dict[str, Any]] = field(default_factory=list)  # of starts.jsonl

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by key."""
        return dict(_flatten(self.config))

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Rows of rollout batches, without the evaluation before training."""
        return [row for row in self.rows if "reward/mean" in row]


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs with the same settings except the seed, and their differences from other groups."""

    label: str
    runs: tuple[Run, ...]
    named: dict[str, tuple[str, str]]  # parts of the label: setting: (value, text)
    differs: tuple[str, ...]  # the settings in which groups differ


def find_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Find the runs in these folders: run directories, or folders that contain some (a study).

    Runs without recorded metrics are omitted. Raises UserError for a folder without runs.
    """
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        inside = [path] if (path / "metrics.jsonl").is_file() else []
        for depth in ("*", "*/*", "*/*/*"):
            candidates = (file.parent for file in path.glob(f"{depth}/metrics.jsonl"))
            inside = inside or sorted(candidates, key=_by_numbers)
        if not inside:
            raise UserError(
                f"{path} contains no run: there is no metrics.jsonl in it or below it; give run "
                "directories, or folders that contain them"
            )
        folders |= dict.fromkeys(folder.resolve() for folder in inside)
    studies = {folder.parents[1] for folder in folders if folder.parent.name == "runs"}
    axes = {folder: place for study in studies for folder, place in _axes(study, folders).items()}
    costs = {study: _rollout_cost(study) for study in studies}
    names = [folder.name for folder in folders]
    runs = []
    for folder in folders:
        shared = names.count(folder.name) > 1
        name = f"{folder.parent.name}/{folder.name}" if shared else folder.name
        config = _read_config(folder / "config.yaml")
        cost = costs.get(folder.parents[1], ROLLOUT_COST)
        starts = folder / "starts.jsonl"
        runs.append(
            Run(folder, name, config, read_metrics(folder), axes.get(folder, {}), cost,
                read_rows(starts) if starts.is_file() else [])
        )  # fmt: skip
    recorded = [run for run in runs if run.rows]
    if not recorded:
        raise UserError(f"{', '.join(names)}: nothing is recorded in metrics.jsonl yet")
    return recorded


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    except yaml.YAMLError as error:
        raise UserError(f"{file} is damaged: {error}; repair it") from error
    return config or {}


def _by_numbers(folder: Path) -> list[str | float]:
    """Return a sort key that orders 62 before 254."""
    parts = re.split(r"(\d+(?:\.\d+)?)", str(folder))
    return [float(part) if index % 2 else part for index, part in enumerate(parts)]


def _axes(study: Path, folders: Iterable[Path]) -> dict[Path, dict[str, str]]:
    """Read the axis values of a study's runs from its results.parquet; empty without one.

    Runs that started after it was written are identified by their name, <value>-...-seed<seed>.
    """
    file = study / "results.parquet"
    if not file.is_file():
        return {}
    names = [name for name in pq.read_schema(file).names if name.startswith("axis/")]
    axes = {}
    for folder in folders:
        *values, seed = folder.name.split("-")
        if folder.parents[1] == study and len(values) == len(names) and seed.startswith("seed"):
            axes[folder] = dict(zip(names, values, strict=True))
    rows = pq.read_table(file, columns=["run", *names]).to_pylist()
    return axes | {(study / "runs" / row.pop("run")).resolve(): row for row in rows}


def _rollout_cost(study: Path) -> float:
    """Read a rollout batch's cost from a study's results.parquet; the default without one."""
    file = study / "results.parquet"
    described = (pq.read_schema(file).metadata if file.is_file() else None) or {}
    return float(described.get(ROLLOUT_COST_METADATA.encode(), ROLLOUT_COST))


def group_runs(runs: Sequence[Run]) -> list[RunGroup]:
    """Group runs by settings, in the given order; label each group by its differences."""
    kinds: dict[tuple, list[Run]] = {}
    for run in runs:
        own = {
            k: show_value(v) for k, v in run.settings.items() if not k.startswith(IGNORED_SETTINGS)
        }
        kinds.setdefault(tuple(sorted((own | run.axes).items())), []).append(run)
    tables = [dict(kind) for kind in kinds]
    axes = [axis for run in runs for axis in run.axes]
    keys = dict.fromkeys([*axes, *(key for table in tables for key in sorted(table))])
    differ = [key for key in sorted(keys, key=_rank)
              if len({table.get(key) for table in tables}) > 1]  # fmt: skip
    naming = _distinguishing(tables, differ)
    groups = []
    for table, members in zip(tables, kinds.values(), strict=True):
        values = {key: table.get(key, "-") for key in naming}
        named = {key: (value, _part(key, value)) for key, value in values.items()}
        name = " · ".join(part for _, part in named.values())
        label = name or table.get("objective.name") or members[0].name
        groups.append(RunGroup(label, tuple(members), named, tuple(differ)))
    return groups


def _distinguishing(tables: Sequence[dict[str, str]], keys: Sequence[str]) -> list[str]:
    """Return the first keys that are needed to distinguish the tables."""
    chosen: list[str] = []
    for key in keys:
        kinds = {tuple(table.get(k) for k in chosen) for table in tables}
        more = {tuple(table.get(k) for k in (*chosen, key)) for table in tables}
        if len(more) > len(kinds):
            chosen.append(key)
    return chosen


def _rank(key: str) -> tuple[bool, bool, str]:
    """Return a sort key: a study's axes in their order, then commonly compared settings."""
    is_axis = key.startswith("axis/")
    return not is_axis, key not in SHORT, "" if is_axis else key


def _part(key: str, value: str) -> str:
    if key in SHORT:
        return SHORT[key].format(value)
    return f"{title_of(key)} {Path(value).name if '/' in value else value}"


def title_of(key: str) -> str:
    """Return a short title of a setting or an axis."""
    return key.removeprefix("axis/").removesuffix(".name").rpartition(".")[2].replace("_", " ")


def first_shown(groups: Sequence[RunGroup], *, most: int = 10) -> list[int]:
    """Return the indices of the initially shown groups: all, or a readable subset of many.

    The subset differs only in the first part of the labels (as a study's objectives do) and has
    the most runs.
    """
    indices = list(range(len(groups)))
    if len(groups) <= most:
        return indices
    subsets: dict[tuple, list[int]] = {}
    for index, group in enumerate(groups):
        subsets.setdefault(tuple(group.named.values())[1:], []).append(index)
    best = max(subsets.values(), key=lambda subset: sum(len(groups[i].runs) for i in subset))
    return best if len(best) > 1 else indices[:most]


def show_value(value: Any) -> str:
    """Format a setting's value."""
    if isinstance(value, float):
        return f"{value:g}"
    return "-" if value is None else str(value)


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


WINDOW = 11  # steps, as in the paper
# Units of cost, and the metric that is summed.
COSTS = {
    "hours": ("time/step", 1 / 3600),
    "tokens": ("rollout/tokens", 1.0),
    "updates": ("train/updates", 1.0),
}


def centered_mean(values: Sequence[float | None], *, window: int = WINDOW) -> list[float | None]:
    """Return the mean of a centered window around each value; windows shrink towards the ends.

    Missing values (None) are skipped and stay None.
    """
    indices = [index for index, value in enumerate(values) if value is not None]
    known = [value for value in values if value is not None]
    smooth: list[float | None] = [None] * len(values)
    for at, index in enumerate(indices):
        half = min(window // 2, at, len(known) - 1 - at)
        smooth[index] = statistics.fmean(known[at - half : at + half + 1])
    return smooth


def progress(run: Run, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the cost up to each row: rollout batches, hours, tokens, updates and simulated time.

    Simulated time is in epochs of training: the study's cost of each rollout batch, plus the
    epochs. Unlike hours it does not depend on how busy the machine was.
    """
    spent: dict[str, list[float]] = {"batches": [row["step"] for row in rows]}
    for name, (key, unit) in COSTS.items():
        total, column = 0.0, []
        for row in rows:
            total += (row.get(key) or 0.0) * unit
            column.append(total)
        spent[name] = column
    per_epoch = run.config.get("trainer", {}).get("minibatches", 1)
    batches = itertools.accumulate(bool(row.get("rollout/tokens")) for row in rows)
    spent["simulated"] = [
        run.rollout_cost * batch + updates / per_epoch
        for batch, updates in zip(batches, spent["updates"], strict=True)
    ]
    return spent


def first_passage(run: Run, threshold: float) -> dict[str, float] | None:
    """Return the cost when the smoothed reward first reached the threshold; None if never."""
    smooth = centered_mean([row["reward/mean"] for row in run.steps])
    spent = progress(run, run.steps)
    for index, value in enumerate(smooth):
        if value is not None and value >= threshold:
            return {name: column[index] for name, column in spent.items()}
    return None


def default_threshold(runs: Sequence[Run]) -> float | None:
    """Return the highest multiple of 0.05 that the smoothed reward reaches in 90% of the runs.

    With fewer than ten runs, all must reach it. For rewards below 0.05 it is a multiple of 0.005,
    0.0005 and so on. Runs without a step do not count. Returns None if no such reward is above 0.
    """
    tops = []
    for run in runs:
        smooth = centered_mean([row["reward/mean"] for row in run.steps])
        if run.steps:
            tops.append(max((value for value in smooth if value is not None), default=0.0))
    reached = sorted(tops)[len(tops) // 10] if tops else 0.0
    if reached <= 0:
        return None
    digits = 2 if reached >= 0.05 else 1 - math.floor(math.log10(reached))
    unit = 5 * 10.0**-digits
    return round(int(reached / unit + 1e-9) * unit, digits)


def score_keys(runs: Sequence[Run]) -> list[str]:
    """Return the keys of all held-out scores, `eval/<set>/avg@<k>`."""
    keys = {key: None for run in runs for row in run.rows for key in row}
    return [key for key in keys if re.fullmatch(r"eval/.+/avg@\d+", key)]


@dataclass(frozen=True)
class Score:
    """Mean, minimum and maximum of a score over a group's runs, in percent.

    Also the mean percentages of truncated and of ungraded responses, which count as wrong; None if
    the metrics do not contain them.
    """

    mean: float
    low: float
    high: float
    truncated: float | None = None
    ungraded: float | None = None

    @classmethod
    def of(cls, evaluations: Sequence["_Evaluation"]) -> "Score | None":
        """Summarize the scores of several runs; None if there are none."""
        values = [100 * evaluation.value for evaluation in evaluations]
        if not values:
            return None
        fractions = (
            _percent([evaluation.truncated for evaluation in evaluations]),
            _percent([evaluation.ungraded for evaluation in evaluations]),
        )
        return cls(statistics.fmean(values), min(values), max(values), *fractions)


@dataclass(frozen=True)
class _Evaluation:
    """Score of one evaluation, in [0, 1], and its fractions of truncated and ungraded responses."""

    value: float
    truncated: float | None
    ungraded: float | None

    @classmethod
    def of_row(cls, row: Mapping[str, Any], key: str) -> "_Evaluation":
        """Read the evaluation of `eval/<set>/avg@<k>` from a row of metrics."""
        prefix = key.rpartition("/")[0]
        ungraded = [row.get(f"{prefix}/{kind}_fraction") for kind in ("time_limit", "failed")]
        known = [value for value in ungraded if value is not None]
        return cls(row[key], row.get(f"{prefix}/truncated_fraction"), sum(known) if known else None)

    @classmethod
    def mean_of(cls, several: Sequence["_Evaluation"]) -> "_Evaluation":
        """Return the unweighted mean over sets."""
        columns = zip(*((e.value, e.truncated, e.ungraded) for e in several), strict=True)
        value, truncated, ungraded = map(_mean, columns)
        assert value is not None, "every set has a score"
        return cls(value, truncated, ungraded)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _percent(values: Iterable[float | None]) -> float | None:
    mean = _mean(values)
    return None if mean is None else 100 * mean


def best_scores(group: RunGroup, keys: Sequence[str]) -> dict[str, Score | None]:
    """Return each set's best observed score, selected per set and run, as in the paper's table.

    `Before` is the unweighted mean over sets of the evaluation before training, `Avg.` that of a
    run's best scores, `Last` that of its last evaluation; they include only runs with every set.
    `before <key>` is one set's score before training.
    """
    best: dict[str, list[_Evaluation]] = {key: [] for key in keys}
    before: dict[str, list[_Evaluation]] = {key: [] for key in keys}
    averages, last, first = [], [], []
    for run in group.runs:
        evaluations = {
            key: [_Evaluation.of_row(row, key) for row in run.rows if row.get(key) is not None]
            for key in keys
        }
        tops = {k: max(es, key=lambda e: e.value) for k, es in evaluations.items() if es}
        start = [row for row in run.rows[:1] if row["step"] == 0]
        for key, top in tops.items():
            best[key].append(top)
            before[key] += [
                _Evaluation.of_row(row, key) for row in start if row.get(key) is not None
            ]
        if keys and start and all(start[0].get(key) is not None for key in keys):
            first.append(_Evaluation.mean_of([_Evaluation.of_row(start[0], key) for key in keys]))
        if keys and all(evaluations.values()):
            averages.append(_Evaluation.mean_of(list(tops.values())))
            last.append(_Evaluation.mean_of([es[-1] for es in evaluations.values()]))
    table = {key: Score.of(evaluations) for key, evaluations in best.items()}
    table |= {f"before {key}": Score.of(evaluations) for key, evaluations in before.items()}
    return table | {
        "Before": Score.of(first), "Avg.": Score.of(averages), "Last": Score.of(last)
    }  # fmt: skip
