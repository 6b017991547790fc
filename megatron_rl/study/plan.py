"""A study file, and the runs that it asks for.

    name: reuse
    base: {...}                # a config, as of a run
    tasks:                     # made first, where they are not there
      .cache/tasks/sum-62: {task: running_sum, size: 16}
    axes:                      # each value: the settings that make it
      length: {62: {model.path: .cache/tasks/sum-62/model}}
      objective: {pnpo: {objective: {name: pnpo}}, gspo: {objective: {name: gspo}}}
    when:                      # settings of some points only, after those of the axes
      - {objective: gspo, length: 62, set: {objective.constraint.low: 1.0e-2}}
    seeds: [1, 2, 3]
    cells:                     # which points, in this order; null: all of them
      - {length: 62, objective: [pnpo, gspo], seeds: [1, 2]}

Runs with the same seed are paired: they begin with the same model and see the same prompts in the
same order, and every random choice of the sampling comes from the same seeds.
"""

import copy
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from megatron_rl.config import (
    Config,
    ConfigError,
    Section,
    apply_override,
    explain,
    parse_config,
    put,
    read_mapping,
    with_absolute_paths,
)
from megatron_rl.config.sections import Count, Name
from megatron_rl.tasks.settings import TaskSettings

PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]*\Z")
NOT_THE_EXPERIMENT = ("run", "logging")  # sections that change nothing of what is found


class StudyFile(Section):
    """The content of a study file."""

    name: Name
    """the study's folder in `dir`"""
    dir: str = "runs"
    """where the study's folder is"""
    base: dict[str, Any] = Field(default_factory=dict)
    """sections of a config"""
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """folder: settings of `megatron-rl task`"""
    axes: dict[str, dict[Any, dict[str, Any] | None]] = Field(min_length=1)
    """axis: value: dotted settings"""
    when: list[dict[str, Any]] = Field(default_factory=list)
    """axis values and `set`"""
    seeds: list[Count] = Field(min_length=1)
    """of every cell that names none"""
    cells: list[dict[str, Any]] | None = None
    """axis: value or values, left out: all of them; `seeds`"""
    side_by_side: Count = 1
    """runs at once"""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    name: str
    point: dict[str, str]  # axis: value
    seed: int
    config: Config
    digest: str  # of the config without where it lies and what it logs

    @property
    def folder(self) -> Path:
        """Its run directory."""
        return Path(self.config.run.dir) / self.name


@dataclass(frozen=True)
class Study:
    """A study file that was read, and its runs in their order."""

    file: StudyFile
    runs: list[PlannedRun]

    @property
    def folder(self) -> Path:
        """Where everything of the study lies."""
        return Path(self.file.dir).absolute() / self.file.name


def load_study(path: str | Path, overrides: list[str]) -> Study:
    """The study in a YAML file; `overrides` are settings of every run, key=value.

    Raises ConfigError that names what is wrong, before anything is made.
    """
    try:
        file = StudyFile.model_validate(read_mapping(path, "study"))
    except ValidationError as error:
        problems = "\n  ".join(explain(error, StudyFile))
        raise ConfigError(f"wrong study file {path}:\n  {problems}") from None
    return plan_study(file, overrides)


def plan_study(file: StudyFile, overrides: list[str]) -> Study:
    """Every run that the file asks for, once, with its complete config."""
    axes = {axis: {str(value): settings or {} for value, settings in values.items()}
            for axis, values in file.axes.items()}  # fmt: skip
    for axis, every in axes.items():
        for value in every:
            if not PART.match(value):
                raise ConfigError(
                    f"axes.{axis}.{value}: a value becomes a part of a folder's name; use letters, "
                    "digits, . and _"
                )
    _check_tasks(file)
    folder = Path(file.dir).absolute() / file.name
    runs: dict[str, PlannedRun] = {}
    for point, seed in _points(file, axes):
        name = "-".join([*point.values(), f"seed{seed}"])
        values: dict[str, Any] = copy.deepcopy(file.base)
        for settings in [*(axes[axis][value] for axis, value in point.items()),
                         *_applying(file, axes, point)]:  # fmt: skip
            for key, value in settings.items():
                _check_nothing_is_lost(values, key, value, run=name)
                put(values, key, copy.deepcopy(value))
        for override in overrides:
            apply_override(values, override)
        values["seed"] = seed
        values.setdefault("run", {}).update(dir=str(folder / "runs"), name=name, resume="auto")
        try:
            config = with_absolute_paths(parse_config(values))
        except ConfigError as error:
            raise ConfigError(f"run {name}: {error}") from None
        runs.setdefault(name, PlannedRun(name, point, seed, config, config_digest(config)))
    return Study(file, list(runs.values()))


