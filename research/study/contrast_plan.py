"""Declaration of a study's primary contrasts, in its file, before any run.

contrasts:
  compare: objective          # axis of the contenders
  at: {epochs: 4}             # value of each other axis
  units: model                # one difference per value of this axis, or per seed
  families: {sum: [sum_2, sum_3], rare: [rare_2, rare_3]}   # units that share a choice
  tune: [rate]                # each contender has its best value in each family ...
  pooled: {gspo_tuned: [gspo_low_0.005, gspo_low_0.01]}     # ... and its best variant
  choose: [1]                 # chosen by the mean score of these seeds,
  confirm: [2]                # tested on these, fresh ones
  pairs: [[gspo_tuned, positive_only], [balanced, positive_only]]
  falls: [[pnpo], [gspo_low_0.005, balanced]]
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from megatron_rl.config import ConfigError, Section
from megatron_rl.config.sections import Count

SEED = "seed"
Point = Mapping[str, str]


class ContrastSection(Section):
    """Primary contrasts: contenders, how the rest is chosen, and the runs that test them."""

    pairs: list[tuple[str, str]] = Field(min_length=1)
    """Contrasts, each of two contenders: the first minus the second."""
    compare: str | None = None
    """Axis of the contenders; the last axis by default."""
    at: dict[str, str | int | float] = Field(default_factory=dict)
    """Value of each axis that is neither compared, tuned nor the units."""
    units: str = SEED
    """Axis with one difference per value; `seed`: one per seed of `confirm`."""
    families: dict[str, list[str | int | float]] = Field(default_factory=dict)
    """Units that share a choice; all units by default."""
    tune: list[str] = Field(default_factory=list)
    """Axes of which each contender has its best value, per family."""
    pooled: dict[str, list[str]] = Field(default_factory=dict)
    """Contenders of several values of `compare`, of which the best is chosen too."""
    choose: list[Count] = Field(min_length=1)
    """Seeds whose mean measure makes the choice."""
    confirm: list[Count] = Field(min_length=1)
    """Seeds on which the choice is tested; none of `choose`."""
    measure: Literal["score", "reward"] = "score"
    """Last score, or mean reward over all rollout batches."""
    falls: tuple[list[str], list[str]] | None = None
    """Two groups of values of `compare` whose falls Fisher's exact test compares, over `choose`."""


@dataclass(frozen=True)
class ContrastPlan:
    """Contrasts with every name resolved."""

    section: ContrastSection
    compare: str
    families: dict[str, list[str]]  # family: units; one family without units for `units: seed`
    choices: dict[tuple[str, str], list[dict[str, str]]]  # (family, contender): points but units
    grid: list[dict[str, str]]  # fixed and tuned axes: every point without `compare` and units
    planned: Collection[tuple]  # (sorted point items, seed) of every run

    @property
    def contenders(self) -> list[str]:
        """Contenders of the pairs, each once."""
        return list(dict.fromkeys(itertools.chain(*self.section.pairs)))

    def points(self, family: str, choice: Point) -> list[dict[str, str]]:
        """Return the points of a choice: one per unit of the family."""
        units = self.families[family]
        if self.section.units == SEED:
            return [dict(choice)]
        return [dict(choice) | {self.section.units: unit} for unit in units]


