"""The third study, a pretrained model: choices and tables from its stored runs.

choose   print the learning rate and the tolerances that the runs of seed 9 give
tables   print outcomes, primary contrasts, and what a level of reward costs

The plan is in research/docs/third-study.md; `python -m research.study FILE --store` stores runs.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from research.study.statistics import holm, paired_interval, student_p
from research.study.storing import Rows, by_run, read_stored

FOLDER = Path(__file__).parent
LAST = 3  # rollout batches whose mean reward chooses a rate
PROPORTION = 1.36  # of the upper to the lower tolerance, the paper's
LEVELS = (0.4, 0.6)  # of reward, the mean of two rollout batches
BATCHES = {"4": 10, "1": 40}  # rollout batches of a run, by epochs
ORDER = ("pnpo", "gspo", "grpo", "balanced", "pnpo_one_sided")
# Objective, epochs and rollout batches of both sides; the first minus the second.
PRIMARY = (
    (("pnpo", "4", 10), ("gspo", "4", 10)),
    (("pnpo", "4", 10), ("grpo", "4", 10)),
    (("pnpo", "4", 10), ("pnpo", "1", 10)),
    (("pnpo", "4", 10), ("pnpo", "1", 40)),
)
Runs = Mapping[tuple[str, str, int], Rows]  # by objective, epochs and seed
Side = tuple[str, str, int]


def trained(rows: Rows) -> Rows:
    """Return the rows of rollout batches, without the row before training."""
    return [row for row in rows if row["step"] > 0]


def score(rows: Rows, batches: int) -> float:
    """Return the held-out avg@2 after so many rollout batches."""
    (found,) = [row["eval/heldout/avg@2"] for row in rows if row["step"] == batches]
    return float(found)


def cost(rows: Rows, level: float) -> tuple[int, int] | None:
    """Return rollout batches and generated tokens until a level of reward; None if never reached.

    It is reached with the first batch whose reward has, with the batch before, a mean of `level`.
    A batch is generated before it is trained on, and no question comes twice in a run.
    """
    tokens, before = 0, None
    for row in trained(rows):
        tokens += int(row["rollout/tokens"])
        if before is not None and (before + row["reward/mean"]) / 2 >= level:
            return int(row["step"]), tokens
        before = row["reward/mean"]
    return None


def spread(rows: Rows) -> float:
    """Return the spread of log w_L in the last epoch, the mean over batches at the full rate.

    Batches without any advantage, on which nothing was trained, have no such metric.
    """
    key = f"epoch_{rows[0]['axis/epochs']}/by_fraction/1.0/prefix_mean_log_std"
    full = max(row["optimizer/learning_rate"] for row in trained(rows))
    some = [row for row in trained(rows) if key in row]
    at_full = [row[key] for row in some if row["optimizer/learning_rate"] == full]
    return statistics.fmean(at_full)


def choose(stored: Rows) -> list[str]:
    """Return a line for each run of seed 9, and the choice for each number of epochs."""
    lines, found = [], {}
    for rows in by_run(stored).values():
        epochs, rate = rows[0]["axis/epochs"], rows[0]["axis/rate"]
        reward = statistics.fmean(row["reward/mean"] for row in trained(rows)[-LAST:])
        found[epochs, rate] = reward, spread(rows)
        lines.append(f"| {epochs} | {rate} | {100 * reward:.1f} | {found[epochs, rate][1]:.2g} |")
    for epochs in sorted({epochs for epochs, _ in found}):
        # The smaller rate of equal ones.
        best = max(
            (rate for one, rate in found if one == epochs),
            key=lambda rate: (found[epochs, rate][0], -float(rate)),
        )
        low = found[epochs, best][1]
        lines.append(f"{epochs} epochs: {best}, low {low:.2g}, high {PROPORTION * low:.2g}")
    return lines


def read_runs(stored: Rows) -> Runs:
    """Return the rows of each stored run by objective, epochs and seed."""
    return {
        (rows[0]["axis/objective"], rows[0]["axis/epochs"], rows[0]["seed"]): rows
        for rows in by_run(stored).values()
    }


def differences(runs: Runs, first: Side, second: Side) -> dict[int, float]:
    """Return the difference of scores of each seed that has both runs."""
    seeds = sorted({seed for _, _, seed in runs})
    return {
        seed: score(runs[*first[:2], seed], first[2]) - score(runs[*second[:2], seed], second[2])
        for seed in seeds
        if (*first[:2], seed) in runs and (*second[:2], seed) in runs
    }


def outcome_lines(runs: Runs) -> list[str]:
    """Return one row for each objective and number of epochs: means over its seeds."""
    lines = []
    for epochs, batches in BATCHES.items():
        for objective in ORDER:
            some = [rows for key, rows in sorted(runs.items()) if key[:2] == (objective, epochs)]
            if not some:
                continue
            after = range(0, batches + 1, batches // (2 if epochs == "4" else 4))
            scores = [100 * statistics.fmean(score(rows, n) for rows in some) for n in after]
            reward = statistics.fmean(
                statistics.fmean(row["reward/mean"] for row in trained(rows)) for rows in some
            )
            costs = [_costs([cost(rows, level) for rows in some]) for level in LEVELS]
            lines.append(
                f"| {epochs} | {objective} | {len(some)} | "
                f"{', '.join(f'{value:.1f}' for value in scores)} | {100 * reward:.1f} | "
                f"{' | '.join(costs)} |"
            )
    return lines


def _costs(found: Sequence[tuple[int, int] | None]) -> str:
    """Return batches and thousands of tokens of each run."""
    return ", ".join(f"{one[0]} ({one[1] / 1000:.0f}k)" if one else "never" for one in found)


def contrast_lines(runs: Runs) -> list[str]:
    """Return one row for each primary contrast; Holm's correction only when all can be tested."""
    found = [list(differences(runs, *pair).values()) for pair in PRIMARY]
    ps = [student_p(one) if len(one) > 1 else None for one in found]
    known = [p for p in ps if p is not None]
    adjusted = holm(known) if len(known) == len(ps) else None
    lines = []
    for number, (pair, some, p) in enumerate(zip(PRIMARY, found, ps, strict=True)):
        name = " - ".join(f"{objective}, {epochs} x {n}" for objective, epochs, n in pair)
        test = "" if p is None else f"{p:.2g}" + (f" ({adjusted[number]:.2g})" if adjusted else "")
        lines.append(f"| {name} | {paired_interval(some) if some else ''} | {test} |")
    return lines


def main() -> None:
    """Run the command."""
    if sys.argv[1] == "choose":
        print("\n".join(choose(read_stored(FOLDER / "real_model_rates.parquet"))))
        return
    runs = read_runs(read_stored(FOLDER / "real_model.parquet"))
    print("\n".join([*outcome_lines(runs), "", *contrast_lines(runs)]))


if __name__ == "__main__":
    main()
