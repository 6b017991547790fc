"""Study file, and the runs that it defines.

    name: reuse
    base: {...}                # config of a run
    tasks:                     # generated first if they do not exist
      .cache/tasks/sum-62: {task: running_sum, size: 16}
    axes:                      # axis -> value -> settings
      length: {62: {model.path: .cache/tasks/sum-62/model}}
      objective: {pnpo: {objective: {name: pnpo}}, gspo: {objective: {name: gspo}}}
    when:                      # settings of some points, applied after those of the axes
      - {objective: gspo, length: 62, set: {objective.constraint.low: 1.0e-2}}
    seeds: [1, 2, 3]
    cells:                     # points to run, in this order; null: all points
      - {length: 62, objective: [pnpo, gspo], seeds: [1, 2]}
    contrasts: {...}           # primary contrasts: see contrast_plan.py

Runs with the same seed are paired: they start from the same model, use the same prompts in the same
order, and sample with the same seeds.
"""

import copy
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from megatron_rl.config import (
    Config,
    ConfigError,
    Section,
    apply_override,
    expand_dotted_keys,
    explain,
    long_form,
    parse_config,
    read_mapping,
    set_dotted,
    with_absolute_paths,
)
from megatron_rl.config.loading import find_file
from megatron_rl.config.sections import Count, Name, PathText
from megatron_rl.runs.files import ROLLOUT_COST
from research.study.contrast_plan import ContrastPlan, ContrastSection, plan_contrasts
from research.tasks.settings import TaskSettings

PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]*\Z")
NOT_THE_EXPERIMENT = ("run", "logging")  # sections that do not affect results


