"""Targets and losses of values against their definitions, one token after the other."""

import math

import pytest
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.values import (
    GaeSettings,
    ValueStatistics,
    compute_targets,
    value_loss,
)
from megatron_rl.types import Denominators
from tests.unit.objectives.response_tree import (
    expected_gradient,
    expected_return,
    make_task,
    token_logprobs,
    true_gradient,
    weight_alone,
)

# Two responses: a conversation of turns of 2, 1 and 2 tokens, and one turn of 3 that was cut.
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0]).bool()
LENGTHS = (9, 5)
TURNS = [[[1, 2], [4], [6, 7]], [[10, 11, 12]]]


def example():
    generator = torch.Generator().manual_seed(2)
    values, rewards = torch.randn(2, len(MASK), generator=generator)
    ends, cut = torch.zeros(14).bool(), torch.tensor([False] * 9 + [True] * 5)
    ends[[turn[-1] for turns in TURNS for turn in turns]] = True
    return SequenceLayout(LENGTHS, MASK), values, rewards, {"ends": ends, "cut": cut}


def targets_by_loop(values, rewards, cut, *, lam, gamma, by_turn):
    advantages = [0.0] * len(MASK)
    for turns in TURNS:
        tokens = [token for turn in turns for token in turn]
        after = 0.0
        is_open = cut[tokens[-1]] and rewards[tokens[-1]] == 0
        next_value = values[tokens[-1]] if is_open else 0.0
        for token in reversed(tokens):
            ends = any(token == turn[-1] for turn in turns) or not by_turn
            g, x = (gamma, lam(len(tokens))) if ends else (1.0, 1.0)
            after = rewards[token] + g * next_value - values[token] + g * x * after
            advantages[token], next_value = after, values[token]
    return advantages


@pytest.mark.parametrize("discount", ["token", "turn"])
@pytest.mark.parametrize("alpha", [None, 0.9])
@pytest.mark.parametrize("reward_at_cut", [0.0, -0.5])
def test_targets_equal_the_loop(discount, alpha, reward_at_cut):
    layout, values, rewards, turns = example()
    rewards[12] = reward_at_cut
    settings = GaeSettings(0.9, 0.7, 0.8, alpha, discount)
    found = compute_targets(layout, values, rewards, **turns, settings=settings)
    cut = turns["cut"]
    lists = [x.double().tolist() for x in (values, rewards)]
    common = {"gamma": 0.9, "by_turn": discount == "turn"}
    policy = (
        (lambda length: 0.7) if alpha is None else (lambda length: max(0, 1 - 1 / (alpha * length)))
    )
    wanted = targets_by_loop(*lists, cut.tolist(), lam=policy, **common)
    assert found.advantages.tolist() == pytest.approx(wanted, abs=1e-6)
    target = targets_by_loop(*lists, cut.tolist(), lam=lambda length: 0.8, **common)
    returns = [
        a + v if own else 0 for a, v, own in zip(target, lists[0], MASK.tolist(), strict=True)
    ]
    assert found.returns.tolist() == pytest.approx(returns, abs=1e-6)


@pytest.mark.parametrize(("reward", "limit"), [(1.0, 1.0), (-0.5, -0.5), (0.0, 0.3)])
def test_values_of_cut_responses_stay_bounded(reward, limit):
    """Values fitted to their own targets again and again, with gamma 1."""
    layout, values, rewards, turns = example()
    rewards[10:13] = torch.tensor([0.0, 0.0, reward])
    values[12] = 0.3
    for _ in range(50):
        values = compute_targets(layout, values, rewards, **turns, settings=GaeSettings()).returns
    assert values[10:13].tolist() == pytest.approx([limit] * 3)


def test_loss_is_ppos_clipped_loss_and_its_gradient_ends_outside():
    layout = SequenceLayout((4,), torch.tensor([1, 1, 1, 0]).bool())
    values = torch.tensor([0.5, 0.9, -1.0, 7.0], requires_grad=True)
    old, returns = torch.zeros(4), torch.tensor([1.0, 0.1, 2.0, 7.0])
    loss, statistics = value_loss(
        values, old, returns, clip=0.2, layout=layout, denominators=Denominators(1.0, 6.0)
    )
    # Token 1 moved towards its target beyond the clip: (0.2 - 1)^2 is larger than (0.5 - 1)^2, and
    # constant. Token 2 moved past it: (0.9 - 0.1)^2. Token 3 moved away: (-1 - 2)^2.
    assert loss.tolist() == pytest.approx([0.64 / 12, 0.64 / 12, 9 / 12, 0])
    loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([0, 0.8 / 6, -3 / 6, 0])
    assert statistics.to_metrics()["critic/clipped_fraction"] == pytest.approx(1 / 3)


def test_explained_variance_of_merged_statistics():
    generator = torch.Generator().manual_seed(1)
    values, returns = torch.randn(2, 40, generator=generator)
    parts = [
        value_loss(
            v, v, r, clip=None, layout=SequenceLayout((20,), torch.ones(20).bool()),
            denominators=Denominators(1.0, 40.0),
        )[1]
        for v, r in zip(values.split(20), returns.split(20), strict=True)
    ]  # fmt: skip
    metrics = parts[0].merge(parts[1]).to_metrics()
    wanted = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert metrics["critic/explained_variance"] == pytest.approx(wanted.item(), rel=1e-5)
    assert metrics["critic/loss"] == pytest.approx(((returns - values) ** 2).mean().item() / 2)
    constant = ValueStatistics(torch.tensor([2.0, 0, 0, 0, 2, 2, 2, 2]).double())
    assert math.isnan(constant.to_metrics()["critic/explained_variance"])