def _check_tasks(file: StudyFile) -> None:
    for folder, settings in file.tasks.items():
        try:
            TaskSettings(**settings)
        except (TypeError, ValueError) as error:
            known = ", ".join(field.name for field in fields(TaskSettings))
            raise ConfigError(
                f"tasks.{folder}: {error}; the settings of a task are {known}"
            ) from None


def _check_nothing_is_lost(values: dict[str, Any], key: str, value: Any, *, run: str) -> None:
    """ConfigError where a section that is set as a whole would drop what is set in it already."""
    present: Any = values
    for part in key.split("."):
        present = present.get(part) if isinstance(present, dict) else None
    if isinstance(present, dict) and isinstance(value, dict) and (lost := present.keys() - value):
        raise ConfigError(
            f"run {run}: {key} is given as a whole, without {', '.join(sorted(lost))}, set before; "
            f"give single settings ({key}.{min(value, default='...')}: ...), or all of them"
        )


def config_digest(config: Config) -> str:
    """A short hash of every setting that decides what a run finds.

    Paths count from the present folder, so that a checkout elsewhere has the same digests.
    """
    values = config.model_dump(exclude=set(NOT_THE_EXPERIMENT))
    text = json.dumps(values, sort_keys=True).replace(json.dumps(f"{os.getcwd()}/")[:-1], '"')
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _points(
    file: StudyFile, axes: dict[str, dict[str, Any]]
) -> Iterator[tuple[dict[str, str], int]]:
    """Every point with every seed, cell after cell; within one all points of a seed together."""
    for number, cell in enumerate(file.cells if file.cells is not None else [{}]):
        where = f"cells[{number}]"
        chosen = _chosen({k: v for k, v in cell.items() if k != "seeds"}, axes, where)
        seeds = cell.get("seeds", file.seeds)
        if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds):
            raise ConfigError(f"{where}.seeds={seeds!r}: must be a list of whole numbers")
        for seed in seeds:
            for values in itertools.product(*chosen.values()):
                yield dict(zip(chosen, values, strict=True)), seed


def _applying(
    file: StudyFile, axes: dict[str, dict[str, Any]], point: dict[str, str]
) -> list[dict[str, Any]]:
    settings = []
    for number, rule in enumerate(file.when):
        where = f"when[{number}]"
        if not isinstance(rule.get("set"), dict):
            raise ConfigError(f"{where}: needs `set`, a mapping of dotted settings")
        chosen = _chosen({k: v for k, v in rule.items() if k != "set"}, axes, where)
        if all(point[axis] in values for axis, values in chosen.items()):
            settings.append(rule["set"])
    return settings


def _chosen(
    selection: dict[str, Any], axes: dict[str, dict[str, Any]], where: str
) -> dict[str, list[str]]:
    """Axis: values, in the order of the axes; ConfigError for what no axis has."""
    for axis, asked in selection.items():
        if axis not in axes:
            raise ConfigError(f"{where}: {axis} is no axis; there are {', '.join(axes)}")
        for value in asked if isinstance(asked, list) else [asked]:
            if str(value) not in axes[axis]:
                raise ConfigError(
                    f"{where}: {axis} has no value {value!r}; it has {', '.join(axes[axis])}"
                )
    return {
        axis: [str(value) for value in (asked if isinstance(asked, list) else [asked])]
        for axis in axes
        for asked in [selection.get(axis, list(axes[axis]))]
    }