class StudyFile(Section):
    """Content of a study file."""

    name: Name
    """Name of the study's folder in `dir`."""
    dir: PathText = "runs"
    """Parent of the study's folder."""
    base: dict[str, Any] = Field(default_factory=dict)
    """Config shared by all runs, as sections or dotted settings."""
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Tasks to generate: folder -> settings of `python -m research.tasks`."""
    axes: dict[str, dict[Any, dict[str, Any] | None]] = Field(min_length=1)
    """Axes of the grid: axis -> value -> dotted settings."""
    when: list[dict[str, Any]] = Field(default_factory=list)
    """Conditional settings: axis values, and the dotted settings under `set`."""
    seeds: list[Count] = Field(min_length=1)
    """Seeds of every cell that does not set its own."""
    cells: list[dict[str, Any]] | None = None
    """Points to run: axis -> value or values, and optionally `seeds`; an omitted axis takes all
    values."""
    side_by_side: Count = 1
    """Maximum number of concurrent runs."""
    contrasts: ContrastSection | None = None
    """Primary contrasts, declared before any run; none by default."""
    rollout_cost: float = Field(default=ROLLOUT_COST, gt=0)
    """Cost of a rollout batch in epochs of training, for simulated time in the figures."""


@dataclass(frozen=True)
class PlannedRun:
    """Run of a study."""

    name: str
    point: dict[str, str]  # axis: value
    seed: int
    config: Config
    digest: str  # of the config without `run` and `logging`

    @property
    def folder(self) -> Path:
        """Run directory."""
        return Path(self.config.run.dir) / self.name


@dataclass(frozen=True)
class Study:
    """Parsed study file with its runs in order."""

    file: StudyFile
    runs: list[PlannedRun]
    contrasts: ContrastPlan | None = None
    digest: str = ""  # of the file's bytes: the first 12 digits that sha256sum prints
    overrides: tuple[str, ...] = ()  # settings of every run that the file does not contain

    @property
    def folder(self) -> Path:
        """Folder of the study."""
        return Path(self.file.dir).absolute() / self.file.name


def load_study(path: str | Path, overrides: list[str]) -> Study:
    """Read a study file; `overrides` are key=value settings of every run.

    Raises ConfigError for a wrong file before anything is written.
    """
    try:
        file = StudyFile.model_validate(read_mapping(path, "study", StudyFile))
    except ValidationError as error:
        problems = "\n  ".join(explain(error, StudyFile, file=path))
        raise ConfigError(f"wrong study file {path}:\n  {problems}") from None
    study = plan_study(file, overrides)
    digest = hashlib.sha256(find_file(path, "study").read_bytes()).hexdigest()[:12]
    return replace(study, digest=digest, overrides=tuple(overrides))


def plan_study(file: StudyFile, overrides: list[str]) -> Study:
    """Build the distinct runs that the file defines, with their complete configs."""
    axes = {axis: {str(value): settings or {} for value, settings in values.items()}
            for axis, values in file.axes.items()}  # fmt: skip
    for axis, all_values in axes.items():
        for value in all_values:
            if not PART.match(value):
                raise ConfigError(
                    f"axes.{axis}.{value}: a value becomes a part of a folder's name; use letters, "
                    "digits, . and _"
                )
    _check_tasks(file)
    base = expand_dotted_keys(file.base)
    folder = Path(file.dir).absolute() / file.name
    runs: dict[str, PlannedRun] = {}
    for point, seed in _points(file, axes):
        name = "-".join([*point.values(), f"seed{seed}"])
        values = copy.deepcopy(base)
        for settings in [*(axes[axis][value] for axis, value in point.items()),
                         *_applying(file, axes, point)]:  # fmt: skip
            for key, given in settings.items():
                value = long_form(key, given)
                _check_nothing_is_lost(values, key, value, run=name)
                set_dotted(values, key, copy.deepcopy(value))
        for override in overrides:
            apply_override(values, override)
        values["seed"] = seed
        values.setdefault("run", {}).update(dir=str(folder / "runs"), name=name, resume="auto")
        try:
            config = with_absolute_paths(parse_config(values))
        except ConfigError as error:
            raise ConfigError(f"run {name}: {error}") from None
        runs.setdefault(name, PlannedRun(name, point, seed, config, config_digest(config)))
    contrasts = None
    if file.contrasts is not None:
        values_of = {axis: list(values) for axis, values in axes.items()}
        planned = {(tuple(sorted(run.point.items())), run.seed) for run in runs.values()}
        contrasts = plan_contrasts(file.contrasts, values_of, planned)
    return Study(file, list(runs.values()), contrasts)


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
    """Raise ConfigError if setting a whole section would drop settings made in it before."""
    present: Any = values
    for part in key.split("."):
        present = present.get(part) if isinstance(present, dict) else None
    if isinstance(present, dict) and isinstance(value, dict) and (lost := present.keys() - value):
        raise ConfigError(
            f"run {run}: {key} is given as a whole, without {', '.join(sorted(lost))}, set before; "
            f"give single settings ({key}.{min(value, default='...')}: ...), or all of them"
        )


def config_digest(config: Config) -> str:
    """Return a short hash of every setting that affects results.

    Paths are relative to the working directory, so that another checkout has the same digests.
    """
    values = config.model_dump(exclude=set(NOT_THE_EXPERIMENT))
    text = json.dumps(values, sort_keys=True).replace(json.dumps(f"{os.getcwd()}/")[:-1], '"')
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _points(
    file: StudyFile, axes: dict[str, dict[str, Any]]
) -> Iterator[tuple[dict[str, str], int]]:
    """Yield every point with every seed: cell by cell, and within a cell seed by seed."""
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
    """Return axis -> selected values, in axis order; ConfigError for unknown axes or values."""
    for axis, wanted in selection.items():
        if axis not in axes:
            raise ConfigError(f"{where}: {axis} is no axis; there are {', '.join(axes)}")
        for value in wanted if isinstance(wanted, list) else [wanted]:
            if str(value) not in axes[axis]:
                raise ConfigError(
                    f"{where}: {axis} has no value {value!r}; it has {', '.join(axes[axis])}"
                )
    return {
        axis: [str(value) for value in (wanted if isinstance(wanted, list) else [wanted])]
        for axis in axes
        for wanted in [selection.get(axis, list(axes[axis]))]
    }
