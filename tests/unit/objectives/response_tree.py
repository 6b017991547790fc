"""Expected gradients of objectives by exact enumeration of all responses of a small tree.

Behavior and policy are softmax tables over every prefix, rewards are random. Every response is
enumerated with its probability, so expectations are finite sums.
"""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import Objective, ObjectiveSpec, TokenInputs
from megatron_rl.objectives.spec import KlPenalty, Unconstrained
from megatron_rl.types import Denominators


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


def divergences(policy: Tensor, teacher: Tensor) -> Tensor:
    """Compute KL(policy, teacher) of the next symbol at each state; [states]."""
    log_p, log_q = (torch.log_softmax(x, dim=-1) for x in (policy, teacher))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def distillation_gradient(task: Task, policy: Tensor, teacher: Tensor) -> Tensor:
    """Compute sum_s P(s) grad KL(s), with P the policy's own probability of visiting s."""
    table = policy.detach().requires_grad_()
    probability = token_logprobs(task, policy).sum(dim=1).exp()[:, None]
    visits = torch.zeros(task.state_count, dtype=torch.float64)
    weights = torch.where(task.mask, probability, 0)
    visits.index_add_(0, task.states.reshape(-1), weights.reshape(-1))
    return torch.autograd.grad((visits * divergences(table, teacher)).sum(), table)[0]


@dataclass(frozen=True)
class Distillation:
    """First and second moments of an objective's gradient from one response y ~ behavior."""

    mean: Tensor  # like the policy's table
    variance: float  # of the whole gradient, per response


def distill(
    task: Task, objective: Objective, *, policy: Tensor, behavior: Tensor, teacher: Tensor
) -> Distillation:
    """Enumerate the loss gradient of an objective without rewards, with a sum over tokens."""
    table = policy.detach().requires_grad_()
    logprobs = token_logprobs(task, table)
    behavior_logprobs, reference = (
        token_logprobs(task, x).reshape(-1) for x in (behavior, teacher)
    )
    count, horizon = task.tokens.shape
    exact = objective.divergence is not None
    result = objective(
        TokenInputs(
            policy_logprobs=logprobs.reshape(-1),
            behavior_logprobs=behavior_logprobs,
            advantages=torch.zeros_like(behavior_logprobs),
            reference_logprobs=None if exact else reference,
            divergence=divergences(table, teacher)[task.states].reshape(-1) if exact else None,
        ),
        layout=SequenceLayout([horizon] * count, task.mask.reshape(-1)),
        denominators=Denominators(responses=1.0, tokens=1.0),
    )
    probability = behavior_logprobs.view(count, horizon).sum(dim=1).exp()
    per_response = result.loss.view(count, horizon).sum(dim=1)
    one_each = torch.eye(count, dtype=torch.float64)
    (rows,) = torch.autograd.grad(per_response, table, one_each, is_grads_batched=True)
    mean = torch.einsum("n,nsv->sv", probability, rows)
    square = (probability * rows.square().sum(dim=(1, 2))).sum() - mean.square().sum()
    return Distillation(mean, float(square))


DISTILLED = {  # reuse of a rollout batch: weight, estimator, weighted
    "divergence": ("token", "reverse_kl", False),
    "divergence, w_{t-1}": ("prefix_mean", "reverse_kl", True),
    "divergence, C_{t-1}": ("prefix_product", "reverse_kl", True),
    "advantage": ("one", "advantage", False),
    "advantage, rho_t": ("token", "advantage", False),
    "advantage, w_t": ("prefix_mean", "advantage", False),
    "advantage, C_t": ("prefix_product", "advantage", False),
}


def distiller(name: str) -> Objective:
    """Return one of DISTILLED without rewards and constraint, with a sum over tokens."""
    weight, estimator, weighted = DISTILLED[name]
    kl = KlPenalty(coefficient=1.0, estimator=estimator, weighted=weighted)
    spec = replace(weight_alone(weight).spec, advantage_coefficient=0.0, kl=kl)
    return Objective(spec)


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
