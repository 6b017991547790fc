"""Bias of objectives' expected gradients relative to grad J, by exact enumeration.

A vocabulary of 3 symbols and a horizon of 4 or 6 give 81 or 729 responses; behavior and policy
are softmax tables over every prefix, rewards are random. Every response is enumerated with its
probability, so expectations are sums. Writes the table and figure of docs/objectives.md:

    python tools/objective_bias.py --out docs/assets/objective_bias.svg
"""

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import Objective, ObjectiveSpec, TokenInputs, build_objective
from megatron_rl.objectives.spec import Unconstrained
from megatron_rl.types import Denominators

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


@dataclass(frozen=True)
class Task:
    """All responses of a small tree, with rewards; symbol 0 ends a response if `ends`."""

    tokens: Tensor  # [N, H] symbols; 0 after the end
    states: Tensor  # [N, H] row of the policy table for each position
    mask: Tensor  # [N, H] bool
    rewards: Tensor  # [N]
    state_count: int
    vocabulary: int


def make_task(*, vocabulary: int, horizon: int, ends: bool, seed: int) -> Task:
    """Enumerate the tree's responses and draw their rewards."""
    rows: dict[tuple[int, ...], int] = {}
    responses = []
    for symbols in itertools.product(range(vocabulary), repeat=horizon):
        length = symbols.index(0) + 1 if ends and 0 in symbols else horizon
        if any(symbols[length:]):
            continue  # the same response as the one padded with zeros
        states = [rows.setdefault(symbols[:t], len(rows)) for t in range(length)]
        responses.append((symbols, states + [0] * (horizon - length), length))
    lengths = torch.tensor([length for _, _, length in responses])
    generator = torch.Generator().manual_seed(seed)
    return Task(
        tokens=torch.tensor([symbols for symbols, _, _ in responses]),
        states=torch.tensor([states for _, states, _ in responses]),
        mask=torch.arange(horizon) < lengths[:, None],
        rewards=torch.randn(len(responses), dtype=torch.float64, generator=generator),
        state_count=len(rows),
        vocabulary=vocabulary,
    )


def token_logprobs(task: Task, table: Tensor) -> Tensor:
    """Compute log pi(y_t | y_<t) of every response from a logit table; [N, H], 0 after the end."""
    logprobs = torch.log_softmax(table, dim=-1)[task.states, task.tokens]
    return torch.where(task.mask, logprobs, 0)


def expected_return(task: Task, table: Tensor) -> Tensor:
    """Compute J, the sum over responses of pi(y) R(y); []."""
    return (token_logprobs(task, table).sum(dim=1).exp() * task.rewards).sum()


def true_gradient(task: Task, table: Tensor) -> Tensor:
    """Compute grad J by differentiating the finite sum; like `table`."""
    table = table.detach().requires_grad_()
    return torch.autograd.grad(expected_return(task, table), table)[0]


def position_advantages(task: Task, table: Tensor) -> Tensor:
    """Compute A_t(s_t, y_t) = Q - V of the table's policy for every response; [N, H]."""
    logprobs = token_logprobs(task, table)
    horizon = task.tokens.shape[1]
    values = [expected_return(task, table).expand(len(task.tokens))]  # V of the empty prefix
    for t in range(1, horizon + 1):  # V of the prefix of length t: expected reward given y_<=t
        _, group = torch.unique(task.tokens[:, :t], dim=0, return_inverse=True)
        rest = logprobs[:, t:].sum(dim=1).exp()
        count = int(group.max()) + 1
        value = torch.zeros(count, dtype=torch.float64)
        values.append(value.index_add_(0, group, rest * task.rewards)[group])
    return torch.stack([values[t + 1] - values[t] for t in range(horizon)], dim=1)


def expected_gradient(
    task: Task, objective: Objective, *, policy: Tensor, behavior: Tensor, advantages: Tensor
) -> Tensor:
    """Compute the objective's expected ascent direction over y ~ behavior; like `policy`.

    The objective sees all responses as one pack; each one's loss is then weighted by its
    probability. Aggregations divide by 1 response or 1 token, and for a mean over L tokens the
    result is multiplied by L: on fixed lengths all aggregations then have the same scale.
    """
    table = policy.detach().requires_grad_()
    logprobs = token_logprobs(task, table)
    with torch.no_grad():
        behavior_logprobs = token_logprobs(task, behavior)
        probability = behavior_logprobs.sum(dim=1).exp()
    count, horizon = task.tokens.shape
    result = objective(
        TokenInputs(
            policy_logprobs=logprobs.reshape(-1),
            behavior_logprobs=behavior_logprobs.reshape(-1),
            advantages=advantages.reshape(-1),
        ),
        layout=SequenceLayout([horizon] * count, task.mask.reshape(-1)),
        denominators=Denominators(responses=1.0, tokens=1.0),
    )
    per_response = result.loss.view(count, horizon).sum(dim=1)
    if objective.spec.aggregation == "response_mean":
        per_response = per_response * task.mask.sum(dim=1)
    return -torch.autograd.grad((probability * per_response).sum(), table)[0]


def weight_alone(weight: str) -> Objective:
    """Return an objective with this weight, no constraint, and a sum over tokens."""
    return Objective(
        ObjectiveSpec(
            weight=weight,
            constraint=Unconstrained(),
            gradient="detached",
            aggregation="response_sum",
        )
    )


def relative_bias(task: Task, objective: Objective, policy: Tensor, behavior: Tensor) -> float:
    """Compute ||E[g] - grad J|| / ||grad J|| with the outcome advantage R - E_behavior[R]."""
    baseline = expected_return(task, behavior)
    advantages = (task.rewards - baseline)[:, None].expand(task.tokens.shape)
    gradient = expected_gradient(
        task, objective, policy=policy, behavior=behavior, advantages=advantages
    )
    truth = true_gradient(task, policy)
    return float((gradient - truth).norm() / truth.norm())


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
    parser.add_argument("--out", type=Path, default=Path("docs/assets/objective_bias.svg"))
    parser.add_argument("--tasks", type=int, default=20)
    arguments = parser.parse_args()
    tables = {horizon: measure(horizon, arguments.tasks) for horizon in (4, 6)}
    for horizon, table in tables.items():
        print_table(table, horizon)
    plot(tables, arguments.out)


if __name__ == "__main__":
    main()