def plan_contrasts(
    section: ContrastSection, axes: Mapping[str, Collection[str]], planned: Collection[tuple]
) -> ContrastPlan:
    """Resolve the declaration against the study's axes and planned runs.

    planned: (sorted point items, seed) of every run. Raises ConfigError if a name is unknown, an
    axis is left open, seeds overlap, or a run that the contrasts need is not planned.
    """
    compare = section.compare or list(axes)[-1]
    _check_axes(section, axes, compare)
    _check_names(section, axes, compare)
    families = {name: [str(unit) for unit in units] for name, units in section.families.items()}
    if section.units == SEED:
        families = {"all": []}
    families = families or {"all": list(axes[section.units])}
    fixed = {axis: str(section.at.get(axis, next(iter(values)))) for axis, values in axes.items()}
    others = [axis for axis in axes if axis not in (compare, section.units)]
    values_of = {axis: axes[axis] if axis in section.tune else [fixed[axis]] for axis in others}
    grid = [dict(zip(values_of, point, strict=True))
            for point in itertools.product(*values_of.values())]  # fmt: skip
    plan = ContrastPlan(section, compare, families, {}, grid, planned)
    for family, contender in itertools.product(families, plan.contenders):
        variants = section.pooled.get(contender, [contender])
        every = [point | {compare: variant} for variant in variants for point in grid]
        chosen = [c for c in every if _is_planned(plan.points(family, c), section.choose, planned)]
        if not chosen:
            raise ConfigError(
                f"contrasts: no run of {contender} in {family} is planned for every unit and every "
                f"seed of choose={section.choose}; add it to `cells` or `seeds`"
            )
        for choice in chosen:
            if not _is_planned(plan.points(family, choice), section.confirm, planned):
                raise ConfigError(
                    f"contrasts: {_text(choice)} may be chosen in {family}, and not every unit has "
                    f"a run of each seed of confirm={section.confirm}; add it to `cells`"
                )
        plan.choices[family, contender] = chosen
    return plan


def _check_axes(
    section: ContrastSection, axes: Mapping[str, Collection[str]], compare: str
) -> None:
    named = {"compare": [compare], "tune": section.tune, "at": list(section.at),
             "units": [section.units] if section.units != SEED else []}  # fmt: skip
    for key, some in named.items():
        for axis in some:
            if axis not in axes:
                raise ConfigError(
                    f"contrasts.{key}: {axis} is no axis; there are {', '.join(axes)}"
                )
    used = list(itertools.chain(*named.values()))
    for axis, values in axes.items():
        if used.count(axis) > 1:
            raise ConfigError(
                f"contrasts: {axis} is named {used.count(axis)} times; give it in one of compare, "
                "units, tune and at"
            )
        if axis not in used and len(values) > 1:
            raise ConfigError(
                f"contrasts: {axis} has {len(values)} values; fix it in `at`, or add it to `tune`"
            )
    if shared := set(section.choose) & set(section.confirm):
        raise ConfigError(
            f"contrasts.confirm: seed {min(shared)} is also in choose; what was chosen on a seed "
            "must be tested on others"
        )


def _check_names(
    section: ContrastSection, axes: Mapping[str, Collection[str]], compare: str
) -> None:
    selections: list[tuple[str, str, Sequence[object]]]
    selections = [(f"at.{axis}", axis, [value]) for axis, value in section.at.items()]
    selections += [(f"pooled.{name}", compare, list(v)) for name, v in section.pooled.items()]
    selections += [("falls", compare, list(group)) for group in section.falls or ()]
    single = [name for pair in section.pairs for name in pair if name not in section.pooled]
    selections.append(("pairs", compare, single))
    if section.units != SEED:
        selections += [
            (f"families.{name}", section.units, u) for name, u in section.families.items()
        ]
        units = [str(unit) for some in section.families.values() for unit in some]
        if repeated := {unit for unit in units if units.count(unit) > 1}:
            raise ConfigError(f"contrasts.families: {min(repeated)} is in more than one family")
        if units and (missing := [unit for unit in axes[section.units] if unit not in units]):
            raise ConfigError(f"contrasts.families: {missing[0]} is in no family; add it to one")
    elif section.families:
        raise ConfigError("contrasts.families: needs `units`, the axis whose values it groups")
    for name in section.pooled:
        if name in axes[compare]:
            raise ConfigError(f"contrasts.pooled.{name}: {compare} has a value of this name")
    for where, axis, values in selections:
        for value in values:
            if str(value) not in axes[axis]:
                raise ConfigError(
                    f"contrasts.{where}: {axis} has no value {value}; it has "
                    f"{', '.join(axes[axis])}"
                )
    for first, second in section.pairs:
        if first == second:
            raise ConfigError(f"contrasts.pairs: {first} is compared with itself")


def _is_planned(points: list[dict[str, str]], seeds: list[int], planned: Collection[tuple]) -> bool:
    keys = ((tuple(sorted(point.items())), seed) for point in points for seed in seeds)
    return all(key in planned for key in keys)


def _text(point: Point) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in point.items())
