"""The runs that a report is about, and which of them differ by chance alone."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from megatron_rl.runs.rows import read_metrics

# What two runs of one group may differ in: the seed, and what has no part in the numbers.
BY_CHANCE = (
    "seed", "run.", "logging.", "resharding.", "reward.workers", "trainer.checkpoint_every",
    "trainer.keep_checkpoints", "rollout.memory_fraction", "rollout.kv_cache_mib",
)  # fmt: skip
SHORT = {
    "axis/objective": "{}",
    "objective.name": "{}", "optimizer.learning_rate": "lr {}", "trainer.epochs": "{} epochs",
    "rollout.max_response_tokens": "{} tokens",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Run:
    """What one run directory holds, as far as every figure needs it."""

    folder: Path
    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]  # of metrics.jsonl, by step
    axes: dict[str, str] = field(default_factory=dict)  # its place in its study

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by its key."""
        return dict(_flatten(self.config))

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of rollout batches, without the evaluation before training."""
        return [row for row in self.rows if "reward/mean" in row]


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ by chance alone, and what sets them apart from the others."""

    label: str
    runs: tuple[Run, ...]
    named: dict[str, tuple[str, str]]  # what the label says: setting: (value, part of the label)
    differs: tuple[str, ...]  # the settings in which groups differ


def find_runs(paths: Iterable[str | Path]) -> list[Run]:
    """The runs in these folders: run directories, or folders that hold some, a study's for one.

    Runs that have recorded nothing are left out. Raises ValueError for a folder without any.
    """
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        inside = [path] if (path / "metrics.jsonl").is_file() else []
        for depth in ("*", "*/*", "*/*/*"):
            found = (file.parent for file in path.glob(f"{depth}/metrics.jsonl"))
            inside = inside or sorted(found, key=_by_numbers)
        if not inside:
            raise ValueError(
                f"{path} holds no run: there is no metrics.jsonl in it or below it; give run "
                "directories, or folders that hold them"
            )
        folders |= dict.fromkeys(folder.resolve() for folder in inside)
    studies = {folder.parents[1] for folder in folders if folder.parent.name == "runs"}
    axes = {folder: place for study in studies for folder, place in _axes(study, folders).items()}
    names = [folder.name for folder in folders]
    runs = []
    for folder in folders:
        shared = names.count(folder.name) > 1
        name = f"{folder.parent.name}/{folder.name}" if shared else folder.name
        config = _read_config(folder / "config.yaml")
        runs.append(Run(folder, name, config, read_metrics(folder), axes.get(folder, {})))
    recorded = [run for run in runs if run.rows]
    if not recorded:
        raise ValueError(f"{', '.join(names)}: nothing is recorded in metrics.jsonl yet")
    return recorded


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(file.read_text()) if file.is_file() else None
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is damaged: {error}; repair it") from error
    return config or {}


def _by_numbers(folder: Path) -> list[str | float]:
    """To sort 62 before 254."""
    parts = re.split(r"(\d+(?:\.\d+)?)", str(folder))
    return [float(part) if place % 2 else part for place, part in enumerate(parts)]


def _axes(study: Path, folders: Iterable[Path]) -> dict[Path, dict[str, str]]:
    """Where in a study's grid its runs are, from its results.parquet; none without one.

    A run that began after that was written says it by its name, <value>-...-seed<seed>.
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


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """The runs by settings, in the order in which they come; each group named by what differs."""
    kinds: dict[tuple, list[Run]] = {}
    for run in runs:
        own = {k: show_value(v) for k, v in run.settings.items() if not k.startswith(BY_CHANCE)}
        kinds.setdefault(tuple(sorted((own | run.axes).items())), []).append(run)
    tables = [dict(kind) for kind in kinds]
    axes = [axis for run in runs for axis in run.axes]
    every = dict.fromkeys([*axes, *(key for table in tables for key in sorted(table))])
    differ = [key for key in sorted(every, key=_rank)
              if len({table.get(key) for table in tables}) > 1]  # fmt: skip
    naming = _distinguishing(tables, differ)
    groups = []
    for table, members in zip(tables, kinds.values(), strict=True):
        values = {key: table.get(key, "-") for key in naming}
        named = {key: (value, _part(key, value)) for key, value in values.items()}
        name = " · ".join(part for _, part in named.values())
        label = name or table.get("objective.name") or members[0].name
        groups.append(Group(label, tuple(members), named, tuple(differ)))
    return groups


def _distinguishing(tables: Sequence[dict[str, str]], keys: Sequence[str]) -> list[str]:
    """Of the keys as few, from the front, as tell the tables apart."""
    chosen: list[str] = []
    for key in keys:
        kinds = {tuple(table.get(one) for one in chosen) for table in tables}
        more = {tuple(table.get(one) for one in (*chosen, key)) for table in tables}
        if len(more) > len(kinds):
            chosen.append(key)
    return chosen


def _rank(key: str) -> tuple[bool, bool, str]:
    """What names a line first: a study's axes in their order, then what is usually compared."""
    is_axis = key.startswith("axis/")
    return not is_axis, key not in SHORT, "" if is_axis else key


def _part(key: str, value: str) -> str:
    if key in SHORT:
        return SHORT[key].format(value)
    return f"{title_of(key)} {Path(value).name if '/' in value else value}"


def title_of(key: str) -> str:
    """A setting or an axis in a word or two."""
    return key.removeprefix("axis/").removesuffix(".name").rpartition(".")[2].replace("_", " ")


def first_shown(groups: Sequence[Group], *, most: int = 10) -> list[int]:
    """Places of the lines that are shown first: all, or of many those that can be read together.

    They differ in what labels say first alone, as a study's objectives do, and have the most runs.
    """
    every = list(range(len(groups)))
    if len(groups) <= most:
        return every
    alike: dict[tuple, list[int]] = {}
    for place, group in enumerate(groups):
        alike.setdefault(tuple(group.named.values())[1:], []).append(place)
    best = max(alike.values(), key=lambda places: sum(len(groups[p].runs) for p in places))
    return best if len(best) > 1 else every[:most]


def show_value(value: Any) -> str:
    """A setting as it is read."""
    if isinstance(value, float):
        return f"{value:g}"
    return "-" if value is None else str(value)


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
