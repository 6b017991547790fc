"""Put the tables of both studies into ../docs/results.md, from their .parquet files.

python -m research.results.tables
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from research.results.runs import Run, read_reuse, read_tolerances
from research.study.statistics import paired_interval
from research.study.study_plan import PlannedRun, load_study

FOLDER = Path(__file__).parent

RESULTS = FOLDER.parent / "docs" / "results.md"
EXAMPLES = FOLDER.parent / "configs"
PUBLISHED = {"low": 0.2, "high": 0.28}  # of GRPO, where a run gives no bounds
RATES = {"0.0002": "2e-4", "0.0004": "4e-4", "0.0008": "8e-4"}


def main() -> None:
    """Each table stands where one with the same heading stood."""
    page = RESULTS.read_text()
    for table in (tolerance_table(), difference_table()):
        heading = table.splitlines()[0]
        start = page.index(heading)
        page = page[:start] + table + page[page.index("\n\n", start) :]
    RESULTS.write_text(page)


def tolerance_table() -> str:
    """A row for each run of the tuning; bold what the study ran with, italic its `_tight` one."""
    study = load_study(EXAMPLES / "study_tolerances.yaml", [])
    bounds = {tuple(run.point.values()): _bounds(run) for run in study.runs}
    lines = [
        "| tokens | objective | low, high | score | reward | spread | accepted | down | ran away |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    taken, found = _taken_bounds(), read_tolerances()
    order = list(dict.fromkeys(point[1] for point in bounds))
    for point in sorted(found, key=lambda p: (int(p[0]), order.index(p[1]), float(p[2]))):
        run, (length, objective, _) = found[point], point
        text = bounds[point]
        mark = "*" * (taken.get((length, f"{objective}_tight")) == text)
        mark = "**" if taken.get((length, objective)) == text else mark
        accepted = min(row["gate/acceptance"] for row in run.rows)
        down = run.rows[0]["gate/rejected_below_negative"]
        lines.append(
            f"| {length} | {objective} | {mark}{text}{mark} | {run.score:.1f} | {run.reward:.1f} "
            f"| {run.spread:.3f} | {accepted:.2f} | {100 * down:.0f} "
            f"| {'yes' if run.ran_away else 'no'} |"
        )
    return "\n".join(lines)


def difference_table() -> str:
    """A row for each point of the study: means, and differences paired by seed."""
    lines = [
        "| tokens | lr | epochs | objective | seeds | score | against pnpo | against gspo "
        "| reward | against pnpo | against gspo | spread | ran away |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    found = read_reuse()
    study = load_study(EXAMPLES / "study_reuse.yaml", [])
    order = list(dict.fromkeys(run.point["objective"] for run in study.runs))
    order.sort(key=lambda objective: not objective.startswith("pnpo"))
    for point in sorted(found, key=lambda p: (*_length(p[0]), p[1], int(p[2]), order.index(p[3]))):
        runs, (length, rate, epochs, objective) = found[point], point
        row = [length.replace("_", ", "), RATES[rate], epochs, objective, _seeds(sorted(runs))]
        for key in ("score", "reward"):
            row.append(f"{statistics.fmean(getattr(run, key) for run in runs.values()):.1f}")
            for other in ("pnpo", "gspo"):
                against = found.get((*point[:3], other), {})
                shown = objective not in ("pnpo", other)
                row.append(describe(differences(runs, against, key)) if shown else "")
        row.append(f"{max(run.spread for run in runs.values()):.3f}")
        row.append(str(sum(run.ran_away for run in runs.values())))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def differences(runs: dict[int, Run], against: dict[int, Run], key: str) -> list[float]:
    """By the seeds that both have."""
    return [getattr(run, key) - getattr(against[seed], key)
            for seed, run in runs.items() if seed in against]  # fmt: skip


def describe(pairs: Sequence[float]) -> str:
    """Their mean with a 95% interval (Student's t); nothing of no pairs."""
    if len(pairs) < 2:
        return "".join(f"{one:+.1f} (one pair)" for one in pairs)
    interval = paired_interval(pairs)
    return f"{interval.mean:+.1f} ± {interval.half_width:.1f}"


def _taken_bounds() -> dict[tuple[str, str], str]:
    """The bounds that each objective of the study ran with, by length and objective."""
    study = load_study(EXAMPLES / "study_reuse.yaml", [])
    return {(run.point["length"], run.point["objective"]): _bounds(run) for run in study.runs}


def _bounds(run: PlannedRun) -> str:
    constraint = run.config.objective.model_dump().get("constraint", PUBLISHED)
    if not isinstance(constraint, dict):
        return f"{constraint}"
    return ", ".join(f"{constraint.get(side, PUBLISHED[side]):.3g}" for side in ("low", "high"))


def _length(name: str) -> tuple[int, str]:
    return int(name.split("_")[0]), name


def _seeds(seeds: Sequence[int]) -> str:
    whole = len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds))


if __name__ == "__main__":
    main()
