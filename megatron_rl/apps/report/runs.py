"""Runs of a report, grouped by settings."""

import re
from collections.abc import Iterable, Sequence
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
