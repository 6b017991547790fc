"""Tables of a study's primary contrasts: choices, tests on fresh seeds, and falls."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from research.study.contrast_plan import SEED, ContrastPlan, Point
from research.study.statistics import (
    LEVEL,
    fisher_p,
    holm,
    paired_interval,
    student_p,
    wilcoxon_p,
)
from research.study.summary import Outcome


@dataclass(frozen=True)
class Contrast:
    """One planned contrast; without p as long as a run of it is missing."""

    pair: tuple[str, str]
    differences: dict[str, float]  # unit: first minus second
    units: int
    p: float | None = None
    p_ranks: float | None = None


class ContrastTables:
    """Primary contrasts of the runs that are done.

    A choice is made only when all runs that it depends on are done, and a test only when all units
    have their differences: an early reading changes neither.
    """

    def __init__(self, plan: ContrastPlan, outcomes: Sequence[Outcome]) -> None:
        self.plan = plan
        self._outcomes = {(_key(it.point), it.seed): it for it in outcomes}
        self._chosen = {key: self._choose(*key) for key in plan.choices}

    def render(self) -> str:
        """Return the tables as Markdown."""
        parts = [self._choice_table(), self._contrast_table(), self._fall_table()]
        return "\n".join(part for part in parts if part)

    def contrasts(self) -> list[Contrast]:
        """Return the planned contrasts, in order."""
        return [self._contrast(pair) for pair in self.plan.section.pairs]

    def _values(self, family: str, choice: Point, seeds: Sequence[int]) -> dict[str, list[float]]:
        """Return the measure of the done runs, by unit."""
        values: dict[str, list[float]] = {}
        for point in self.plan.points(family, choice):
            for seed in seeds:
                if (outcome := self._outcomes.get((_key(point), seed))) is not None:
                    unit = self.plan.section.units
                    name = f"seed {seed}" if unit == SEED else point[unit]
                    values.setdefault(name, []).append(getattr(outcome, self.plan.section.measure))
        return values

    def _mean(self, family: str, choice: Point) -> tuple[float | None, int, int]:
        """Return the mean measure over the seeds of `choose`, the runs done, and those planned."""
        seeds = self.plan.section.choose
        values = [v for some in self._values(family, choice, seeds).values() for v in some]
        planned = len(self.plan.points(family, choice)) * len(seeds)
        return (statistics.fmean(values) if values else None), len(values), planned

    def _choose(self, family: str, contender: str) -> dict[str, str] | None:
        """Return the best choice; the first one of equals, None while a run is missing."""
        means = []
        for choice in self.plan.choices[family, contender]:
            mean, done, planned = self._mean(family, choice)
            if mean is None or done < planned:
                return None
            means.append(mean)
        return self.plan.choices[family, contender][means.index(max(means))]

    def _contrast(self, pair: tuple[str, str]) -> Contrast:
        section, units = self.plan.section, 0
        differences: dict[str, float] = {}
        for family in self.plan.families:
            count = len(self.plan.families[family]) or len(section.confirm)
            units += count
            per_unit = 1 if section.units == SEED else len(section.confirm)
            choices = [self._chosen[family, contender] for contender in pair]
            if choices[0] is None or choices[1] is None:
                continue
            first, second = (self._values(family, choice, section.confirm)
                             for choice in choices if choice is not None)  # fmt: skip
            for unit in first:
                if len(first[unit]) == len(second.get(unit, [])) == per_unit:
                    difference = statistics.fmean(first[unit]) - statistics.fmean(second[unit])
                    differences[unit] = difference
        values = list(differences.values())
        if len(values) < units or units < 2:
            return Contrast(pair, differences, units)
        return Contrast(pair, differences, units, student_p(values), wilcoxon_p(values))

    def _choice_table(self) -> str:
        """Return the best value of every contender in every family, with all means."""
        seeds = ", ".join(map(str, self.plan.section.choose))
        lines = [f"## Choices, by the mean {self.plan.section.measure} of seed {seeds}", "",
                 "| family | contender | chosen | mean of every candidate (runs done) |",
                 "|---|---|---|---|"]  # fmt: skip
        for (family, contender), chosen in self._chosen.items():
            cells = []
            for choice in self.plan.choices[family, contender]:
                mean, done, planned = self._mean(family, choice)
                text = "-" if mean is None else f"{100 * mean:.1f}"
                count = "" if done == planned else f" ({done} of {planned})"
                cells.append(f"{self._name(contender, choice)}: {text}{count}")
            name = self._name(contender, chosen) if chosen else "not all runs are done"
            lines.append(f"| {family} | {contender} | {name} | {'; '.join(cells)} |")
        return "\n".join(lines) + "\n"

    def _name(self, contender: str, choice: Point) -> str:
        compare, tuned = self.plan.compare, self.plan.section.tune
        parts = [choice[compare]] if contender != choice[compare] else []
        parts += [f"{axis} {choice[axis]}" for axis in choice if axis in tuned]
        return ", ".join(parts) or choice[compare]

    def _contrast_table(self) -> str:
        section, found = self.plan.section, self.contrasts()
        seeds = ", ".join(map(str, section.confirm))
        lines = [
            f"## Primary contrasts: {section.measure}, each at its choice, on seed {seeds}", "",
            "| contrast | mean ± 95% (units) | p (Student) | p (Holm) | p (Wilcoxon) | by unit |",
            "|---|---|---|---|---|---|",
        ]  # fmt: skip
        whole = [contrast.p for contrast in found if contrast.p is not None]
        adjusted = iter(holm(whole) if len(whole) == len(found) else [])
        for contrast in found:
            p, ranks = (_p(value) for value in (contrast.p, contrast.p_ranks))
            corrected = next(adjusted, None)
            mark = " *" if corrected is not None and corrected < LEVEL else ""
            values = list(contrast.differences.values())
            mean = str(paired_interval(values)) if contrast.p is not None else (
                f"{len(values)} of {contrast.units} units are done"
            )  # fmt: skip
            units = ", ".join(f"{u} {100 * v:+.1f}" for u, v in contrast.differences.items())
            lines.append(f"| {' - '.join(contrast.pair)} | {mean} | {p} | {_p(corrected)}{mark} "
                         f"| {ranks} | {units} |")  # fmt: skip
        lines += ["", f"Holm's correction is over these {len(found)}; * is below {LEVEL:g}."]
        return "\n".join(lines) + "\n"

    def _fall_table(self) -> str:
        section = self.plan.section
        if section.falls is None:
            return ""
        counts, planned = [], 0
        lines = ["## Falls of 20 points", "", "| group | runs that fell |", "|---|---|"]
        for group in section.falls:
            runs = list(self._runs(group))
            planned += len(runs)
            done = [run for run in runs if run is not None]
            counts.append((sum(run.has_fallen for run in done), len(done)))
            left = "" if len(done) == len(runs) else f" ({len(runs)} are planned)"
            lines.append(f"| {', '.join(group)} | {counts[-1][0]} of {counts[-1][1]}{left} |")
        if sum(count for _, count in counts) == planned:
            lines += ["", f"Fisher's exact test, two-sided: p = {_p(fisher_p(*counts))}."]
        return "\n".join(lines) + "\n"

    def _runs(self, group: Sequence[str]) -> Iterator[Outcome | None]:
        """Yield the outcome of every planned run of these values, over the seeds of `choose`."""
        for family in self.plan.families:
            for grid in self.plan.grid:
                for value in group:
                    for point in self.plan.points(family, {**grid, self.plan.compare: value}):
                        for seed in self.plan.section.choose:
                            if (_key(point), seed) in self.plan.planned:
                                yield self._outcomes.get((_key(point), seed))


def _key(point: Point) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(point.items()))


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"