def test_a_value_that_is_not_finite_is_a_fault():
    layout = SequenceLayout((2,), torch.ones(2).bool())
    values = torch.tensor([0.0, float("nan")])
    _, statistics = value_loss(
        values, values, values, clip=0.2, layout=layout, denominators=Denominators(1.0, 2.0)
    )
    with pytest.raises(ValueError, match="critic's loss is not finite"):
        statistics.raise_on_faults()


def exact_values(task, table):
    """Expected reward after each state of the tree; [states]."""
    probability = token_logprobs(task, table).sum(dim=1).exp()
    mass, value = torch.zeros(2, task.state_count, dtype=torch.float64)
    for position in range(task.tokens.shape[1]):
        own = task.mask[:, position]
        mass.index_add_(0, task.states[own, position], probability[own])
        value.index_add_(0, task.states[own, position], (probability * task.rewards)[own])
    return value / mass


@pytest.mark.parametrize(
    ("critic", "lam", "is_exact"),
    [("perfect", 0.0, True), ("perfect", 0.6, True), ("perfect", 1.0, True), ("any", 1.0, True),
     ("any", 0.6, False)],
)  # fmt: skip
def test_expected_policy_gradient_over_all_responses(critic, lam, is_exact):
    # gamma = 1. V(s_t) does not depend on y_t, so it cancels in the expectation where the rest of
    # the return is unbiased: with lambda = 1, or with the values of the policy itself.
    task = make_task(vocabulary=3, horizon=4, ends=True, seed=4)
    generator = torch.Generator().manual_seed(6)
    shape = (2, task.state_count, task.vocabulary)
    policy, noise = torch.randn(shape, dtype=torch.float64, generator=generator)
    values = exact_values(task, policy)
    assert values[0] == pytest.approx(expected_return(task, policy).item())
    if critic == "any":
        values = noise[:, 0]
    layout = SequenceLayout([task.tokens.shape[1]] * len(task.tokens), task.mask.reshape(-1))
    last = task.mask.sum(dim=1, keepdim=True) - 1
    rewards = torch.zeros(task.tokens.shape, dtype=torch.float64)
    rewards.scatter_(1, last, task.rewards[:, None])
    found = compute_targets(
        layout,
        values[task.states].reshape(-1),
        rewards.reshape(-1),
        ends=layout.mask,
        cut=torch.zeros_like(layout.mask),
        settings=GaeSettings(gamma=1.0, gae_lambda=lam, target_lambda=1.0),
    )
    gradient = expected_gradient(
        task, weight_alone("token"), policy=policy, behavior=policy,
        advantages=found.advantages.view(task.tokens.shape),
    )  # fmt: skip
    error = (gradient - true_gradient(task, policy)).abs().max().item()
    assert error < 1e-14 if is_exact else error > 1e-2


def test_equals_numbers_of_verl():
    """By verl 0.9.1's own functions, which are copies of TRL's.

    research/tools/compare_implementations.py runs them on random batches.
    """
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 0, 0, 1, 0, 0]]).bool()
    values = torch.tensor([[0.5, -0.25, 0, 0.75, 0.125, -0.5], [1.0, 0, 0, -0.5, 0, 0]])
    rewards = torch.tensor([[0, 1, 0, 0, -0.5, 2], [0.25, 0, 0, 1, 0, 0]])
    layout = SequenceLayout((6, 6), mask.flatten())
    settings = GaeSettings(gamma=0.9, gae_lambda=0.8, target_lambda=0.8)
    found = compute_targets(
        layout, values.flatten(), rewards.flatten(), ends=layout.mask, cut=torch.zeros(12).bool(),
        settings=settings,
    )  # fmt: skip
    own = mask.flatten()
    advantages = [0.6011248, 1.84184, -0.1155, 0.725, 2.5, -0.12, 1.5]
    returns = [1.1011248, 1.59184, 0.6345, 0.85, 2.0, 0.88, 1.0]
    assert found.advantages[own].tolist() == pytest.approx(advantages, rel=1e-6)
    assert found.returns[own].tolist() == pytest.approx(returns, rel=1e-6)
    moved = torch.tensor([[0.1, 0.5, 0, -0.5, 0.25, -0.1], [0.4, 0, 0, 0.05, 0, 0]])
    predicted = (values + moved).flatten().requires_grad_()
    losses, statistics = value_loss(
        predicted, values.flatten(), found.returns, clip=0.3, layout=layout,
        denominators=Denominators(2.0, 7.0),
    )  # fmt: skip
    losses.sum().backward()
    gradient = [-0.071589257143, 0.0, -0.054928571429, -0.067857142857, -0.371428571429,
                0.074285714286, -0.207142857143]  # fmt: skip
    assert losses.sum().item() == pytest.approx(0.8667687071982174, rel=1e-6)
    assert predicted.grad[own].tolist() == pytest.approx(gradient, rel=1e-5)
    assert statistics.to_metrics()["critic/clipped_fraction"] == pytest.approx(1 / 7)
