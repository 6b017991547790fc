"""Bias of objectives' expected gradients relative to grad J, by exact enumeration.

A vocabulary of 3 symbols and a horizon of 4 or 6 give 81 or 729 responses. Prints the tables and
draws the figure of research/docs/objectives.md:

    python -m research.tools.objective_bias
"""

import argparse
from pathlib import Path

import torch

from megatron_rl.objectives import build_objective
from tests.unit.objectives.response_tree import (
    DISTILLED,
    distill,
    distillation_gradient,
    distiller,
    make_task,
    relative_bias,
    weight_alone,
)

WEIGHTS = (
    "token",
    "prefix_mean",
    "prefix_min",
    "prefix_product",
    "sequence_mean",
    "sequence_product",
)
NAMED = ("pnpo", "gspo", "grpo", "ctpo", "minpro")
DRIFTS = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)


def measure(horizon: int, tasks: int) -> dict[str, list[float]]:
    """Compute the mean relative bias at every drift, per weight and per named objective."""
    objectives = {f"weight {weight}": weight_alone(weight) for weight in WEIGHTS}
    objectives |= {name: build_objective(name) for name in NAMED}
    # Bounds depend on the lengths and steps of a run: PNPO's for 15k tokens are tight here.
    wide = {"low": 7e-2, "high": 9.5e-2}
    objectives["pnpo, one-sided"] = build_objective("pnpo", constraint={"sided": "advantage"})
    objectives["pnpo, tolerances x 100"] = build_objective("pnpo", constraint=wide)
    objectives["pnpo, x 100, one-sided"] = build_objective(
        "pnpo", constraint={**wide, "sided": "advantage"}
    )
    table: dict[str, list[float]] = {name: [] for name in objectives}
    for drift in DRIFTS:
        sums = dict.fromkeys(objectives, 0.0)
        for seed in range(tasks):
            task = make_task(vocabulary=3, horizon=horizon, ends=False, seed=seed)
            generator = torch.Generator().manual_seed(1000 + seed)
            shape = (task.state_count, task.vocabulary)
            behavior = torch.randn(shape, dtype=torch.float64, generator=generator)
            direction = torch.randn(shape, dtype=torch.float64, generator=generator)
            for name, objective in objectives.items():
                sums[name] += relative_bias(task, objective, behavior + drift * direction, behavior)
        for name in objectives:
            table[name].append(sums[name] / tasks)
    return table


def measure_distillation(horizon: int, tasks: int) -> dict[str, list[float]]:
    """Compute the mean relative bias of distillation under reuse, and at the end its variance.

    Relative to the gradient at the policy's own prefixes; the variance, of one response's gradient
    at a drift of 0.3, is relative to the squared norm of that gradient.
    """
    table: dict[str, list[float]] = {name: [0.0] * (len(DRIFTS) + 1) for name in DISTILLED}
    for seed in range(tasks):
        task = make_task(vocabulary=3, horizon=horizon, ends=False, seed=seed)
        generator = torch.Generator().manual_seed(2000 + seed)
        shape = (3, task.state_count, task.vocabulary)
        behavior, direction, teacher = torch.randn(shape, dtype=torch.float64, generator=generator)
        for place, drift in enumerate(DRIFTS):
            policy = behavior + drift * direction
            truth = distillation_gradient(task, policy, teacher)
            for name, row in table.items():
                got = distill(
                    task, distiller(name), policy=policy, behavior=behavior, teacher=teacher
                )
                row[place] += float((got.mean - truth).norm() / truth.norm()) / tasks
                if drift == 0.3:
                    row[-1] += got.variance / float(truth.square().sum()) / tasks
    return table


def print_table(table: dict[str, list[float]], horizon: int) -> None:
    """Format the table in Markdown."""
    print(f"\n| horizon {horizon}, drift | " + " | ".join(f"{d:g}" for d in DRIFTS) + " |")
    print("|---|" + "---|" * len(DRIFTS))
    for name, biases in table.items():
        print(f"| {name} | " + " | ".join(f"{bias:.2g}" for bias in biases) + " |")


def plot(tables: dict[int, dict[str, list[float]]], out: Path) -> None:
    """Draw one panel per horizon, bias over drift on logarithmic axes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "objective_bias"  # the same file on every run
    figure, axes = pyplot.subplots(1, len(tables), figsize=(11, 5), sharey=True)
    for axis, (horizon, table) in zip(axes, tables.items(), strict=True):
        for name, biases in table.items():
            if name == "weight sequence_product":
                continue  # exact: a line at 1e-15
            style = "-" if name.startswith("weight") else "--"
            axis.loglog(DRIFTS, biases, style, marker=".", label=name)
        axis.set_title(f"horizon {horizon}")
        axis.set_xlabel("drift of the logits (standard deviation)")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative bias of the expected gradient")
    axes[-1].legend(fontsize=7)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("research/docs/objective_bias.svg"))
    parser.add_argument("--tasks", type=int, default=20)
    arguments = parser.parse_args()
    tables = {horizon: measure(horizon, arguments.tasks) for horizon in (4, 6)}
    for horizon, table in tables.items():
        print_table(table, horizon)
    plot(tables, arguments.out)
    print("\nDistillation; the last column is the relative variance at a drift of 0.3")
    for horizon in (4, 6):
        print(f"\n| horizon {horizon}, drift | {' | '.join(f'{d:g}' for d in DRIFTS)} | variance |")
        print("|---|" + "---|" * (len(DRIFTS) + 1))
        for name, row in measure_distillation(horizon, 4).items():
            print(f"| {name} | " + " | ".join(f"{value:.2g}" for value in row) + " |")


if __name__ == "__main__":
    main()
